"""Which op computes what a module computes: found by running a small twin of it, never by its name.

Each `recognise_*` takes a module and returns
- a recipe: called with the module and its inputs, it computes the same with the op;
- a reason (str): the module looks like one of this kind but computes something else;
- None: the module is nothing of this kind.

A twin has random parameters and must reproduce the reference of an op bit for bit, in fp32 and bf16, training and
evaluating. Rows of very different sizes make epsilon, offset and the place of the rounding show.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.hf.replacement import is_changed
from tigon.hf.standin import in_mode, linear, normal, own_tensors, probing, stand_in, without_parameters
from tigon.ops.dispatch import runs_kernels
from tigon.ops.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.layer_norm import layer_norm, layer_norm_reference
from tigon.ops.relu2 import relu2, relu2_reference
from tigon.ops.rms_norm import rms_norm, rms_norm_reference

__all__ = [
    "GLU",
    "LayerNorm",
    "RMSNorm",
    "ReLU2",
    "describe",
    "recognise_glu",
    "recognise_norm",
    "recognise_relu2",
]

FP32, BF16 = torch.float32, torch.bfloat16


def describe(error: Exception) -> str:
    """One line of an exception for a report."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def _takes(module: nn.Module, *counts: int) -> bool:
    """Whether the class has a forward of its own that can be called with one of these numbers of arguments."""
    if type(module).forward is nn.Module.forward:
        return False
    for count in counts:
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(type(module).forward).bind(module, *[None] * count)
            return True
    return False


