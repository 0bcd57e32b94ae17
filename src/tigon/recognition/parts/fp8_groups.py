"""The layers in FP8 that a patched model computes together, so that their weights share a scale.

A call decides which layers it computes together, and quantises their weights as one matrix. Weights that are gathered
in FP8 are quantised before the call. So this file predicts the decisions from the recipes of the modules. A wrong
prediction costs no correctness: layers whose weights have different scales are computed one by one, and a layer whose
weight shares the scale of others has somewhat larger rounding errors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tigon.ops.mlps.activation_kernels import PLAIN_GATE
from tigon.ops.mlps.projections import does_more_than_forward
from tigon.recognition.parts.adapters import AdapterRecipe
from tigon.recognition.parts.fp8 import FP8Recipe
from tigon.recognition.parts.glu_recipe import GLURecipe
from tigon.recognition.parts.rope import RopeRecipe
from tigon.recognition.replacement import find_replacement, installed_recipe
from tigon.recognition.rewriting.fused_statements import FusedStatementsRecipe
from tigon.runtime.device import runs_kernels


def _calls(model: nn.Module) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the layers of each call that may compute several layers in FP8, and those of them with the same input."""
    for module in model.modules():
        recipe = getattr(find_replacement(module), "recipe", None)
        if isinstance(recipe, GLURecipe):
            if recipe.up is not None and recipe.scaling == PLAIN_GATE:
                layers = [getattr(module, name, None) for name in (recipe.gate, recipe.up, recipe.down)]
                yield layers, layers[:2]
        elif isinstance(recipe, (FusedStatementsRecipe, RopeRecipe)):
            for names in recipe.product_groups:
                layers = [getattr(module, name, None) for name in names]
                yield layers, layers


def _base_of(layer: nn.Module) -> nn.Module | None:
    """Return the layer in FP8 that a layer with adapters adds them to; None if there is none."""
    bases = [m for m in layer.modules() if isinstance(recipe := installed_recipe(m), FP8Recipe) and recipe.is_base]
    return bases[0] if len(bases) == 1 else None


def _has_adapter_kernels(layer: Any) -> bool:
    shard = layer.weight.to_local() if hasattr(layer.weight, "to_local") else layer.weight
    return isinstance(shard, Tensor) and runs_kernels(shard)


def _group_of(layers: Sequence[Any], with_same_input: Sequence[Any]) -> list[nn.Module]:
    """Return the layers in FP8, or bases of adapters in FP8, whose weights a call quantises as one matrix."""
    if not all(isinstance(layer, nn.Module) and not does_more_than_forward(layer) for layer in layers):
        return []
    recipes = [installed_recipe(layer) for layer in layers]
    if all(isinstance(recipe, FP8Recipe) and recipe.settings == recipes[0].settings for recipe in recipes):
        return [*with_same_input]
    if not any(isinstance(recipe, AdapterRecipe) for recipe in recipes):
        return []
    # The ops of adapters compute the layers together, and these ops are kernels.
    in_fp8 = [layer if isinstance(installed_recipe(layer), FP8Recipe) else _base_of(layer) for layer in with_same_input]
    return [layer for layer in in_fp8 if layer is not None and _has_adapter_kernels(layer)]


def find_groups(model: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of two or more layers in FP8 whose weights share a scale. No layer is in two groups."""
    groups, seen = [], set()
    for layers, with_same_input in _calls(model):
        group = [layer for layer in _group_of(layers, with_same_input) if layer not in seen]
        if len(group) > 1:
            groups.append(group)
            seen |= {*group}
    return groups
