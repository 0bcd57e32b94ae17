"""Recognise RMS norms and layer norms: rows of very different sizes show epsilon, offset and where a norm rounds."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.layer_norm import layer_norm, layer_norm_reference
from tigon.ops.norms.rms_norm import rms_norm, rms_norm_reference
from tigon.recognition.code_facts import has_conditions, largest_number, may_see_sizes
from tigon.recognition.probes import (
    DTYPES,
    agrees,
    agrees_by_circumstances,
    agrees_in_product,
    reads_of_input,
    runs_without_contiguity,
)
from tigon.recognition.standin import (
    BF16,
    FP16,
    FP32,
    WritesTensor,
    describe,
    normal,
    own_tensors,
    probing,
    run_forward,
    select_equal,
    select_equal_gradients,
    stand_in,
    takes,
    unusual,
)
from tigon.recognition.symbolic import find_size_use
from tigon.recognition.trials import unrecorded
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.reach import Reach, explore

__all__ = ["LayerNormRecipe", "RMSNormRecipe", "recognise_norm"]

LOGGER = logging.getLogger("tigon")

# Pairs of a dtype of the input and a dtype of the weight.
PAIRS = tuple(itertools.product(DTYPES, DTYPES))


ONE_ARGUMENT = ", in calls with one argument"


@dataclass(frozen=True)
class Scope:
    """The inputs for which recognition compared a module with the op. A recipe gives others to the stock forward."""

    dims: frozenset[int] = frozenset((1, 2, 3, 4))
    # Dtypes of the weight for each dtype of the input. None stands for a norm without weight.
    weight_dtypes: dict[torch.dtype, tuple[torch.dtype | None, ...]] = field(
        default_factory=lambda: dict.fromkeys(DTYPES, (None, *DTYPES))
    )
    # The stock forward runs inputs that are not contiguous.
    contiguous: bool = False
    # An attribute that must stay equal to the shape of the weight, such as `normalized_shape`.
    shape: str | None = None
    # The recipe may read epsilon in every call. Otherwise the module is left alone once epsilon changes.
    live_eps: bool = True
    # The module takes a second argument too. The stock forward runs calls that give one.
    takes_more: bool = False

    def fits(self, module: nn.Module, args: tuple, weight: Tensor | None) -> bool:
        """Return True if recognition compared the module with the op for arguments of this kind."""
        x = args[0]
        if type(x) not in PLAIN or x.dim() not in self.dims or x.layout is not torch.strided or x.is_nested:
            return False
        if weight is None:
            if None not in self.weight_dtypes.get(x.dtype, ()):
                return False
        elif (
            weight.dtype not in self.weight_dtypes.get(x.dtype, ())
            or weight.device != x.device
            or weight.shape != x.shape[-1:]
        ):
            return False
        if self.shape is not None and getattr(module, self.shape, None) != x.shape[-1:]:
            return False
        return not (self.contiguous and not x.is_contiguous()) and (len(args) == 1 or _is_like(args[1], x))


def _is_like(gate: Any, x: Tensor) -> bool:
    """Return True if a gate is as plain as the input, and of its dtype and device."""
    is_plain = type(gate) in PLAIN and gate.layout is torch.strided and not gate.is_nested
    return is_plain and gate.dtype is x.dtype and gate.dim() == x.dim() and gate.device == x.device


@dataclass(frozen=True)
class RMSNormRecipe:
    """Recipe: `rms_norm` with the module's weight and epsilon, read at every call.

    A gated norm multiplies the result by silu(gate).
    """

    eps: str | float
    weight: str | None
    offset: float
    rounding: Literal["before_weight", "after_weight"]
    gated: bool
    scope: Scope = field(default_factory=Scope, compare=False)
    part = "rms_norm"
    choices = ()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the names of the attributes that the recipe reads in every call."""
        return _live_names(self.weight, self.eps if self.scope.live_eps else None)

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        weight, eps = _resolve(module, self.weight), _resolve(module, self.eps)
        as_recognised = len(args) == 1 + self.gated and not kwargs and _is_set(self.weight, weight, eps)
        # A reference also runs on tensors without values, for `tigon.recognition.symbolic`.
        if not (as_recognised and (reference or self.scope.fits(module, args, weight))):
            return type(module).forward(module, *args, **kwargs)
        y = (rms_norm_reference if reference else rms_norm)(
            args[0], weight, eps, offset=self.offset, rounding=self.rounding
        )
        if not self.gated:
            return y
        dtype, gate = args[0].dtype, args[1]
        if not reference and dtype == y.dtype == gate.dtype and runs_kernels(y, gate):
            # `swiglu` computes in fp32, as the last line does.
            return swiglu(gate, y)
        return (y * F.silu(gate.float())).to(dtype)

    def arguments(self, module: nn.Module, x: Tensor) -> tuple[Tensor | None, float, dict[str, Any]] | None:
        """Return weight, epsilon and options for the op; None if the module does anything else with x."""
        weight, eps = _resolve(module, self.weight), _resolve(module, self.eps)
        if self.gated or not (_is_set(self.weight, weight, eps) and self.scope.fits(module, (x,), weight)):
            return None
        return weight, eps, {"offset": self.offset, "rounding": self.rounding}

    def __str__(self) -> str:
        offset = f", offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"
        form = f"rms_norm{' without weight' if self.weight is None else offset}{', then swiglu' if self.gated else ''}"
        return form + ONE_ARGUMENT * self.scope.takes_more


