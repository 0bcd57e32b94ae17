"""Compare a module with the candidates for a gated MLP: build stand-ins with small projections, and run both.

The sizes of the projections show which child may be the gate, the up projection and the down projection (`Wiring`). In
a stand-in each projection has another size, so that a wrong wiring fails.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from tigon.recognition.guards.code_facts import has_conditions, largest_number
from tigon.recognition.probing.probes import (
    DTYPES,
    agrees,
    agrees_in_all_combinations,
    agrees_in_circumstances,
    explain_limits,
    runs_without_contiguity,
)
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    copy_in_mode,
    normal,
    random_linear,
    run_forward,
    select_equal,
    select_equal_gradients,
    stand_in,
    unusual_values,
)
from tigon.runtime.reach.places import Reach, is_simple

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes something else than silu, gelu or gelu-tanh gates"

# Each case is (dtype, leading shape), with long and short sequences.
CASES = [(FP32, (2, 16)), (BF16, (1, 300)), (BF16, (2, 16)), (FP32, (1, 32)), (FP16, (4, 8))]
# Leading shapes that give other numbers of dimensions, which some modules do not accept.
SHAPES = [(), (16,), (2, 3, 4)]


class MLPLikeRecipe(Protocol):
    """A recipe that these comparisons can test: of a gated MLP, or of an MLP of two layers."""

    # These fields have the types of a data class, which `dataclasses.replace` needs.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def down(self) -> str: ...

    @property
    def dims(self) -> frozenset[int]: ...

    def with_call_order(self, order: list[str]) -> Any: ...

    @property
    def __call__(self) -> Callable[..., Tensor]: ...


RecipeType = TypeVar("RecipeType", bound=MLPLikeRecipe)


class Wiring(NamedTuple):
    """The names of the children. Without `up`, the output of `gate` contains both factors, packed."""

    gate: str
    up: str | None
    down: str


def wirings(projections: Mapping[str, Any]) -> Iterator[Wiring]:
    """Yield every wiring that the sizes of the children allow."""
    for gate, *ups, down in itertools.permutations(projections):
        width, inner = projections[gate].in_features, projections[gate].out_features
        fits = all((projections[up].in_features, projections[up].out_features) == (width, inner) for up in ups)
        if fits and projections[down].in_features * (1 if ups else 2) == inner:
            yield Wiring(gate, ups[0] if ups else None, down)


# --- stand-ins ---------------------------------------------------------------------------------------


class _Projection(nn.Linear):
    """A projection of a stand-in. It passes for an object of the real projection's class, and it records its calls."""

    __class__ = property(lambda self: self.__dict__["_real_class"])

    def __call__(self, x: Tensor) -> Tensor:
        self.__dict__["_calls"].append(self.__dict__["_name"])
        return nn.Linear.__call__(self, x)


def _projection(child: nn.Module, layer: nn.Linear, name: str, calls: list[str]) -> nn.Module:
    """Return a linear layer with the settings of a real projection, which the forward may read."""
    projection = object.__new__(_Projection)
    settings = {key: value for key, value in vars(child).items() if is_simple(value)}
    state = {"_real_class": type(child), "_name": name, "_calls": calls}
    projection.__dict__.update(settings | vars(layer) | state)
    return projection


class Widths(NamedTuple):
    """The features of a stand-in: of its input, of the product, and of its output."""

    hidden: int = 24
    inner: int = 40
    out: int = 56


DEFAULT_WIDTHS = Widths()


