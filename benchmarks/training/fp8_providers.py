"""The providers whose products run in FP8: their names, and the peer torchao.

    tigon-fp8-RECIPE, tigon-LEVEL-fp8-RECIPE        `tigon.patch(model, memory=LEVEL, fp8=RECIPE)`
    torchao-float8-RECIPE                           `torchao.float8`, compiled by torch

The suffix -bf16-dw keeps the gradients of weights in bf16.
"""

import importlib.util
import re
from typing import Any, NamedTuple

from torch import nn

FP8_RECIPES = ("tensorwise", "rowwise")
TORCHAO = "torchao-float8"
# This suffix means that the gradients of weights are no FP8 products.
BF16_DW = "-bf16-dw"
_NAME = re.compile(rf"(?P<base>.+?)-(?P<recipe>{'|'.join(FP8_RECIPES)})(?P<dw>{BF16_DW})?")


class FP8Name(NamedTuple):
    """The parts of the name of a provider in FP8."""

    # The name of the provider without FP8: tigon or tigon-LEVEL, or `TORCHAO`.
    base: str
    recipe: str
    fp8_dw: bool


def read_fp8(name: str) -> FP8Name | None:
    """Return the parts of a name; None if it is not the name of a provider in FP8.

    >>> read_fp8("tigon-lean-fp8-rowwise")
    FP8Name(base='tigon-lean', recipe='rowwise', fp8_dw=True)
    """
    if (match := _NAME.fullmatch(name)) is None:
        return None
    name_parts = FP8Name(match["base"].removesuffix("-fp8"), match["recipe"], not match["dw"])
    if match["base"] == TORCHAO:
        # torchao has no such recipe for tensorwise scales.
        has_recipe = name_parts.fp8_dw or name_parts.recipe == "rowwise"
        return name_parts if has_recipe else None
    return name_parts if match["base"].endswith("-fp8") else None


def add_fp8(names: list[str], recipes: str, fp8_dw: bool) -> list[str]:
    """Return the names of providers with those in FP8 beside Tigon's, and torchao's at the end if it is installed.

    Raises:
        ValueError: A recipe is unknown, or no provider is Tigon's.
    """
    chosen = [recipe.strip() for recipe in recipes.split(",") if recipe.strip()]
    if not chosen or not set(chosen) <= set(FP8_RECIPES):
        raise ValueError(f"bench train: fp8 must be one or both of {', '.join(FP8_RECIPES)}, got {recipes!r}")
    suffix = "" if fp8_dw else BF16_DW
    result = []
    for name in names:
        result.append(name)
        if name.partition("-")[0] == "tigon" and read_fp8(name) is None:
            result += [f"{name}-fp8-{recipe}{suffix}" for recipe in chosen]
    if len(result) == len(names):
        raise ValueError("bench train: fp8 needs a provider of Tigon: name tigon or tigon-LEVEL among the providers")
    if importlib.util.find_spec("torchao") is not None:
        peers = (f"{TORCHAO}-{recipe}{suffix}" for recipe in chosen)
        result += [peer for peer in peers if peer not in result and read_fp8(peer) is not None]
    return result


def apply_torchao(model: Any, recipe: str, fp8_dw: bool) -> str:
    """Let torchao compute the linear layers in FP8, except the head; return a description for the report.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao import __version__
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or module is head:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = Float8LinearConfig.from_recipe_name(recipe if fp8_dw else f"{recipe}_with_gw_hp")
    convert_to_float8_training(model, module_filter_fn=is_converted, config=config)
    count = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    dw = "" if fp8_dw else ", dW in bf16"
    return f"torchao {__version__}, {count} linear layers in FP8, {recipe}{dw}; torch.compile"
