"""Compare functions of a model's file with the ops of linear recurrences: rules, a scan, a causal convolution.

    o, state = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False,
                                      use_qk_l2norm_in_kernel=True)   # q, k [B, T, H, Dk], v [B, T, H, Dv]
    o, state = chunk_kimi_delta_attention(...)                        # the same, but g is [B, T, H, Dk]
    y = mamba2_chunk_scan(x, dt, A, B, C, chunk_size, D=D, dt_bias=bias, ...)   # x [B, T, H, P], B, C [B, T, K, N]
    y = causal_conv1d_fn(x, weight, bias, activation="silu")          # x [B, C, T], weight [C, K]

The results agree up to the order of sums: within 1e-5 of the largest value in fp32, and in half precision the op must
be as near to the results in fp32 as the function is. Loops over chunks cannot run with symbolic sizes, so short and
long sequences are compared.
"""

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tigon.ops.mixers.causal_conv1d import causal_conv1d_reference
from tigon.ops.mixers.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from tigon.ops.mixers.kda import kda, kda_reference
from tigon.ops.mixers.ssd import ssd, ssd_reference
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.parts.comparison import LOGGER, is_as_exact
from tigon.recognition.probing.standin import BF16, FP16, FP32, describe, gradients, normal, probing, same_gradients
from tigon.recognition.probing.trials import Trials, current_trials, not_recording, record, recording
from tigon.recognition.rewriting.source import NotReadable, definition_of
from tigon.runtime.device import runs_kernels
from tigon.runtime.reach.explore import explore
from tigon.runtime.weak_cache import cached_weakly

