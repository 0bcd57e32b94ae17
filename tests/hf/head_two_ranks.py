"""Run by test_head_sharded.py, once a rank: a head cut by rows over two ranks, as tensor parallelism cuts it.

python head_two_ranks.py RANK STORE
"""

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tigon

SIZE = {
    "vocab_size": 132,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def transformers_plan(model: nn.Module) -> nn.Module:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)))
    model.tie_weights()  # as from_pretrained does after it
    return model


def torch_plan(**options) -> Callable:
    def cut(model: nn.Module) -> nn.Module:
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate(), **options)}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)

    return cut


def both(model: nn.Module) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model.lm_head, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"], ignored_params=set(model.model.parameters()))


# How the head is cut, of what config, and when it is patched.
WAYS: dict[str, tuple[Callable, dict, str]] = {
    "the plan of transformers": (transformers_plan, {}, "before"),
    "the plan of transformers, on a model as it is loaded": (transformers_plan, {}, "after"),
    "the plan of transformers, tied": (transformers_plan, {"tie_word_embeddings": True}, "after"),
    "the plan of torch": (torch_plan(), {}, "before"),
    "the plan of torch, logits as a DTensor": (torch_plan(use_local_output=False), {}, "after"),
    "the plan of torch under FSDP2": (both, {}, "before"),
}


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def step(model: nn.Module, patched: bool, **call) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = model(**call)
    assert (outputs.logits is None) == patched, "the loss was not fused" if patched else "the loss was fused"
    outputs.loss.backward()
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": full(outputs.loss.detach()), **gradients}


def assert_same(given: dict, expected: dict) -> None:
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 64 * torch.finfo(torch.float32).eps * value.abs().max().item()
        torch.testing.assert_close(given[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def check(way: str) -> None:
    distribute, options, patched = WAYS[way]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma2", **SIZE | {"tie_word_embeddings": False} | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    stock = copy.deepcopy(model)  # on one rank, whole
    tokens = torch.randint(3, 132, (2, 11), generator=torch.Generator().manual_seed(0))  # the same on both
    call = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.tensor(17)}
    if patched == "before":
        report = tigon.patch(model)
        model = distribute(model)
    else:
        model = distribute(model)
        report = tigon.patch(model)
    assert "loss" in {entry.part for entry in report.replaced}, report
    expected = step(stock, False, **call)
    assert_same(step(model, True, **call), expected)
    if way != "the plan of torch, logits as a DTensor":  # stock's loss cannot take one
        evaluated = model.eval()(input_ids=tokens, labels=tokens)
        torch.testing.assert_close(evaluated.logits, stock.eval()(input_ids=tokens).logits)
        report.restore()
        assert_same(step(model.train(), False, **call), expected)


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for way in WAYS:
        check(way)
        print(f"{way}: same", flush=True)
    dist.destroy_process_group()
