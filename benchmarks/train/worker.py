"""A training process of one model: `python -m benchmarks.train.worker JOB.json`, alone or as a rank of torchrun.

Each line of standard input is a `Point`. The process trains it and answers with events on standard output; the end of
standard input ends the process. Rank 0 reads and answers; a rank that fails reports the failure itself.

    {"event": "ready", "parameters": .., "parameters_of_a_rank": .., "state_bytes": .., "attention": ..,
     "threads": .., "applied": .., "seconds": ..}
    {"event": "refused", "status": "missing" | "unsupported", "note": ..}
    {"event": "step", "step": .., "loss": .., "timed": ..}
    {"event": "point", "seconds": [..], "host_seconds": [..], "losses": [..], "allocated": .., "reserved": ..}
    {"event": "out of memory", "reason": ..}                       the process is as before, and takes another point
    {"event": "failed", "out_of_memory": .., "reason": ..}         the process ends

A point starts from the weights at the end of the point before it. In a job with `continues`, it also takes the next
data, and peaks of memory are those since the start of the process.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.train import unsloth_model
from benchmarks.train.answers import Rank, WriteEvent, answer, answer_points
from benchmarks.train.job import Job, Point
from benchmarks.train.models import (
    ResidentMemory,
    add_adapters,
    draw_adapters,
    freeze,
    quantise,
    random_model,
    read_config,
    shard,
)
from benchmarks.train.providers import Missing, UnsupportedModel, find_provider
from benchmarks.train.text import batches

LR_WARMUP_STEPS = 4
# At least this many steps are timed, even if less time is left.
LEAST_STEPS = 3


# --- time and memory -----------------------------------------------------------------------------


class StepMeter:
    """Times of steps and peaks of memory. On a GPU, events mark the steps, so that the host does not wait for them."""

    def __init__(self, device: torch.device, state_bytes: int) -> None:
        self._device, self._state_bytes = device, state_bytes
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self, reset_peaks: bool = True) -> None:
        """Drop all marks and, with `reset_peaks`, the peaks."""
        self._marks = []
        if not reset_peaks:
            return
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._resident = ResidentMemory()

    def mark(self) -> None:
        """Mark the current place in the device's queue of work."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self, index: int) -> None:
        """Wait until the device has passed a mark."""
        if self._on_gpu:
            self._marks[index].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds between the marks."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]

    def peaks(self) -> tuple[int, int | None]:
        """Return the peaks of allocated and of reserved bytes.

        On a CPU, return the bytes of the state plus the growth of the process, and None.
        """
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        return self._state_bytes + self._resident.peak_bytes(), None


# --- training ------------------------------------------------------------------------------------


def create_states(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> int:
    """Create gradients and optimizer states of the trained parameters without training; return the bytes of all state.

    A few tokens go forward and backward, which also loads the libraries' code. Then the gradients are zeroed, and a
    step with a learning rate of 0 creates the states, whose step counters are set back to 0.
    """
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for state in optimizer.state.values():
        state["step"].zero_()
    return sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *gradients, *states))