def _same_bits(a: object, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


# --- norms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RMSNorm:
    """`rms_norm` of the module's own weight and epsilon, read by name at every call; gated: times silu of a gate."""

    eps: str | float
    weight: str | None
    offset: float
    rounding: Literal["before_weight", "after_weight"]
    gated: bool
    part = "rms_norm"

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        if kwargs or len(args) != 1 + self.gated or not all(isinstance(x, Tensor) for x in args):
            return type(module).forward(module, *args, **kwargs)
        weight, eps = _own(module, self.weight), _own(module, self.eps)
        y = (rms_norm_reference if reference else rms_norm)(
            args[0], weight, eps, offset=self.offset, rounding=self.rounding
        )
        if not self.gated:
            return y
        dtype, gate = args[0].dtype, args[1]
        if not reference and dtype == y.dtype == gate.dtype and runs_kernels(y, gate):
            return swiglu(gate, y)  # in fp32 as below
        return (y * F.silu(gate.float())).to(dtype)

    def __str__(self) -> str:
        offset = f", offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"
        return f"rms_norm{' without weight' if self.weight is None else offset}{', then swiglu' if self.gated else ''}"


# Other ways to write `layer_norm_reference`, rounded once as well.


def _layer_norm_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = (t if t is None else t.float() for t in (x, weight, bias))
    return layer_norm_reference(*wide, eps).to(x.dtype)


def _layer_norm_in_steps(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x.float() - x.float().mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else weight.float() * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """`layer_norm` of the module's own weight, bias and epsilon, read by name at every call."""

    eps: str | float
    weight: str | None
    bias: str | None
    written: Callable  # a reference with the module's bits
    part = "layer_norm"

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        if kwargs or len(args) != 1:
            return type(module).forward(module, *args, **kwargs)
        own = [_own(module, name) for name in (self.weight, self.bias, self.eps)]
        return (self.written if reference else layer_norm)(args[0], *own)

    def __str__(self) -> str:
        without = [name for name in ("weight", "bias") if getattr(self, name) is None]
        return f"layer_norm without {' and '.join(without)}" if without else "layer_norm"


def _own(module: nn.Module, name: str | float | None) -> Tensor | float | None:
    return getattr(module, name) if isinstance(name, str) else name


def _norm_candidates(names: list[str], epsilons: list[str | float], gated: bool) -> Iterator[RMSNorm | LayerNorm]:
    if len(names) < 2:
        forms = itertools.product((0.0, 1.0), ("before_weight", "after_weight")) if names else [(0.0, "before_weight")]
        weight = names[0] if names else None
        yield from (RMSNorm(eps, weight, *form, gated) for eps, form in itertools.product(epsilons, forms))
    if not gated:
        pairs = itertools.permutations([*names, None][:2], 2) if names else [(None, None)]
        written = (layer_norm_reference, _layer_norm_in_fp32, _layer_norm_in_steps)
        yield from (LayerNorm(eps, *pair, how) for eps, pair, how in itertools.product(epsilons, pairs, written))


def _run_norm(module: nn.Module, names: list[str], candidates: list, width: int, gated: bool) -> list:
    """The candidates that reproduce the module in every combination of dtypes it can run."""
    rows = max(16, 4096 // width)
    sizes = torch.logspace(-4, 2, rows)[:, None]  # the smallest have a mean square below any epsilon
    combinations = itertools.product((True, False), (FP32, BF16), (FP32, BF16))
    for seed, (training, dtype, weight_dtype) in enumerate(combinations):
        inputs = [(normal(seed, rows, width) * sizes).to(dtype)]
        inputs += [normal(50 + seed, rows, width, dtype=dtype)] if gated else []
        own = {name: normal(100 + seed + 10 * i, width, dtype=weight_dtype) for i, name in enumerate(names)}
        twin = stand_in(module, own, training=training)
        try:
            y = type(module).forward(twin, *(x.clone() for x in inputs))
        except Exception:
            if dtype == weight_dtype:
                raise
            continue  # it refuses mixed dtypes, so there is nothing to reproduce
        candidates = [c for c in candidates if _same_bits(y, c(twin, *inputs, reference=True))]
    return candidates


def recognise_norm(module: nn.Module) -> RMSNorm | LayerNorm | str | None:
    """A norm: no children, at most two parameters (1-D, of one size), and an epsilon or "norm" in the class's name."""
    tensors = {name: t for name, t in own_tensors(module).items() if t is not None}
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0.0 < value <= 0.1]
    # Without both it may be a dropout or an activation as well.
    likely = (tensors and epsilons) or "norm" in type(module).__name__.lower()
    if module._modules or not likely or not _takes(module, 1, 2) or any(t.dim() > 1 for t in tensors.values()):
        return None
    # ZeRO-3 keeps the shape of what it took; FSDP1 may leave nothing on this rank.
    sizes = {tuple(getattr(t, "ds_shape", t.shape)) for t in tensors.values()} - {(0,)}
    if len(tensors) > 2 or len(sizes) > 1 or any(b is not None for b in module._buffers.values()):
        return "has more state than a norm"
    # Without a weight it may still check its input's width against an attribute.
    own = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
    widths = list(*sizes) if sizes else [size for size in own if type(size) is int and 1 < size <= 65536] + [96]
    failure = "computes something else than a norm"
    gated = _takes(module, 2)
    for width in widths:
        candidates = list(_norm_candidates(list(tensors), epsilons or [1e-5, 1e-6], gated))
        try:
            with probing():
                if found := _run_norm(module, list(tensors), candidates, width, gated):
                    return found[0]
        except Exception as error:
            failure = f"cannot be run by itself ({describe(error)})"
    return failure


# --- gated MLPs ----------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable, Callable]] = {  # the op and its reference
    "swiglu": (swiglu, swiglu_reference),
    "geglu": (geglu, geglu_reference),
    "geglu (tanh)": tuple(functools.partial(f, approximate="tanh") for f in (geglu, geglu_reference)),
}


@dataclass(frozen=True)
class GLU:
    """`down(act(gate(x)) * up(x))` through the module's own children; without `up`, `gate` gives both, packed."""

    kind: str
    gate: str
    up: str | None
    down: str
    skipped: tuple[tuple[str, type], ...] = ()  # the children that the op does without: the activation

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        children = module._modules
        skips = all(type(children[name]) is cls and not is_changed(children[name]) for name, cls in self.skipped)
        if kwargs or len(args) != 1 or not skips:
            return type(module).forward(module, *args, **kwargs)
        gate = getattr(module, self.gate)(*args)
        up = None if self.up is None else getattr(module, self.up)(*args)
        # Children of different dtypes: the reference promotes as torch does.
        op, eager = KINDS[self.kind]
        op = eager if reference or (up is not None and up.dtype != gate.dtype) else op
        return getattr(module, self.down)(op(gate, up))

    def __str__(self) -> str:
        return f"{self.kind}, packed" if self.up is None else self.kind


def _wirings(linears: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the sizes of the children allow."""
    for gate, *ups, down in itertools.permutations(linears):
        width, inner = linears[gate].in_features, linears[gate].out_features
        fits = all((linears[up].in_features, linears[up].out_features) == (width, inner) for up in ups)
        if fits and linears[down].in_features * (1 if ups else 2) == inner:
            yield gate, (ups[0] if ups else None), down


def _glu_twin(module: nn.Module, linears: dict, wiring: tuple, dtype: torch.dtype, seed: int) -> nn.Module:
    """The module with small children of the same wiring, and its attributes that name sizes made small likewise."""
    gate, up, down = wiring
    real = linears[gate].in_features, linears[down].in_features, linears[down].out_features
    hidden, inner, out = 24, 40, 24 if real[2] == real[0] else 56  # all different, so that a wrong wiring fails
    training = seed % 2 == 1
    children: dict[str, nn.Module] = {}
    for i, (name, child) in enumerate(module._modules.items()):
        if name in linears:
            sizes = (inner, out) if name == down else (hidden, inner if up else 2 * inner)
            bias = getattr(child, "bias", None) is not None
            children[name] = linear(seed + 10 * i, *sizes, dtype, bias)
        else:
            children[name] = child and in_mode(child, training)
    small = {real[2]: out, 2 * real[1]: 2 * inner, real[1]: inner, real[0]: hidden}
    sizes = {name: small[value] for name, value in vars(module).items() if type(value) is int and value in small}
    return stand_in(module, {}, children, training=training, **sizes)


def recognise_glu(module: nn.Module) -> GLU | str | None:
    """A gated MLP: two (packed) or three linear children that fit each other, and nothing else with parameters."""
    has_sizes = lambda m: all(type(getattr(m, name, None)) is int for name in ("in_features", "out_features"))
    linears = {name: child for name, child in module._modules.items() if has_sizes(child)}
    if len(linears) not in (2, 3) or not _takes(module, 1) or not (wirings := list(_wirings(linears))):
        return None
    others = {name: child for name, child in module._modules.items() if name not in linears and child is not None}
    extra = [name for name, child in others.items() if not without_parameters(child)]
    extra += [name for name, tensor in own_tensors(module).items() if tensor is not None]
    if extra:
        return f"has more state than a gated MLP ({', '.join(extra)})"
    if changed := [name for name, child in others.items() if is_changed(child)]:
        return f"has hooks on {', '.join(changed)}, or another forward there"
    skipped = tuple((name, type(child)) for name, child in others.items())
    failure = "computes something else than silu, gelu or gelu-tanh gates"
    for wiring in wirings:
        candidates = [GLU(kind, *wiring, skipped) for kind in KINDS]
        try:
            with probing():
                for seed, dtype in enumerate((FP32, BF16, BF16, FP32)):
                    twin = _glu_twin(module, linears, wiring, dtype, seed)
                    x = (normal(1000 + seed, 2, 16, 24) * 3).to(dtype)
                    y = type(module).forward(twin, x.clone())
                    candidates = [c for c in candidates if _same_bits(y, c(twin, x, reference=True))]
        except Exception as error:
            failure = f"cannot be run by itself ({describe(error)})"
            continue
        if candidates:
            return candidates[0]
    return failure


# --- squared ReLU --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReLU2:
    """`relu2`, for an activation that is a module of its own."""

    def __call__(self, module: nn.Module, *args, **kwargs) -> Tensor:
        return type(module).forward(module, *args, **kwargs) if kwargs or len(args) != 1 else relu2(*args)

    def __str__(self) -> str:
        return "relu2"


def recognise_relu2(module: nn.Module) -> ReLU2 | None:
    """A squared ReLU: no children, no parameters."""
    if module._modules or not without_parameters(module) or not _takes(module, 1):
        return None
    with contextlib.suppress(Exception), probing():
        for seed, dtype in enumerate((FP32, BF16, FP32)):
            x = normal(seed, 16, 24, dtype=dtype)
            twin = stand_in(module, training=seed > 0)
            if not _same_bits(type(module).forward(twin, x.clone()), relu2_reference(x)):
                return None
        return ReLU2()
    return None
