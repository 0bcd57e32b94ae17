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
    """`rms_norm` of the module's own weight and epsilon, read by name at every call; gated: times silu of a gate."""

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
        """The attributes that the recipe reads in every call."""
        return tuple(name for name in (self.weight, self.eps) if isinstance(name, str))

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        weight, eps = _own(module, self.weight), _own(module, self.eps)
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
            return swiglu(gate, y)  # in fp32 as below
        return (y * F.silu(gate.float())).to(dtype)

    def arguments(self, module: nn.Module, x: Tensor) -> tuple[Tensor | None, float, dict[str, Any]] | None:
        """Weight, epsilon and form for the op, if that is all the module does with x."""
        weight, eps = _own(module, self.weight), _own(module, self.eps)
        if self.gated or not (_is_set(self.weight, weight, eps) and _fits((x,), weight, self.dims)):
            return None
        return weight, eps, {"offset": self.offset, "rounding": self.rounding}

    def __str__(self) -> str:
        offset = f", offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"
        return f"rms_norm{' without weight' if self.weight is None else offset}{', then swiglu' if self.gated else ''}"


# Other ways to write `layer_norm_reference`, rounded once as well.


def _layer_norm_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = (t if t is None else t.float() for t in (x, weight, bias))
    return layer_norm_reference(*wide, eps).to(x.dtype)


def _layer_norm_mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)  # on a CPU also of bf16 by fp32 weights