class Trainer(Rank):
    """A model, its optimizer, and the steps that they have made."""

    def __init__(self, job: Job, rank: int, write_event: WriteEvent) -> None:
        start_time = time.perf_counter()
        provider = find_provider(job.provider, job.checkpointing)
        assert provider is not None, job.provider
        self.provider = provider
        if self.provider.loads:
            # Before other libraries and before CUDA starts: Unsloth changes both.
            unsloth_model.import_unsloth(job.device)
        super().__init__(job.device, rank, job.ranks)
        self.job, self._write_event = job, write_event
        self.ends_if_out_of_memory = self.keeps_gradients = job.continues
        self._facts: dict[str, Any] = {}
        model: nn.Module
        if self.provider.loads:
            model, description = self._load()
        else:
            model, description = self._prepare(self._random_model())
        if job.lora is not None:
            draw_adapters(model, job.seed)
        # An optimizer must have a parameter.
        trained_parameters = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
        self.optimizer = self.provider.make_optimizer(trained_parameters, job.lr)
        if job.ranks > 1:
            model, self.optimizer = shard(model, self.optimizer)
        self.model: Callable[..., Any] = torch.compile(model) if self.provider.compiles else model
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        rank_parameters = sum(p.numel() for p in shards)
        # Parameters, and the two moments of AdamW for those that are trained.
        state_bytes = sum(p.nbytes + (self.provider.moment_bytes(p) if p.requires_grad else 0) for p in shards)
        if job.continues:
            state_bytes = create_states(model, self.optimizer, torch.arange(8, device=self.device)[None])
            self.free()
        self._meter = StepMeter(self.device, state_bytes)
        self._meter.start()
        write_event(
            "ready", **self._facts, parameters_of_a_rank=rank_parameters, state_bytes=state_bytes,
            threads=torch.get_num_threads(), applied=description, seconds=time.perf_counter() - start_time,
        )  # fmt: skip

    def _random_model(self) -> Any:
        """Return the model of random weights, in 4 bits with `qlora`, and note its facts for the report."""
        job = self.job
        torch.manual_seed(job.seed)
        model: Any = random_model(read_config(job.config), job.dtype, self.device)
        if self.provider.in_fp32:
            model = model.float()
        self._facts = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "attention": model.config._attn_implementation,
        }
        if job.qlora:
            quantise(model)
        return model

    def _load(self) -> tuple[Any, str]:
        """Return the model that Unsloth loads and changes, and a description for the report."""
        job = self.job
        assert job.lora is not None
        return unsloth_model.load_with_adapters(
            self._random_model, read_config(job.config), job.dtype, job.lora, job.qlora,
            self.provider.checkpoints,
        )  # fmt: skip

    def _prepare(self, model: Any) -> tuple[Any, str]:
        """Return the model that is trained, changed by the provider, and a description for the report."""
        job = self.job
        if not self.provider.trains:
            freeze(model)
        elif job.lora is not None and self.provider.is_tigon:
            model = add_adapters(model, job.lora)
        description = self.provider.apply(model, self.device.type)
        if job.lora is not None and not self.provider.is_tigon:
            # Peers change the modules of a model of transformers, which PEFT then wraps.
            if getattr(model, "is_gradient_checkpointing", False):
                model.enable_input_require_grads()
            model = add_adapters(model, job.lora)
        return model, description

    def free(self) -> None:
        if self.provider.compiles:
            # Compile each size anew, as in a run of that size alone.
            torch.compiler.reset()
        super().free()

    def _step(self, ids: Tensor) -> Tensor:
        """Train one step on [batch, seq] tokens and return its loss, [] fp32, without waiting for it."""
        ids = ids.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * min(1.0, (self.steps + 1) / LR_WARMUP_STEPS)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.zero_gradients()
        self.steps += 1
        return loss.detach().float()

    def _batches(self, point: Point) -> Iterator[Tensor]:
        """Yield this rank's part of each global batch, [batch, seq]."""
        part = slice(self.rank * point.batch, (self.rank + 1) * point.batch)
        for ids in batches(Path(self.job.tokens), point.batch * self.job.ranks, point.seq, self.job.seed):
            share = ids.flip(0)[part] if self.job.reverse else ids[part]
            yield share.pin_memory() if self.device.type == "cuda" else share

    def train(self, line: str) -> dict[str, Any]:
        """Train the steps of a point; the host runs ahead of the device by at most one step.

        In a job with `continues`, a point continues with the data and the peaks of the point before it.
        """
        point = Point.from_json(line)
        if self.provider.loads:
            unsloth_model.allow_length(self.model, point.seq)
        if not self.job.continues:
            self.free()
        if not self.job.continues or not self.steps:
            self._data = self._batches(point)
            torch.manual_seed(self.job.seed)
        meter, data = self._meter, self._data
        losses, step_seconds = [], 0.0
        for step in range(point.warmup):
            start_time = time.perf_counter()
            # `item` waits for the step.
            losses.append(self._step(next(data)).item())
            step_seconds = time.perf_counter() - start_time
            self._write_event("step", step=step, loss=losses[-1], timed=False)
        steps = self.broadcast(self._affordable_steps(point, step_seconds))
        losses_on_host = torch.empty(steps, pin_memory=self.device.type == "cuda")
        host_seconds = []

        def report_step(index: int) -> None:
            meter.wait(index + 1)
            losses.append(losses_on_host[index].item())
            self._write_event("step", step=point.warmup + index, loss=losses[-1], timed=True)

        ids = next(data)
        meter.start(reset_peaks=not self.job.continues)
        meter.mark()
        for index in range(steps):
            if index:
                ids = next(data)
            start_time = time.perf_counter()
            losses_on_host[index].copy_(self._step(ids), non_blocking=True)
            meter.mark()
            host_seconds.append(time.perf_counter() - start_time)
            # Report the previous step, so that the device always has work.
            if index:
                report_step(index - 1)
        report_step(steps - 1)
        allocated_peak, reserved_peak = meter.peaks()
        return self.merge_ranks({
            "seconds": meter.seconds(), "host_seconds": host_seconds, "losses": losses, "allocated": allocated_peak,
            "reserved": reserved_peak,
        })  # fmt: skip

    @staticmethod
    def _affordable_steps(point: Point, step_seconds: float) -> int:
        if point.seconds is None or not step_seconds:
            return point.steps
        return min(point.steps, max(LEAST_STEPS, int(point.seconds / step_seconds)))


def serve(job: Job, rank: int, points: Iterator[str], write_event: WriteEvent) -> bool:
    """Build the model of `job` and train every point; return whether the process ends without an error."""
    try:
        return answer_points(lambda write_group_event: Trainer(job, rank, write_group_event), rank, points, write_event)
    except (Missing, UnsupportedModel) as refusal:
        if rank == 0:
            write_event("refused", status=type(refusal).__name__.lower(), note=str(refusal))
        return True


def main(path: str) -> int:
    job = Job.from_json(Path(path).read_text(encoding="utf-8"))
    return answer(lambda rank, write_event: serve(job, rank, iter(sys.stdin.readline, ""), write_event), job.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
