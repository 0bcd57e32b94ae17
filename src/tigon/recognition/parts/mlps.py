"""Recognise MLPs, whatever the names of their children are.

    down(silu(gate(x)) * up(x))            a gated MLP of three projections
    down(silu(a) * b), a, b = gate(x)      a gated MLP of two projections, packed
    down(gelu(up(x)))                      an MLP of two layers

Gate and result may be multiplied by numbers (Falcon H1), and gate and up may be clamped (DeepSeek V4). An MLP of two
layers may have dropouts, and transposed weights as `Conv1D` of transformers. A module may have other children, such as
an activation, but no other parameters. The sizes of the layers show which child may be which (`Wiring`); in a stand-in
each layer has another size, so that a wrong wiring fails.
"""

import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from tigon.recognition.guards.code_facts import largest_number
from tigon.recognition.parts.comparison import CANNOT_RUN, explain_difference, if_similar, run_probes, select
from tigon.recognition.parts.mlp_recipes import FORMULAS, GATE_KINDS, GLURecipe, MLPRecipe
from tigon.recognition.probing.probes import DTYPES, SpecialCase, Subject, runs_without_contiguity
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    accepts_inputs,
    copy_in_mode,
    has_no_tensors,
    is_linear,
    normal,
    own_tensors,
    probing,
    random_linear,
    same_bits,
    stand_in,
    unusual_values,
)
from tigon.recognition.replacement import is_changed
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.places import Reach, is_simple
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

NO_GATED_MLP = "computes something else than silu, gelu or gelu-tanh gates"
NO_MLP = "computes something else than two linear layers with a GELU or a squared ReLU in between"
READS_WEIGHTS = "its forward reads the weights of its linear layers, besides calling them"

RecipeType = TypeVar("RecipeType", GLURecipe, MLPRecipe)


class Wiring(NamedTuple):
    """The names of the layers. Without `up`, the output of `gate` contains both factors, or there is no gate."""

    gate: str
    up: str | None
    down: str


class _Projection(nn.Linear):
    """A layer of a stand-in. It passes for an object of the real layer's class, and it records its calls."""

    __class__ = property(lambda self: self.__dict__["_real_class"])

    def __call__(self, x: Tensor) -> Tensor:
        self.__dict__["_calls"].append(self.__dict__["_name"])
        return nn.Linear.__call__(self, x)