def _layer_norm_in_steps(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x.float() - x.float().mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else weight.float() * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


@dataclass(frozen=True)
class LayerNormRecipe:
    """`layer_norm` of the module's own weight, bias and epsilon, read by name at every call."""

    eps: str | float
    weight: str | None
    bias: str | None
    written: Callable  # a reference with the module's bits
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    part = "layer_norm"
    choices = ()

    @property
    def live(self) -> tuple[str, ...]:
        """The attributes that the recipe reads in every call."""
        return tuple(name for name in (self.weight, self.bias, self.eps) if isinstance(name, str))

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        own = [_own(module, name) for name in (self.weight, self.bias, self.eps)]
        as_recognised = len(args) == 1 and not kwargs and _is_set(self.weight, own[0], own[2])
        if not (as_recognised and (self.bias is None) == (own[1] is None) and _fits(args, own[0], self.dims)):
            return type(module).forward(module, *args, **kwargs)
        # Without kernels torch's own sums a bf16 weight's gradient in bf16; who wrote it in fp32 keeps that.
        exact = reference or (self.written is not layer_norm_reference and not runs_kernels(args[0], *own[:2]))
        return (self.written if exact else layer_norm)(args[0], *own)

    def __str__(self) -> str:
        without = [name for name in ("weight", "bias") if getattr(self, name) is None]
        return f"layer_norm without {' and '.join(without)}" if without else "layer_norm"


def _own(module: nn.Module, name: str | float | None) -> Tensor | float | None:
    return getattr(module, name) if isinstance(name, str) else name


def _is_set(name: str | None, weight: Tensor | None, eps: Any) -> bool:
    """Return True if there is a weight where there was one, and epsilon is a number."""
    return (name is None) == (weight is None) and type(eps) in (float, int)


def _fits(args: tuple, weight: Tensor | None, dims: frozenset[int]) -> bool:
    """Return True if the module was compared with the op for arguments of these dtypes and dimensions."""
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
        written = (layer_norm_reference, _layer_norm_mixed, _layer_norm_in_fp32, _layer_norm_in_steps)
        yield from (LayerNormRecipe(eps, *pair, how) for eps, pair, how in itertools.product(epsilons, pairs, written))


# Training and dtypes of the input and of the weights.
CASES = [
    *itertools.product((True, False), (FP32, BF16), (FP32, BF16)),
    (True, FP16, FP16),
]


def _run_norm(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """The candidates that reproduce the module, in every combination of dtypes it can run, and its gradients."""
    rows = max(16, 4096 // width) // 4 * 4
    # The smallest have a mean square below any epsilon, the largest are beyond any clamp.
    sizes = torch.logspace(-4, 12, rows)
    shapes = (rows,), (2, rows // 2), (2, 2, rows // 4)
    for seed, (training, dtype, weight_dtype) in enumerate(CASES):
        shape = (*shapes[seed % 3], width)
        inputs = [
            (normal(seed, *shape) * sizes.clamp(max=1e3 if dtype == FP16 else 1e12).view(*shape[:-1], 1)).to(dtype)
        ]
        inputs += [normal(50 + seed, *shape, dtype=dtype)] if gated else []
        own = {name: normal(100 + seed + 10 * i, width, dtype=weight_dtype) for i, name in enumerate(names)}
        twin = stand_in(module, own, training=training)
        try:
            y = run_forward(twin, *inputs)
        except WritesTensor:
            raise
        except Exception:
            if dtype == weight_dtype:
                raise
            continue  # it refuses mixed dtypes, so there is nothing to reproduce
        candidates = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
    return _run_unusual(module, names, candidates, width, gated)


def _run_unusual(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """The candidates with the module's gradients, which also reproduce it at values and weights of any size."""
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
        own = {
            name: unusual(3 + n + i, 1, width)[0].to(dtype) if i % 2 else (normal(i + n, width) * 1e3).to(dtype)
            for n, name in enumerate(names)
        }
        twin = stand_in(module, own, training=True)
        y = run_forward(twin, *inputs)
        candidates = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
    return candidates


def _taken_dims(
    module: nn.Module, names: list[str], candidates: list, width: int, gated: bool
) -> tuple[list, frozenset[int]]:
    """One row without a batch: the candidates that reproduce it, and whether the module takes it at all."""
    twin = stand_in(module, {name: normal(i, width) for i, name in enumerate(names)}, training=True)
    inputs = [normal(i, width) for i in range(1 + gated)]
    try:
        y = run_forward(twin, *inputs)
    except Exception:
        return candidates, frozenset((2, 3, 4))
    same = [c for c in candidates if same_bits(y, c(twin, *inputs, reference=True))]
    return same, frozenset((1, 2, 3, 4))


def recognise_norm(module: nn.Module) -> RMSNormRecipe | LayerNormRecipe | str | None:
    """A norm: no children, at most two parameters (1-D, of one size), and an epsilon or "norm" in the class's name."""
    tensors = {name: t for name, t in own_tensors(module).items() if t is not None}
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0.0 < value <= 0.1]
    # Without both it may be a dropout or an activation as well.
    likely = (tensors and epsilons) or "norm" in type(module).__name__.lower()
    if module._modules or not likely or not takes(module, 1, 2) or any(t.dim() > 1 for t in tensors.values()):
        return None
    # ZeRO-3 keeps the shape of what it took; FSDP1 may leave nothing on this rank.
    sizes = {tuple(getattr(t, "ds_shape", t.shape)) for t in tensors.values()} - {(0,)}
    if len(tensors) > 2 or len(sizes) > 1 or any(b is not None for b in module._buffers.values()):
        return "has more state than a norm"
    if (1,) in sizes:
        return "has a weight of one element"
    # Without a weight it may still check its input's width against an attribute, or take parts of that width each.
    own = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    named = [size for size in own if type(size) is int and 1 < size <= 65536] + [96]
    widths = list(*sizes) if sizes else [factor * size for size in named for factor in (1, 2)]
    gated, names, failure = takes(module, 2), list(tensors), ""
    candidates, ran = list(_norm_candidates(names, epsilons or [1e-5, 1e-6], gated)), False
    reach = explore(module)
    if reason := reach.reason or reach.decision:
        return reason
    for width in widths:
        try:
            with reach.preserved(), probing():
                candidates, ran = _run_norm(module, names, candidates, width, gated), True
                candidates, dims = _taken_dims(module, names, candidates, width, gated)
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            failure = f"cannot be run by itself ({describe(error)})"
    if not ran:
        return failure
    if not candidates or reach.reason:
        return reach.reason or "computes something else than rms_norm or layer_norm"
    return replace(candidates[0], dims=dims)
