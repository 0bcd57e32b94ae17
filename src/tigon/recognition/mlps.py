"""Recognise gated MLPs, whatever the names of their children are, and squared ReLUs."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tigon.memory.lean import call_mlp_region, call_projection
from tigon.ops.mlps.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.mlps.glu_mlp import glu_mlp_by_kernels, plain_weight, supports_weights
from tigon.ops.mlps.relu2 import relu2, relu2_reference
from tigon.recognition.code_facts import has_conditions, largest_number, may_see_sizes
from tigon.recognition.probes import (
    DTYPES,
    agrees,
    agrees_by_circumstances,
    agrees_in_product,
    reads_of_input,
    runs_without_contiguity,
)
from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import (
    BF16,
    FP16,
    FP32,
    WritesTensor,
    describe,
    in_mode,
    linear,
    normal,
    own_tensors,
    probing,
    run_forward,
    select_equal,
    select_equal_gradients,
    stand_in,
    takes,
    unusual,
    without_parameters,
)
from tigon.recognition.symbolic import find_size_use
from tigon.recognition.trials import explain_none, recorded, recording
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.places import is_simple
from tigon.runtime.reach import Reach, explore
from tigon.runtime.torch_private import any_global_hook

__all__ = ["GLURecipe", "ReLU2Recipe", "recognise_glu", "recognise_relu2"]

LOGGER = logging.getLogger("tigon")

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
    # The module calls `up` before `gate`. The order shows in hooks, and in random numbers of the children.
    up_first: bool = field(default=False, compare=False)
    # The stock forward runs inputs that are not contiguous.
    contiguous: bool = field(default=False, compare=False)
    live = ()
    choices = ()

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        fits = len(args) == 1 and not kwargs and (reference or self._fits(args[0]))
        # A global module hook would see a call of the activation, and the op makes no such call.
        if not fits or any_global_hook():
            return type(module).forward(module, *args, **kwargs)
        if self.up is not None and not reference:
            weights = [plain_weight(getattr(module, name)) for name in (self.gate, self.up, self.down)]
            if supports_weights(*args, *weights):
                return glu_mlp_by_kernels(*args, *weights, KINDS[self.kind][2])
        return getattr(module, self.down)(call_mlp_region(self._product, module, *args, reference))

    def _fits(self, x: object) -> bool:
        """Return True if recognition compared the module with the op for an input of this kind."""
        if type(x) not in PLAIN or x.dim() not in self.dims or x.dtype not in KERNEL_DTYPES:
            return False
        return x.layout is torch.strided and not x.is_nested and (not self.contiguous or x.is_contiguous())

    def _product(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        """Return act(gate) * up, computed through the module's children."""
        up = call_projection(getattr(module, self.up), x) if self.up_first else None
        gate = call_projection(getattr(module, self.gate), x)
        if self.up is not None and not self.up_first:
            up = call_projection(getattr(module, self.up), x)
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


class _Projection(nn.Linear):
    """A projection of a stand-in: it passes for the class of the real projection, and it logs its calls."""

    __class__ = property(lambda self: self.__dict__["_real_class"])

    def __call__(self, x: Tensor) -> Tensor:
        self._calls.append(self._name)
        return nn.Linear.__call__(self, x)


def _projection(child: nn.Module, layer: nn.Linear, name: str, calls: list[str]) -> nn.Module:
    """Return a linear layer with the settings of a real projection, which the forward may read."""
    projection = object.__new__(_Projection)
    settings = {key: value for key, value in vars(child).items() if is_simple(value)}
    state = {"_real_class": type(child), "_name": name, "_calls": calls}
    projection.__dict__.update(settings | vars(layer) | state)
    return projection


