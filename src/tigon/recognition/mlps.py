"""Recognise gated MLPs, whatever the names of their children are, and squared ReLUs."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tigon.memory import call, remade_mlp
from tigon.ops.dispatch import KERNEL_DTYPES, any_global_hook
from tigon.ops.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.glu_mlp import glu_mlp_by_kernels, plain_weight, takes_weights
from tigon.ops.relu2 import relu2, relu2_reference
from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import (
    BF16,
    FP16,
    FP32,
    WritesTensor,
    describe,
    gradients,
    in_mode,
    linear,
    normal,
    own_tensors,
    probing,
    run_forward,
    same_bits,
    same_gradients,
    stand_in,
    takes,
    unusual,
    without_parameters,
)
from tigon.runtime.reach import explore

__all__ = ["GLURecipe", "ReLU2Recipe", "recognise_glu", "recognise_relu2"]

# Each entry is the op, its reference, and its name in `glu_mlp`.
KINDS: dict[str, tuple[Callable, Callable, str]] = {
    "swiglu": (swiglu, swiglu_reference, "silu"),
    "geglu": (geglu, geglu_reference, "gelu"),
    "geglu (tanh)": (*(functools.partial(f, approximate="tanh") for f in (geglu, geglu_reference)), "gelu_tanh"),
}


@dataclass(frozen=True)
class GLURecipe:
    """Recipe: `down(act(gate(x)) * up(x))` through the module's children.

    Without `up`, the output of `gate` contains both factors, packed.
    """

    kind: str
    gate: str
    up: str | None
    down: str
    # Dimensions of inputs for which the module was compared with the op.
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    live = ()
    choices = ()

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        x = args[0] if len(args) == 1 and not kwargs else None
        fits = isinstance(x, Tensor) and x.dim() in self.dims and x.dtype in KERNEL_DTYPES
        # A global module hook would see a call of the activation, and the op makes no such call.
        if not fits or any_global_hook():
            return type(module).forward(module, *args, **kwargs)
        if self.up is not None and not reference:
            weights = [plain_weight(getattr(module, name)) for name in (self.gate, self.up, self.down)]
            if takes_weights(*args, *weights):
                return glu_mlp_by_kernels(*args, *weights, KINDS[self.kind][2])
        return getattr(module, self.down)(remade_mlp(self._product, module, *args, reference))

    def _product(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        """Return act(gate) * up, computed through the module's children."""
        gate = call(getattr(module, self.gate), x)
        up = None if self.up is None else call(getattr(module, self.up), x)
        # If gate and up have different dtypes, the reference promotes as torch does.
        op, eager, _ = KINDS[self.kind]
        return (eager if reference or (up is not None and up.dtype != gate.dtype) else op)(gate, up)

    def __str__(self) -> str:
        return f"{self.kind}, packed" if self.up is None else self.kind


def _wirings(linears: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str]]:
    """Yield every (gate, up, down) that the sizes of the children allow."""
    for gate, *ups, down in itertools.permutations(linears):
        width, inner = linears[gate].in_features, linears[gate].out_features
        fits = all((linears[up].in_features, linears[up].out_features) == (width, inner) for up in ups)
        if fits and linears[down].in_features * (1 if ups else 2) == inner:
            yield gate, (ups[0] if ups else None), down


