"""Run by test_two_ranks.py, once a rank: a patched and a stock model take a step under each way of sharding.

python two_ranks.py RANK STORE
"""

import sys

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tigon

SIZE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(*groups: str):
    def shard(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            fully_shard(layer)
        units = {"head": model.lm_head, "norm": model.model.norm}
        if groups:
            fully_shard([units[name] for name in groups] if len(groups) > 1 else units[groups[0]])
        return fully_shard(model)

    return shard


WAYS = {
    "DDP": (ddp, {}),
    "FSDP2, plain root": (sharded(), {}),
    "FSDP2, the head a unit of its own": (sharded("head"), {}),
    "FSDP2, norm and head one unit": (sharded("norm", "head"), {}),
    "FSDP2, tied embeddings": (sharded(), {"tie_word_embeddings": True}),
}


def step(way: str, patched: bool, rank: int) -> dict[str, torch.Tensor]:
    distribute, options = WAYS[way]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma2", **SIZE | {"tie_word_embeddings": False} | options)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if patched:
        assert {entry.part for entry in tigon.patch(model).replaced} == {"rms_norm", "glu", "rope", "loss"}
    model = distribute(model)
    tokens = torch.randint(3, 131, (2, 11), generator=torch.Generator().manual_seed(rank))
    outputs = model(input_ids=tokens, labels=tokens)
    assert (outputs.logits is None) == patched, "the loss was not fused"
    outputs.loss.backward()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return {"loss": outputs.loss.detach(), **{name: full(p.grad) for name, p in model.named_parameters()}}


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for way in WAYS:
        given, expected = step(way, True, rank), step(way, False, rank)
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            tolerance = 64 * torch.finfo(torch.float32).eps * value.abs().max().item()
            torch.testing.assert_close(given[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        print(f"{way}: same")
    dist.destroy_process_group()
