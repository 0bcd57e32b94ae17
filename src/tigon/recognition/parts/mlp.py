"""Recognise MLPs of two linear layers, whatever the names of their children are: down(act(up(x))).

The activation is one of `activations`. The module may have dropouts after the activation and after the second layer,
and other children without parameters, such as the activation. A layer may be an `nn.Linear`, or a layer that multiplies
by a transposed weight, as `Conv1D` of transformers does.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.memory.lean import call_mlp_region, call_projection
from tigon.ops.mlps.mlp import activate, mlp_by_kernels
from tigon.ops.mlps.projections import does_more_than_forward, is_plain, supports_products
from tigon.recognition.parts.activations import FORMULAS
from tigon.recognition.parts.glu_probes import GLUSubject, Wiring, confirm, select_by_dims, select_by_values
from tigon.recognition.parts.glu_recipe import is_plain_input
from tigon.recognition.probing.standin import (
    WritesTensor,
    accepts_inputs,
    describe,
    has_no_tensors,
    is_linear,
    normal,
    own_tensors,
    probing,
    same_bits,
    stand_in,
)
from tigon.recognition.probing.trials import current_trials, explain_none, recording
from tigon.recognition.replacement import is_changed
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.reach.explore import explore
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes something else than two linear layers with a GELU or a squared ReLU in between"


# --- layers --------------------------------------------------------------------------------------


def _is_transposed_linear(layer: nn.Module) -> bool:
    """Return True if a layer without children computes x W + b for a weight W [in, out] and a bias b [out]."""
    tensors = {name: t for name, t in own_tensors(layer).items() if t is not None}
    if layer._modules or set(tensors) != {"weight", "bias"} or tensors["weight"].dim() != 2:
        return False
    sizes = tuple(tensors["weight"].shape)
    attributes = {name: value for name, value in vars(layer).items() if type(value) is int}
    is_named = set(attributes) == {"nf", "nx"} and (attributes["nx"], attributes["nf"]) == sizes
    cls: Any = type(layer)
    return is_named and _multiplies_transposed(cls.forward, cls)


@cached_weakly
def _multiplies_transposed(forward: Any, cls: Any) -> bool:
    """Return True if the forward of a class computes x W + b, with the bits of `torch.addmm`."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    try:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
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


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a layer, under the names of `nn.Linear`."""

    layer: nn.Module
    in_features: int
    out_features: int

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.layer, "bias", None)


def _parameters(layer: Any, transposed_forward: object) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight [out, in] and the bias of a layer whose call is only its product; None for any other layer."""
    if is_plain(layer):
        return layer.weight, layer.bias
    if transposed_forward is None or type(layer).forward is not transposed_forward or "forward" in vars(layer):
        return None
    return None if does_more_than_forward(layer) else (layer.weight.t(), layer.bias)


