"""Recognise RMS norms and layer norms: rows of very different sizes show epsilon, offset and where a norm rounds."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.dispatch import KERNEL_DTYPES, runs_kernels
from tigon.ops.glu import swiglu
from tigon.ops.layer_norm import layer_norm, layer_norm_reference
from tigon.ops.rms_norm import rms_norm, rms_norm_reference
from tigon.recognition.standin import (
    BF16,
    FP16,
    FP32,
    WritesTensor,
    describe,
    gradients,
    normal,
    own_tensors,
    probing,
    run_forward,
    same_bits,
    same_gradients,
    stand_in,
    takes,
    unusual,
)
from tigon.runtime.reach import explore

__all__ = ["LayerNormRecipe", "RMSNormRecipe", "recognise_norm"]


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
    # Dimensions of inputs for which the module was compared with the op.
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    part = "rms_norm"
    choices = ()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the names of the attributes that the recipe reads in every call."""
        return tuple(name for name in (self.weight, self.eps) if isinstance(name, str))

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        weight, eps = _resolve(module, self.weight), _resolve(module, self.eps)
        as_recognised = len(args) == 1 + self.gated and not kwargs and _is_set(self.weight, weight, eps)
        if not (as_recognised and _fits(args, weight, self.dims)):
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
        if self.gated or not (_is_set(self.weight, weight, eps) and _fits((x,), weight, self.dims)):
            return None
        return weight, eps, {"offset": self.offset, "rounding": self.rounding}

    def __str__(self) -> str:
        offset = f", offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"
        return f"rms_norm{' without weight' if self.weight is None else offset}{', then swiglu' if self.gated else ''}"


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
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    part = "layer_norm"
    choices = ()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the names of the attributes that the recipe reads in every call."""
        return tuple(name for name in (self.weight, self.bias, self.eps) if isinstance(name, str))

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        weight, bias, eps = [_resolve(module, name) for name in (self.weight, self.bias, self.eps)]
        as_recognised = len(args) == 1 and not kwargs and _is_set(self.weight, weight, eps)
        if not (as_recognised and (self.bias is None) == (bias is None) and _fits(args, weight, self.dims)):
            return type(module).forward(module, *args, **kwargs)
        # Without kernels, torch's layer norm sums a bf16 weight's gradient in bf16. A module that computes in fp32
        # keeps its own formula.
        exact = reference or (self.formula is not layer_norm_reference and not runs_kernels(args[0], weight, bias))
        return (self.formula if exact else layer_norm)(args[0], weight, bias, eps)

    def __str__(self) -> str:
        without = [name for name in ("weight", "bias") if getattr(self, name) is None]
        return f"layer_norm without {' and '.join(without)}" if without else "layer_norm"


def _resolve(module: nn.Module, name: str | float | None) -> Tensor | float | None:
    """Return the attribute with this name; a number or None stands for itself."""
    return getattr(module, name) if isinstance(name, str) else name


def _is_set(name: str | None, weight: Tensor | None, eps: Any) -> bool:
    """Return True if the module has a weight exactly if the recipe names one, and epsilon is a number."""
    return (name is None) == (weight is None) and type(eps) in (float, int)


def _fits(args: tuple, weight: Tensor | None, dims: frozenset[int]) -> bool:
    """Return True if recognition compared the module with the op for arguments of these dtypes and dimensions."""
    if not all(isinstance(x, Tensor) and x.dim() in dims and x.dtype in KERNEL_DTYPES for x in args):
        return False
    return weight is None or weight.shape == args[0].shape[-1:]


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
            if dtype == weight_dtype:
                raise
            # The module refuses mixed dtypes, so there is nothing to reproduce.
            continue
        candidates = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
    return _run_unusual(module, names, candidates, width, gated)


def _run_unusual(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """Return the candidates that reproduce the gradients, and the outputs for values and weights of any size."""
    twin = stand_in(module, {name: normal(i, width) for i, name in enumerate(names)}, training=True)
    inputs = [normal(20 + i, 8, width) for i in range(1 + gated)]
    parameters = [twin._parameters[name] for name in names]
    for leaves in ([*inputs, *parameters], parameters):
        stock = gradients(functools.partial(type(module).forward, twin, *inputs), leaves)
        ours = [gradients(functools.partial(c, twin, *inputs), leaves) for c in candidates]
        candidates = [c for c, g in zip(candidates, ours, strict=True) if same_gradients(g, stock)]
        inputs = [x.detach() for x in inputs]
    for i, (dtype, shape) in enumerate(itertools.product((FP32, BF16), ((16,), (2, 8), (2, 2, 4)))):
        inputs = [unusual(i, *shape, width, dtype=dtype), *([normal(i, *shape, width, dtype=dtype)] * gated)]
        weights = {
            name: unusual(3 + n + i, 1, width)[0].to(dtype) if i % 2 else (normal(i + n, width) * 1e3).to(dtype)
            for n, name in enumerate(names)
        }
        twin = stand_in(module, weights, training=True)
        y = run_forward(twin, *inputs)
        candidates = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
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
        return candidates, frozenset((2, 3, 4))
    same = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
    return same, frozenset((1, 2, 3, 4))


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
    # A norm without a weight may check its input's width against an attribute, or normalise parts of that width.
    values = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    likely_widths = [size for size in values if type(size) is int and 1 < size <= 65536] + [96]
    widths = list(*sizes) if sizes else [factor * size for size in likely_widths for factor in (1, 2)]
    gated, names, failure = takes(module, 2), list(tensors), ""
    candidates, has_run = list(_norm_candidates(names, epsilons or [1e-5, 1e-6], gated)), False
    reach = explore(module, inputs=1 + gated)
    if reason := reach.reason or reach.decision:
        return reason
    for width in widths:
        try:
            with reach.preserved(), probing():
                candidates, has_run = _run_norm(module, names, candidates, width, gated), True
                candidates, dims = _compare_dims(module, names, candidates, width, gated)
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            failure = f"cannot be run by itself ({describe(error)})"
    if not has_run:
        return failure
    if not candidates or reach.reason:
        return reach.reason or "computes something else than rms_norm or layer_norm"
    return replace(candidates[0], dims=dims)