@dataclass(frozen=True)
class GLUSubject:
    """Builds stand-ins of a gated MLP and inputs for them. `projections` are the linear children of the module."""

    module: nn.Module
    projections: Mapping[str, Any]
    wiring: Wiring
    widths: Widths = DEFAULT_WIDTHS
    # How many times the width of the product the output of a first layer without an up projection has.
    factor: int = 2
    # The names of the attributes that hold a size, which is smaller in stand-ins. None stands for all attributes whose
    # value is one of the sizes.
    size_names: frozenset[str] | None = None

    def __call__(self, dtype: torch.dtype = FP32, training: bool = True) -> nn.Module:
        return self.stand_in(dtype, 77, training)

    def stand_in(self, dtype: torch.dtype, seed: int, training: bool | None = None) -> nn.Module:
        """Return a copy of the module with small children of the same wiring.

        Attributes in `size_names` hold the small size. By default, odd seeds are in training mode.
        """
        gate, down = self.projections[self.wiring.gate], self.projections[self.wiring.down]
        real_hidden, real_inner, real_out = gate.in_features, down.in_features, down.out_features
        gate_out = self.widths.inner * (self.factor if self.wiring.up is None else 1)
        # Sizes differ, so that a wrong wiring fails. The output has the input's size only if the original's output has.
        hidden, inner, other_out = self.widths
        out = hidden if real_out == real_hidden else other_out
        training = seed % 2 == 1 if training is None else training
        calls: list[str] = []
        children: dict[str, nn.Module | None] = {}
        for i, (name, child) in enumerate(self.module._modules.items()):
            if child is None or name not in self.projections:
                children[name] = child and copy_in_mode(child, training)
                continue
            sizes = (inner, out) if name == self.wiring.down else (hidden, gate_out)
            has_bias = getattr(child, "bias", None) is not None
            children[name] = _projection(child, random_linear(seed + 10 * i, *sizes, dtype, has_bias), name, calls)
        small = {real_out: out, 2 * real_inner: 2 * inner, real_inner: inner, real_hidden: hidden}
        attributes = vars(self.module).items()
        small_sizes = {name: small[value] for name, value in attributes if type(value) is int and value in small}
        if self.size_names is not None:
            small_sizes = {name: size for name, size in small_sizes.items() if name in self.size_names}
        return stand_in(self.module, {}, children, training=training, **small_sizes)

    def with_size_names(self) -> Self:
        """Return a subject that knows which attributes hold a size.

        Another setting may have the value of a size by chance, and must keep it in stand-ins. An attribute counts as a
        size if the forward of a stand-in raises an error when only this attribute keeps its original value.
        """
        names = {name for name, value in vars(self.module).items() if type(value) is int}
        size_names = frozenset(name for name in names if not replace(self, size_names=frozenset(names - {name})).runs())
        return replace(self, size_names=size_names)

    def runs(self) -> bool:
        """Return True if a stand-in accepts its inputs."""
        twin = self()
        try:
            type(twin).forward(twin, *self.inputs(FP32, 2, 4))
        except Exception:
            LOGGER.debug("a stand-in of %s refuses its inputs", type(self.module).__name__, exc_info=True)
            return False
        return True

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        """Return the input with these leading dimensions."""
        return [normal(60, *shape, self.widths.hidden, dtype=dtype)]

    def parameters(self, twin: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a stand-in's projections."""
        children = [twin._modules[name] for name in self.projections]
        return [p for child in children if child is not None for p in child._parameters.values() if p is not None]

    def with_weights(self, dtype: torch.dtype, change: Callable[[str, Tensor], object]) -> nn.Module:
        """Return a stand-in whose weights `change` has changed in place."""
        twin = self(dtype)
        for name in self.projections:
            change(name, getattr(twin, name).weight.data)
        return twin

    def call_order(self) -> list[str]:
        """Return the names of the projections in the order in which the forward calls them."""
        twin = self()
        type(twin).forward(twin, *self.inputs(FP32, 2, 4))
        return list(vars(getattr(twin, self.wiring.gate))["_calls"])


# --- comparisons that select candidates --------------------------------------------------------------


def select_by_values(subject: GLUSubject, candidates: list[RecipeType]) -> list[RecipeType]:
    """Return the candidates that reproduce the outputs of the module, and in fp32 its gradients too.

    Raises:
        WritesTensor: The forward writes to its input or to a parameter, or draws random numbers.
    """
    for seed, (dtype, shape) in enumerate(CASES):
        twin = subject.stand_in(dtype, seed)
        plain = normal(1000 + seed, *shape, subject.widths.hidden)
        sizes = torch.logspace(-4, 1 if dtype == FP16 else 10, plain[..., 0].numel()).view(*shape, 1)
        for x in ((plain * sizes).to(dtype), unusual_values(seed, *shape, subject.widths.hidden, dtype=dtype)):
            candidates = select_equal(candidates, twin, [x], run_forward(twin, x))
        if dtype == FP32 and candidates:
            candidates = _select_by_gradients(subject, twin, candidates, plain)
    return candidates


def _select_by_gradients(
    subject: GLUSubject, twin: nn.Module, candidates: list[RecipeType], x: Tensor
) -> list[RecipeType]:
    """Return the candidates that reproduce the gradients, and the outputs for large weights."""
    parameters = subject.parameters(twin)
    for leaves in ([x, *parameters], parameters):
        candidates = select_equal_gradients(candidates, twin, [x], leaves)
        x = x.detach()
    for p in parameters:
        # A module may clamp its weights or its intermediate values.
        p.requires_grad_(False).mul_(100.0)
    return select_equal(candidates, twin, [x], run_forward(twin, x))


def select_by_dims(subject: GLUSubject, candidates: list[RecipeType]) -> tuple[list[RecipeType], frozenset[int]]:
    """Return the candidates that reproduce the module with every number of dimensions, and the accepted numbers."""
    twin, dims = subject.stand_in(FP32, 7), {3}
    for shape in SHAPES:
        x = normal(7, *shape, subject.widths.hidden)
        try:
            run_forward(twin, x)
            dims.add(x.dim())
        except Exception:
            name = type(subject.module).__name__
            LOGGER.debug("%s refuses an input with %d dimensions", name, x.dim(), exc_info=True)
        if x.dim() in dims:
            candidates = select_equal(candidates, twin, [x], run_forward(twin, x))
    return candidates, frozenset(dims)


# --- comparisons of one candidate in other circumstances ---------------------------------------------


def confirm(recipe: RecipeType, subject: GLUSubject, reach: Reach, different: str = DIFFERENT) -> RecipeType | str:
    """Compare a candidate in all other circumstances. Return the final recipe, or the reason why it does not hold.

    `different` is the reason if a comparison fails.
    """
    order = subject.call_order()
    if sorted(order) != sorted(subject.projections) or order[-1] != recipe.down:
        return "its forward does not call each of its linear layers once"
    recipe = recipe.with_call_order(order)
    accepts_strides = runs_without_contiguity(recipe, subject, subject.inputs)
    pairs = [(dtype, dtype) for dtype in DTYPES]
    if reason := explain_limits(recipe, subject, subject.inputs, subject.module, reach, pairs, recipe.dims):
        return reason
    if not (
        agrees_in_circumstances(recipe, subject, subject.inputs)
        and _agrees_on_weights(recipe, subject)
        and _agrees_on_mixed_dtypes(recipe, subject)
        and _agrees_beyond(recipe, subject, largest_number(reach))
        and (not has_conditions(reach) or agrees_in_all_combinations(recipe, subject, subject.inputs, pairs))
    ):
        return different
    return replace(recipe, needs_contiguity=not accepts_strides)


def _agrees_on_weights(recipe: MLPLikeRecipe, subject: GLUSubject) -> bool:
    """Compare for weights of zeros and ones, and for weights of one sign, with which outputs overflow to infinity."""

    def align(name: str, weight: Tensor) -> None:
        weight.abs_()
        if name == recipe.down:
            weight[::2] *= -1

    for dtype in DTYPES:
        largest = 4 if dtype == FP16 else 30
        x = subject.inputs(dtype, 32)[0].abs() * torch.logspace(-1, largest, 32, dtype=torch.float32)[:, None].to(dtype)
        changes = align, lambda name, weight: weight.zero_(), lambda name, weight: weight.fill_(1.0)
        factories = (functools.partial(subject.with_weights, dtype, change) for change in changes)
        if any(agrees(recipe, make, [x]) is False for make in factories):
            return False
    return True


def _agrees_on_mixed_dtypes(recipe: MLPLikeRecipe, subject: GLUSubject) -> bool:
    """Return False if the op differs for an input whose dtype is not that of the weights, but the module accepts it."""
    pairs = (FP32, BF16), (BF16, FP32), (FP16, FP32), (FP32, FP16)
    return all(agrees(recipe, functools.partial(subject, w), subject.inputs(x, 2, 4)) is not False for x, w in pairs)


def _agrees_beyond(recipe: MLPLikeRecipe, subject: GLUSubject, number: int) -> bool:
    """Compare at widths beyond a number in the code. The code may treat features beyond this index in another way."""
    large = number + 8
    if not 32 < large <= 65536:
        return True
    for widths in (Widths(24, large, 56), Widths(large, 40, large + 16)):
        wide = replace(subject, widths=widths)
        if agrees(recipe, wide, wide.inputs(FP32, 2, 2)) is False:
            return False
    return True
