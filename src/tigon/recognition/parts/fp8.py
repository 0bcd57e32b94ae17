"""Linear layers that compute their products in FP8, because the user of `tigon.patch` requested it.

This recipe changes results: it rounds the factors of products that would be in bf16 or fp16. It is installed on the
linear layer itself. Recipes that compute several layers at once look for it, and quantise their common input once.
Products in fp32 and with DTensors stay as they are. So do short calls without gradients, as in generation, for which
quantising the weight would take longer than multiplying.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.adapters.fp8_weight import Fp8Weight
from tigon.ops.adapters.projection import TensorLike
from tigon.ops.fp8.formats import Fp8Options
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.fp8.weights import WeightCache
from tigon.recognition.parts.fp8_weights import StepCache
from tigon.recognition.replacement import installed_recipe
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.engines import keeps_versions
from tigon.runtime.stock import does_more_than_forward, linears_are_stock

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
    # True if quantised weights of the forward are saved for backward.
    keeps_copies: bool = True


class FP8Recipe:
    """Recipe of an `nn.Linear`: the same product, with its factors rounded to FP8. A copy of a layer starts without a
    quantised weight. `is_base` is True if the layer is, or was, the base of a layer with adapters. A merge of the
    adapters changes the weight without a new version, so only an op that adds the adapters uses a cache. Any other call
    quantises."""

    def __init__(self, settings: FP8Settings, is_base: bool = False) -> None:
        self.settings = settings
        self.options = Fp8Options(settings.recipe, settings.fp8_dw)
        self.is_base = is_base
        # The number of calls of a base by itself, before which its adapters may have been merged.
        self.merges = 0
        # The caches of the groups of layers of which this layer is the first one, by the number of layers.
        self.caches: dict[int, StepCache] = {}
        self.device: torch.device | None = None

    def __reduce__(self) -> tuple:
        return FP8Recipe, (self.settings, self.is_base)

    def __call__(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self.free_moved_copies(layer)
        if len(args) == 1 and not kwargs and _takes(args[0]) and _fits(layer, args[0], has_copies=not self.is_base):
            return _compute(args[0], [layer], [self])[0]
        self.count_call()
        return type(layer).forward(layer, *args, **kwargs)

    def frozen_weight(self, layer: Any, x: Tensor | TensorLike, has_adapters: bool) -> Fp8Weight | None:
        """Return the weight for an op that adds adapters to products of x; None if the layer has to be called. With
        `has_adapters`, the op adds adapters of this layer, which are therefore not merged into its weight."""
        self.free_moved_copies(layer)
        is_cacheable = has_adapters or not self.is_base
        if layer.weight.requires_grad or not _fits(layer, x, is_cacheable):
            return None
        find_cache = self.find_cache if is_cacheable else None
        return Fp8Weight(layer.weight, self.options, find_cache, self.merges if self.is_base else None)

    def find_cache(self, weights: Sequence[Tensor], merges: Sequence[int | None]) -> WeightCache | None:
        """Return the cache for a group of weights, of which the first one is that of this layer. `merges` holds the
        attributes `merges` of recipes whose layers are bases of adapters, and None for others."""
        if torch.compiler.is_compiling():
            return None
        self.device = weights[0].device
        if (cache := self.caches.get(len(weights))) is None:
            cache = self.caches[len(weights)] = StepCache(self.settings.keeps_copies)
        return cache.find(weights, merges)

    def mark_base(self) -> None:
        """Record that the layer is the base of adapters, whose merge changes the weight without a new version."""
        self.is_base, self.caches = True, {}

    def clear(self) -> None:
        self.caches.clear()

    def count_call(self) -> None:
        """Count a call of a base without its adapters, which may have been merged."""
        if self.is_base and not torch.compiler.is_compiling():
            self.merges += 1

    def free_moved_copies(self, layer: Any) -> None:
        """Free the copies if the weight of the layer was moved to another device."""
        if not torch.compiler.is_compiling() and self.caches and layer.weight.device != self.device:
            self.caches.clear()


def copies_of(recipe: Any) -> Any:
    """Return the object that holds the FP8 copies of a recipe: an `FP8Recipe`, an `FP8Experts`, or None."""
    return recipe if isinstance(recipe, FP8Recipe) else getattr(recipe, "fp8", None)


def mark_bases(layer: nn.Module) -> None:
    """Record in the recipes of the FP8 layers in a layer with adapters that a merge changes their weights."""
    for module in layer.modules():
        if (copies := copies_of(installed_recipe(module))) is not None:
            copies.mark_base()


def _takes(x: Any) -> bool:
    return type(x) in PLAIN and x.layout is torch.strided and not x.is_nested


def _fits(layer: Any, x: Any, has_copies: bool) -> bool:
    """Return whether FP8 products may replace `F.linear`. With `has_copies`, those of a frozen weight exist already."""
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
    if torch.is_grad_enabled() or (has_copies and not weight.requires_grad and keeps_versions(weight)):
        return True
    return math.prod(x.shape[:-1]) >= FEWEST_ROWS


def _compute(x: Tensor, layers: Sequence[Any], recipes: Sequence[FP8Recipe]) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers with the same input and the same settings."""
    weights, settings = [layer.weight for layer in layers], recipes[0].settings
    return fp8_projections(
        x, weights, [layer.bias for layer in layers], recipe=settings.recipe, fp8_dw=settings.fp8_dw,
        caches=_find_cache(recipes, weights),
    )  # fmt: skip


def _find_cache(recipes: Sequence[FP8Recipe], weights: Sequence[Tensor]) -> WeightCache | None:
    """Return the cache for layers that are called without adapters; None if the call must quantise their weights."""
    for recipe in recipes:
        recipe.count_call()
    has_base = any(recipe.is_base for recipe in recipes)
    return None if has_base else recipes[0].find_cache(weights, [None] * len(weights))


def _find_recipes(x: Any, layers: Sequence[nn.Module]) -> list[FP8Recipe] | None:
    """Return the recipes of the layers if all of them compute FP8 products of x with equal settings, or None."""
    # Most layers are not in FP8, so the first one is read alone.
    if type(installed_recipe(layers[0])) is not FP8Recipe or not _takes(x):
        return None
    recipes = [installed_recipe(layer) for layer in layers]
    for layer, recipe in zip(layers, recipes, strict=True):
        if type(recipe) is not FP8Recipe or recipe.settings != recipes[0].settings:
            return None
        recipe.free_moved_copies(layer)
        if does_more_than_forward(layer) or not _fits(layer, x, has_copies=not recipe.is_base):
            return None
    return recipes


def compute_in_fp8(x: Any, layers: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Return layer(x) for each layer, with x quantised once; None if the caller has to call the layers."""
    recipes = _find_recipes(x, layers)
    return None if recipes is None else _compute(x, layers, recipes)


def compute_mlp_in_fp8(x: Any, layers: Sequence[Any], activation: str) -> Tensor | None:
    """Return the gated MLP of the layers gate, up and down as one op; None if the caller has to call the layers."""
    # The input of `down` has the rows and the dtype of x.
    recipes = _find_recipes(x, layers)
    if recipes is None or any(layer.bias is not None for layer in layers):
        return None
    weights, settings = [layer.weight for layer in layers], recipes[0].settings
    return fp8_glu_mlp(
        x, *weights, activation=activation, recipe=settings.recipe, fp8_dw=settings.fp8_dw,
        caches=_find_cache(recipes, weights),
    )  # fmt: skip