class _VisibleDropout(nn.Dropout):
    """A dropout of a stand-in that changes its input in a known way, each by another shift, so that its place shows. It
    draws no random numbers. In evaluation mode it returns its input."""

    shift: float

    __class__ = property(lambda self: nn.Dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.25 + self.shift if self.training else x


def _imitate(cls: Any, child: Any, **state: Any) -> Any:
    """Return a child of a stand-in of class `cls`, with the simple settings of a real child and with this state."""
    twin = object.__new__(cls)
    twin.__dict__.update({key: value for key, value in vars(child).items() if is_simple(value)} | state)
    return twin


@dataclass(frozen=True)
class _MLPSubject(Subject):
    """Builds stand-ins of an MLP and inputs for them. `layers` are the linear children of the module."""

    module: nn.Module
    layers: Mapping[str, Any]
    wiring: Wiring
    # The dropouts that show their places.
    dropouts: Sequence[str] = ()
    # How many times the width of the product the output of a first layer without an up projection has.
    factor: int = 2
    # The features of a stand-in: of its input, of the product, and of its output.
    widths: tuple[int, int, int] = (24, 40, 56)
    # The names of the attributes that hold a size, which is smaller in stand-ins. None stands for all attributes whose
    # value is one of the sizes.
    size_names: frozenset[str] | None = None

    def __call__(self, dtype: torch.dtype | None = FP32, training: bool = True) -> nn.Module:
        gate, down = self.layers[self.wiring.gate], self.layers[self.wiring.down]
        real_hidden, real_inner, real_out = gate.in_features, down.in_features, down.out_features
        # Sizes differ, so that a wrong wiring fails. The output has the input's size only if the original's output has.
        hidden, inner, other_out = self.widths
        gate_out = inner * (self.factor if self.wiring.up is None else 1)
        out = hidden if real_out == real_hidden else other_out
        calls: list[str] = []
        children: dict[str, nn.Module | None] = {}
        for i, (name, child) in enumerate(self.module._modules.items()):
            if child is None or name not in self.layers:
                children[name] = child and copy_in_mode(child, training)
                continue
            sizes = (inner, out) if name == self.wiring.down else (hidden, gate_out)
            layer = random_linear(77 + 10 * i, *sizes, dtype or FP32, getattr(child, "bias", None) is not None)
            state = vars(layer) | {"_real_class": type(child), "_name": name, "_calls": calls}
            children[name] = _imitate(_Projection, child, **state)
        for i, name in enumerate(self.dropouts):
            children[name] = _imitate(_VisibleDropout, children[name], **vars(children[name]), shift=0.5 + i)
        small = {real_out: out, 2 * real_inner: 2 * inner, real_inner: inner, real_hidden: hidden}
        attributes = vars(self.module).items()
        small_sizes = {name: small[value] for name, value in attributes if type(value) is int and value in small}
        if self.size_names is not None:
            small_sizes = {name: size for name, size in small_sizes.items() if name in self.size_names}
        return stand_in(self.module, {}, children, training=training, **small_sizes)

    def with_size_names(self) -> Self:
        """Return a subject that knows which attributes hold a size. Another setting may have the value of a size by
        chance, and must keep it in stand-ins. An attribute counts as a size if the forward of a stand-in raises an
        error when only this attribute keeps its original value."""
        names = {name for name, value in vars(self.module).items() if type(value) is int}
        without = {name: replace(self, size_names=frozenset(names - {name})) for name in names}
        return replace(self, size_names=frozenset(name for name in names if without[name].call_order() is None))

    def call_order(self) -> list[str] | None:
        """Return the names of the layers in the order in which a stand-in calls them; None if it refuses its input."""
        twin = self()
        try:
            type(twin).forward(twin, *self.inputs(FP32, 2, 4))
        except Exception:
            LOGGER.debug("a stand-in of %s refuses its input", type(self.module).__name__, exc_info=True)
            return None
        return list(vars(getattr(twin, self.wiring.gate))["_calls"])

    def inputs(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        return [normal(60, *shape, self.widths[0], dtype=dtype)]

    def cases(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        cases = [(FP32, (2, 16)), (BF16, (1, 300)), (BF16, (2, 16)), (FP32, (1, 32)), (FP16, (4, 8))]
        for seed, (dtype, shape) in enumerate(cases):
            twin, plain = self(dtype, training=seed % 2 == 1), normal(1000 + seed, *shape, self.widths[0])
            sizes = torch.logspace(-4, 1 if dtype == FP16 else 10, plain[..., 0].numel()).view(*shape, 1)
            yield twin, [(plain * sizes).to(dtype)]
            yield twin, [unusual_values(seed, *shape, self.widths[0], dtype=dtype)]
        for training in (True, False):
            # A module may clamp its weights or its intermediate values.
            yield self.with_weights(FP32, lambda name, values: values.mul_(100.0), training), self.inputs(FP32, 2, 16)

    def special_cases(self, recipe: Any, reach: Reach) -> Iterator[SpecialCase]:
        """Yield weights of zeros, ones and one sign, for which outputs overflow, mixed dtypes, and widths beyond a
        number in the code, which may treat features beyond an index in another way."""

        def align(name: str, values: Tensor) -> None:
            values.abs_()
            if name == f"{recipe.down}.weight":
                values[::2] *= -1

        changes = align, lambda name, values: values.zero_(), lambda name, values: values.fill_(1.0)
        for dtype in DTYPES:
            sizes = torch.logspace(-1, 4 if dtype == FP16 else 30, 32, dtype=FP32)[:, None].to(dtype)
            for change in changes:
                yield functools.partial(self.with_weights, dtype, change), [self.inputs(dtype, 32)[0].abs() * sizes]
        for dtype, weight_dtype in ((FP32, BF16), (BF16, FP32), (FP16, FP32), (FP32, FP16)):
            yield functools.partial(self, weight_dtype), self.inputs(dtype, 2, 4)
        large = largest_number(reach) + 8
        for widths in ((24, large, 56), (large, 40, large + 16)) if 32 < large <= 65536 else ():
            wide = replace(self, widths=widths)
            yield wide, wide.inputs(FP32, 2, 2)


def _compare(subject: _MLPSubject, candidates: Sequence[RecipeType], reach: Reach, different: str) -> RecipeType | str:
    """Return the first candidate that computes what the module computes, or the reason why none does."""
    subject = subject.with_size_names()
    selected, dims = select(subject, candidates)
    if not selected:
        return different
    recipe: Any = selected[0]
    order = subject.call_order() or [""]
    if sorted(order) != sorted(subject.layers) or order[-1] != recipe.down:
        return "its forward does not call each of its linear layers once"
    if isinstance(recipe, GLURecipe):
        recipe = replace(recipe, up_first=order[0] == recipe.up)
    recipe = replace(recipe, dims=dims)
    accepts_strides = runs_without_contiguity(recipe, subject)
    reason = explain_difference(recipe, subject, reach, dims, different=different)
    return reason or replace(recipe, needs_contiguity=not accepts_strides)


def _explain_changes(others: Mapping[str, nn.Module]) -> str | None:
    """Return why the children without parameters keep their module from being replaced, or None."""
    changed_children = [name for name, child in others.items() if is_changed(child)]
    return (
        f"has hooks on {', '.join(changed_children)}, or their call or forward was replaced"
        if changed_children
        else None
    )


def _wirings(projections: Mapping[str, Any]) -> Iterator[Wiring]:
    """Yield every wiring of a gated MLP that the sizes of the children allow."""
    for gate, *ups, down in itertools.permutations(projections):
        width, inner = projections[gate].in_features, projections[gate].out_features
        fits = all((projections[up].in_features, projections[up].out_features) == (width, inner) for up in ups)
        if fits and projections[down].in_features * (1 if ups else 2) == inner:
            yield Wiring(gate, ups[0] if ups else None, down)


def recognise_glu(module: nn.Module) -> GLURecipe | str | None:
    """Recognise a gated MLP: two (packed) or three linear children of fitting sizes, and no other parameters."""
    projections: dict[str, Any] = {name: child for name, child in module._modules.items() if is_linear(child)}
    if len(projections) not in (2, 3) or not accepts_inputs(module, 1):
        return None
    if not (wirings := list(_wirings(projections))):
        return None
    others = {n: child for n, child in module._modules.items() if n not in projections and child is not None}
    extra = [name for name, child in others.items() if not has_no_tensors(child)]
    extra += [name for name, tensor in own_tensors(module).items() if tensor is not None]
    if extra:
        return f"has more state than a gated MLP ({', '.join(extra)})"
    if reason := _explain_changes(others):
        return reason
    sizes = {size for layer in projections.values() for size in (layer.in_features, layer.out_features)}
    # Children of one size may be the projections of an attention layer, which need no reason in the report. Its forward
    # cannot be run with one input.
    may_be_attention = len(sizes) == 1
    reach = explore(module)
    if reach.reason:
        return None if may_be_attention else reach.reason
    if reach.names & {"weight", "bias"}:
        return READS_WEIGHTS
    # An attribute may hold a factor or a limit. The guard of the recipe fails once such an attribute changes.
    floats = [value for value in vars(module).values() if type(value) is float and math.isfinite(value) and value]
    factors, limits = list(dict.fromkeys([1.0, *floats])), [value for value in dict.fromkeys(floats) if value > 0]
    forms = list(itertools.product(GATE_KINDS, factors, factors, [math.inf, *limits]))
    reasons: list[str] = []
    for wiring in wirings:
        candidates = [GLURecipe(kind, *wiring, *numbers) for kind, *numbers in forms]
        compare = functools.partial(_compare, _MLPSubject(module, projections, wiring), candidates, reach, NO_GATED_MLP)
        result = run_probes(compare, module, reach)
        if not isinstance(result, str) or not (result == NO_GATED_MLP or result.startswith(CANNOT_RUN)):
            return result
        reasons.append(result)
    if NO_GATED_MLP in reasons:
        return NO_GATED_MLP
    return None if may_be_attention else reasons[-1]


def _is_transposed_linear(layer: nn.Module) -> bool:
    """Return True if a layer without children computes x W + b for a weight W [in, out] and a bias b [out]."""
    tensors = {name: t for name, t in own_tensors(layer).items() if t is not None}
    if layer._modules or set(tensors) != {"weight", "bias"} or tensors["weight"].dim() != 2:
        return False
    attributes = {name: value for name, value in vars(layer).items() if type(value) is int}
    is_named = attributes == dict(zip(("nx", "nf"), tensors["weight"].shape, strict=True))
    cls: Any = type(layer)
    return is_named and _multiplies_transposed(cls.forward, cls)


@cached_weakly
def _multiplies_transposed(forward: Any, cls: Any) -> bool:
    """Return True if the forward of a class computes x W + b, with the bits of `torch.addmm`."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    try:
        for seed, dtype in enumerate((FP32, BF16)):
            weight, bias = normal(seed, 24, 40, dtype=dtype), normal(seed + 1, 40, dtype=dtype)
            x = normal(seed + 2, 3, 5, 24, dtype=dtype)
            with probing():
                twin = stand_in(layer, {"weight": weight, "bias": bias}, nf=40, nx=24)
                expected = torch.addmm(bias, x.view(-1, 24), weight).view(3, 5, 40)
                if not same_bits(cls.forward(twin, x), expected):
                    return False
    except Exception:
        LOGGER.debug("%s cannot be run as a linear layer", cls.__name__, exc_info=True)
        return False
    return True


def recognise_mlp(module: nn.Module) -> MLPRecipe | str | None:
    """Recognise an MLP of two linear layers. Another module, such as a router, gets no reason."""
    if not accepts_inputs(module, 1):
        return None
    children: dict[str, Any] = {name: child for name, child in module._modules.items() if child is not None}
    transposed = {n: child for n, child in children.items() if not is_linear(child) and _is_transposed_linear(child)}
    layers = {name: child for name, child in children.items() if is_linear(child)}
    layers |= {name: SimpleNamespace(in_features=child.nx, out_features=child.nf) for name, child in transposed.items()}
    others = {name: child for name, child in children.items() if name not in layers}
    has_more_state = any(t is not None for t in own_tensors(module).values())
    if len(layers) != 2 or has_more_state or not all(map(has_no_tensors, others.values())):
        return None
    reach, failure = explore(module), None
    forward = next((type(child).forward for child in transposed.values()), None)
    dropouts = [name for name, child in others.items() if type(child) is nn.Dropout]
    # A module has at most one dropout in each place. One that it does not call is in none of them.
    places = [(), *((name,) for name in dropouts)]
    for up, down in (tuple(layers), tuple(layers)[::-1]):
        if layers[up].out_features != layers[down].in_features:
            continue
        forms = itertools.product(FORMULAS, places, places)
        candidates = [MLPRecipe(formula, up, down, inner, outer, forward) for formula, inner, outer in forms]
        subject = _MLPSubject(module, layers, Wiring(up, None, down), dropouts, factor=1)
        compare = functools.partial(_compare, subject, candidates, reach, NO_MLP)
        result = if_similar(functools.partial(run_probes, compare, module, reach), candidates)
        if isinstance(result, MLPRecipe):
            return _explain_changes(others) or (READS_WEIGHTS if reach.names & {"weight", "bias"} else result)
        failure = result or failure
    return failure
