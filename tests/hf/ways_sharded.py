"""Data-parallel models, and models that torch shards: DDP, FSDP2 and FSDP1."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from hf.ways import DEVICE, EXPERTS, assert_same, batch, build, distributed, patch, step, with_op_on_experts
from tigon.graphs import calls

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, groups: tuple[str, ...] = (), **options) -> nn.Module:
    """Shard a model by FSDP2. Modules named in `groups` (norm, head, embed) form one unit; the root has the rest."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    units = {"head": model.lm_head, "norm": model.model.norm, "embed": model.model.embed_tokens}
    if groups:
        fully_shard([units[name] for name in groups] if len(groups) > 1 else units[groups[0]], **options)
    return fully_shard(model, **options)


def fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device(DEVICE)
    )


def by_accelerate(model: nn.Module) -> nn.Module:
    """Shard a model in the units of accelerate, which finds the last norm by the name of its class."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )
    # An Accelerator supports FSDP only on accelerators, so a namespace takes its place.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True, device=DEVICE
    )
    model = fsdp2_prepare_model(accelerator, model)
    assert isinstance(model.model.norm, FSDPModule)
    return model


def experts_as_unit(model: nn.Module) -> nn.Module:
    """Make the experts of each layer a unit of FSDP2, in which each rank has the weights of half of them."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            fully_shard(layer.mlp.experts)
    model = fsdp2(model)
    sharded_dims = {p.placements[0].dim for name, p in model.named_parameters() if ".experts." in name}
    assert sharded_dims == {0}, sharded_dims
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp2(model)


def make_setup(distribute: Callable, patch_after: bool = False, **config) -> Callable[[int], None]:
    """Return a setup that compares the second step of a patched and of a stock distributed model."""

    def setup(rank: int) -> None:
        steps = []
        for patched in (True, False):
            model = distributed(distribute, patched, patch_after, **config)
            # State that remains after the first step must not change the second one.
            step(model, patched, **batch(rank))
            steps.append(step(model, patched, **batch(rank, seed=1)))
        assert_same(*steps)

    return setup


def make_experts_setup(distribute: Callable, patch_after: bool = False) -> Callable[[int], None]:
    """Return a setup whose models have experts in one layer. A patched model takes two steps."""
    return with_op_on_experts(make_setup(distribute, patch_after, **EXPERTS), count=2)


def mixed_precision(rank: int) -> None:
    """Assert that with bf16 parameters, the patched model is as close to fp32 as the stock one."""
    exact = step(fsdp2(build()), False, **batch(rank))
    stock = step(fsdp2(build(), **BF16), False, **batch(rank))
    model = build()
    patch(model)
    actual = step(fsdp2(model, ("norm", "head"), **BF16), True, **batch(rank))
    assert actual.keys() == exact.keys()
    for name, value in exact.items():
        allowed = 2 * (stock[name] - value).abs().max() + 0.01 * value.abs().max()
        assert (actual[name] - value).abs().max() < allowed, name


def accumulated(rank: int) -> None:
    """Accumulate two batches with the number of items of both. Only the second backward reduces the gradients."""
    steps = []
    for patched in (True, False):
        model = build()
        if patched:
            patch(model)
        model = ddp(model)
        with model.no_sync():
            step(model, patched, **batch(rank), num_items_in_batch=torch.tensor(40, device=DEVICE))
        steps.append(step(model, patched, **batch(rank, seed=1), num_items_in_batch=torch.tensor(40, device=DEVICE)))
    assert_same(*steps)


def graphed(rank: int) -> None:
    """Assert that several ranks run eagerly, with the reason in the report, although their device captures graphs."""
    steps = []
    with mock.patch.object(calls, "is_supported", return_value=True):
        for graphs in (True, False):
            model = build()
            report = patch(model, graphs=graphs)
            model = ddp(model)
            steps += [[step(model, True, **batch(rank, seed)) for seed in range(4)]]
            assert report.graphs is None or report.graphs.eager == {"the process group has several ranks": 4}, report
    for ours, expected in zip(*steps, strict=True):
        assert_same(ours, expected)


SETUPS = {
    "DDP": make_setup(ddp),
    "FSDP2, norm and head one unit": make_setup(functools.partial(fsdp2, groups=("norm", "head"))),
    "FSDP2, patched after": make_setup(functools.partial(fsdp2, groups=("norm", "head")), patch_after=True),
    "FSDP2, experts as a unit": make_experts_setup(experts_as_unit),
}
# The group `sharded_more`.
MORE_SETUPS = {
    "DDP with accumulation": accumulated,
    "DDP, graphs": graphed,
    "FSDP2, tied embeddings, norm and head one unit": make_setup(
        functools.partial(fsdp2, groups=("norm", "embed", "head")), tie_word_embeddings=True
    ),
    "FSDP2, checkpointing": make_setup(checkpointed),
    "FSDP2, bf16 parameters": mixed_precision,
    "FSDP2 by accelerate, tied embeddings": make_setup(by_accelerate, tie_word_embeddings=True),
    "FSDP1, original parameters": make_setup(functools.partial(fsdp1, use_orig_params=True)),
    "FSDP1, flat parameters": make_setup(functools.partial(fsdp1, use_orig_params=False)),
}
