"""Recognise linear recurrences: functions of the module's file, which the forward of a mixer calls.

        qkv = causal_conv1d_fn(qkv, weight, bias, activation="silu", **kwargs)
        o, state = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, ..., **kwargs)   # globals of the file

The recipe runs the forward of the class with the ops in place of these functions (`parts.functions`). Both ops restart
at the boundaries of packed samples, `cu_seq_lens_q`, which the functions of transformers ignore. With a cache and
without gradients the stock forward runs, so that text is generated as before.
"""

import ast
import functools
import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.mixers.causal_conv1d import MAX_TAPS, MIN_TAPS, causal_conv1d
from tigon.ops.mixers.delta_rule_chunks import DeltaInputs
from tigon.ops.mixers.delta_rule_config import fits_kernels
from tigon.ops.mixers.gated_delta_rule import gated_delta_rule
from tigon.ops.mixers.kda import kda
from tigon.ops.mixers.ssd import ssd
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.parts.functions import (
    FunctionsRecipe,
    FusedFunction,
    computed_function,
    globals_of,
    recognise_functions,
)
from tigon.recognition.parts.mixer_functions import (
    ACTIVATIONS,
    CONVOLUTION_ARGUMENTS,
    SCAN_OPTIONS,
    SCAN_TENSORS,
    ConvolutionForm,
    RuleForm,
    ScanForm,
    SkippedForm,
    form_of,
    ignores_other_arguments,
    recognise_function,
    watch,
)
from tigon.recognition.rewriting.recurrences import RepeatedHeads
from tigon.recognition.rewriting.source import NotReadable, definition_of
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import KERNEL_DTYPES, PLAIN

# The names by which the boundaries of packed samples reach a function.
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q")
# The names of the argument of a forward that holds the states of earlier tokens.
CACHES = ("cache_params", "cache", "past_key_values", "past_key_value")


def boundaries_in(kwargs: dict[str, Any]) -> Any:
    """Return the boundaries of packed samples among the arguments of a call, or None."""
    for name in BOUNDARIES:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


@torch.compiler.assume_constant_result
def warn_of_mixed_samples(text: str) -> bool:
    """Warn, once for each text, that the samples of a call are not independent. In a graph, warn at the trace."""
    return _warn_once(f"tigon: packed samples are not independent in this call: {text}")


@functools.cache
def _warn_once(text: str) -> bool:
    warnings.warn(text, stacklevel=4)
    return True


# Arguments that the kernels of other packages read, and that the torch code ignores.
READ_BY_KERNELS = ("seq_idx", "z")


