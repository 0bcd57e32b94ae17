"""One rank of one variant of Medusa, which trains a few steps: `python measure.py JOB`, alone or as a rank of torchrun.

`benchmarks.train.process` describes the job and the result, which has "seconds", "losses", "peak_bytes" and
"state_bytes".
"""

import asyncio
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from model import Medusa
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import tigon

# `benchmarks` is a folder of the repository, and not a part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.train.process import answer, merge_ranks, select_device
from benchmarks.train.text import read_text

GIB = 2**30


@dataclass(frozen=True)
class MedusaJob:
    """A variant, its model, and the steps of its training.

    `variant` is "stock", "stock:checkpoint", "tigon" or "tigon:LEVEL".
    """

    variant: str
    stage: int
    heads: int
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    optimizer: str
    warmup: int
    steps: int
    device: str
    ranks: int = 1


def build(job: MedusaJob, device: torch.device) -> Medusa:
    """Return the model with the memory savings of the variant. All variants have the same random weights."""
    name, _, level = job.variant.partition(":")
    # The heads of the attention have a size of 128, and there are four times as many for queries as for keys. With a
    # hidden size of 4096 this is the shape of Llama-3-8B.
    size = 128 if job.hidden >= 1024 else 16
    query_heads = job.hidden // size
    key_heads = next(n for n in range(max(1, query_heads // 4), 0, -1) if query_heads % n == 0)
    config = transformers.LlamaConfig(
        hidden_size=job.hidden, intermediate_size=job.hidden * 7 // 2, num_hidden_layers=job.layers,
        num_attention_heads=query_heads, num_key_value_heads=key_heads, head_dim=size,
        vocab_size=job.vocabulary, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with device:
        trunk = transformers.AutoModel.from_config(config, dtype=dtype).train()
        model = Medusa(trunk, job.heads, job.stage, fused=name == "tigon")
    torch.set_default_dtype(torch.float32)
    if name == "tigon":
        tigon.patch(trunk, memory=level or "default")
    elif level == "checkpoint":
        trunk.gradient_checkpointing_enable({"use_reentrant": False})
    if dist.is_initialized():
        for unit in (*trunk.layers, *model.heads):
            fully_shard(unit)
        fully_shard(model)
    return model


def local_bytes(x: Tensor) -> int:
    """Return the bytes of this rank's shard of a tensor."""
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.numel() * x.element_size()


def make_optimizer(job: MedusaJob, model: Medusa) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters."""
    trainable_parameters = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "adamw":
        return torch.optim.AdamW(trainable_parameters, lr=1e-5, weight_decay=0.0, fused=True)
    return torch.optim.SGD(trainable_parameters, lr=1e-3)


def read_bytes(job: MedusaJob) -> Tensor:
    """Return bytes of source code as tokens, so that no tokenizer is needed."""
    data = bytearray("".join(read_text(Path(asyncio.__file__).parent).documents).encode())
    return torch.frombuffer(data, dtype=torch.uint8).clamp(max=min(job.vocabulary, 256) - 1)


def state_bytes(model: Medusa, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients of trained parameters, and optimizer states."""
    gradients = sum(local_bytes(p) for group in optimizer.param_groups for p in group["params"])
    states = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(map(local_bytes, [*model.parameters(), *states])) + gradients


def train(job: MedusaJob, rank: int = 0) -> dict[str, Any]:
    """Train warm-up and timed steps; return the slowest rank's seconds, the mean losses, and the highest peak.

    The peak is that of allocated memory; on a CPU it is the peak of the process since its start.
    """
    device = select_device(job.device, rank, job.ranks)
    on_gpu = device.type == "cuda"
    if job.ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    model = build(job, device)
    optimizer, text = make_optimizer(job, model), read_bytes(job)
    position, count = rank * len(text) // job.ranks, job.batch * job.length
    losses, seconds = [], []
    for index in range(job.warmup + job.steps):
        # After its end the text begins again.
        places = (position + index * count + torch.arange(count)) % len(text)
        ids = text[places].view(job.batch, job.length).to(device, torch.int64)
        if on_gpu:
            torch.cuda.synchronize(device)
        if on_gpu and index <= job.warmup:
            torch.cuda.reset_peak_memory_stats(device)
        start_time = time.perf_counter()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_time)
    peak = (
        torch.cuda.max_memory_allocated(device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    fields = {"seconds": seconds[job.warmup :], "losses": losses, "peak_bytes": peak}
    return merge_ranks({**fields, "state_bytes": state_bytes(model, optimizer)}, job.ranks)


def train_job(job: dict[str, Any], rank: int) -> dict[str, Any]:
    # Without this setting, long sequences would fragment the memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return train(MedusaJob(**job), rank)


if __name__ == "__main__":
    sys.exit(answer(train_job))