def _glu_twin(
    module: nn.Module,
    linears: dict,
    wiring: tuple,
    dtype: torch.dtype,
    seed: int,
    training: bool | None = None,
    widths: tuple[int, int, int] = (24, 40, 56),
) -> nn.Module:
    """Return a copy of the module with small children of the same wiring.

    Attributes that hold a size of the original hold the small size.
    """
    gate, up, down = wiring
    real = linears[gate].in_features, linears[down].in_features, linears[down].out_features
    # Sizes differ, so that a wrong wiring fails. Only `out` equals `hidden` if the original has them equal.
    hidden, inner, other = widths
    out = hidden if real[2] == real[0] else other
    training = seed % 2 == 1 if training is None else training
    calls: list[str] = []
    children: dict[str, nn.Module] = {}
    for i, (name, child) in enumerate(module._modules.items()):
        if name in linears:
            sizes = (inner, out) if name == down else (hidden, inner if up else 2 * inner)
            bias = getattr(child, "bias", None) is not None
            children[name] = _projection(child, linear(seed + 10 * i, *sizes, dtype, bias), name, calls)
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
        candidates = select_equal(candidates, twin, [x], run_forward(twin, x))
    if dtype != FP32 or not candidates:
        return candidates
    parameters = [p for name in linears for p in twin._modules[name]._parameters.values() if p is not None]
    for leaves in ([plain, *parameters], parameters):
        candidates = select_equal_gradients(candidates, twin, [plain], leaves)
        plain = plain.detach()
    for p in parameters:
        # A module may clamp its weights or its intermediate values.
        p.requires_grad_(False).mul_(100.0)
    return select_equal(candidates, twin, [plain], run_forward(twin, plain))


def _run_shapes(module: nn.Module, linears: dict, wiring: tuple, candidates: list) -> tuple[list, frozenset[int]]:
    """Return the candidates that reproduce the module with every number of dimensions, and the accepted numbers."""
    twin, dims = _glu_twin(module, linears, wiring, FP32, 7), {3}
    for shape in SHAPES:
        x = normal(7, *shape, 24)
        try:
            run_forward(twin, x)
            dims.add(x.dim())
        except Exception:
            LOGGER.debug("%s refuses an input with %d dimensions", type(module).__name__, x.dim(), exc_info=True)
        if x.dim() in dims:
            candidates = select_equal(candidates, twin, [x], run_forward(twin, x))
    return candidates, frozenset(dims)


@dataclass(frozen=True)
class _Subject:
    """Makes stand-ins of a gated MLP and inputs for them."""

    module: nn.Module
    linears: dict[str, nn.Module]
    wiring: tuple[str, str | None, str]
    widths: tuple[int, int, int] = (24, 40, 56)

    def __call__(self, dtype: torch.dtype = FP32, training: bool = True) -> nn.Module:
        return _glu_twin(self.module, self.linears, self.wiring, dtype, 77, training, self.widths)

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        return [normal(60, *shape, self.widths[0], dtype=dtype)]

    def of_weights(self, dtype: torch.dtype, change: Callable[[str, Tensor], None]) -> nn.Module:
        """Return a stand-in whose weights `change` has changed in place."""
        twin = self(dtype)
        for name in self.linears:
            change(name, twin._modules[name].weight.data)
        return twin

    def call_order(self) -> list[str]:
        """Return the names of the projections in the order in which the forward calls them."""
        twin = self()
        type(twin).forward(twin, *self.inputs(FP32, 2, 4))
        return list(twin._modules[self.wiring[0]]._calls)


DIFFERENT = "computes something else than silu, gelu or gelu-tanh gates"


def _confirm(recipe: GLURecipe, subject: _Subject, reach: Reach) -> GLURecipe | str:
    """Compare a candidate in all other circumstances. Return the final recipe, or the reason why it does not hold."""
    order = subject.call_order()
    if sorted(order) != sorted(subject.linears) or order[-1] != recipe.down:
        return "its forward does not call each of its linear layers once"
    recipe = replace(recipe, up_first=recipe.up is not None and order[0] == recipe.up)
    choices = has_conditions(reach)
    strided = runs_without_contiguity(recipe, subject, subject.inputs)
    pairs = [(dtype, dtype) for dtype in DTYPES]
    if not (
        agrees_by_circumstances(recipe, subject, subject.inputs)
        and _agrees_on_weights(recipe, subject)
        and _agrees_on_mixed_dtypes(recipe, subject)
        and _agrees_beyond(recipe, subject, largest_number(reach))
        and (not choices or agrees_in_product(recipe, subject, subject.inputs, pairs))
    ):
        return DIFFERENT
    if reason := reads_of_input(subject(), subject.inputs(FP32, 2, 4)):
        return reason
    if may_see_sizes(reach, subject.module) and (reason := _size_use(recipe, subject, choices)):
        return reason
    return replace(recipe, contiguous=not strided)


