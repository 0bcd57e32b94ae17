"""Experts whose forward products and products of dX run in FP8, because the user of `tigon.patch` requested it.

The recipe of experts holds an `FP8Experts`, which decides for each call whether its products run in FP8. They do if the
experts have enough rows, or if the quantised weights of an earlier call still serve (`tigon.recognition.fp8_weights`).

A mixture has many weights for each token that an expert sees, and often most weights of the model. Their copies are
therefore made in each direction and freed after the product, at every level of memory. Only micro-batches of one step,
and calls with frozen weights, share copies.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8
from tigon.ops.fp8.formats import MULTIPLE
from tigon.ops.fp8.grouped_products import has_grouped_units
from tigon.ops.fp8.weights import WeightCache
from tigon.recognition.fp8 import FP8_DTYPES, FP8Settings
from tigon.recognition.fp8_weights import StepCache
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.torch_private.autograd import has_active_transform

__all__ = ["FEWEST_ROWS", "FP8Experts", "explain_experts"]

# A call has at least this number of rows for each expert, or quantised weights of an earlier call. This is calculated:
# a GPU moves 6 to 8 bytes to quantise a weight for both directions, which takes 1.4 to 1.9 ps at the 4.3 TB/s of an
# H200. For each row of an expert, the products of a training step save 2.7 to 3.0 fs for each weight in FP8 (measured
# on an H100 for Qwen3-30B-A3B without da, gpt-oss-20b and Mixtral-8x7B). The two are equal at 470 to 690 rows.
FEWEST_ROWS = 640


def explain_experts(weights: list[Tensor]) -> str | None:
    """Return why experts with these weights, up and down, do not run in FP8, or None."""
    if any(w.dtype not in (*FP8_DTYPES, torch.float32) for w in weights):
        return f"their weights are in {str(weights[0].dtype).removeprefix('torch.')}"
    if any(size % MULTIPLE or not size for w in weights for size in w.shape[1:]):
        shapes = " and ".join(str(tuple(w.shape)) for w in weights)
        return f"their sizes are not multiples of {MULTIPLE} ({shapes})"
    if not _has_products(weights[0]):
        return "torch has grouped products in FP8 only for GPUs of compute capability 9.0"
    return None


def _has_products(weight: Tensor) -> bool:
    """Return whether the products of experts run in FP8 on the device of their weights. A CPU emulates them."""
    return weight.device.type in ("cpu", "meta") or has_grouped_units(weight)


class FP8Experts:
    """The decision of one module of experts, for each call, whether its products run in FP8, and their copies.

    A copy of the module starts without quantised weights.

    Args:
        settings: The options of the patch. Experts have scales by rows with every recipe, because torch has no other
            grouped products, and the gradients of their weights are never products in FP8.
        is_base: The experts are, or were, the base of adapters. A merge of the adapters changes the weights without a
            new version, so no copies are kept.
    """

    def __init__(self, settings: FP8Settings, is_base: bool = False) -> None:
        self.settings = settings
        self.is_base = is_base
        self.copies = StepCache(keeps_copies=False)

    def __reduce__(self) -> tuple:
        return FP8Experts, (self.settings, self.is_base)

    def mark_base(self) -> None:
        """Record that the experts are the base of adapters."""
        self.is_base = True
        self.clear()

    def clear(self) -> None:
        """Free all copies."""
        self.copies = StepCache(keeps_copies=False)

    def compute(
        self, x: Tensor, parameters: ExpertParameters, index: Tensor, router_weights: Tensor, transposed: bool,
        activation: Any,
    ) -> Tensor | None:  # fmt: skip
        """Return the experts of a call with products in FP8; None if they run in the dtype of the weights."""
        up, down = parameters.up, parameters.down
        if up.dtype not in FP8_DTYPES or x.dtype not in KERNEL_DTYPES or type(x) not in PLAIN or x.device != up.device:
            return None
        if has_active_transform() or explain_experts([up, down]) is not None:
            return None
        cache = self._find_cache(up, down)
        if index.numel() < FEWEST_ROWS * len(up) and not self._holds_copies(cache, up, down, transposed):
            return None
        return moe_mlp_in_fp8(
            x, parameters, index, router_weights, transposed=transposed, activation=activation, cache=cache
        )

    def _find_cache(self, up: Tensor, down: Tensor) -> WeightCache | None:
        """Return the cache for a call with these weights; None if the call must quantise them."""
        if torch.compiler.is_compiling() or up.is_meta or self.is_base:
            return None
        return self.copies.find([up, down], [None, None])

    def _holds_copies(self, cache: WeightCache | None, up: Tensor, down: Tensor, transposed: bool) -> bool:
        """Return whether the cache holds all copies that the call and its backward need."""
        if cache is None:
            return False
        for_forward = not transposed, transposed
        needs = (True, True) if torch.is_grad_enabled() else for_forward
        return cache.holds("up", up, *needs) and cache.holds("down", down, *needs)
