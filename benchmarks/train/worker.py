"""A training process of one model: `python -m benchmarks.train.worker JOB`, alone or as a rank of torchrun.

It trains the steps of a `Job`, and its result has the fields of `Trainer.train` or of `train_by_trl`.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.train import unsloth_model
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
from benchmarks.train.process import answer, merge_ranks, select_device
from benchmarks.train.providers import find_provider
from benchmarks.train.text import SEED, batches

LR_WARMUP_STEPS = 4
# The number of steps under the profiler, after all others.
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Job:
    """A model, its data, and the steps of `batch` sequences of `seq` tokens on each rank. `config` holds the fields of
    a transformers config, `tokens` is the path of a file. Each of `ranks` processes holds a shard of the model; a
    single process holds all of it. With `reverse`, the sequences of a batch come in reverse order, so that the loss is
    the same and its sums are taken in another order. With `lora`, only adapters of this rank are trained; with `qlora`,
    the layers that have adapters are in 4 bits. `warmup` steps come before the timed `steps`. Then the model trains a
    step at each of the `lengths`, which are shorter than `seq`, and a second time at each. With `trl`, the SFTTrainer
    of TRL trains on texts of at most `seq` tokens."""

    provider: str
    config: dict[str, Any]
    tokens: str
    batch: int
    seq: int
    steps: int = 1
    warmup: int = 0
    dtype: str = "bfloat16"
    device: str = "cuda"
    ranks: int = 1
    lr: float = 1e-4
    reverse: bool = False
    lora: int | None = None
    qlora: bool = False
    lengths: Sequence[int] = ()
    trl: bool = False


@dataclass
class StepTimes:
    """The seconds of steps without those of captures, the seconds until their calls returned, and their losses."""

    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class StepMeter:
    """Times of steps and peaks of memory. On a GPU, events mark the steps, so that the host does not wait for them."""

    def __init__(self, device: torch.device, state_bytes: int) -> None:
        self._device, self._state_bytes = device, state_bytes
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._resident = ResidentMemory()

    def mark(self) -> int:
        """Mark the current place in the device's queue of work, and return the index of the mark."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return len(self._marks) - 1

    def wait(self, index: int) -> None:
        if self._on_gpu:
            self._marks[index].synchronize()

    def seconds(self, first: int = 0) -> list[float]:
        """Return the seconds between the marks from the index `first` on."""
        pairs = zip(self._marks[first:], self._marks[first + 1 :], strict=False)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]

    def peaks(self) -> tuple[int | None, int | None]:
        """Return the peaks of allocated and of reserved bytes. On a CPU, return the bytes of the state plus the growth
        of the process, if the system reports it, and None."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        growth = self._resident.growth()
        return None if growth is None else self._state_bytes + growth, None


def kernel_totals(events: Iterable[Any], steps: int) -> tuple[float, int]:
    """Return the seconds of the GPU in one of several steps, and the number of kernels, copies and fills in it."""
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [event for event in events if event.device_type == on_gpu and not event.is_user_annotation]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e6 / steps, round(len(kernels) / steps)


class Trainer:
    """A model, its optimizer, and the steps that they have made."""

    def __init__(self, job: Job, rank: int) -> None:
        provider = find_provider(job.provider)
        assert provider is not None, job.provider
        self.provider = provider
        if self.provider.loads:
            # Before other libraries and before CUDA starts: Unsloth changes both.
            unsloth_model.import_unsloth(job.device)
        self.device = select_device(job.device, rank, job.ranks)
        self.job, self.rank, self._steps = job, rank, 0
        self._data = batches(Path(job.tokens), job.batch * job.ranks, job.seq, SEED)
        self._facts: dict[str, Any] = {}
        # `applied` is the report of `tigon.patch`, or a description of what another provider changed.
        model: nn.Module
        model, self.applied = self._prepare()
        if job.lora is not None:
            draw_adapters(model, SEED)
        # An optimizer must have a parameter.
        trained_parameters = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
        self.optimizer = self.provider.make_optimizer(trained_parameters, job.lr)
        if job.ranks > 1:
            model, self.optimizer = shard(model, self.optimizer)
        if self.provider.loads:
            unsloth_model.allow_length(model, job.seq)
        self.model: Callable[..., Any] = model
        if self.provider.compiles:
            self.model = torch.compile(model, mode=self.provider.mode)
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        # Parameters, and the two moments of AdamW for those that are trained.
        moments = sum(self.provider.moment_bytes(p) for p in shards if p.requires_grad)
        self.state_bytes = sum(p.nbytes for p in shards) + moments
        self._facts |= {
            "parameters_of_a_rank": sum(p.numel() for p in shards), "state_bytes": self.state_bytes,
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def _random_model(self) -> Any:
        """Return the model of random weights, in 4 bits with `qlora`, and note its facts for the report."""
        job = self.job
        torch.manual_seed(SEED)
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

    def _prepare(self) -> tuple[Any, Any]:
        """Return the model that is trained, changed by the provider, and what the provider says about it."""
        job = self.job
        if self.provider.loads:
            assert job.lora is not None
            return unsloth_model.load_with_adapters(
                self._random_model, read_config(job.config), job.dtype, job.lora, job.qlora, self.provider.checkpoints
            )
        model = self._random_model()
        if not self.provider.trains:
            freeze(model)
        elif job.lora is not None and self.provider.is_tigon:
            model = add_adapters(model, job.lora)
        applied = self.provider.apply(model, self.device.type)
        if job.lora is not None and not self.provider.is_tigon:
            # Peers change the modules of a model of transformers, which PEFT then wraps.
            if getattr(model, "is_gradient_checkpointing", False):
                model.enable_input_require_grads()
            model = add_adapters(model, job.lora)
        return model, applied

    def step(self, ids: Tensor) -> Tensor:
        """Train one step on [batch, seq] tokens and return its loss, [] fp32, without waiting for it."""
        ids = ids.to(self.device, non_blocking=True)
        if self.provider.mode is not None:
            # The graphs of torch.compile may now overwrite the outputs of the previous step.
            torch.compiler.cudagraph_mark_step_begin()
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * min(1.0, (self._steps + 1) / LR_WARMUP_STEPS)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        return loss.detach().float()

    def _next_batch(self, length: int | None = None) -> Tensor:
        """Return this rank's part of the next global batch, [batch, seq], or its first `length` tokens."""
        job, ids = self.job, next(self._data)
        part = slice(self.rank * job.batch, (self.rank + 1) * job.batch)
        share = (ids.flip(0) if job.reverse else ids)[part, :length].contiguous()
        return share.pin_memory() if self.device.type == "cuda" else share

    def captures(self) -> list[dict[str, Any]]:
        """Return the signature and the seconds of each pair of CUDA graphs that the patched model has captured."""
        graphs = getattr(self.applied, "graphs", None)
        return [] if graphs is None else [{"signature": x.signature, "seconds": x.seconds} for x in graphs.captured]

    def _time_steps(self, lengths: Sequence[int | None], meter: StepMeter) -> StepTimes:
        """Train a step at each of the lengths; the host runs ahead of the device by at most one step."""
        times, capture_seconds, first_mark = StepTimes(), [], meter.mark()
        losses_on_host = torch.empty(len(lengths), pin_memory=self.device.type == "cuda")

        def end_step(index: int) -> None:
            meter.wait(first_mark + index + 1)
            times.losses.append(losses_on_host[index].item())

        for index, length in enumerate(lengths):
            ids, captured = self._next_batch(length), len(self.captures())
            start_time = time.perf_counter()
            losses_on_host[index].copy_(self.step(ids), non_blocking=True)
            meter.mark()
            times.host_seconds.append(time.perf_counter() - start_time)
            capture_seconds.append(sum(capture["seconds"] for capture in self.captures()[captured:]))
            # Wait for the previous step, so that the device always has work.
            if index:
                end_step(index - 1)
        end_step(len(lengths) - 1)
        times.seconds = [a - b for a, b in zip(meter.seconds(first_mark), capture_seconds, strict=True)]
        return times

    def _profile(self) -> tuple[float | None, int | None]:
        """Return the sum of the times of a step's kernels, copies and fills on a GPU, and their number."""
        if self.device.type != "cuda":
            return None, None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                self.step(self._next_batch())
            torch.cuda.synchronize(self.device)
        return kernel_totals(profiler.events(), PROFILED_STEPS)

    def train(self) -> dict[str, Any]:
        """Train all steps, and return the measurements and the facts about the model."""
        job = self.job
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(SEED)
        # `item` waits for the step.
        losses = [self.step(self._next_batch()).item() for _ in range(job.warmup)]
        meter = self.make_meter()
        timed = self._time_steps([None] * job.steps, meter)
        # `torch.compile` would compile each length anew, or give up the graphs.
        lengths = () if self.provider.compiles else job.lengths
        first, again = (self._time_steps(lengths, meter) if lengths else StepTimes() for _ in range(2))
        allocated_peak, reserved_peak = meter.peaks()
        gpu_seconds, kernels = self._profile()
        fields = {
            "seconds": timed.seconds, "host_seconds": timed.host_seconds,
            "losses": losses + timed.losses + first.losses + again.losses, "first_seconds": first.seconds,
            "again_seconds": again.seconds, "allocated": allocated_peak, "reserved": reserved_peak,
            "gpu_seconds": gpu_seconds, "kernels": kernels,
        }  # fmt: skip
        return merge_ranks(fields, job.ranks) | self.facts()

    def facts(self) -> dict[str, Any]:
        """Return the facts about the model, and what the report of the patch has after the training."""
        return self._facts | {"captures": self.captures(), "applied": str(self.applied)}

    def make_meter(self) -> StepMeter:
        return StepMeter(self.device, self.state_bytes)


def train_job(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Build the model of a job, train its steps, and return the fields of the result."""
    trainer = Trainer(Job(**job), rank)
    if not trainer.job.trl:
        return trainer.train()
    from benchmarks.train.trl import train_by_trl

    return train_by_trl(trainer)


if __name__ == "__main__":
    sys.exit(answer(train_job))
