"""A sequence on both ranks, by torch's context parallelism: the levels of memory give the results of one process."""

import contextlib
from collections.abc import Callable
from unittest.mock import patch as replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.experimental import context_parallel
from transformers import AttentionInterface

import tigon
from hf.ways import DEVICE, Step, assert_same, batch, build, step
from hf.ways_sharded import fsdp2
from memory.steps import paged
from tigon.memory import layer_inputs

TOKENS = 12
future_gradient_bytes = layer_inputs._future_gradient_bytes


def attend_by_position(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float,
    position_ids: Tensor, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the attention of this rank's queries to all keys. torch's ring of SDPA calls runs on GPUs only."""
    assert attention_mask is None, "the hook of accelerate has not removed the mask"
    key, value = (all_gather_tensor_autograd(x.contiguous(), 2, dist.group.WORLD) for x in (key, value))
    positions = all_gather_tensor_autograd(position_ids.float().contiguous(), 1, dist.group.WORLD)
    mask = position_ids[:, None, :, None] >= positions[:, None, None, :]
    # torch has replaced `F.scaled_dot_product_attention` in this context.
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def whole_batch(valid: int) -> dict[str, Tensor]:
    """Return a batch of whole sequences with labels for the first `valid` tokens."""
    tokens = batch(0)["input_ids"]
    labels = tokens.clone()
    labels[:, valid:] = -100
    positions = torch.arange(TOKENS, device=DEVICE).repeat(len(tokens), 1)
    shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return {"input_ids": tokens, "position_ids": positions, "labels": labels, "shift_labels": shift_labels}


@contextlib.contextmanager
def offloading():
    """Move the inputs of tiny layers too, also on the CPU."""
    with (
        replace.object(layer_inputs, "can_offload", lambda device: True),
        replace.object(layer_inputs, "_future_gradient_bytes", lambda layers, device: 0),
        paged(256),
    ):
        yield


def one_process(valid: int) -> Step:
    """Return the results of the stock model for whole sequences."""
    inputs = whole_batch(valid)
    items = (inputs["shift_labels"] != -100).sum()
    return step(build("llama", num_hidden_layers=3), False, **inputs, num_items_in_batch=items)


def torch_context_parallel(level: str, valid: int = TOKENS, is_sharded: bool = False) -> Callable[[int], None]:
    """Return a setup in which torch divides sequences over the ranks, in chunks that balance the causal attention."""

    def setup(rank: int) -> None:
        AttentionInterface.register("attend_by_position", attend_by_position)
        mesh = dist.init_device_mesh(DEVICE, (2,), mesh_dim_names=("cp",))
        model = build("llama", num_hidden_layers=3)
        tigon.patch(model, memory=level)
        model.set_attn_implementation("attend_by_position")
        if is_sharded:
            whole_bytes = sum(p.nbytes for p in model.model.layers.parameters())
            model = fsdp2(model)
            # A rank has the gradients of its shards.
            assert future_gradient_bytes(model.model.layers, torch.device(DEVICE)) == whole_bytes / 2
        _attach_context_parallel_hooks(model)
        inputs = whole_batch(valid)
        items = (inputs["shift_labels"] != -100).sum()
        with offloading(), context_parallel(mesh, buffers=[*inputs.values()], buffer_seq_dims=[1] * len(inputs)):
            assert inputs["input_ids"].shape == (2, TOKENS // 2)
            assert inputs["position_ids"][0].tolist() == ([0, 1, 2, 9, 10, 11] if rank == 0 else [3, 4, 5, 6, 7, 8])
            results = step(model, True, **inputs, num_items_in_batch=items)
        for name, value in results.items():
            # FSDP has averaged the gradients over the ranks.
            if is_sharded and name != "loss":
                value *= 2
            else:
                dist.all_reduce(value)
        if level == "checkpoint+offload":
            function = model.model.layers[0]._gradient_checkpointing_func
            assert function.judge() is None
            assert function.place.inputs.pages.capacity == 2 * 3 * 1024
        assert_same(results, one_process(valid))

    return setup


SETUPS = {
    "torch's context parallelism": torch_context_parallel("default"),
    "torch's context parallelism, few labels": torch_context_parallel("lean", valid=3),
    "torch's context parallelism, checkpoint+offload": torch_context_parallel("checkpoint+offload"),
    "torch's context parallelism, FSDP2, checkpoint+offload": torch_context_parallel(
        "checkpoint+offload", is_sharded=True
    ),
}