# --- recipe --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLPRecipe:
    """Recipe: `down(act(up(x)))` through the module's children, with dropouts where the module has them."""

    # A key of `FORMULAS`.
    formula: str
    up: str
    down: str
    # The names of the dropouts after the activation, and of those after the second layer.
    inner_dropouts: tuple[str, ...] = ()
    outer_dropouts: tuple[str, ...] = ()
    # The forward of the layers' class if they multiply by transposed weights.
    transposed_forward: Any = field(default=None, compare=False)
    # Numbers of dimensions of inputs for which the module was compared with the op.
    dims: frozenset[int] = field(default=frozenset((1, 2, 3, 4)), compare=False)
    # True if the recipe takes contiguous inputs only. The stock forward runs for all others.
    needs_contiguity: bool = field(default=False, compare=False)
    live: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    searched: ClassVar[tuple[str, ...]] = ()

    def __call__(self, module: nn.Module, *args: Any, reference: bool = False, **kwargs: Any) -> Tensor:
        fits = len(args) == 1 and not kwargs and (reference or self._fits(args[0]))
        # A global module hook would see a call of the activation, and the op makes no such call.
        if not fits or any_global_hook():
            return type(module).forward(module, *args, **kwargs)
        (x,) = args
        y = None if reference else self._run_kernels(module, x)
        if y is None:
            y = getattr(module, self.down)(call_mlp_region(self._activation, module, x, reference))
        for name in self.outer_dropouts:
            y = getattr(module, name)(y)
        return y

    def _fits(self, x: Any) -> bool:
        """Return True if recognition compared the module with the op for an input of this kind."""
        return is_plain_input(x, self.needs_contiguity) and x.dim() in self.dims

    def _run_kernels(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the MLP as one node of autograd, or None if a layer or a dropout does more than the op."""
        dropouts = (getattr(module, name) for name in self.inner_dropouts)
        if any(dropout.training and dropout.p for dropout in dropouts):
            return None
        up = _parameters(getattr(module, self.up), self.transposed_forward)
        down = _parameters(getattr(module, self.down), self.transposed_forward)
        if up is None or down is None or not supports_products(x, *up, *down):
            return None
        return mlp_by_kernels(x, up[0], down[0], up[1], down[1], FORMULAS[self.formula].activation)

    def _activation(self, module: nn.Module, x: Tensor, reference: bool) -> Tensor:
        """Return the input of the second layer, computed through the module's children."""
        h = call_projection(getattr(module, self.up), x)
        formula = FORMULAS[self.formula]
        a = formula.compute(h) if reference else activate(h, formula.activation)
        for name in self.inner_dropouts:
            a = getattr(module, name)(a)
        return a

    def with_call_order(self, order: list[str]) -> "MLPRecipe":
        """Return the recipe for a module that calls its layers in this order."""
        return self

    def __str__(self) -> str:
        return f"mlp, {FORMULAS[self.formula].label}"


# --- recognition ---------------------------------------------------------------------------------


class _VisibleDropout(nn.Dropout):
    """A dropout of a stand-in that changes its input in a known way, so that its place in the forward shows.

    In training mode it draws no random numbers. In evaluation mode it returns its input, as the real one does. Each
    dropout of a stand-in has another shift, so that two of them cannot be confused.
    """

    shift: float

    __class__ = property(lambda self: nn.Dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.25 + self.shift if self.training else x


@dataclass(frozen=True)
class _MLPSubject(GLUSubject):
    """Builds stand-ins of an MLP. Each dropout of a stand-in shows its place."""

    def stand_in(self, dtype: torch.dtype, seed: int, training: bool | None = None) -> nn.Module:
        twin = super().stand_in(dtype, seed, training)
        for i, name in enumerate(_dropouts(self.module)):
            dropout = object.__new__(_VisibleDropout)
            dropout.__dict__.update(vars(twin._modules[name]), shift=0.5 + i)
            twin._modules[name] = dropout
        return twin


def _dropouts(module: nn.Module) -> list[str]:
    """Return the names of the children that are dropouts of torch."""
    return [name for name, child in module._modules.items() if type(child) is nn.Dropout]


def _places(dropouts: list[str]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the dropouts after the activation and those after the second layer, in every possible way.

    A module has at most one dropout in each place. One that it does not call is in none of them.
    """
    for inner in [(), *((name,) for name in dropouts)]:
        for outer in [(), *((name,) for name in dropouts)]:
            yield inner, outer


def recognise_mlp(module: nn.Module) -> MLPRecipe | str | None:
    """Recognise an MLP of two linear layers.

    It is a module with two linear children of fitting sizes, and no other parameters. Return a recipe, the reason why
    such a module keeps its forward, or None for another module. A reason is returned only for a module that computes
    such an MLP for some inputs. Other modules with two linear layers, such as routers, are not of this kind.
    """
    if not accepts_inputs(module, 1):
        return None
    layers: dict[str, Any] = {name: child for name, child in module._modules.items() if is_linear(child)}
    others = {name: child for name, child in module._modules.items() if child is not None and name not in layers}
    transposed: dict[str, Any] = {name: child for name, child in others.items() if _is_transposed_linear(child)}
    layers |= {name: _Sizes(child, child.nx, child.nf) for name, child in transposed.items()}
    if len(layers) != 2:
        return None
    others = {name: child for name, child in others.items() if name not in layers}
    has_more_state = any(t is not None for t in own_tensors(module).values())
    if has_more_state or not all(map(has_no_tensors, others.values())):
        return None
    wirings = [Wiring(up, None, down) for up, down in (tuple(layers), tuple(layers)[::-1])]
    wirings = [w for w in wirings if layers[w.gate].out_features == layers[w.down].in_features]
    reach = explore(module)
    failure: str | None = None
    forwards = {type(child).forward for child in transposed.values()}
    for wiring in wirings:
        subject = _MLPSubject(module, layers, wiring, factor=1)
        candidates = [
            MLPRecipe(formula, wiring.gate, wiring.down, inner, outer, next(iter(forwards), None))
            for formula in FORMULAS
            for inner, outer in _places(_dropouts(module))
        ]
        result: MLPRecipe | str = DIFFERENT
        with recording(current_trials()) as trials:
            try:
                with reach.preserved(), probing():
                    subject = subject.with_size_names()
                    matches = select_by_values(subject, candidates)
                    matches, dims = select_by_dims(subject, matches)
                    if matches:
                        result = _explain_state(module, others, reach) or confirm(
                            replace(matches[0], dims=dims), subject, reach, DIFFERENT
                        )
            except WritesTensor as error:
                result = str(error)
            except Exception as error:
                LOGGER.debug("%s cannot be run as an MLP", type(module).__name__, exc_info=True)
                result = f"cannot be run by itself ({describe(error)})"
        if isinstance(result, MLPRecipe):
            return reach.reason or result
        if any(trials.agreements[candidate] for candidate in candidates):
            failure = result
        else:
            explain_none(result)
    return failure


def _explain_state(module: nn.Module, others: dict[str, nn.Module], reach: Any) -> str | None:
    """Return why a module that computes an MLP must keep its forward, or None."""
    if changed_children := [name for name, child in others.items() if is_changed(child)]:
        return f"has hooks on {', '.join(changed_children)}, or their call or forward was replaced"
    if reach.names & {"weight", "bias"}:
        return "its forward reads the weights of its linear layers, besides calling them"
    return reach.reason
