"""One model on both ranks: its layers and head are sharded (tensor parallel), or its sequences (context parallel)."""

import functools
import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.distributed import DistributedConfig

import tigon
from hf.ways import DEVICE, EXPERTS, assert_same, batch, build, distributed, patch, step, with_op_on_experts
from tigon.runtime import device


def load(model: nn.Module, **options) -> tuple[nn.Module, set[str]]:
    """Save a model and load it with a plan of transformers. Return it with the names of its sharded parameters."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    model = type(model).from_pretrained(folder[0], attn_implementation="eager", **options).train()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return model, {name for name, p in model.named_parameters() if hasattr(p, "placements")}


def by_plan(model: nn.Module) -> nn.Module:
    """Load a model with the plan of transformers that shards the features of its layers and its head."""
    model, names = load(model, tp_plan="auto")
    sharded_modules = {name.split(".")[-2] for name in names}
    assert {"lm_head", "o_proj", "down_proj"} <= sharded_modules, sharded_modules
    return model


def by_experts(model: nn.Module) -> nn.Module:
    """Load a model with the plan of transformers that gives each rank half of the experts.

    The router of a rank gives choices of experts on the other rank an index behind the last expert, and the weight 0.
    transformers 5.17 does not shard other layers then, and 5.23 does.
    """
    plan = DistributedConfig(tp_size=2, tp_plan="auto", enable_expert_parallel=True)
    model, names = load(model, distributed_config=plan)
    weights = {name: p for name, p in model.named_parameters() if ".experts." in name}
    assert weights.keys() <= names
    assert {p.to_local().shape[0] for p in weights.values()} == {2}
    return model


def by_layers(model: nn.Module, local: bool) -> nn.Module:
    """Shard a model with the parallel styles of torch: norms by the sequence (as DTensors), MLPs by the features."""
    mesh = dist.init_device_mesh(DEVICE, (2,))
    whole, sequence = Replicate(), Shard(1)
    for layer in model.model.layers:
        norm = layer.pre_feedforward_layernorm
        parallelize_module(norm, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=sequence))
        parallelize_module(norm, mesh, SequenceParallel())
        mlp = {
            "": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
            "gate_proj": ColwiseParallel(use_local_output=local),
            "up_proj": ColwiseParallel(use_local_output=local),
            "down_proj": RowwiseParallel(),
        }
        for name, style in mlp.items():
            parallelize_module(layer.mlp.get_submodule(name), mesh, style)
    return model


def tensor_parallel(distribute: Callable, patch_after: bool = True, **config) -> Callable[[int], None]:
    """Return a setup in which both ranks get the same batch. It compares with a sharded and a whole stock model."""

    def setup(rank: int) -> None:
        steps = []
        for patched in (True, False):
            model = distributed(distribute, patched, patch_after, **config)
            steps.append(step(model, patched, **batch(0)))
        assert_same(*steps)
        assert_same(steps[0], step(build(**config), False, **batch(0)))

    return setup


def patched_by_type(distribute: Callable, model_type: str, **config) -> Callable[[int], None]:
    """Return a setup that patches a type before its models are built. They are sharded when they are loaded."""

    def setup(rank: int) -> None:
        stock = build(model_type, **config)
        report = tigon.patch(model_type)
        model = distribute(stock)
        report.restore()
        assert_same(step(model, True, **batch(0)), step(stock, False, **batch(0)))

    return setup


def no_kernel_on_dtensors(rank: int) -> None:
    """Assert that no kernel gets a DTensor, which has no memory that a kernel could read."""
    x = distribute_tensor(torch.randn(4, 8, device=DEVICE), dist.init_device_mesh(DEVICE, (2,)), [Shard(0)])
    before, device.INTERPRETED = device.INTERPRETED, True
    assert device.runs_kernels(x.to_local())
    assert not device.runs_kernels(x)
    device.INTERPRETED = before


def attend_to_all(module, query, key, value, attention_mask, scaling, **kwargs) -> tuple[Tensor, None]:
    """Compute the attention of the queries of this rank to the whole sequence."""
    key, value = (all_gather_tensor_autograd(x.contiguous(), 2, dist.group.WORLD) for x in (key, value))
    rows, columns = query.shape[2], key.shape[2]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(rows * dist.get_rank())
    # The other kernels of a GPU are less exact.
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def context_parallel(valid: int) -> Callable[[int], None]:
    """Return a setup in which each rank has half of a sequence. Only the first `valid` tokens have labels."""

    def setup(rank: int) -> None:
        AttentionInterface.register("attend_to_all", attend_to_all)
        tokens = batch(0)["input_ids"]
        labels = tokens.clone()
        labels[:, valid:] = -100
        whole = {"input_ids": tokens, "position_ids": torch.arange(12, device=DEVICE).expand(2, 12), "labels": labels}
        whole["shift_labels"] = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        part = {name: value[:, 6 * rank : 6 * rank + 6].contiguous() for name, value in whole.items()}
        items = (whole["shift_labels"] != -100).sum()
        steps = []
        for patched in (True, False):
            model = build("llama")
            if patched:
                patch(model)
            model.set_attn_implementation("attend_to_all")
            local_results = step(model, patched, **part, num_items_in_batch=items)
            assert (rank == 1 and valid <= 6) == (local_results["loss"] == 0)
            for value in local_results.values():
                dist.all_reduce(value)
            steps.append(local_results)
        assert_same(*steps)
        assert_same(steps[0], step(build("llama"), False, **whole, num_items_in_batch=items))

    return setup


PHI3_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# All layers have experts with biases and a clamped gate.
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
# In transformers 5.23, the expert parallelism calls the stock forward of the experts by another object.
EXPERT_CALLS = 0 if "ep_size" in DistributedConfig.__dataclass_fields__ else 1

SETUPS = {
    "transformers' plan": tensor_parallel(by_plan),
    "transformers' plan, norms of heads": tensor_parallel(by_plan, model_type="qwen3"),
    "transformers' plan, packed": tensor_parallel(
        by_plan, model_type="phi3", rope_parameters=PHI3_ROPE, eos_token_id=2
    ),
    "transformers' plan, patched by type": patched_by_type(by_plan, "gemma2"),
    "transformers' plan, experts": with_op_on_experts(tensor_parallel(by_plan, **EXPERTS), count=1),
    "transformers' plan, experts patched by type": with_op_on_experts(patched_by_type(by_plan, **EXPERTS), count=1),
    "expert parallel": with_op_on_experts(tensor_parallel(by_experts, **EXPERTS), EXPERT_CALLS),
    "expert parallel, patched by type": with_op_on_experts(patched_by_type(by_experts, **EXPERTS), EXPERT_CALLS),
    "expert parallel, biases, patched by type": with_op_on_experts(
        patched_by_type(by_experts, **GPT_OSS), 2 * EXPERT_CALLS
    ),
    "torch's styles": tensor_parallel(functools.partial(by_layers, local=True)),
    "torch's styles, DTensors between them": tensor_parallel(functools.partial(by_layers, local=False)),
    "torch's styles, patched before": tensor_parallel(functools.partial(by_layers, local=True), patch_after=False),
    "no kernel on DTensors": no_kernel_on_dtensors,
    "context parallel": context_parallel(valid=12),
    "context parallel, a rank without valid tokens": context_parallel(valid=6),
}