def _agrees_on_weights(recipe: GLURecipe, subject: _Subject) -> bool:
    """Compare for weights of zeros and ones, and for weights of one sign, which let outputs overflow to infinity."""

    def align(name: str, weight: Tensor) -> None:
        weight.abs_()
        if name == recipe.down:
            weight[::2] *= -1

    for dtype in DTYPES:
        largest = 4 if dtype == FP16 else 30
        x = subject.inputs(dtype, 32)[0].abs() * torch.logspace(-1, largest, 32, dtype=torch.float32)[:, None].to(dtype)
        changes = align, lambda name, weight: weight.zero_(), lambda name, weight: weight.fill_(1.0)
        makes = (functools.partial(subject.of_weights, dtype, change) for change in changes)
        if any(agrees(recipe, make, [x]) is False for make in makes):
            return False
    return True


def _agrees_on_mixed_dtypes(recipe: GLURecipe, subject: _Subject) -> bool:
    """Return False if the module accepts an input of another dtype than its weights, and the op does not."""
    pairs = (FP32, BF16), (BF16, FP32), (FP16, FP32), (FP32, FP16)
    return all(agrees(recipe, functools.partial(subject, w), subject.inputs(x, 2, 4)) is not False for x, w in pairs)


def _agrees_beyond(recipe: GLURecipe, subject: _Subject, number: int) -> bool:
    """Compare at widths beyond a number in the code, which may separate features from others."""
    large = number + 8
    if not 32 < large <= 65536:
        return True
    for widths in ((24, large, 56), (large, 40, large + 16)):
        wide = replace(subject, widths=widths)
        if agrees(recipe, wide, wide.inputs(FP32, 2, 2)) is False:
            return False
    return True


def _size_use(recipe: GLURecipe, subject: _Subject, choices: bool) -> str | None:
    """Return why the module may compute something else for other batch sizes, or None."""
    dims = sorted(recipe.dims - {1}) if choices else (3,)
    for training, dtype, dim in itertools.product(
        (True, False) if choices else (True,), DTYPES[: 3 if choices else 1], dims
    ):
        twin = subject(dtype, training)
        reference = functools.partial(recipe, twin, reference=True)
        inputs = tuple(subject.inputs(dtype, *[2] * (dim - 1)))
        if reason := find_size_use(functools.partial(type(twin).forward, twin), reference, inputs):
            return reason
    return None


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
        return f"has hooks on {', '.join(changed_children)}, or another call or forward there"
    sizes = {size for layer in linears.values() for size in (layer.in_features, layer.out_features)}
    reach = explore(module, inputs=1)
    if reason := reach.reason or reach.decision:
        # Children of one size may be the projections of an attention, which need no reason in the report.
        return reason if len(sizes) > 1 else None
    if reach.names & {"weight", "bias"}:
        return "its forward reads the weights of its linear layers, besides calling them"
    failure, has_run = DIFFERENT, False
    for wiring in wirings:
        candidates = [GLURecipe(kind, *wiring) for kind in KINDS]
        try:
            with reach.preserved(), probing():
                for case in enumerate(CASES):
                    candidates = _run_glu(module, linears, wiring, candidates, *case)
                candidates, dims = _run_shapes(module, linears, wiring, candidates)
                subject = _Subject(module, linears, wiring)
                results = [_confirm(replace(c, dims=dims), subject, reach) for c in candidates[:1]]
        except WritesTensor as error:
            return str(error)
        except Exception as error:
            LOGGER.debug("%s cannot be run as a gated MLP", type(module).__name__, exc_info=True)
            failure = failure if has_run else f"cannot be run by itself ({describe(error)})"
            continue
        failure, has_run = DIFFERENT, True
        if reach.reason:
            return reach.reason
        if results and (isinstance(results[0], GLURecipe) or results[0] != DIFFERENT):
            return results[0]
    # Children of one size that cannot be run may be the projections of an attention.
    return failure if has_run or len(sizes) > 1 else None


