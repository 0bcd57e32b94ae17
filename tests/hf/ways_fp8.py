"""Sharded and data-parallel models whose linear layers run in FP8.

Engines write gathered weights without a new version, so a quantised weight of the first step must not serve the second.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import tigon
from hf.ways import batch, build
from hf.ways_sharded import BF16, checkpointed, ddp, fsdp1, fsdp2
from tigon.hf import fp8
from tigon.recognition.parts.fp8 import FP8Recipe
from tigon.recognition.replacement import find_replacement

# The layers of the test are narrower than those that FP8 pays for.
fp8.NARROWEST = 1
STEPS, RATE = 3, 0.3


def recipes(model: nn.Module) -> list[FP8Recipe]:
    found = (getattr(find_replacement(module), "recipe", None) for module in model.modules())
    return [recipe for recipe in found if isinstance(recipe, FP8Recipe)]


def train(model: nn.Module, rank: int, micro_batches: int, reduce: bool) -> list[float]:
    """Return the loss of each micro-batch. With `reduce`, this function averages the gradients of the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        for i in range(micro_batches):
            # Each step has the same data, so the loss falls.
            loss = model(**batch(rank, seed=i)).loss
            (loss / micro_batches).backward()
            losses.append(loss.item())
        for parameter in model.parameters() if reduce else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def make_setup(
    distribute: Callable, *, patch_after: bool = False, micro_batches: int = 1, dtype: torch.dtype = torch.bfloat16,
    is_cached: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return a setup that compares the losses of a distributed model with those of a whole model on each rank."""

    def setup(rank: int) -> None:
        model, whole = build("qwen3").to(dtype), build("qwen3").to(torch.bfloat16)
        tigon.patch(whole, fp8="rowwise")
        if not patch_after:
            tigon.patch(model, fp8="rowwise")
        model = distribute(model)
        if patch_after:
            tigon.patch(model, fp8="rowwise")
        assert len(recipes(model)) == 14
        actual = train(model, rank, micro_batches, reduce=False)
        caches = [cache.cache for recipe in recipes(model) for cache in recipe.caches.values()]
        # The caches show that every layer ran in FP8.
        assert len(caches) == 2 * 3
        assert all((cache is not None) == is_cached for cache in caches)
        expected = train(whole, rank, micro_batches, reduce=True)
        assert expected[-1] < expected[0] - 0.2
        # Gradients are averaged in another order, and in bf16, which moves the weights.
        for a, b in zip(actual, expected, strict=True):
            assert abs(a - b) < 0.05 * (expected[0] - expected[-1]) + 0.01, (actual, expected)

    return setup


# Once FSDP2 has sharded a model of the process, no weight is cached. So data-parallel models come first.
SETUPS = {
    "DDP": make_setup(ddp, is_cached=True),
    "DDP with accumulation": make_setup(ddp, micro_batches=2, is_cached=True),
    "FSDP2": make_setup(fsdp2),
    "FSDP2, patched after": make_setup(fsdp2, patch_after=True),
    "FSDP2 with accumulation": make_setup(fsdp2, micro_batches=2),
    "FSDP2, checkpointing": make_setup(checkpointed),
    "FSDP2, fp32 shards and bf16 parameters": make_setup(functools.partial(fsdp2, **BF16), dtype=torch.float32),
    "FSDP1, original parameters": make_setup(functools.partial(fsdp1, use_orig_params=True)),
    "FSDP1, flat parameters": make_setup(functools.partial(fsdp1, use_orig_params=False)),
}
