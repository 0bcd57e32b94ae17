"""One rank of one variant of Medusa: trains a few steps for each length that it is asked for.

`python measure.py JOB.json`, alone or as a rank of torchrun. For each line on standard input, a length, rank 0 answers
one line of JSON on standard output. `tigon.tools.training.answers` has the events of what does not fit or fails.

    {"event": "ready", "device": .., "memory_bytes": .., "parameters": ..}
    {"event": "length", "length": .., "seconds": [..], "loss": .., "peak_bytes": .., "state_bytes": ..}
"""

import asyncio
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from model import Medusa
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import tigon
from tigon.tools.training.answers import Rank, Say, answer, answer_points
from tigon.tools.training.records import Record
from tigon.tools.training.text import read_text


@dataclass(frozen=True)
class Job(Record):
    """What decides the numbers of a variant but for the length."""

    variant: str  # "stock", "stock:checkpoint", "tigon" or "tigon:LEVEL"
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
    seconds: float  # a length takes this long after its first step, or one step more
    device: str
    ranks: int = 1


def build(job: Job, device: torch.device) -> Medusa:
    """The model in random weights, the same for every variant, with the variant's means to save memory."""
    name, _, level = job.variant.partition(":")
    # Heads of 128, and four times as many of queries as of keys: Llama-3-8B at a hidden size of 4096.
    size = 128 if job.hidden >= 1024 else 16
    queries = job.hidden // size
    keys = next(n for n in range(max(1, queries // 4), 0, -1) if queries % n == 0)
    config = transformers.LlamaConfig(
        hidden_size=job.hidden, intermediate_size=job.intermediate, num_hidden_layers=job.layers,
        num_attention_heads=queries, num_key_value_heads=keys, head_dim=size,
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
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.numel() * x.element_size()


class Trainer(Rank):
    """A model, its optimizer, and text."""

    event = "length"

    def __init__(self, job: Job, rank: int = 0, say: Say = lambda *_, **__: None) -> None:
        super().__init__(job.device, rank, job.ranks)
        self.job = job
        if job.ranks > 1:
            dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
        self.model = build(job, self.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if job.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=1e-3)
        # Bytes of source code as tokens: real text, and nothing to learn before it.
        data = bytearray("".join(read_text(Path(asyncio.__file__).parent).documents).encode())
        self.text = torch.frombuffer(data, dtype=torch.uint8).clamp(max=min(job.vocabulary, 256) - 1)
        self.place = rank * len(self.text) // job.ranks
        gpu = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        device, memory = (gpu.name, gpu.total_memory) if gpu else ("CPU", None)
        say("ready", device=device, memory_bytes=memory, parameters=sum(p.numel() for p in self.model.parameters()))

    def ids(self, length: int) -> Tensor:
        """[batch, length], further on in the text each time, and around."""
        count = self.job.batch * length
        index = (self.place + torch.arange(count)) % len(self.text)
        self.place += count
        return self.text[index].view(self.job.batch, length).to(self.device, torch.int64)

    def step(self, length: int) -> tuple[float, float]:
        """Loss and seconds."""
        ids = self.ids(length)
        self.synchronise()
        started = time.perf_counter()
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        value = loss.item()
        self.synchronise()
        return value, time.perf_counter() - started

    def state_bytes(self) -> int:
        """Parameters, gradients of those that are trained, and what the optimizer keeps."""
        gradients = sum(local_bytes(p) for group in self.optimizer.param_groups for p in group["params"])
        states = [x for state in self.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return sum(map(local_bytes, [*self.model.parameters(), *states])) + gradients

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # since the process began

    def train(self, line: str) -> dict:
        """The slowest rank's seconds, the mean loss, the largest peak."""
        every = self.gather(self.measure(int(line)))
        return {
            "length": int(line),
            "seconds": [max(times) for times in zip(*(part["seconds"] for part in every), strict=True)],
            "loss": sum(part["loss"] for part in every) / len(every),
            "peak_bytes": max(part["peak_bytes"] for part in every),
            "state_bytes": max(part["state_bytes"] for part in every),
        }

    def measure(self, length: int) -> dict:
        """Warm-up and timed steps as far as the time goes; where it ends in the warm-up, its last step is timed.

        The first is not, unless no warm-up is asked for: in it kernels are compiled and ranks find each other.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        results = []
        for i in range(self.job.warmup + self.job.steps):
            if i <= self.job.warmup and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            results.append(self.step(length))
            if i == 0:
                started = time.perf_counter()
            elif self.enough(time.perf_counter() - started):
                break
        timed = results[self.job.warmup :] or results[-1:]
        return {
            "length": length, "seconds": [seconds for _, seconds in timed], "loss": results[0][0],
            "peak_bytes": self.peak_bytes(), "state_bytes": self.state_bytes(),
        }  # fmt: skip

    def enough(self, seconds: float) -> bool:
        """Whether the time is over, on any rank: all stop at the same step."""
        over = torch.tensor(float(seconds > self.job.seconds), device=self.device)
        if dist.is_initialized():
            dist.all_reduce(over)
        return over.item() > 0


def main(path: str) -> int:
    job = Job.from_json(Path(path).read_text(encoding="utf-8"))
    lines = iter(sys.stdin.readline, "")
    return answer(lambda rank, say: answer_points(lambda speak: Trainer(job, rank, speak), rank, lines, say), job.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