# Other ways to compute a layer norm that also round once.


def _layer_norm_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = (t if t is None else t.float() for t in (x, weight, bias))
    return layer_norm_reference(*wide, eps).to(x.dtype)


def _layer_norm_mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    # On a CPU this also takes a bf16 input and fp32 weights.
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_in_steps(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x.float() - x.float().mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else weight.float() * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


@dataclass(frozen=True)
class LayerNormRecipe:
    """Recipe: `layer_norm` with the module's weight, bias and epsilon, read at every call."""

    eps: str | float
    weight: str | None
    bias: str | None
    # The reference that gives the bits of the module.
    formula: Callable
    scope: Scope = field(default_factory=Scope, compare=False)
    part = "layer_norm"
    choices = ()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the names of the attributes that the recipe reads in every call."""
        return _live_names(self.weight, self.bias, self.eps if self.scope.live_eps else None)

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        weight, bias, eps = [_resolve(module, name) for name in (self.weight, self.bias, self.eps)]
        as_recognised = len(args) == 1 and not kwargs and _is_set(self.weight, weight, eps)
        as_recognised = as_recognised and (self.bias is None) == (bias is None)
        if not (as_recognised and (reference or self.scope.fits(module, args, weight))):
            return type(module).forward(module, *args, **kwargs)
        # Without kernels, torch's layer norm sums a bf16 weight's gradient in bf16. A module that computes in fp32
        # keeps its own formula.
        exact = reference or (self.formula is not layer_norm_reference and not runs_kernels(args[0], weight, bias))
        return (self.formula if exact else layer_norm)(args[0], weight, bias, eps)

    def __str__(self) -> str:
        without = [name for name in ("weight", "bias") if getattr(self, name) is None]
        form = f"layer_norm without {' and '.join(without)}" if without else "layer_norm"
        return form + ONE_ARGUMENT * self.scope.takes_more


def _resolve(module: nn.Module, name: str | float | None) -> Tensor | float | None:
    """Return the attribute with this name; a number or None stands for itself."""
    return getattr(module, name) if isinstance(name, str) else name


def _is_set(name: str | None, weight: Tensor | None, eps: Any) -> bool:
    """Return True if the module has a weight exactly if the recipe names one, and epsilon is a number."""
    return (name is None) == (weight is None) and type(eps) in (float, int)


def _live_names(*names: str | float | None) -> tuple[str, ...]:
    """Return those of the values that are names of attributes."""
    return tuple(name for name in names if isinstance(name, str))


def _norm_candidates(
    names: list[str], epsilons: list[str | float], gated: bool
) -> Iterator[RMSNormRecipe | LayerNormRecipe]:
    if len(names) < 2:
        forms = itertools.product((0.0, 1.0), ("before_weight", "after_weight")) if names else [(0.0, "before_weight")]
        weight = names[0] if names else None
        yield from (RMSNormRecipe(eps, weight, *form, gated) for eps, form in itertools.product(epsilons, forms))
    if not gated:
        pairs = itertools.permutations([*names, None][:2], 2) if names else [(None, None)]
        formulas = (layer_norm_reference, _layer_norm_mixed, _layer_norm_in_fp32, _layer_norm_in_steps)
        yield from (LayerNormRecipe(eps, *pair, f) for eps, pair, f in itertools.product(epsilons, pairs, formulas))


# Each case is (training, dtype of the input, dtype of the weights).
CASES = [
    *itertools.product((True, False), (FP32, BF16), (FP32, BF16)),
    (True, FP16, FP16),
]


def _run_norm(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """Return the candidates that reproduce the module's outputs in every dtype that it accepts, and its gradients."""
    rows = max(16, 4096 // width) // 4 * 4
    # The smallest rows have a mean square below any epsilon. The largest exceed any clamp.
    sizes = torch.logspace(-4, 12, rows)
    shapes = (rows,), (2, rows // 2), (2, 2, rows // 4)
    for seed, (training, dtype, weight_dtype) in enumerate(CASES):
        shape = (*shapes[seed % 3], width)
        inputs = [
            (normal(seed, *shape) * sizes.clamp(max=1e3 if dtype == FP16 else 1e12).view(*shape[:-1], 1)).to(dtype)
        ]
        inputs += [normal(50 + seed, *shape, dtype=dtype)] if gated else []
        weights = {name: normal(100 + seed + 10 * i, width, dtype=weight_dtype) for i, name in enumerate(names)}
        twin = stand_in(module, weights, training=training)
        try:
            y = run_forward(twin, *inputs)
        except WritesTensor:
            raise
        except Exception:
            LOGGER.debug("%s refuses %s with weights in %s", type(module).__name__, dtype, weight_dtype, exc_info=True)
            if dtype == weight_dtype:
                raise
            # The module refuses mixed dtypes, so there is nothing to reproduce.
            continue
        candidates = select_equal(candidates, twin, inputs, y)
    return _run_unusual(module, names, candidates, width, gated)


def _run_unusual(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """Return the candidates that reproduce the gradients, and the outputs for values and weights of any size."""
    twin = stand_in(module, {name: normal(i, width) for i, name in enumerate(names)}, training=True)
    inputs = [normal(20 + i, 8, width) for i in range(1 + gated)]
    parameters = [twin._parameters[name] for name in names]
    for leaves in ([*inputs, *parameters], parameters):
        candidates = select_equal_gradients(candidates, twin, inputs, leaves)
        inputs = [x.detach() for x in inputs]
    for i, (dtype, shape) in enumerate(itertools.product((FP32, BF16), ((16,), (2, 8), (2, 2, 4)))):
        inputs = [unusual(i, *shape, width, dtype=dtype), *([normal(i, *shape, width, dtype=dtype)] * gated)]
        weights = {
            name: unusual(3 + n + i, 1, width)[0].to(dtype) if i % 2 else (normal(i + n, width) * 1e3).to(dtype)
            for n, name in enumerate(names)
        }
        twin = stand_in(module, weights, training=True)
        y = run_forward(twin, *inputs)
        candidates = select_equal(candidates, twin, inputs, y)
    return candidates


def _compare_dims(
    module: nn.Module, names: list[str], candidates: list, width: int, gated: bool
) -> tuple[list, frozenset[int]]:
    """Try a 1-D input.

    Return the candidates that reproduce its output, and the numbers of dimensions that the module accepts.
    """
    twin = stand_in(module, {name: normal(i, width) for i, name in enumerate(names)}, training=True)
    inputs = [normal(i, width) for i in range(1 + gated)]
    try:
        y = run_forward(twin, *inputs)
    except Exception:
        LOGGER.debug("%s refuses an input with one dimension", type(module).__name__, exc_info=True)
        return candidates, frozenset((2, 3, 4))
    return select_equal(candidates, twin, inputs, y), frozenset((1, 2, 3, 4))


@dataclass(frozen=True)
class _Subject:
    """Makes stand-ins of a norm and inputs for them."""

    module: nn.Module
    names: tuple[str, ...]
    width: int
    gated: bool

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True, **attributes: Any) -> nn.Module:
        weights = {name: normal(40 + i, self.width, dtype=dtype) for i, name in enumerate(self.names)}
        return stand_in(self.module, weights, training=training, **attributes)

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        return [normal(60 + i, *shape, self.width, dtype=dtype) for i in range(1 + self.gated)]

    def of_weights(self, weight: Callable[[int], Tensor]) -> Callable[[], nn.Module]:
        """Return a function that makes stand-ins with these weights."""
        return lambda: stand_in(self.module, {n: weight(i) for i, n in enumerate(self.names)}, training=True)


def _confirm(recipe: RMSNormRecipe | LayerNormRecipe, subject: _Subject, dims: frozenset[int], reach: Reach):
    """Compare a candidate in all other circumstances. Return it with its scope, a reason, or None if it differs."""
    pairs, module = _agreeing_pairs(recipe, subject), subject.module
    choices = has_conditions(reach)
    if not (agrees_by_circumstances(recipe, subject, subject.inputs) and _agrees_on_weights(recipe, subject)):
        return None
    if choices and not agrees_in_product(recipe, subject, subject.inputs, pairs):
        return None
    strided = runs_without_contiguity(recipe, subject, subject.inputs)
    if reason := reads_of_input(subject(), subject.inputs(FP32, 2, 4)):
        return reason
    cases = pairs if choices else [(FP32, FP32)]
    if may_see_sizes(reach, module) and (reason := _size_use(recipe, subject, cases, dims, choices)):
        return reason
    weight_dtypes = {x: tuple(w for dtype, w in pairs if dtype == x) for x in DTYPES}
    if not recipe.weight:
        weight_dtypes = dict.fromkeys(DTYPES, (None,))
    shape = "normalized_shape" if getattr(module, "normalized_shape", None) == (subject.width,) else None
    live_eps = _reads_eps_as_it_is(recipe, subject)
    return replace(recipe, scope=Scope(dims, weight_dtypes, not strided, shape, live_eps))


def _agreeing_pairs(recipe: RMSNormRecipe | LayerNormRecipe, subject: _Subject) -> list[tuple]:
    """Return the pairs (dtype of the input, dtype of the weights) that the module accepts and for which both agree."""
    same = lambda x, w: agrees(recipe, functools.partial(subject, w), subject.inputs(x, 2, 8))
    pairs = PAIRS if subject.names else list(zip(DTYPES, DTYPES, strict=True))
    with unrecorded():
        return [(x, w) for x, w in pairs if same(x, w)]


def _agrees_on_weights(recipe: RMSNormRecipe | LayerNormRecipe, subject: _Subject) -> bool:
    """Compare for weights of ones and zeros, and for weights so large that outputs overflow in both directions."""
    large = lambda dtype: [
        lambda i: (normal(80 + i, subject.width).sign() * torch.finfo(dtype).max * 0.9).to(dtype),
        lambda i: torch.full((subject.width,), torch.finfo(dtype).max).to(dtype),
    ]
    for dtype in DTYPES:
        x = [t * 4 for t in subject.inputs(dtype, 2, 8)]
        fills = [lambda i: torch.ones(subject.width, dtype=dtype), lambda i: torch.zeros(subject.width, dtype=dtype)]  # noqa: B023
        if any(agrees(recipe, subject.of_weights(fill), x) is False for fill in (*fills, *large(dtype))):
            return False
    return True


def _size_use(recipe, subject: _Subject, pairs: list, dims: frozenset[int], choices: bool) -> str | None:
    """Return why the module may compute something else for other batch sizes, or None."""
    cases = itertools.product((True, False) if choices else (True,), pairs, sorted(dims - {1}) if choices else (3,))
    for training, (dtype, weight_dtype), dim in cases:
        twin = subject(weight_dtype, training)
        reference = functools.partial(recipe, twin, reference=True)
        inputs = tuple(subject.inputs(dtype, *[2] * (dim - 1)))
        if reason := find_size_use(functools.partial(type(twin).forward, twin), reference, inputs):
            return reason
    return None


def _reads_eps_as_it_is(recipe: RMSNormRecipe | LayerNormRecipe, subject: _Subject) -> bool:
    """Return True if the module does what the op does for any epsilon. It may limit epsilon or replace a zero."""
    if not isinstance(recipe.eps, str):
        return True
    x = [subject.inputs(FP32, 8)[0] * torch.logspace(-8, 4, 8)[:, None], *subject.inputs(FP32, 8)[1:]]
    x[0][0] = 0
    changed = (functools.partial(subject, FP32, **{recipe.eps: eps}) for eps in (0.0, 1e-12, 1e-3, 0.5, 10.0))
    with unrecorded():
        return all(agrees(recipe, make, x) for make in changed)


def recognise_norm(module: nn.Module) -> RMSNormRecipe | LayerNormRecipe | str | None:
    """Recognise a norm.

    It is a module without children, with at most two parameters (1-D, of one size), and with an epsilon or "norm" in
    the name of its class. Return a recipe, the reason why such a module is left as it is, or None for another module.
    """
    tensors = {name: t for name, t in own_tensors(module).items() if t is not None}
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0.0 < value <= 0.1]
    # Without an epsilon or such a name, the module may be a dropout or an activation.
    is_likely = (tensors and epsilons) or "norm" in type(module).__name__.lower()
    if module._modules or not is_likely or not takes(module, 1, 2) or any(t.dim() > 1 for t in tensors.values()):
        return None
    # ZeRO-3 keeps the full shape in `ds_shape`. FSDP1 may leave an empty shard on this rank.
    sizes = {tuple(getattr(t, "ds_shape", t.shape)) for t in tensors.values()} - {(0,)}
    if len(tensors) > 2 or len(sizes) > 1 or any(b is not None for b in module._buffers.values()):
        return "has more state than a norm"
    if (1,) in sizes:
        return "has a weight of one element"
    reasons = []
    # A second argument may be a gate, or a residual that is None by default.
    for gated in (form for form in (True, False) if takes(module, 1 + form)):
        reach = explore(module, inputs=1 + gated)
        if (result := reach.reason or reach.decision) is None:
            widths = [*next(iter(sizes))] if sizes else _likely_widths(module, reach)
            result = _find(module, reach, list(tensors), epsilons or [1e-5, 1e-6], widths, gated)
        if not isinstance(result, str):
            return replace(result, scope=replace(result.scope, takes_more=not gated and takes(module, 2)))
        reasons.append(result)
    return reasons[0]


def _likely_widths(module: nn.Module, reach: Reach) -> list[int]:
    """Return widths to try for a norm without a weight.

    It may check its input's width against an attribute, or normalise parts of that width. The last width is beyond
    every number in its code.
    """
    values = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    likely_widths = [size for size in values if type(size) is int and 1 < size <= 65536] + [96]
    beyond = [size + 8 for size in [largest_number(reach)] if 96 <= size <= 65536]
    return [factor * size for size in likely_widths for factor in (1, 2)] + beyond


def _find(module: nn.Module, reach: Reach, names: list, epsilons: list, widths: list[int], gated: bool):
    """Return the recipe of a norm, or the reason why none was found."""
    candidates, has_run, failure = list(_norm_candidates(names, epsilons, gated)), False, ""
    for width in widths:
        try:
            with reach.preserved(), probing():
                candidates, has_run = _run_norm(module, names, candidates, width, gated), True
                candidates, dims = _compare_dims(module, names, candidates, width, gated)
                subject = _Subject(module, tuple(names), width, gated)
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            LOGGER.debug("%s cannot be run as a norm of width %d", type(module).__name__, width, exc_info=True)
            failure = f"cannot be run by itself ({describe(error)})"
    if not has_run:
        return failure
    try:
        with reach.preserved(), probing():
            recipes = (_confirm(candidate, subject, dims, reach) for candidate in candidates)
            recipe = next((recipe for recipe in recipes if recipe is not None), None)
    except Exception as error:
        LOGGER.debug("%s cannot be compared with a norm", type(module).__name__, exc_info=True)
        return f"cannot be run by itself ({describe(error)})"
    if recipe is None or reach.reason:
        return reach.reason or "computes something else than rms_norm or layer_norm"
    return recipe