def _glu_twin(module: nn.Module, linears: dict, wiring: tuple, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a copy of the module with small children of the same wiring.

    Attributes that hold a size of the original hold the small size.
    """
    gate, up, down = wiring
    real = linears[gate].in_features, linears[down].in_features, linears[down].out_features
    # Sizes differ, so that a wrong wiring fails. Only `out` equals `hidden` if the original has them equal.
    hidden, inner, out = 24, 40, 24 if real[2] == real[0] else 56
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


# Each case is (dtype, leading shape), with long and short sequences.
CASES = [(FP32, (2, 16)), (BF16, (1, 300)), (BF16, (2, 16)), (FP32, (1, 32)), (FP16, (4, 8))]
# Leading shapes that give other numbers of dimensions, which some modules do not accept.
SHAPES = [(), (16,), (2, 3, 4)]


def _run_glu(module: nn.Module, linears: dict, wiring: tuple, candidates: list, seed: int, case: tuple) -> list:
    """Return the candidates that reproduce the outputs of the module, and in fp32 its gradients too."""
    dtype, shape = case
    twin = _glu_twin(module, linears, wiring, dtype, seed)
    plain = normal(1000 + seed, *shape, 24)
    sizes = torch.logspace(-4, 1 if dtype == FP16 else 10, plain[..., 0].numel()).view(*shape, 1)
    for x in ((plain * sizes).to(dtype), unusual(seed, *shape, 24, dtype=dtype)):
        candidates = _select_equal(twin, candidates, x)
    if dtype != FP32 or not candidates:
        return candidates
    parameters = [p for name in linears for p in twin._modules[name]._parameters.values() if p is not None]
    for leaves in ([plain, *parameters], parameters):
        stock = gradients(functools.partial(type(module).forward, twin, plain), leaves)
        candidates = [
            c for c in candidates if same_gradients(gradients(functools.partial(c, twin, plain), leaves), stock)
        ]
        plain = plain.detach()
    for p in parameters:
        # A module may clamp its weights or its intermediate values.
        p.requires_grad_(False).mul_(100.0)
    return _select_equal(twin, candidates, plain)


def _select_equal(twin: nn.Module, candidates: list, x: Tensor) -> list:
    """Return the candidates whose output for x has the bits of the module's output."""
    y = run_forward(twin, x)
    return [c for c in candidates if same_bits(y, c(twin, x, reference=True))]


def _run_shapes(module: nn.Module, linears: dict, wiring: tuple, candidates: list) -> tuple[list, frozenset[int]]:
    """Return the candidates that reproduce the module with every number of dimensions, and the accepted numbers."""
    twin, dims = _glu_twin(module, linears, wiring, FP32, 7), {3}
    for shape in SHAPES:
        x = normal(7, *shape, 24)
        with contextlib.suppress(Exception):
            run_forward(twin, x)
            dims.add(x.dim())
        if x.dim() in dims:
            candidates = _select_equal(twin, candidates, x)
    return candidates, frozenset(dims)


def recognise_glu(module: nn.Module) -> GLURecipe | str | None:
    """Recognise a gated MLP.

    It is a module with two (packed) or three linear children of fitting sizes, and no other parameters. Return a
    recipe, the reason why such a module is left as it is, or None for another module.
    """
    has_sizes = lambda m: all(type(getattr(m, name, None)) is int for name in ("in_features", "out_features"))
    linears = {name: child for name, child in module._modules.items() if has_sizes(child)}
    if len(linears) not in (2, 3) or not takes(module, 1) or not (wirings := list(_wirings(linears))):
        return None
    others = {name: child for name, child in module._modules.items() if name not in linears and child is not None}
    extra = [name for name, child in others.items() if not without_parameters(child)]
    extra += [name for name, tensor in own_tensors(module).items() if tensor is not None]
    if extra:
        return f"has more state than a gated MLP ({', '.join(extra)})"
    if changed_children := [name for name, child in others.items() if is_changed(child)]:
        return f"has hooks on {', '.join(changed_children)}, or another forward there"
    sizes = {size for layer in linears.values() for size in (layer.in_features, layer.out_features)}
    reach = explore(module, inputs=1)
    if reason := reach.reason or reach.decision:
        # Children of one size may be the projections of an attention, which need no reason in the report.
        return reason if len(sizes) > 1 else None
    if reach.names & {"weight", "bias"}:
        return "its forward reads the weights of its linear layers, besides calling them"
    mismatch = "computes something else than silu, gelu or gelu-tanh gates"
    failure, has_run = mismatch, False
    for wiring in wirings:
        candidates = [GLURecipe(kind, *wiring) for kind in KINDS]
        try:
            with reach.preserved(), probing():
                for case in enumerate(CASES):
                    candidates = _run_glu(module, linears, wiring, candidates, *case)
                candidates, dims = _run_shapes(module, linears, wiring, candidates)
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            failure = failure if has_run else f"cannot be run by itself ({describe(error)})"
            continue
        failure, has_run = mismatch, True
        if reach.reason:
            return reach.reason
        if candidates:
            return replace(candidates[0], dims=dims)
    # Children of one size that cannot be run may be the projections of an attention.
    return failure if has_run or len(sizes) > 1 else None


# --- squared ReLU --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReLU2Recipe:
    """Recipe: `relu2`, for an activation that is a module."""

    live = ()
    choices = ()

    def __call__(self, module: nn.Module, *args, **kwargs) -> Tensor:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dtype not in KERNEL_DTYPES:
            return type(module).forward(module, *args, **kwargs)
        return relu2(*args)

    def __str__(self) -> str:
        return "relu2"


def recognise_relu2(module: nn.Module) -> ReLU2Recipe | str | None:
    """Recognise a squared ReLU: a module without children and without parameters."""
    if module._modules or not without_parameters(module) or not takes(module, 1):
        return None
    reach = explore(module, inputs=1)
    with contextlib.suppress(Exception), reach.preserved(), probing():
        for seed, dtype in enumerate((FP32, BF16, FP16)):
            wide = (normal(seed, 16, 24) * torch.logspace(-4, 1 if dtype == FP16 else 15, 16)[:, None]).to(dtype)
            others = [unusual(seed, *shape, 24, dtype=dtype) for shape in ((16,), (), (2, 8), (2, 2, 4))]
            twins = [stand_in(module, training=training) for training in (True, False)]
            for twin, x in itertools.product(twins, (wide, *others)):
                if not same_bits(run_forward(twin, x), relu2_reference(x)):
                    return None
        x, twin = normal(3, 16, 24), stand_in(module)
        stock, ours = (gradients(run, [x]) for run in (lambda: type(module).forward(twin, x), lambda: relu2(x)))
        if same_gradients(ours, stock):
            return reach.reason or reach.decision or ReLU2Recipe()
    return None
