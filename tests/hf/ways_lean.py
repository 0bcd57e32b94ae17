"""In distributed models, every memory level gives bit for bit the loss and gradients of the default level."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tigon
from hf.ways import DEVICE, batch, build, step
from hf.ways_parallel import by_plan
from hf.ways_sharded import BF16, checkpointed, ddp, fsdp1, fsdp2


def shard_norms_separately(model: nn.Module) -> nn.Module:
    """Make each norm a unit of FSDP2. Its weight is not gathered during the backward of the layers around it."""
    for layer in model.model.layers:
        for name, child in layer.named_children():
            if "norm" in name:
                fully_shard(child)
    fully_shard(model.model.norm)
    return fsdp2(model)


def checkpoint_one_layer(model: nn.Module) -> nn.Module:
    model = checkpointed(model)
    model.model.layers[0].gradient_checkpointing = False
    return model


def shard_linears_separately(model: nn.Module) -> nn.Module:
    """Make each projection a unit of FSDP2. Backward calls it again during the backward of another projection."""
    for layer in model.model.layers:
        for child in layer.mlp.children():
            if isinstance(child, nn.Linear):
                fully_shard(child)
    return shard_norms_separately(model)


def count_calls(model: nn.Module) -> list:
    """Count the calls of the gate and up projections by a hook that looks like an engine's.

    Modules with any other hook run only once, because a second run might differ.
    """
    calls = []

    def count(module: nn.Module, args: tuple) -> None:
        calls.append(1)

    count.__module__ = "accelerate.hooks"
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj")):
            module.register_forward_pre_hook(count)
    return calls


# The number of runs of each projection, relative to the default level. The last of two layers is not checkpointed.
RUNS = {"lean": 1, "checkpoint": 1.5, "checkpoint+attention": 1.5}


def make_setup(
    distribute: Callable, patch_after: bool = False, one_batch: bool = False, level: str = "lean", **config
) -> Callable[[int], None]:
    def setup(rank: int) -> None:
        results, counts = [], []
        for memory in (level, "default"):
            model = build(**config)
            if "attention" in level:
                model.set_attn_implementation("sdpa")
            if not patch_after:
                tigon.patch(model, memory=memory)
            model = distribute(model)
            if patch_after:
                tigon.patch(model, memory=memory)
            calls = count_calls(model)
            # State that remains after the first step must not change the second one.
            for seed in range(2):
                result = step(model, True, **batch(0 if one_batch else rank, seed))
            results.append(result)
            counts.append(len(calls))
        actual, default = results
        assert actual.keys() == default.keys()
        assert all(torch.equal(actual[name], value) for name, value in default.items())
        assert counts[0] == RUNS.get(level, 2) * counts[1] or distribute is checkpoint_one_layer, counts

    return setup


lean_mlp = functools.partial(make_setup, level="lean+mlp")
checkpoint = functools.partial(make_setup, level="checkpoint")


def accumulated(rank: int) -> None:
    results = []
    for memory in ("lean", "default"):
        model = build()
        tigon.patch(model, memory=memory)
        model = ddp(model)
        items = {"num_items_in_batch": torch.tensor(40, device=DEVICE)}
        with model.no_sync():
            step(model, True, **batch(rank), **items)
        results.append(step(model, True, **batch(rank, seed=1), **items))
    lean, default = results
    assert all(torch.equal(lean[name], value) for name, value in default.items())


SETUPS = {
    "DDP": make_setup(ddp),
    "FSDP2, plain root": make_setup(fsdp2),
    "FSDP2, each norm a unit": make_setup(shard_norms_separately),
    "FSDP1, flat parameters": make_setup(functools.partial(fsdp1, use_orig_params=False)),
    "tensor parallel": make_setup(by_plan, patch_after=True, one_batch=True, model_type="llama"),
    "lean+mlp, FSDP2": lean_mlp(fsdp2, model_type="llama", patch_after=True),
    "lean+mlp, FSDP2, each linear layer a unit": lean_mlp(shard_linears_separately),
    "checkpoint, FSDP2": checkpoint(fsdp2, model_type="qwen3", patch_after=True),
    "checkpoint+attention, FSDP2": make_setup(fsdp2, level="checkpoint+attention", model_type="llama"),
}
# The group `lean_more`.
MORE_SETUPS = {
    "DDP with accumulation": accumulated,
    "FSDP2, checkpointing of one layer": make_setup(checkpoint_one_layer),
    "FSDP2, bf16 parameters": make_setup(functools.partial(fsdp2, **BF16)),
    "FSDP1, original parameters": make_setup(functools.partial(fsdp1, use_orig_params=True)),
    "lean+mlp, FSDP1, flat parameters": lean_mlp(functools.partial(fsdp1, use_orig_params=False)),
    "lean+mlp, tensor parallel": lean_mlp(by_plan, patch_after=True, one_batch=True, model_type="llama"),
    "checkpoint, DDP": checkpoint(ddp),
}
