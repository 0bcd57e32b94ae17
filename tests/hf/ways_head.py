"""Tensor parallelism shards the head by rows: two ranks, each with half of the vocabulary, compute the stock loss."""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hf.ways import DEVICE, TOLERANCE, assert_same, batch, build, patch, step


def transformers_plan(model: nn.Module) -> nn.Module:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    # from_pretrained ties weights after it has sharded them.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    plan = ()
    # transformers 5.17 reads the plan from the model, 5.23 reads it by the names of modules.
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        plan = model._resolve_parallel_plans(DistributedConfig(tp_size=2))[:1]
    model = apply_tensor_parallelism(model, init_device_mesh(DEVICE, (2,)), *plan)
    model.tie_weights()
    return model


def torch_plan(**options) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate(), **options)}
        return parallelize_module(model, init_device_mesh(DEVICE, (2,)), plan)

    return shard


def under_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model.lm_head, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"], ignored_params=set(model.model.parameters()))


def shard_head(
    distribute: Callable, patch_after: bool = False, stock_runs: bool = True, **config
) -> Callable[[int], None]:
    """Return a setup with a sharded head. With `stock_runs`, the sharded stock model computes its loss too."""

    def setup(rank: int) -> None:
        model = build(**config)
        # Each rank has a whole stock model.
        stock = copy.deepcopy(model)
        call = batch(0) | {"num_items_in_batch": torch.tensor(17, device=DEVICE)}
        expected = step(stock, False, **call)
        if patch_after:
            report = patch(model := distribute(model))
        else:
            report = patch(model)
            model = distribute(model)
        assert_same(step(model, True, **call), expected)
        if stock_runs:
            logits = [m.eval()(**batch(0)).logits for m in (model, stock)]
            torch.testing.assert_close(*logits, rtol=0, atol=TOLERANCE * float(logits[1].abs().max()))
            report.restore()
            model.zero_grad()
            assert_same(step(model.train(), False, **call), expected)

    return setup


SETUPS = {
    "the plan of transformers": shard_head(transformers_plan),
    "the plan of transformers, on a model as it is loaded": shard_head(transformers_plan, patch_after=True),
    "the plan of transformers, tied": shard_head(transformers_plan, patch_after=True, tie_word_embeddings=True),
    "the plan of torch": shard_head(torch_plan()),
    "the plan of torch, logits as a DTensor": shard_head(
        torch_plan(use_local_output=False), patch_after=True, stock_runs=False
    ),
    "the plan of torch under FSDP2": shard_head(under_fsdp2),
}