# The function of transformers by which a rule chooses other statements while a model is exported. The op is not used
# then.
LIVE = ("is_torchdynamo_exporting",)
ACTIVATIONS = ("silu", "swish")
RULE_OPTIONS = {"scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "chunk_size"}
SCAN_TENSORS = ("dt", "A", "B", "C")
SCAN_OPTIONS = ("D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states")
# A dtype of the input of a convolution and one of its weight.
Pair = tuple[torch.dtype, torch.dtype]
CONVOLUTION_ARGUMENTS = ("weight", "bias", "activation")
DIFFERENT = "computes something else than the op"


@dataclass(frozen=True)
class RuleForm:
    """A gated delta rule, or Kimi Delta Attention."""

    # The names of the arguments q, k, v, g and beta.
    tensors: tuple[str, ...]
    # True for Kimi Delta Attention: g has a number for each feature of a head of k.
    has_feature_decay: bool = False

    def __str__(self) -> str:
        return "Kimi Delta Attention" if self.has_feature_decay else "gated delta rule"


@dataclass(frozen=True)
class ConvolutionForm:
    """A causal depthwise convolution."""

    # The name of the input [B, C, T].
    x: str
    # True if the function accepts an input in half precision with a weight in fp32, as under autocast.
    is_mixed: bool = False

    def __str__(self) -> str:
        return "causal convolution"


@dataclass(frozen=True)
class ScanForm:
    """The state space dual of Mamba-2."""

    # The name of x [B, T, H, P].
    x: str

    def __str__(self) -> str:
        return "state space dual"


@dataclass(frozen=True)
class SkippedForm:
    """A function whose torch code returns None, so that the statements after it run. A kernel may replace them all."""

    def __str__(self) -> str:
        return ""


Form = RuleForm | ScanForm | ConvolutionForm | SkippedForm


def form_of(function: types.FunctionType) -> Form | None:
    """Return the form that the names of a function's arguments suggest; None for any other function."""
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    tensors, options = tuple(names[:5]), set(names[5:])
    if tensors[3:] == ("g", "beta") and [name[:1] for name in tensors[:3]] == ["q", "k", "v"]:
        return RuleForm(tensors) if {"initial_state", "output_final_state"} <= options <= RULE_OPTIONS else None
    if {"zxbcdt", "A", "D"} <= {*names} and _returns_none(function):
        return SkippedForm()
    if tensors[1:] == SCAN_TENSORS:
        return ScanForm(names[0]) if options == {"chunk_size", *SCAN_OPTIONS} else None
    return ConvolutionForm(names[0]) if tuple(names[1:]) == CONVOLUTION_ARGUMENTS else None


def _returns_none(function: types.FunctionType) -> bool:
    """Return True if the code of a function is `return None`."""
    try:
        definition = definition_of(function)
    except NotReadable:
        return False
    match getattr(definition, "body", None):
        case [ast.Return(ast.Constant(None))]:
            return True
    return False


def ignores_other_arguments(function: types.FunctionType) -> bool:
    """Return True if a function takes any keyword arguments and never reads those that it has no names for."""
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    try:
        nodes = list(ast.walk(definition_of(function))) if names else []
    except NotReadable:
        return False
    loads = {node.id for node in nodes if isinstance(node, ast.Name)}
    return bool(names) and loads.isdisjoint({*names, "locals", "vars"})


def watch(function: types.FunctionType) -> FunctionGuard:
    """Return the guard of a function that an op replaces."""
    return FunctionGuard(function, LIVE, texts=ACTIVATIONS)


def recognise_function(function: types.FunctionType) -> Form | str | None:
    """Return the form that computes what a function computes, the reason why there is none, or None if not similar."""
    if form_of(function) is None:
        return None
    # A function is compared once for all layers, and again if anything that it reads has been replaced.
    reach = explore(function, LIVE, texts=ACTIVATIONS)
    if reach.reason:
        return reach.reason.removeprefix("its forward ")
    with reach.preserved():
        form, trials = _recognise(function, reach.fingerprint)
    if (current := current_trials()) is not None:
        current.agreements.update(trials.agreements)
        current.mismatches.update(trials.mismatches)
    return reach.reason or form


@cached_weakly
def _recognise(function: types.FunctionType, state: tuple) -> tuple[Form | str, Trials]:
    """Return the form of a function and the comparisons that found it. `state` is the fingerprint of its reach."""
    form = form_of(function)
    assert form is not None
    # A rule may take either kind of g. The reason is that of the first one.
    forms: tuple[Form, ...] = (form,)
    if isinstance(form, RuleForm):
        forms = form, replace(form, has_feature_decay=True)
    reasons: list[str] = []
    with recording() as trials, probing():
        for form in forms:
            if isinstance(form, SkippedForm):
                return form, trials
            try:
                if isinstance(form, RuleForm) and _compare_rule(function, form):
                    return form, trials
                if isinstance(form, ScanForm) and _compare_scan(function, form):
                    return form, trials
                if isinstance(form, ConvolutionForm) and _compare_convolution(function, form):
                    return _with_mixed_dtypes(function, form), trials
                reasons.append(DIFFERENT)
            except Exception as error:
                LOGGER.debug("%s cannot be compared with an op", function.__qualname__, exc_info=True)
                reasons.append(f"takes other arguments than the op ({describe(error)})")
    return reasons[0], trials


# Batch, length, heads, and the sizes of the heads of keys and values. Stock chunks have 64 tokens.
_SMALL, _TAIL, _LONG = (2, 5, 2, 16, 8), (2, 70, 2, 16, 8), (1, 200, 1, 128, 128)
# Each pair says whether q and k are divided by their l2 norms, and how large they are. Small ones show the epsilon.
_NORMS = (False, 1.0), (True, 1.0), (True, 3e-4)


def _rule_inputs(form: RuleForm, seed: int, sizes: tuple[int, ...], factor: float, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, g and beta. Some steps do not decay the state, and some clear it."""
    batch, length, heads, k_size, v_size = sizes
    features = (k_size,) if form.has_feature_decay else ()
    q, k = (normal(seed + i, batch, length, heads, k_size) * k_size**-0.5 * factor for i in range(2))
    v, g = normal(seed + 2, batch, length, heads, v_size), -normal(seed + 3, batch, length, heads, *features).abs()
    g.view(-1)[::7], g.view(-1)[3::11] = 0.0, -30.0
    # Models with negative eigenvalues double the sigmoid.
    beta = 2 * normal(seed + 4, batch, length, heads).sigmoid()
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)]


def _compare_rule(function: types.FunctionType, form: RuleForm) -> bool:
    """Return True if a function has the outputs, the states and the gradients of the op."""
    names = inspect.signature(function).parameters
    if "use_qk_l2norm_in_kernel" not in names:
        # The function may normalise always or never.
        return False
    scales = (None, 0.3) if "scale" in names else (None,)
    cases = [
        *itertools.product((_SMALL,), _NORMS, scales, (False, True), (FP32, BF16, FP16)),
        *itertools.product((_TAIL,), _NORMS[:2], scales, (False, True), (FP32,)),
        (_LONG, _NORMS[1], None, False, FP32),
    ]
    for seed, (sizes, (norm, factor), scale, has_state, dtype) in enumerate(cases):
        inputs = _rule_inputs(form, 10 * seed, sizes, factor, dtype)
        batch, _, heads, k_size, v_size = sizes
        state = normal(10 * seed + 5, batch, heads, k_size, v_size) if has_state else None
        stock, op = _rule_calls(function, _op_for(form, sizes), norm, scale, state)
        if not _agrees(form, inputs, stock, op):
            return False
    inputs, op = _rule_inputs(form, 7, _TAIL, 1.0, FP32), _op_for(form, _TAIL)
    return all(_has_gradients_of(form, inputs, *_rule_calls(function, op, norm)) for norm in (False, True))


def _op_for(form: RuleForm, sizes: tuple[int, ...]) -> Callable[..., tuple]:
    """Return the op or its reference. On the CPU, the op takes a fifth of the time of its reference for long inputs."""
    is_short = sizes is _SMALL or runs_kernels(torch.empty(0))
    if form.has_feature_decay:
        return kda_reference if is_short else kda
    return gated_delta_rule_reference if is_short else gated_delta_rule


def _rule_calls(
    function: Callable, rule: Callable, norm: bool, scale: float | None = None, state: Tensor | None = None
) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """Return the function and the op with these options, as functions of q, k, v, g and beta."""
    options: dict[str, Any] = {"initial_state": state, "output_final_state": state is not None}
    options |= {} if scale is None else {"scale": scale}
    stock = lambda q, k, v, g, beta: function(q, k, v, g=g, beta=beta, **options, use_qk_l2norm_in_kernel=norm)
    return stock, lambda *inputs: rule(*inputs, **options, use_qk_l2norm=norm)


# Batch, length, heads of x and their size, groups of B and C and their size, and the tokens of a stock chunk.
_SCANS = (2, 5, 2, 16, 1, 8, 16), (2, 70, 4, 8, 2, 16, 32), (1, 200, 2, 64, 1, 128, 128)


def _scan_inputs(seed: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return x, dt, A, B, C, D and the bias of dt. Some steps clear the state, and some leave it as it is."""
    batch, length, heads, size, groups, state_size, _ = sizes
    x, dt = normal(seed, batch, length, heads, size), normal(seed + 1, batch, length, heads)
    dt.view(-1)[::7], dt.view(-1)[3::11] = -30.0, 30.0
    B, C = (normal(seed + 2 + i, batch, length, groups, state_size) * state_size**-0.25 for i in range(2))
    A, D, bias = -normal(seed + 4, heads).exp(), normal(seed + 5, heads), normal(seed + 6, heads)
    return [x.to(dtype), dt.to(dtype), A, B.to(dtype), C.to(dtype), D, bias]


def _compare_scan(function: types.FunctionType, form: ScanForm) -> bool:
    """Return True if a function has the outputs, the states and the gradients of the op."""
    limits = (0.0, float("inf")), (0.1, 2.0)
    cases = [
        *itertools.product(_SCANS[:1], (False, True), (False, True), (False, True), limits, (FP32,)),
        *itertools.product(_SCANS[1:2], (False,), (True,), (True,), limits, (FP32, BF16, FP16)),
        (_SCANS[2], False, False, True, limits[0], FP32),
    ]
    for seed, (sizes, has_states, returns_states, applies_softplus, limit, dtype) in enumerate(cases):
        states = _initial_states(10 * seed, sizes) if has_states else None
        options = {"dt_limit": limit, "dt_softplus": applies_softplus, "initial_states": states}
        inputs = _scan_inputs(10 * seed, sizes, dtype)
        # Steps without a softplus must not be negative.
        inputs[1] = inputs[1] if applies_softplus else inputs[1].abs()
        if not _agrees(form, inputs, *_scan_calls(function, sizes, options | {"return_final_states": returns_states})):
            return False
    inputs, states = _scan_inputs(7, _SCANS[1], FP32), _initial_states(7, _SCANS[1])
    options = {"dt_softplus": True, "dt_limit": limits[1]}
    return all(
        _has_gradients_of(form, [*inputs[:5], *more], *_scan_calls(function, _SCANS[1], options | flags, names))
        for names, more, flags in (
            ((), (), {}),
            (("D",), inputs[5:6], {}),
            (("dt_bias",), inputs[6:], {}),
            (("D", "dt_bias", "initial_states"), (*inputs[5:], states), {"return_final_states": True}),
        )
    )


def _initial_states(seed: int, sizes: tuple[int, ...]) -> Tensor:
    batch, _, heads, size, _, state_size, _ = sizes
    return normal(seed + 7, batch, heads, size, state_size)


def _scan_calls(
    function: Callable, sizes: tuple[int, ...], options: dict[str, Any], names: tuple[str, ...] = ("D", "dt_bias")
) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """Return the function and the op with these options, as functions of x, dt, A, B, C and the tensors of `names`.

    The stock function returns y in fp32. The op returns it in the dtype of x, as the kernels of mamba-ssm do.
    """
    # On the CPU, the op takes a fraction of the time of its reference for long inputs.
    op = ssd_reference if sizes is _SCANS[0] or runs_kernels(torch.empty(0)) else ssd

    def call(compute: Callable, x: Tensor, *others: Tensor, **more: Any) -> tuple:
        result = compute(x, *others[:4], **options | dict(zip(names, others[4:], strict=True)), **more)
        y, *states = result if isinstance(result, tuple) else (result,)
        return y.to(x.dtype), *states

    stock = lambda *inputs: call(function, *inputs, chunk_size=sizes[-1])
    return stock, lambda *inputs: call(op, *inputs)


def _compare_convolution(
    function: types.FunctionType, form: Any, dtypes: Sequence[Pair] = ((FP32, FP32), (BF16, BF16), (FP16, FP16))
) -> bool:
    """Return True if a function has the outputs and the gradients of the op. The dtypes are those of x and weight."""
    cases = itertools.product((2, 4), (1, 9), (False, True), (None, *ACTIVATIONS[:1]), dtypes)
    for seed, (width, length, has_bias, activation, (dtype, weight_dtype)) in enumerate(cases):
        # The op takes [B, T, C], as the projection before the convolution returns it.
        x = normal(10 * seed, 2, length, 6).transpose(1, 2)
        inputs = [x, normal(10 * seed + 1, 6, width), *([normal(10 * seed + 2, 6)] if has_bias else [])]
        inputs = [x.to(dtype), *(each.to(weight_dtype) for each in inputs[1:])]
        stock, op = (
            lambda *tensors, call=call, options=options: (call(*tensors, **options),)
            for call, options in (
                (function, {"activation": activation}),
                (causal_conv1d_reference, {"activation": activation, "channels_last": False}),
            )
        )
        if not _agrees(form, inputs, stock, op):
            return False
        if dtype == FP32 and not _has_gradients_of(form, inputs, stock, op):
            return False
    return True


def _with_mixed_dtypes(function: types.FunctionType, form: ConvolutionForm) -> ConvolutionForm:
    """Return a form that says whether a function accepts mixed dtypes, and then computes what the op computes."""
    try:
        with not_recording():
            return replace(form, is_mixed=_compare_convolution(function, form, ((BF16, FP32), (FP16, FP32))))
    except Exception:
        LOGGER.debug("%s refuses mixed dtypes", function.__qualname__, exc_info=True)
        return form


def _agrees(form: Any, inputs: Sequence[Tensor], stock: Callable[..., tuple], op: Callable[..., tuple]) -> bool:
    """Return True if the op has the results of a function, and record the comparison."""
    expected, ours = stock(*(x.clone() for x in inputs)), op(*inputs)
    # The results of both for the same values, computed in fp32.
    exact, exact_ours = expected, ours
    if any(x.dtype != FP32 for x in inputs):
        wide_inputs = [x.float() for x in inputs]
        exact, exact_ours = stock(*wide_inputs), op(*wide_inputs)
    is_same = isinstance(expected, tuple) and len(expected) == len(ours)
    for results in zip(expected, ours, exact, exact_ours, strict=True) if is_same else ():
        if any(result is None for result in results):
            is_same &= all(result is None for result in results)
        else:
            stock_result, our_result, *_ = results
            is_like = isinstance(stock_result, Tensor) and stock_result.dtype == our_result.dtype
            is_same &= is_like and is_as_exact(*results)
    return record(bool(is_same), form, None, inputs, ours, expected)


def _has_gradients_of(form: Any, inputs: list[Tensor], stock: Callable[..., tuple], op: Callable[..., tuple]) -> bool:
    """Return True if the op has the gradients of a function, and record the comparison."""
    expected, ours = (gradients(functools.partial(call, *inputs), inputs) for call in (stock, op))
    return record(same_gradients(ours, expected), form, None, inputs, ours, expected, mode="gradients")