# --- squared ReLU --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReLU2Recipe:
    """Recipe: `relu2`, for an activation that is a module."""

    live = ()
    choices = ()

    # The stock forward runs inputs that are not contiguous.
    contiguous: bool = field(default=False, compare=False)

    def __call__(self, module: nn.Module, *args, reference: bool = False, **kwargs) -> Tensor:
        if kwargs or len(args) != 1 or not (reference or self._fits(args[0])):
            return type(module).forward(module, *args, **kwargs)
        return (relu2_reference if reference else relu2)(*args)

    def _fits(self, x: object) -> bool:
        """Return True if recognition compared the module with the op for an input of this kind."""
        if type(x) not in PLAIN or x.dtype not in KERNEL_DTYPES or x.layout is not torch.strided or x.is_nested:
            return False
        return not self.contiguous or x.is_contiguous()

    def __str__(self) -> str:
        return "relu2"


def recognise_relu2(module: nn.Module) -> ReLU2Recipe | str | None:
    """Recognise a squared ReLU: a module without children and without parameters.

    A reason is returned only for a module that computes a squared ReLU for some inputs, or has the name of one: other
    activations are no modules of this kind.
    """
    if module._modules or not without_parameters(module) or not takes(module, 1):
        return None
    reach, recipe = explore(module, inputs=1), ReLU2Recipe()
    try:
        with reach.preserved(), probing(), recording(recorded()) as trials:
            result = _compare_relu2(module, recipe) and (reach.reason or reach.decision)
            result = _confirm_relu2(module, reach) if result is None else result
    except WritesTensor as error:
        result = str(error)
    except Exception as error:
        LOGGER.debug("%s cannot be run as a squared ReLU", type(module).__name__, exc_info=True)
        result = f"cannot be run by itself ({describe(error)})"
    if isinstance(result, ReLU2Recipe):
        return result
    result = result or NOT_RELU2
    name = type(module).__name__.lower()
    if trials.passed[recipe] or "relu2" in name or ("relu" in name and "squared" in name):
        return result
    explain_none(result)
    return None


NOT_RELU2 = "computes something else than a squared ReLU"


def _compare_relu2(module: nn.Module, recipe: ReLU2Recipe) -> bool:
    """Return True if the recipe reproduces the module's outputs for values of every size, and its gradients."""
    for seed, dtype in enumerate((FP32, BF16, FP16)):
        wide = (normal(seed, 16, 24) * torch.logspace(-4, 1 if dtype == FP16 else 15, 16)[:, None]).to(dtype)
        others = [unusual(seed, *shape, 24, dtype=dtype) for shape in ((16,), (), (2, 8), (2, 2, 4))]
        twins = [stand_in(module, training=training) for training in (True, False)]
        for twin, x in itertools.product(twins, (wide, *others)):
            if not select_equal([recipe], twin, [x], run_forward(twin, x)):
                return False
    x = normal(3, 16, 24)
    return bool(select_equal_gradients([recipe], stand_in(module), [x], [x]))


def _confirm_relu2(module: nn.Module, reach: Reach) -> ReLU2Recipe | str:
    """Compare a squared ReLU in all other circumstances. Return a recipe, or the reason why there is none."""
    recipe, number = ReLU2Recipe(), largest_number(reach)
    subject = lambda dtype=FP32, training=True: stand_in(module, training=training)
    inputs = lambda dtype, *shape: [normal(60, *shape, number + 8 if 24 <= number <= 65536 else 24, dtype=dtype)]
    pairs = [(dtype, dtype) for dtype in DTYPES]
    strided = runs_without_contiguity(recipe, subject, inputs)
    agreement = agrees_by_circumstances(recipe, subject, inputs) and agrees_in_product(recipe, subject, inputs, pairs)
    if not agreement:
        return NOT_RELU2
    if reason := reads_of_input(subject(), inputs(FP32, 2, 4)):
        return reason
    if may_see_sizes(reach, module):
        run, reference = (functools.partial(f, subject()) for f in (type(module).forward, recipe))
        if reason := find_size_use(run, functools.partial(reference, reference=True), tuple(inputs(FP32, 2, 2))):
            return reason
    return replace(recipe, contiguous=not strided)
