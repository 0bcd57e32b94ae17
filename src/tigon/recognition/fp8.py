"""Linear layers that compute their products in FP8, because the user of `tigon.patch` requested it.

Unlike the other recipes, this one changes results: it rounds the factors of products to FP8. It is installed on the
linear layer itself, so whoever calls the layer gets FP8 products. Recipes that compute several layers at once (a gated
MLP, layers with the same input) look for it, and then quantise their common input only once.

An FP8 product replaces one in bf16 or fp16, also if autocast is the reason for this dtype. A product in fp32 stays as
it is, and so does one with a DTensor, which torch computes on several devices. A short call without gradients, as in
generation, is not computed in FP8 either, because it would take longer to quantise the weight than to multiply.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.adapters.fp8_weight import Fp8Weight
from tigon.ops.fp8.formats import Fp8Options
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.weights import WeightCache
from tigon.ops.mlps.projections import does_more_than_forward
from tigon.recognition.deferred import Deferred, TensorLike, call_deferred, product_dtype
from tigon.recognition.fp8_weights import StepCache
from tigon.recognition.replacement import installed_recipe
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.engines import keeps_versions
from tigon.runtime.stock import linears_are_stock
from tigon.runtime.torch_private.autograd import has_active_transform

__all__ = ["FP8_DTYPES", "FP8Recipe", "FP8Settings", "compute_in_fp8", "compute_mlp_in_fp8", "set_owners"]

# The dtypes of the weights and inputs that are quantised. An FP8 product would be too coarse for a layer in fp32.
FP8_DTYPES = (torch.bfloat16, torch.float16)

# A call without gradients has at least this number of rows, or the quantised weight of an earlier call. To quantise a
# weight, an H200 moves 3 bytes per element, which takes as long as an FP8 product saves with 570 rows: for each row and
# element, it saves two operations at 700 instead of 1300 TFLOPS.
FEWEST_ROWS = 512


@dataclass(frozen=True)
class FP8Settings:
    """The options of `tigon.patch` that concern FP8."""

    # The granularity of scales: "tensorwise" or "rowwise".
    recipe: str
    # True if the products of dW are computed in FP8 too.
    fp8_dw: bool = True
    # True if quantised weights of the forward are kept for backward.
    keeps_copies: bool = True


class FP8Recipe:
    """Recipe of an `nn.Linear`: the same product, with its factors rounded to FP8.

    A copy of a layer starts without a quantised weight.
    """

    # A call with a `Deferred` returns a deferred output.
    takes_deferred = True

    def __init__(self, settings: FP8Settings) -> None:
        self.settings = settings
        # The caches of the groups of layers of which this layer is the first one, by the number of layers.
        self.caches: dict[int, StepCache] = {}
        # The layer with adapters whose base this layer is.
        self.owner: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple:
        return FP8Recipe, (self.settings,)

    def __call__(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _takes(args[0]) and _fits(layer, args[0]):
            # A forward that runs without values records the call of this layer, and not a product in another dtype.
            dtype = product_dtype(args[0])
            if (output := call_deferred(layer, args[0], layer.out_features, dtype)) is not None:
                return output
            return _compute(args[0], [layer], self)[0]
        return type(layer).forward(layer, *args, **kwargs)

    def frozen_weight(self, layer: Any, x: Tensor | TensorLike) -> Fp8Weight | None:
        """Return the weight for an op that adds adapters to the product of x; None if the layer has to be called."""
        if layer.weight.requires_grad or not _fits(layer, x):
            return None
        options = Fp8Options(self.settings.recipe, self.settings.fp8_dw)
        return Fp8Weight(layer.weight, options, self.find_cache)

    def find_cache(self, weights: Sequence[Tensor]) -> WeightCache | None:
        """Return the cache for a group of weights, of which the first one is that of this layer."""
        if torch.compiler.is_compiling():
            return None
        if (cache := self.caches.get(len(weights))) is None:
            cache = self.caches[len(weights)] = StepCache(self.settings.keeps_copies)
        return cache.find(weights, None if self.owner is None else self.owner())


def set_owners(layer: nn.Module) -> None:
    """Let the layers in a layer with adapters that run in FP8 know it. It may merge its adapters into them."""
    for module in layer.modules():
        if isinstance(recipe := installed_recipe(module), FP8Recipe):
            recipe.owner, recipe.caches = weakref.ref(layer), {}


def _takes(x: Any) -> bool:
    """Return whether x is a dense tensor, or a tensor without values."""
    return type(x) is Deferred or (type(x) in PLAIN and x.layout is torch.strided and not x.is_nested)


def _fits(layer: Any, x: Any) -> bool:
    """Return whether FP8 products may replace `F.linear(x, layer.weight, layer.bias)`.

    `x` may also be a `Deferred` or a `TensorLike`, which have the properties of a tensor.
    """
    if not linears_are_stock() or type(layer).forward is not nn.Linear.forward or has_active_transform():
        return False
    weight, bias = layer.weight, layer.bias
    if type(weight) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return False
    if len(x.shape) < 2 or 0 in x.shape or x.device != weight.device:
        return False
    if x.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        return False
    # Autocast does not exist on the meta device. The op converts its factors from any dtype.
    if not weight.is_meta and torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    elif x.dtype == weight.dtype:
        dtype = weight.dtype
    else:
        return False
    if dtype not in FP8_DTYPES:
        return False
    if torch.is_grad_enabled() or (not weight.requires_grad and keeps_versions(weight)):
        return True
    return math.prod(x.shape[:-1]) >= FEWEST_ROWS


def _compute(x: Tensor, layers: Sequence[Any], first_recipe: FP8Recipe) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers with the same input and the same settings."""
    weights, settings = [layer.weight for layer in layers], first_recipe.settings
    return fp8_projections(
        x, weights, [layer.bias for layer in layers], recipe=settings.recipe, fp8_dw=settings.fp8_dw,
        caches=first_recipe.find_cache(weights),
    )  # fmt: skip


def _find_recipe(x: Any, layers: Sequence[nn.Module]) -> FP8Recipe | None:
    """Return the recipe of the first layer if all layers compute FP8 products of x with equal settings, or None."""
    first_recipe = installed_recipe(layers[0])
    if type(first_recipe) is not FP8Recipe or not _takes(x):
        return None
    for layer in layers:
        recipe = installed_recipe(layer)
        if type(recipe) is not FP8Recipe or recipe.settings != first_recipe.settings:
            return None
        if does_more_than_forward(layer) or not _fits(layer, x):
            return None
    return first_recipe


def compute_in_fp8(x: Any, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return layer(x) for each layer, with x quantised once; None if the caller has to call the layers."""
    recipe = _find_recipe(x, layers)
    return None if recipe is None else _compute(x, layers, recipe)


def compute_mlp_in_fp8(x: Any, layers: Sequence[Any], activation: str) -> Tensor | None:
    """Return the gated MLP of the layers gate, up and down as one op; None if the caller has to call the layers."""
    # The input of `down` has the rows and the dtype of x.
    recipe = _find_recipe(x, layers)
    if recipe is None or any(layer.bias is not None for layer in layers):
        return None
    weights, settings = [layer.weight for layer in layers], recipe.settings
    return fp8_glu_mlp(
        x, *weights, activation=activation, recipe=settings.recipe, fp8_dw=settings.fp8_dw,
        caches=recipe.find_cache(weights),
    )  # fmt: skip
