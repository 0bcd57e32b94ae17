"""Which op computes what a module computes: found by running a small twin of it, never by its name.

Each `recognise_*` takes a module and returns
- a recipe: called with the module and its inputs, it computes the same with the op;
- a reason (str): the module looks like one of this kind but computes something else;
- None: the module is nothing of this kind.

A twin has random parameters and must reproduce the reference of an op bit for bit, in fp32 and bf16, training and
evaluating. Rows of very different sizes make epsilon, offset and the place of the rounding show.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tigon.hf.replacement import is_changed
from tigon.hf.standin import in_mode, linear, normal, probing, stand_in, without_parameters
from tigon.ops.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.rms_norm import rms_norm, rms_norm_reference

__all__ = ["GLU", "Norm", "describe", "recognise_glu", "recognise_norm"]

FP32, BF16 = torch.float32, torch.bfloat16


def describe(error: Exception) -> str:
    """One line of an exception for a report."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def _takes_one_input(module: nn.Module) -> bool:
    """Whether forward can be called with a single positional argument."""
    try:
        inspect.signature(type(module).forward).bind(module, None)
    except (TypeError, ValueError):
        return False
    return True


def _same_bits(a: object, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


# --- RMS norms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """`rms_norm` of the module's own weight and epsilon, both read by name at every call."""

    weight: str | None
    eps: str
    offset: float
    rounding: Literal["before_weight", "after_weight"]

    def __call__(self, module: nn.Module, *args, op: Callable = rms_norm, **kwargs) -> Tensor:
        if kwargs or len(args) != 1:
            return type(module).forward(module, *args, **kwargs)
        weight = None if self.weight is None else getattr(module, self.weight)
        return op(args[0], weight, getattr(module, self.eps), offset=self.offset, rounding=self.rounding)

    def __str__(self) -> str:
        if self.weight is None:
            return "rms_norm without weight"
        return f"rms_norm, offset {self.offset:g}, rounded {self.rounding.replace('_', ' the ')}"


def _run_norm(module: nn.Module, name: str | None, candidates: list[Norm], width: int) -> list[Norm]:
    """The candidates that reproduce the module in every combination of dtypes it can run."""
    rows = max(16, 4096 // width)
    sizes = torch.logspace(-4, 2, rows)[:, None]  # the smallest have a mean square below any epsilon
    combinations = itertools.product((True, False), (FP32, BF16), (FP32, BF16))
    for seed, (training, dtype, weight_dtype) in enumerate(combinations):
        x = (normal(seed, rows, width) * sizes).to(dtype)
        weight = {} if name is None else {name: normal(100 + seed, width, dtype=weight_dtype)}
        twin = stand_in(module, weight, training=training)
        try:
            y = type(module).forward(twin, x.clone())
        except Exception:
            if dtype == weight_dtype:
                raise
            continue  # it refuses mixed dtypes, so there is nothing to reproduce
        candidates = [c for c in candidates if _same_bits(y, c(twin, x, op=rms_norm_reference))]
    return candidates


def recognise_norm(module: nn.Module) -> Norm | str | None:
    """An RMS norm: no children, at most one parameter (1-D), an attribute that is its epsilon."""
    tensors = {name: t for name, t in (module._parameters | module._buffers).items() if t is not None}
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0.0 < value <= 0.1]
    if module._modules or not epsilons or not _takes_one_input(module) or any(t.dim() > 1 for t in tensors.values()):
        return None
    if not tensors and "norm" not in type(module).__name__.lower():  # a dropout or an activation, say
        return None
    if len(tensors) > 1 or any(b is not None for b in module._buffers.values()):
        return "has more state than one weight, so it is no RMS norm"
    name = next(iter(tensors), None)
    if name is None:
        candidates = [Norm(None, eps, 0.0, "before_weight") for eps in epsilons]
        # It may still check its input's width against an attribute.
        sizes = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in vars(module).values()]
        widths = [size for size in sizes if type(size) is int and 1 < size <= 65536] + [96]
    else:
        roundings = ("before_weight", "after_weight")
        candidates = [Norm(name, *c) for c in itertools.product(epsilons, (0.0, 1.0), roundings)]
        widths = list(getattr(tensors[name], "ds_shape", tensors[name].shape))  # ZeRO-3 keeps the shape of what it took
    failure = "computes something else than an RMS norm"
    for width in widths:
        try:
            with probing():
                if found := _run_norm(module, name, candidates, width):
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
    if len(linears) not in (2, 3) or not _takes_one_input(module) or not (wirings := list(_wirings(linears))):
        return None
    others = {name: child for name, child in module._modules.items() if name not in linears and child is not None}
    extra = [name for name, child in others.items() if not without_parameters(child)]
    extra += [name for name, tensor in (module._parameters | module._buffers).items() if tensor is not None]
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
                    x = (normal(1000 + seed, 32, 24) * 3).to(dtype)
                    y = type(module).forward(twin, x.clone())
                    candidates = [c for c in candidates if _same_bits(y, c(twin, x, reference=True))]
        except Exception as error:
            failure = f"cannot be run by itself ({describe(error)})"
            continue
        if candidates:
            return candidates[0]
    return failure
