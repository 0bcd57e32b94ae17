"""One rank of one variant of Medusa, which trains a few steps at each length.

`python measure.py JOB.json`, alone or as a rank of torchrun. Each line of standard input is a length, which rank 0
answers with a line of JSON on standard output. `benchmarks.train.answers` has the events of lengths that do not fit
and of failures.

    {"event": "ready", "device": .., "memory_bytes": .., "parameters": ..}
    {"event": "point", "seconds": [..], "losses": [..], "peak_bytes": .., "state_bytes": ..}
"""

import asyncio
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

from benchmarks.train.answers import Rank, WriteEvent, answer, answer_points
from benchmarks.train.job import RankJob
from benchmarks.train.text import read_text


@dataclass(frozen=True)
class MedusaJob(RankJob):
    """A variant, its model and the settings of its training, without the length.

    `variant` is "stock", "stock:checkpoint", "tigon" or "tigon:LEVEL". The steps of a length end `seconds` after its
    first step, but at least one more is trained.
    """

    variant: str
    stage: int
    heads: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    batch: int
    optimizer: str
    warmup: int
    steps: int
    seconds: float
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
        hidden_size=job.hidden, intermediate_size=job.intermediate, num_hidden_layers=job.layers,
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


class Trainer(Rank):
    """A model, its optimizer, and the text."""

    def __init__(self, job: MedusaJob, rank: int = 0, write_event: WriteEvent = lambda *_, **__: None) -> None:
        super().__init__(job.device, rank, job.ranks)
        self.job = job
        if job.ranks > 1:
            dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
        self.model = build(job, self.device)
        trainable_parameters = [p for p in self.model.parameters() if p.requires_grad]
        if job.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(trainable_parameters, lr=1e-5, weight_decay=0.0, fused=True)
        else:
            self.optimizer = torch.optim.SGD(trainable_parameters, lr=1e-3)
        # The tokens are bytes of source code, so that no tokenizer is needed.
        data = bytearray("".join(read_text(Path(asyncio.__file__).parent).documents).encode())
        self.text = torch.frombuffer(data, dtype=torch.uint8).clamp(max=min(job.vocabulary, 256) - 1)
        self.position = rank * len(self.text) // job.ranks
        gpu = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        device, memory = (gpu.name, gpu.total_memory) if gpu else ("CPU", None)
        write_event(
            "ready", device=device, memory_bytes=memory, parameters=sum(p.numel() for p in self.model.parameters())
        )

    def ids(self, length: int) -> Tensor:
        """Return the next tokens of the text, [batch, length]. After its end the text begins again."""
        count = self.job.batch * length
        index = (self.position + torch.arange(count)) % len(self.text)
        self.position += count
        return self.text[index].view(self.job.batch, length).to(self.device, torch.int64)

    def step(self, length: int) -> tuple[float, float]:
        """Train one step and return its loss and seconds."""
        ids = self.ids(length)
        self.synchronise()
        start_time = time.perf_counter()
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        value = loss.item()
        self.synchronise()
        return value, time.perf_counter() - start_time

    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients of trained parameters, and optimizer states."""
        gradients = sum(local_bytes(p) for group in self.optimizer.param_groups for p in group["params"])
        states = [x for state in self.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return sum(map(local_bytes, [*self.model.parameters(), *states])) + gradients

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory; on a CPU the peak of the process since its start."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def train(self, line: str) -> dict[str, Any]:
        """Measure a length; return the slowest rank's seconds, the mean losses, and the highest peak."""
        return self.merge_ranks(self.measure(int(line)))

    def measure(self, length: int) -> dict[str, Any]:
        """Train warm-up and timed steps until the time is over. If it is over in the warm-up, time its last step.

        The first step is not timed unless there is no warm-up, because kernels are compiled and ranks connect in it.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        results = []
        for i in range(self.job.warmup + self.job.steps):
            if i <= self.job.warmup and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            results.append(self.step(length))
            if i == 0:
                start_time = time.perf_counter()
            elif self.is_over(time.perf_counter() - start_time):
                break
        timed_results = results[self.job.warmup :] or results[-1:]
        return {
            "seconds": [seconds for _, seconds in timed_results], "losses": [loss for loss, _ in results],
            "peak_bytes": self.peak_bytes(), "state_bytes": self.state_bytes(),
        }  # fmt: skip

    def is_over(self, seconds: float) -> bool:
        """Return whether the time is over on any rank, so that all ranks stop at the same step."""
        over = torch.tensor(float(seconds > self.job.seconds), device=self.device)
        if dist.is_initialized():
            dist.all_reduce(over)
        return over.item() > 0


def main(path: str) -> int:
    job = MedusaJob.from_json(Path(path).read_text(encoding="utf-8"))
    lines = iter(sys.stdin.readline, "")
    return answer(
        lambda rank, write_event: answer_points(
            lambda write_group_event: Trainer(job, rank, write_group_event), rank, lines, write_event
        ),
        job.ranks,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
