"""Recognise linear layers with low-rank adapters: base(x) + sum_j s_j (B_j(A_j(dropout(x))) + bias_j).

The settings of such a layer change while it trains: another adapter becomes active, all of them are disabled or merged,
or the scaling is set again. Therefore a replaced layer has no guard that compares its settings with those at the time
of the patch. Instead, a call first runs the layer's own forward on a tensor without values (`recognition.deferred`).
This run records which products with which tensors the call consists of. If they are those of a linear layer with
adapters, an op computes them. If not, the recorded operations are carried out one by one. If the forward does something
that cannot be recorded, it runs again, on the real tensor. A call that finds everything that the forward reads as an
earlier call has left it recalls the layer that this call has recorded (`recognition.adapter_memo`).

When a layer is recognised, the forward of a small copy runs on a real tensor and on a tensor without values. The
outputs and gradients of the real run must be those of the recorded products.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.adapters.fp8_weight import Fp8Weight
from tigon.ops.adapters.frozen_weight import FrozenWeight
from tigon.ops.adapters.lora import add_adapters, lora_node, takes_adapters
from tigon.ops.adapters.projection import Adapter, Projection
from tigon.ops.mlps.projections import does_more_than_forward, is_plain
from tigon.recognition.guards.code_facts import assigns_attributes
from tigon.recognition.parts.adapter_memo import LayerMemo, key_of
from tigon.recognition.parts.dequantisation import WeightReader
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe, recognise_expert_adapters, wrappers_of
from tigon.recognition.parts.fp8 import FP8Recipe, mark_bases
from tigon.recognition.parts.recorded_layers import RecordedLayer, read_layer
from tigon.recognition.probing.deferred import (
    Computed,
    Refusal,
    TensorLike,
    call_deferred,
    defer,
    evaluate,
    has_call,
    product_dtype,
)
from tigon.recognition.probing.standin import (
    BF16,
    FP16,
    FP32,
    accepts_inputs,
    describe,
    gradients,
    is_linear,
    normal,
    probing,
    random_linear,
    same_bits,
    same_gradients,
    stand_in,
)
from tigon.recognition.probing.trials import record
from tigon.recognition.replacement import Replacement, find_replacement, install, installed_recipe, uninstall
from tigon.runtime.compat.modules import any_global_hook
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.state.reach import explore
from tigon.runtime.stock import has_stock_call, linears_are_stock

LOGGER = logging.getLogger("tigon")

DIFFERENT = "computes something else than a linear layer with low-rank adapters"

# The sizes of a small copy: the features of its input and of its output, and the largest other size, such as the rank.
SMALL_INPUT, SMALL_OUTPUT, LARGEST_OTHER = 24, 40, 8


# --- what a forward computes -------------------------------------------------------------------------


class AdaptedCall(NamedTuple):
    """A layer with adapters whose base is called as a module, because only its own code computes its product."""

    base: nn.Module
    adapters: tuple[Adapter, ...]


def _resolve(recorded: RecordedLayer, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
    """Return a layer, with the weight of its base if an op may multiply x by it.

    The result is None if the output of this layer would have another dtype than that of the recorded one.
    """
    layer: Projection | AdaptedCall = recorded.projection
    if (base := recorded.base) is not None:
        weight, adapters = _frozen_weight(base, x), recorded.projection.adapters
        layer = AdaptedCall(base, adapters)
        layer = layer if weight is None else Projection(weight, getattr(base, "bias", None), adapters)
    return layer if recorded.dtype == output_dtype(layer, x) else None


def _to_layer(computed: Computed, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
    """Return the linear layer with adapters that a forward applied to x; None if it computed something else."""
    recorded = read_layer(computed, x)
    return None if recorded is None else _resolve(recorded, x)


def output_dtype(layer: Projection | AdaptedCall, x: Tensor | TensorLike) -> torch.dtype:
    """Return the dtype of the output of a layer for the input x.

    Under autocast, the product of an `nn.Linear` has the dtype of autocast. A quantised layer returns the dtype of x.
    """
    weight = layer.weight if isinstance(layer, Projection) else None
    is_linear_product = weight is not None and (isinstance(weight, Fp8Weight) or not isinstance(weight, FrozenWeight))
    return product_dtype(x) if is_linear_product else x.dtype


def cast_for_products(x: Tensor) -> Tensor:
    """Return x in the dtype in which products with x are computed: under autocast, that of autocast."""
    return x.to(product_dtype(x))


def compute_layers(x: Tensor, layers: Sequence[Projection]) -> tuple[Tensor, ...] | None:
    """Return the outputs of linear layers with adapters and with the same input, or None if no op computes them."""
    operand = cast_for_products(x)
    if not takes_adapters(operand, layers):
        return None
    outputs = lora_node(operand, layers)
    return tuple(y.to(output_dtype(layer, x)) for y, layer in zip(outputs, layers, strict=True))


# --- the recipe --------------------------------------------------------------------------------------


class BaseRecipe:
    """Recipe of a base layer that is not an `nn.Linear`, such as a quantised layer.

    The code of such a layer needs the values of its input. A call with a `Deferred` therefore does not run this code,
    and records the call of the layer. Any other call runs the layer's own forward.
    """

    part = "adapters"
    # The recipe returns a deferred output for a deferred input.
    takes_deferred = True

    def __init__(self) -> None:
        self.weight_reader = WeightReader()

    def __call__(self, base: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (output := call_deferred(base, args[0], base.out_features)) is not None:
            return output
        return type(base).forward(base, *args, **kwargs)


def _frozen_weight(base: Any, x: Tensor | TensorLike) -> FrozenWeight | None:
    """Return the weight of a quantised base layer, or of one in FP8, if an op may multiply x by it.

    The result is None if the layer has to be called.
    """
    recipe = installed_recipe(base)
    if type(recipe) is FP8Recipe:
        return recipe.frozen_weight(base, x, has_adapters=True)
    return recipe.weight_reader.read(base, x) if isinstance(recipe, BaseRecipe) else None


def _runs_own_forwards(layer: nn.Module) -> bool:
    """Return True if no descendant has a hook or another forward, which would receive tensors without values."""
    modules = [*layer._modules.values()]
    for module in modules:
        # These containers are never called. Their class defines a `__call__` that raises an error.
        if module is None or isinstance(module, (nn.ParameterDict, nn.ParameterList)):
            continue
        attributes = module.__dict__
        has_hook = attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]
        has_hook = has_hook or attributes["_backward_pre_hooks"] or attributes["_backward_hooks"]
        if has_hook or not has_stock_call(module):
            return False
        if "forward" in attributes and not getattr(installed_recipe(module), "takes_deferred", False):
            return False
        modules += module._modules.values()
    return True


class AdapterRecipe:
    """Recipe: run the layer's forward without values at every call, and compute the recorded products with an op."""

    part = "adapters"

    def record(self, layer: nn.Module, x: Tensor | TensorLike) -> Computed | None:
        """Return what the forward of a layer computes from x, or None if this cannot be recorded."""
        if not _runs_own_forwards(layer) or not linears_are_stock():
            return None
        computed = defer(functools.partial(type(layer).forward, layer), x)
        return None if isinstance(computed, Refusal) else computed

    def recall(self, layer: nn.Module, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
        """Return the layer that the forward has computed in an earlier call and in the same state; None if unknown."""
        memo, key = _memo_of(self, layer), key_of(x)
        recorded = None if memo is None or key is None else memo.find(layer, key)
        return None if recorded is None else _resolve(recorded, x)

    def run(self, layer: nn.Module, x: Tensor | TensorLike) -> Computed | None:
        """Return what `record` returns, and let later calls recall it."""
        memo, key = _memo_of(self, layer), key_of(x)
        if memo is None or key is None:
            return self.record(layer, x)
        return memo.run(layer, key, x, functools.partial(self.record, layer, x))

    def read(self, layer: nn.Module, x: Tensor | TensorLike) -> Projection | AdaptedCall | None:
        """Return the linear layer with adapters that a layer's forward applies to x; None for any other forward."""
        if (recalled := self.recall(layer, x)) is not None:
            return recalled
        computed = self.run(layer, x)
        return None if computed is None else _to_layer(computed, x)

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = None
        if len(args) == 1 and not kwargs and _may_defer(args[0]):
            (x,) = args
            recalled = self.recall(layer, x)
            output = None if recalled is None else self._compute(x, recalled)
            if output is None and (computed := self.run(layer, x)) is not None:
                output = self._compute(x, _to_layer(computed, x))
                # The forward has run once, so its code, which may count or log, does not run again. But the code may
                # depend on the dtype of a called module's output, which was a guess.
                if output is None and not has_call(computed.expression):
                    output = evaluate(computed.expression, x)
        return type(layer).forward(layer, *args, **kwargs) if output is None else output

    def _compute(self, x: Tensor, layer: Projection | AdaptedCall | None) -> Tensor | None:
        """Return the output of a layer for x by an op; None if no op computes it."""
        if isinstance(layer, AdaptedCall):
            if not takes_adapters(x, [Projection(None, None, layer.adapters)]):
                return None
            return add_adapters(x, layer.base(x), layer.adapters)
        if layer is not None and layer.adapters and (outputs := compute_layers(x, [layer])) is not None:
            return outputs[0]
        return None

    def __str__(self) -> str:
        return "low-rank adapters"


def _memo_of(recipe: AdapterRecipe, layer: nn.Module) -> LayerMemo | None:
    """Return the memo of a layer; None if the recipe is not installed on it, or reads more than the layer."""
    replacement = layer.__dict__.get("forward")
    if type(recipe) is not AdapterRecipe or type(replacement) is not Replacement:
        return None
    if replacement.memo is None:
        replacement.memo = LayerMemo((FP8Recipe, BaseRecipe))
    return replacement.memo


def _may_defer(x: Any) -> bool:
    """Return True if an op may compute the products of x, so that the forward need not run."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or torch.compiler.is_compiling():
        return False
    # Autocast converts an fp32 input to its own dtype.
    has_dtype = x.dtype in (BF16, FP16) or (x.dtype == FP32 and product_dtype(x) in (BF16, FP16))
    return has_dtype and runs_kernels(x) and not any_global_hook()


def read_projection(layer: nn.Module, x: Tensor | TensorLike) -> Projection | None:
    """Return the linear layer, with its adapters, that `layer(x)` computes; None if the layer has to be called."""
    if is_plain(layer):
        return Projection(layer.weight, layer.bias)
    recipe = installed_recipe(layer)
    if type(recipe) is FP8Recipe and not does_more_than_forward(layer):
        weight: Any = recipe.frozen_weight(layer, x, has_adapters=False)
        return None if weight is None else Projection(weight, getattr(layer, "bias", None))
    if type(recipe) is not AdapterRecipe or does_more_than_forward(layer):
        return None
    result = recipe.read(layer, x)
    return result if isinstance(result, Projection) else None


def may_have_adapters(x: Any, layers: Sequence[nn.Module]) -> bool:
    """Return whether a layer may have adapters that an op adds. Most models have none, so this is a fast check."""
    return any(type(layer) is not nn.Linear for layer in layers) and _may_defer(x)


def read_projections(x: Tensor, layers: Sequence[nn.Module]) -> list[Projection] | None:
    """Return the linear layers with adapters that the calls `layer(x)` compute.

    The result is None if one of the layers has to be called, or if none has an adapter.
    """
    if not may_have_adapters(x, layers):
        return None
    projections = []
    for layer in layers:
        if (projection := read_projection(layer, x)) is None:
            return None
        projections.append(projection)
    return projections if any(projection.adapters for projection in projections) else None


# --- recognition -------------------------------------------------------------------------------------


def _layers_of(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers among the children of a module, and in its dicts and lists of modules."""
    for child in module._modules.values():
        if isinstance(child, (nn.ModuleDict, nn.ModuleList)):
            yield from _layers_of(child)
        elif is_linear(child):
            yield child


class Sizes(NamedTuple):
    """The sizes of a layer with an adapter."""

    inputs: int
    outputs: int
    rank: int


def _find_sizes(module: nn.Module) -> Sizes | None:
    """Return the sizes of a layer that has the children of an adapter; None for any other module.

    For I inputs, O outputs and rank r, these are a linear layer A from I to r features, a linear layer B from r to O
    features, and the base layer from I to O features. The base may also be a weight [O, I] of the module itself.
    """
    layers = list(_layers_of(module))
    weight = module._parameters.get("weight")
    weight_sizes = None if weight is None else (weight.shape[-1], weight.shape[0])
    candidates: list[Sizes] = []
    for a, b in itertools.permutations(layers, 2):
        sizes = Sizes(a.in_features, b.out_features, a.out_features)
        if sizes.rank != b.in_features:
            continue
        other_sizes = [(layer.in_features, layer.out_features) for layer in layers if layer is not a and layer is not b]
        if sizes[:2] in (*other_sizes, weight_sizes):
            candidates.append(sizes)
    # A square base and B of one adapter have the sizes of A and B too, with a larger rank than that of the adapters.
    return min(candidates, key=lambda sizes: sizes.rank, default=None)


def _small_copy(
    module: nn.Module, sizes: dict[int, int], base_dtype: torch.dtype, adapter_dtype: torch.dtype, training: bool
) -> Any:
    """Return a stand-in of a module and its descendants with small random tensors.

    `sizes` maps the features of the input and of the output of the layer to small numbers. The base layer gets the
    dtype `base_dtype`, and all other layers get the dtype `adapter_dtype`.
    """
    small = lambda size: sizes.get(size, min(size, LARGEST_OTHER))
    children: dict[str, nn.Module | None] = {}
    for number, (name, child) in enumerate(module._modules.items()):
        if child is None or not is_linear(child):
            children[name] = child and _small_copy(child, sizes, base_dtype, adapter_dtype, training)
            continue
        is_base = child.in_features in sizes and child.out_features in sizes
        children[name] = random_linear(
            10 * number, small(child.in_features), small(child.out_features), base_dtype if is_base else adapter_dtype,
            bias=getattr(child, "bias", None) is not None,
        )  # fmt: skip
    tensors = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    parameters = {name: normal(7, *map(small, tensor.shape), dtype=base_dtype) for name, tensor in tensors.items()}
    return stand_in(module, parameters, children, training=training)


def recognise_adapters(module: nn.Module) -> AdapterRecipe | ExpertAdapterRecipe | str | None:
    """Recognise a linear layer with low-rank adapters.

    Return a recipe, the reason why such a layer keeps its forward, or None for another module. A wrapper of experts has
    a recipe of its own (`recognition.expert_adapters`).
    """
    if (expert_result := recognise_expert_adapters(module)) is not None:
        return expert_result
    sizes = _find_sizes(module)
    if sizes is None or not accepts_inputs(module, 1):
        return None
    result: AdapterRecipe | str
    if assigns_attributes(type(module).forward):
        # A forward that cannot run without values runs a second time, and would assign its attributes twice.
        result = f"{DIFFERENT}: its forward assigns attributes"
    elif not _runs_own_forwards(module):
        result = "has hooks on its children, or their call or forward was replaced"
    else:
        recipe, reach = AdapterRecipe(), explore(module, inputs=1)
        try:
            with reach.preserved(), probing():
                result = _compare(module, sizes, recipe)
        except Exception as error:
            LOGGER.debug("%s cannot be run as a layer with adapters", type(module).__name__, exc_info=True)
            result = f"cannot be run by itself ({describe(error)})"
    # The projections of an attention layer may have such sizes too. They need no reason in the report.
    is_low_rank = sizes.rank < min(sizes.inputs, sizes.outputs)
    return result if is_low_rank or isinstance(result, AdapterRecipe) else None


def recipes_for(layer: nn.Module, recipe: AdapterRecipe | ExpertAdapterRecipe) -> dict[nn.Module, Any]:
    """Return the recipes to install: that of the layer, and `BaseRecipe` for a base that is not an `nn.Linear`.

    Experts have one wrapper for each weight with adapters. All wrappers get the recipe of the outermost one.
    """
    if isinstance(recipe, ExpertAdapterRecipe):
        return dict.fromkeys(wrappers_of(layer)[0], recipe)
    recipes: dict[nn.Module, Any] = {layer: recipe}
    sizes = _find_sizes(layer)
    for child in _layers_of(layer):
        is_base = sizes is not None and (child.in_features, child.out_features) == sizes[:2]
        is_stock = not does_more_than_forward(child) and "forward" not in vars(child)
        if is_base and is_stock and type(child) is not nn.Linear:
            recipes[child] = BaseRecipe()
    return recipes


def install_adapters(layer: nn.Module, recipe: AdapterRecipe | ExpertAdapterRecipe) -> Callable[[], None]:
    """Install the recipes of a layer and of its base. Return a function that uninstalls them."""
    undo = [install(module, each) for module, each in recipes_for(layer, recipe).items()]
    mark_bases(layer)

    def restore() -> None:
        for step in undo:
            step()

    return restore


def uninstall_adapters(module: nn.Module) -> None:
    """Give a layer with adapters, or the base of one, the forward of its class back."""
    replacement = find_replacement(module)
    if replacement is not None and isinstance(replacement.recipe, (AdapterRecipe, BaseRecipe, ExpertAdapterRecipe)):
        uninstall(module, replacement)


def _compare(module: nn.Module, sizes: Sizes, recipe: AdapterRecipe) -> AdapterRecipe | str:
    """Compare the forward of a layer with the products that it records, in outputs and gradients.

    Return the recipe, or the reason why the layer keeps its forward.
    """
    small_sizes = {sizes.outputs: SMALL_OUTPUT, sizes.inputs: SMALL_INPUT}
    dtypes = (FP32, FP32), (BF16, BF16), (BF16, FP32)
    for (base_dtype, adapter_dtype), training in itertools.product(dtypes, (True, False)):
        twin = _small_copy(module, small_sizes, base_dtype, adapter_dtype, training)
        x = normal(5, 2, 3, SMALL_INPUT, dtype=base_dtype)
        forward = functools.partial(type(twin).forward, twin)
        computed = defer(forward, x)
        # Some layers do not accept adapters of another dtype.
        if base_dtype != adapter_dtype and not _runs(forward, x):
            continue
        if isinstance(computed, Refusal):
            return f"{DIFFERENT}: its forward {computed}"
        if _to_layer(computed, x) is None:
            return DIFFERENT
        ours = functools.partial(evaluate, computed.expression)
        expected, actual = _seeded(forward, x), _seeded(ours, x)
        if not record(same_bits(expected, actual), recipe, twin, [x], actual, expected):
            return DIFFERENT
        leaves = [x, *twin.parameters()]
        expected, actual = (gradients(functools.partial(_seeded, f, x), leaves) for f in (forward, ours))
        if not record(same_gradients(actual, expected), recipe, twin, [x], actual, expected, mode="gradients"):
            return DIFFERENT
    return recipe


def _runs(forward: Callable, x: Tensor) -> bool:
    """Return whether a forward accepts an input."""
    try:
        forward(x)
    except Exception:
        LOGGER.debug("a layer with adapters refuses adapters of another dtype", exc_info=True)
        return False
    return True


def _seeded(forward: Callable, x: Tensor) -> Any:
    """Return forward(x), in which each dropout draws the same mask at every call."""
    torch.default_generator.manual_seed(0)
    return forward(x)