class FusedMixerFunction(FusedFunction):
    """Runs an op in place of a function. Arguments that the function takes and ignores may name boundaries."""

    def __init__(self, scope: dict[str, Any], name: str, form: Any, guard: FunctionGuard) -> None:
        super().__init__(scope, name, form, guard)
        self.ignores_others = ignores_other_arguments(self.computed)
        parameters = inspect.signature(self.stock).parameters.values()
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.read(args, kwargs)
        result = None if arguments is None else self.compute(arguments)
        if result is not None:
            return result
        if boundaries_in({**dict(zip(self.names, args, strict=False)), **kwargs}) is not None:
            warn_of_mixed_samples(
                f"{self.name} runs in place of the op, which restarts at their boundaries ({_reason(arguments)})"
            )
        args, kwargs = tuple(map(_computed, args)), {name: _computed(value) for name, value in kwargs.items()}
        return self.scope[self.name](*args, **kwargs)

    def read(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        others = kwargs.keys() - self.known_names
        if others and not self.ignores_others:
            return None
        named = {name: value for name, value in kwargs.items() if name in self.known_names}
        if (arguments := super().read(args, named)) is None:
            return None
        boundaries = boundaries_in(kwargs | arguments)
        if any(kwargs.get(name) is not None for name in READ_BY_KERNELS) and boundaries is None:
            return None
        if torch.compiler.is_exporting() or has_active_transform():
            return None
        if boundaries is not None and not isinstance(boundaries, Tensor):
            return None
        return self.defaults | arguments | {"cu_seqlens": boundaries}


def _reason(arguments: dict[str, Any] | None) -> str:
    """Return the reason why an op does not run with these arguments, which `FusedMixerFunction.read` returned."""
    if arguments is None:
        return "the function has changed since the patch, or the op does not take its arguments"
    if any(arguments.get(name) is not None for name in ("initial_state", "initial_states")):
        return "it has an initial state"
    tensors = [x for name, x in arguments.items() if isinstance(x, Tensor) and name != "cu_seqlens"]
    kinds = dict.fromkeys(f"{type(x).__name__} {x.dtype}" for x in tensors)
    return f"the op does not take its tensors: {', '.join(kinds)}"


class FusedRule(FusedMixerFunction):
    """Runs `gated_delta_rule` or `kda` in place of a function."""

    form: RuleForm

    def compute(self, arguments: dict[str, Any]) -> Any:
        inputs: list[Any] = [arguments.get(name) for name in self.form.tensors]
        state, keeps_state = arguments.get("initial_state"), bool(arguments.get("output_final_state"))
        boundaries = arguments["cu_seqlens"]
        q, k = inputs[:2]
        if isinstance(q, RepeatedHeads) and isinstance(k, RepeatedHeads) and q.copies == k.copies:
            copies, inputs[:2] = q.copies, (q.heads, k.heads)
        else:
            copies, inputs[:2] = 1, map(_computed, (q, k))
        if not _is_rule(inputs, self.form, state, copies) or (boundaries is not None and state is not None):
            return None
        if self.form.has_feature_decay and boundaries is None and _lacks_kernels(inputs):
            return None
        options: dict[str, Any] = {
            "scale": arguments.get("scale"),
            "use_qk_l2norm": bool(arguments.get("use_qk_l2norm_in_kernel", False)),
            "initial_state": state,
            "output_final_state": keeps_state,
        }
        shape = inputs[2].shape
        if boundaries is not None:
            inputs = [x.reshape(1, -1, *x.shape[2:]) for x in inputs]
        q, k, v, g, beta = inputs
        op = kda if self.form.has_feature_decay else gated_delta_rule
        o, state = op(q, k, v, g, beta, **options, cu_seqlens=boundaries)
        return o.reshape(shape), _states_of_rows(state, boundaries, shape)


def _states_of_rows(states: Any, boundaries: Tensor | None, shape: torch.Size) -> Any:
    """Return the last states of the rows of a batch [B, T, ...], given those of their samples."""
    if boundaries is None or states is None:
        return states
    # The last sample of each row leaves the state of the row.
    ends = torch.arange(1, shape[0] + 1, dtype=boundaries.dtype, device=boundaries.device) * shape[1]
    return states[torch.searchsorted(boundaries, ends) - 1]


def _lacks_kernels(inputs: list[Any]) -> bool:
    """Return True on a GPU on which torch would compute `kda`, in more operations than the stock function."""
    q, k, v, g, beta = inputs
    return q.is_cuda and not fits_kernels(DeltaInputs(q, k, v, g, beta, None, None))


def _computed(value: Any) -> Any:
    """Return the tensor that stands for repeated heads, or any other value itself."""
    return value.compute() if isinstance(value, RepeatedHeads) else value


def _is_rule(inputs: list[Any], form: RuleForm, state: Any, copies: int) -> bool:
    """Return True if the op accepts these tensors, with `copies` heads of v for each head of q."""
    if any(type(x) not in PLAIN for x in inputs) or (state is not None and type(state) not in PLAIN):
        return False
    q, k, v, g, beta = inputs
    if q.dim() != 4 or v.dim() != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or not q.numel():
        return False
    if q.shape[2] * copies != v.shape[2]:
        return False
    decay_shape = (*v.shape[:3], q.shape[3]) if form.has_feature_decay else v.shape[:3]
    if not (q.dtype == k.dtype == v.dtype and q.dtype in KERNEL_DTYPES):
        return False
    if beta.shape != v.shape[:3] or tuple(g.shape) != tuple(decay_shape):
        return False
    if g.dtype not in KERNEL_DTYPES or beta.dtype not in KERNEL_DTYPES:
        return False
    shape = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    fits = state is None or (tuple(state.shape) == shape and state.dtype in KERNEL_DTYPES)
    # On the CPU, the op refuses a decay that grows, which the function computes.
    is_decay = g.device.type != "cpu" or torch.compiler.is_compiling() or bool((g <= 0).all())
    return fits and is_decay and len({x.device for x in (*inputs, *([] if state is None else [state]))}) == 1


class SkippedFunction(FusedFunction):
    """Returns None, as the torch code of a function does whose kernel computes a whole mixer, so that the ops run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holds = self._holds_for_graph() if torch.compiler.is_compiling() else self._is_same()
        return None if holds else self.scope[self.name](*args, **kwargs)


class FusedScan(FusedMixerFunction):
    """Runs `ssd` in place of a function. y has the dtype of x, as from the kernels of mamba-ssm."""

    form: ScanForm

    def compute(self, arguments: dict[str, Any]) -> Any:
        inputs: list[Any] = [arguments.get(name) for name in (self.form.x, *SCAN_TENSORS)]
        options: dict[str, Any] = {name: arguments.get(name) for name in SCAN_OPTIONS}
        options |= {name: bool(options[name]) for name in ("dt_softplus", "return_final_states")}
        boundaries = arguments["cu_seqlens"]
        is_resumed = options["initial_states"] is not None
        if not _is_scan(inputs, options) or (boundaries is not None and is_resumed):
            return None
        x, dt, A, B, C = inputs
        shape = x.shape
        if is_resumed and torch.is_grad_enabled():
            # A cache writes the next state into the same tensor, which backward reads.
            options["initial_states"] = options["initial_states"].clone()
        if boundaries is not None:
            x, dt, B, C = (tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (x, dt, B, C))
        result: Any = ssd(x, dt, A, B, C, **options, cu_seqlens=boundaries)
        if not options["return_final_states"]:
            return result.reshape(shape)
        return result[0].reshape(shape), _states_of_rows(result[1], boundaries, shape)


def _is_scan(inputs: list[Any], options: dict[str, Any]) -> bool:
    """Return True if the op accepts these tensors and options."""
    D, bias, states, limit = (options[name] for name in ("D", "dt_bias", "initial_states", "dt_limit"))
    tensors = [*inputs, *(each for each in (D, bias, states) if each is not None)]
    if any(type(each) not in PLAIN or each.dtype not in KERNEL_DTYPES for each in tensors):
        return False
    x, dt, A, B, C = inputs
    if x.dim() != 4 or B.dim() != 4 or not x.numel() or not B.numel() or x.shape[2] % B.shape[2]:
        return False
    if not (x.dtype == B.dtype == C.dtype and C.shape == B.shape and B.shape[:2] == x.shape[:2] == dt.shape[:2]):
        return False
    vectors = [each for each in (A, D, bias) if each is not None]
    if dt.shape != x.shape[:3] or any(each.shape != x.shape[2:3] for each in vectors):
        return False
    if states is not None and tuple(states.shape) != (x.shape[0], *x.shape[2:], B.shape[3]):
        return False
    is_limit = isinstance(limit, (tuple, list)) and len(limit) == 2 and 0 <= limit[0] <= limit[1]
    is_limit = is_limit and all(type(number) in (int, float) for number in limit) and limit[0] < torch.inf
    # On the CPU, the op refuses a decay that grows, which the function computes.
    is_decay = A.device.type != "cpu" or torch.compiler.is_compiling() or bool((A <= 0).all())
    return is_limit and is_decay and len({each.device for each in tensors}) == 1


class FusedConvolution(FusedMixerFunction):
    """Runs `causal_conv1d` in place of a function."""

    form: ConvolutionForm

    def compute(self, arguments: dict[str, Any]) -> Any:
        values: list[Any] = [arguments.get(name) for name in (self.form.x, *CONVOLUTION_ARGUMENTS)]
        x, weight, bias, activation = values
        if activation not in (None, *ACTIVATIONS) or not _is_convolution(x, weight, bias):
            return None
        if weight.dtype != x.dtype and not (self.form.is_mixed and weight.dtype == torch.float32):
            return None
        if (boundaries := arguments["cu_seqlens"]) is None:
            return causal_conv1d(x, weight, bias, activation, channels_last=False)
        rows = x.transpose(1, 2)
        y = causal_conv1d(rows.reshape(1, -1, rows.shape[2]), weight, bias, activation, boundaries)
        return y.reshape(rows.shape).transpose(1, 2)


def _is_convolution(x: Any, weight: Any, bias: Any) -> bool:
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if any(type(each) not in PLAIN for each in tensors) or x.dim() != 3 or not x.numel():
        return False
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or not MIN_TAPS <= weight.shape[1] <= MAX_TAPS:
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        return False
    fits = x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    return fits and len({each.device for each in tensors}) == 1


class MixerRecipe(FunctionsRecipe):
    """The stock forward of a class of mixers, with ops in place of its rule and its convolution."""

    part = "mixers"
    is_recurrent, required_form = True, (RuleForm, ScanForm)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = [kwargs[name] for name in CACHES if kwargs.get(name) is not None]
        is_packed = boundaries_in(kwargs) is not None
        # A cache with a state, or of a call that is shorter than the kernel, adds columns before the first sample.
        hidden = args[0] if args else kwargs.get("hidden_states")
        is_long = isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.shape[1] >= MAX_TAPS
        has_more_columns = is_packed and caches and not (is_long and _is_empty(caches[0], module))
        if has_more_columns:
            warn_of_mixed_samples("the ops do not take boundaries together with the states of a cache")
        if has_more_columns or (caches and not is_packed and not torch.is_grad_enabled()):
            return type(module).forward(module, *args, **kwargs)
        return super().__call__(module, *args, **kwargs)

    def restarts_at_boundaries(self, module: nn.Module) -> bool:
        """Return True if the forward passes boundaries of samples on to its rule and its convolution, both ops."""
        if not isinstance(self.stock, types.FunctionType):
            return False
        similar_names = {name for name, value in globals_of(self.stock) if form_of(computed_function(value))}
        has_convolution = any(isinstance(form, ConvolutionForm) for _, form in self.forms)
        calls_child = not has_convolution and any(isinstance(child, nn.Conv1d) for child in module.children())
        is_complete = similar_names == self.functions.keys() and not calls_child
        return is_complete and passes_boundaries(self.stock, similar_names)

    def watch(self, function: types.FunctionType) -> FunctionGuard:
        return watch(function)

    def fuse(self, form: Any, scope: dict[str, Any], name: str, guard: FunctionGuard) -> FusedFunction:
        classes: dict[type, Any] = {
            RuleForm: FusedRule, ScanForm: FusedScan, ConvolutionForm: FusedConvolution, SkippedForm: SkippedFunction,
        }  # fmt: skip
        return classes[type(form)](scope, name, form, guard)


def _is_empty(cache: Any, module: nn.Module) -> bool:
    """Return True if a cache of transformers has no state of a layer yet."""
    has_state = getattr(cache, "has_previous_state", True)
    return not (has_state(getattr(module, "layer_idx", None)) if callable(has_state) else has_state)


def passes_boundaries(forward: types.FunctionType, names: set[str], module: nn.Module | None = None) -> bool:
    """Return True if a forward calls functions or children with these names, and always passes boundaries on. If a name
    is that of a list, the forward calls its items, for example in a loop. Branches for other kinds of a layer than
    `module`, such as `if self.block_type == "mlp"`, do not count."""
    try:
        nodes = list(_walk(definition_of(forward), module))
    except NotReadable:
        return False
    # The variable of a loop stands for the items.
    loops = [node for node in nodes if isinstance(node, ast.For) and names & {*_names_in(node.iter)}]
    names = names.union(*(_names_in(loop.target) for loop in loops))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name_of(node.func) in names]
    passes = lambda call: any(keyword.arg in (None, *BOUNDARIES) for keyword in call.keywords)
    return bool(calls) and all(map(passes, calls))


def _walk(node: ast.AST, module: nn.Module | None) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, but not the branches that a module never takes."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        match node.test:
            # The kind of a layer is a string, which does not change. Flags such as `training` do.
            case ast.Compare(ast.Attribute(ast.Name("self"), name), [ast.Eq()], [ast.Constant(str(value))]) if (
                module is not None
            ):
                children = node.body if getattr(module, name, None) == value else node.orelse  # type: ignore[assignment]
    for child in children:
        yield from _walk(child, module)


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a variable, an attribute or an item of these."""
    return _name_of(node.value) if isinstance(node, ast.Subscript) else getattr(node, "attr", getattr(node, "id", None))


def _names_in(node: ast.AST) -> set[str]:
    return {name for each in ast.walk(node) if (name := _name_of(each)) is not None}


def recognise_mixer(module: nn.Module) -> Any:
    """Recognise a module whose forward calls a rule or a scan. A convolution is replaced only together with these."""
    return recognise_functions(module, MixerRecipe, lambda value, _: recognise_function(computed_function(value)))
