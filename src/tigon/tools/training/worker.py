"""One training run: `python -m tigon.tools.training.worker JOB.json`, alone or as a rank of torchrun.

For each line on standard input, a `Point`, it trains and answers on standard output with lines of JSON; the end of
standard input ends it. Rank 0 reads and answers; a failure is said by the rank that has it.

    {"event": "ready", "parameters": .., "parameters_of_a_rank": .., "state_bytes": .., "attention": ..,
     "threads": .., "applied": .., "seconds": ..}
    {"event": "refused", "status": "missing" | "unsupported", "note": ..}
    {"event": "step", "step": .., "loss": .., "timed": ..}
    {"event": "point", "seconds": [..], "host_seconds": [..], "losses": [..], "allocated": .., "reserved": ..}
    {"event": "out of memory", "reason": ..}                       the process is as before, and takes another point
    {"event": "failed", "out_of_memory": .., "reason": ..}         and ends

The model goes on from one point to the next: its weights are what the steps before made of them. In a job with turns
the answer to a point is its one step, and memory is the peak since the start above the state:

    {"event": "step", "step": .., "loss": .., "seconds": .., "peak_bytes": ..}
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.tools.training.answers import Rank, Say, answer, answer_points
from tigon.tools.training.job import Job, Point
from tigon.tools.training.models import random_model, read_config
from tigon.tools.training.providers import Missing, Unsupported, select
from tigon.tools.training.resident import ResidentMemory
from tigon.tools.training.text import batches

__all__ = ["Trainer", "main", "prime", "serve"]

LR_WARMUP = 4  # steps
LEAST_STEPS = 3  # that are timed, however little time is left


# --- time and memory -----------------------------------------------------------------------------


class Meter:
    """Times of steps and peaks of memory. On a GPU steps are marked by events: nothing waits between them."""

    def __init__(self, device: torch.device, state_bytes: int) -> None:
        self._device, self._state_bytes = device, state_bytes
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Forget all before: marks and peaks."""
        self._marks = []
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._resident = ResidentMemory()

    def mark(self) -> None:
        """Here, in the order of the device's work."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self, index: int) -> None:
        """Until the device has come to this mark."""
        if self._cuda:
            self._marks[index].synchronize()

    def seconds(self) -> list[float]:
        """Between the marks."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]

    def peaks(self) -> tuple[int, int | None]:
        """Bytes allocated and reserved at most; on a CPU the model and what the process grew by."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        return self._state_bytes + self._resident.peak_bytes(), None


# --- training ------------------------------------------------------------------------------------


def prime(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> int:
    """Create gradients and optimizer states without training; return the bytes of all state.

    A few tokens go forward and backward (which also loads the libraries' code), the gradients are zeroed, and one step
    with a learning rate of 0 creates the states; their step counters go back to 0.
    """
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for state in optimizer.state.values():
        state["step"].zero_()
    held = [tensor for p in model.parameters() for tensor in (p, p.grad)] + states
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


class Trainer(Rank):
    """A model, its optimizer and the steps that it has made."""

    def __init__(self, job: Job, rank: int, say: Say) -> None:
        started = time.perf_counter()
        super().__init__(job.device, rank, job.ranks)
        self.job, self._say = job, say
        self.ends_without_memory = self.keeps_gradients = job.turns
        self.event = "step" if job.turns else "point"
        (self.provider,) = select([job.provider], job.checkpointing)
        torch.manual_seed(job.seed)
        model = random_model(read_config(job.config), job.dtype, self.device)
        parameters, attention = sum(p.numel() for p in model.parameters()), model.config._attn_implementation
        applied = self.provider.apply(model, job.checkpointing, self.device.type)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if job.ranks > 1:
            from tigon.tools.training.sharding import shard

            model, self.optimizer = shard(model, self.optimizer)
        self.model: nn.Module = torch.compile(model) if self.provider.compiles else model
        local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
        itemsize = getattr(torch, job.dtype).itemsize
        self._state_bytes = 3 * local * itemsize  # with the two moments of AdamW
        if job.turns:
            self._state_bytes = prime(model, self.optimizer, torch.arange(8, device=self.device)[None])
            self.free()
            self._meter = Meter(self.device, self._state_bytes)
            self._meter.start()
        say(
            "ready", parameters=parameters, parameters_of_a_rank=local, state_bytes=self._state_bytes,
            attention=attention, threads=torch.get_num_threads(), applied=applied,
            seconds=time.perf_counter() - started,
        )  # fmt: skip

    def free(self) -> None:
        if self.provider.compiles:
            # Each size is compiled for itself, as in a run that knows no other.
            torch.compiler.reset()
        super().free()

    def _step(self, ids: Tensor) -> Tensor:
        """One step on [batch, seq] tokens; -> its loss, [] fp32, which is not waited for."""
        ids = ids.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * min(1.0, (self.steps + 1) / LR_WARMUP)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.zero_gradients()
        self.steps += 1
        return loss.detach().float()

    def _batches(self, point: Point) -> Iterator[Tensor]:
        """The rank's share of each global batch, [batch, seq]."""
        own = slice(self.rank * point.batch, (self.rank + 1) * point.batch)
        for ids in batches(Path(self.job.tokens), point.batch * self.job.ranks, point.seq, self.job.seed):
            share = ids.flip(0)[own] if self.job.reverse else ids[own]
            yield share.pin_memory() if self.device.type == "cuda" else share

    def train(self, line: str) -> dict[str, Any]:
        point = Point.from_json(line)
        return self._take_turn(point) if self.job.turns else self._train_steps(point)

    def _take_turn(self, point: Point) -> dict[str, Any]:
        """Train one step on the next batch and wait for it."""
        if not self.steps:
            self._data = self._batches(point)
            torch.manual_seed(self.job.seed)
        ids = next(self._data).to(self.device)
        self.synchronise()
        began = time.perf_counter()
        loss = self._step(ids)
        self.synchronise()
        seconds = time.perf_counter() - began
        peak = self._meter.peaks()[0] - self._state_bytes
        return {"step": self.steps - 1, "loss": loss.item(), "seconds": seconds, "peak_bytes": peak}

    def _train_steps(self, point: Point) -> dict[str, Any]:
        """Train the steps of a point; the host runs ahead of the device."""
        self.free()
        meter, data = Meter(self.device, self._state_bytes), self._batches(point)
        torch.manual_seed(self.job.seed)
        losses, took = [], 0.0
        for step in range(point.warmup):
            began = time.perf_counter()
            losses.append(self._step(next(data)).item())  # waits
            took = time.perf_counter() - began
            self._say("step", step=step, loss=losses[-1], timed=False)
        steps = self.agree(self._affordable(point, took))
        on_host = torch.empty(steps, pin_memory=self.device.type == "cuda")
        host_seconds = []

        def tell(index: int) -> None:
            meter.wait(index + 1)
            losses.append(on_host[index].item())
            self._say("step", step=point.warmup + index, loss=losses[-1], timed=True)

        meter.start()
        meter.mark()
        for index in range(steps):
            ids, began = next(data), time.perf_counter()
            on_host[index].copy_(self._step(ids), non_blocking=True)
            meter.mark()
            host_seconds.append(time.perf_counter() - began)
            if index:
                tell(index - 1)  # the step before: the device is never idle for it
        tell(steps - 1)
        allocated, reserved = meter.peaks()
        own = {"seconds": meter.seconds(), "host_seconds": host_seconds, "losses": losses}
        return self._together({**own, "allocated": allocated, "reserved": reserved})

    @staticmethod
    def _affordable(point: Point, step_seconds: float) -> int:
        if point.seconds is None or not step_seconds:
            return point.steps
        return min(point.steps, max(LEAST_STEPS, int(point.seconds / step_seconds)))

    def _together(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the slowest rank's seconds at each step, the mean loss, the highest peaks."""
        every = self.gather(own)
        each = lambda name: zip(*(part[name] for part in every), strict=True)
        return {
            "seconds": [max(values) for values in each("seconds")],
            "host_seconds": [max(values) for values in each("host_seconds")],
            "losses": [sum(values) / len(values) for values in each("losses")],
            "allocated": max(part["allocated"] for part in every),
            "reserved": None if own["reserved"] is None else max(part["reserved"] for part in every),
        }


def serve(job: Job, rank: int, points: Iterator[str], say: Say) -> bool:
    """Build the model of `job` and train every point; return whether that went well."""
    try:
        return answer_points(lambda speak: Trainer(job, rank, speak), rank, points, say)
    except (Missing, Unsupported) as refusal:
        if rank == 0:
            say("refused", status=type(refusal).__name__.lower(), note=str(refusal))
        return True


def main(path: str) -> int:
    job = Job.from_json(Path(path).read_text(encoding="utf-8"))
    return answer(lambda rank, say: serve(job, rank, iter(sys.stdin.readline, ""), say), job.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
