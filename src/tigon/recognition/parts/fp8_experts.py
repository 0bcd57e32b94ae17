"""Experts whose forward products and products of dX run in FP8, because the user of `tigon.patch` requested it.

An `FP8Experts` decides for each call: the experts need enough rows to pay for the quantisation of the weights, or the
quantised weights of an earlier call. Experts are often most of a model, so copies of weights are freed after the
product at every level of memory. Only micro-batches of one step, and calls with frozen weights, share copies.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.memory.lean import in_checkpoint
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8
from tigon.ops.fp8.formats import MULTIPLE
from tigon.ops.fp8.products import has_grouped_units
from tigon.ops.fp8.weights import WeightCache
from tigon.recognition.parts.fp8 import FP8_DTYPES, FP8Settings
from tigon.recognition.parts.fp8_weights import StepCache
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import KERNEL_DTYPES, PLAIN

# A call that quantises the weights has at least this number of rows for each expert. Forward and backward of trained
# experts, with 8192 tokens on an H100, took 5.531 ms in FP8 and 4.237 in bf16 for Qwen3-30B-A3B (512 rows), 9.875 and
# 9.518 for gpt-oss-20b (1024 rows), and 26.457 and 26.745 for Mixtral-8x7B (2048 rows): FP8 breaks even there. With the
# copies of an earlier call it took 4.001, 7.864 and 21.214 ms, so such a call needs no number of rows.
# Two micro-batches of gpt-oss-20b that share copies take 17.7 ms by these numbers, and 19.0 in bf16.
FEWEST_ROWS = 2048


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
    """Decides for each call of one module of experts whether its products run in FP8, and keeps the weights' copies. A
    copy of the module starts without quantised weights. Experts have scales by rows with every recipe, because torch
    has no other grouped products, and the gradients of their weights are never products in FP8. Experts that are, or
    were, the base of adapters (`is_base`) keep no copies, because a merge of the adapters changes the weights without a
    new version."""

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
        shared_rows = index.numel() * self._count_calls(cache, up, down)
        if shared_rows < FEWEST_ROWS * len(up) and not self._holds_copies(cache, up, down, transposed):
            return None
        return moe_mlp_in_fp8(
            x, parameters, index, router_weights, transposed=transposed, activation=activation, cache=cache
        )

    def _find_cache(self, up: Tensor, down: Tensor) -> WeightCache | None:
        """Return the cache for a call with these weights; None if the call keeps no copies."""
        if torch.compiler.is_compiling() or up.is_meta or self.is_base:
            return None
        return self.copies.find([up, down], [None, None])

    def _count_calls(self, cache: WeightCache | None, up: Tensor, down: Tensor) -> int:
        """Return how many calls are sure to share the copies: two in a step of several backwards, otherwise one.
        Trained experts have a cache only in such a step. In a checkpoint, both runs of a call must decide alike, and a
        second forward before the backward takes the cache away, so a checkpointed call counts alone."""
        is_trained = up.requires_grad or down.requires_grad
        return 2 if cache is not None and is_trained and not in_checkpoint() else 1

    def _holds_copies(self, cache: WeightCache | None, up: Tensor, down: Tensor, transposed: bool) -> bool:
        """Return whether the cache holds all copies that the call and its backward need."""
        if cache is None:
            return False
        for_forward = not transposed, transposed
        needs = (True, True) if torch.is_grad_enabled() else for_forward
        return cache.holds("up", up, *needs) and cache.holds("down", down, *needs)
