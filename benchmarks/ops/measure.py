"""Measurement of time and memory of one forward and backward pass.

- Kernel time is the sum of the durations of the GPU kernels, copies and fills of the call, from the profiler.
- Host time lasts until the call returns, with an idle GPU. Wall time lasts until the GPU is done too.
- Peak memory is the most that is allocated above the inputs: activations, temporaries and gradients.

On a GPU the L2 cache is emptied before each call, and overwritten inputs are reset. Neither is measured. Each round of
long calls begins with the same number of calls that are not measured: at its power limit a GPU lowers its clock within
milliseconds, and how far depends on the work that it has just done. So each provider is measured at the clock of its
own work.
"""

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.ops.accuracy import BoundProvider
from tigon.runtime.compat.operators import memory_events, sleep_on_device

# The most calls of a provider in one round.
MOST_CALLS = 20


@dataclass
class Samples:
    """The measurements of one provider on one case: milliseconds of each call, and bytes.

    `kernel_source` is "profiler" or "events", or "" without kernel times. `gradient_bytes` is the size of the gradients
    that a call returns.
    """

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    kernel_source: str = ""
    peak_bytes: int | None = None
    gradient_bytes: int = 0

    @staticmethod
    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Roofline:
    """The speed of the machine: bytes per second (read + written) of a big copy, operations per second of a product."""

    bytes_per_second: float
    flops_per_second: float

    def floor_ms(self, bytes: int | None, flops: int | None) -> float:
        """Return the least time that the work takes."""
        return 1e3 * max((bytes or 0) / self.bytes_per_second, (flops or 0) / self.flops_per_second)


class Meter:
    """Measures wall time on the CPU, and memory from the allocator. `CudaMeter` adds the measurements of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A provider is called for this long in one round, and at least once.
        self.busy_ms = 100.0
        # The sizes of the copy and of the product that measure the roofline.
        self.copy_bytes, self.matmul_size = 2**27, 1024

    def synchronize(self) -> None:
        """Wait for the device."""

    def prepare(self, bound: BoundProvider) -> None:
        """Prepare a call, outside the measured part."""
        bound.restore()
        self.synchronize()

    def warm_up(self, bound: BoundProvider) -> float:
        """Call twice, so that later calls compile and allocate nothing new, and return the ms of the second call."""
        self._wall(bound)
        return self._wall(bound)[0]

    def calls(self, milliseconds: float) -> int:
        """Return the number of calls of that length in one round."""
        return int(min(MOST_CALLS, max(1, self.busy_ms / max(milliseconds, 1e-3))))

    def measure_round(self, bound: BoundProvider, calls: int, into: Samples) -> None:
        """Measure one round: each call adds a sample of wall time to `into`."""
        for _ in range(calls):
            wall, _ = self._wall(bound)
            into.wall.append(wall)

    def _wall(self, bound: BoundProvider) -> tuple[float, float]:
        self.prepare(bound)
        start = time.perf_counter()
        result = bound()
        return_time = time.perf_counter()
        self.synchronize()
        end_time = time.perf_counter()
        del result
        return (end_time - start) * 1e3, (return_time - start) * 1e3

    def peak_bytes(self, bound: BoundProvider) -> int | None:
        """Return the largest sum of live allocations during a call, its results included."""
        self.prepare(bound)
        with _quiet_profile([ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = bound()
        del result
        live = peak = 0
        for event in sorted(memory_events(profiler), key=lambda event: event.time_ns):
            live += event.nbytes
            peak = max(peak, live)
        return peak

    def roofline(self) -> Roofline:
        """Measure a big copy and a big bf16 product of random data, each as the median of several."""
        generator = torch.Generator(self.device).manual_seed(0)
        normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        source, n = normal(self.copy_bytes // 2), self.matmul_size
        target = torch.empty_like(source)
        a, b = normal(n, n), normal(n, n)
        copy = self._median_seconds(lambda: target.copy_(source))
        product = self._median_seconds(lambda: a @ b)
        return Roofline(2 * source.nbytes / copy, 2 * n**3 / product)

    def _median_seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        times = []
        for _ in range(3 + repeats):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])


class CudaMeter(Meter):
    """Adds kernel time, host time and the memory of the CUDA allocator. It serves ROCm too, which torch calls cuda."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        properties = torch.cuda.get_device_properties(device)
        self.copy_bytes, self.matmul_size = min(2**32, properties.total_memory // 16), 8192
        # Reading this much evicts everything else from L2, so no kernel has to write back older data.
        size = max(4 * getattr(properties, "L2_cache_size", 0), 2**28)
        self._flush = torch.ones(size // 4, dtype=torch.int32, device=device)
        # A kernel that no provider launches marks the start and the end of each call in the profile. This is its name.
        self._marker = self._marker_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def prepare(self, bound: BoundProvider) -> None:
        bound.restore()
        self._flush.max()
        self.synchronize()

    def measure_round(self, bound: BoundProvider, calls: int, into: Samples) -> None:
        self._run_unmeasured(bound, calls)
        for _ in range(calls):
            wall, host = self._wall(bound)
            into.wall.append(wall)
            into.host.append(host)
        times, source = self._kernel_ms(bound, calls), "profiler"
        if not times:
            times, source = [self._event_ms(bound) for _ in range(calls)], "events"
        # A median must not mix both sources, so times of the profiler replace those of events.
        if into.kernel_source != source:
            if into.kernel_source == "profiler":
                return
            into.kernel.clear()
        into.kernel_source = source
        into.kernel += times

    def peak_bytes(self, bound: BoundProvider) -> int | None:
        self.prepare(bound)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = bound()
        self.synchronize()
        del result
        return torch.cuda.max_memory_allocated(self.device) - before

    def _run_unmeasured(self, bound: BoundProvider, calls: int) -> None:
        """Run unmeasured calls, so that the clock is that of this load. A round of many short calls needs none."""
        for _ in range(calls if calls < MOST_CALLS else 0):
            bound.restore()
            self._flush.max()
            bound()

    # --- kernel time ---

    def _kernel_ms(self, bound: BoundProvider, calls: int) -> list[float]:
        """Return the kernel time of each call that the profiler has recorded completely."""
        if self._marker is None:
            return []
        with _quiet_profile([ProfilerActivity.CUDA]) as profiler:
            self._lead_in()
            self._run_unmeasured(bound, calls)
            for _ in range(calls):
                bound.restore()
                self._flush.max()
                self._mark(2)
                result = bound()
                self._mark(1)
                del result
            self._flush.max()
            self.synchronize()
        windows = kernel_windows(_device_events(profiler), self._marker)
        # Every call launches the same kernels, so a window with fewer of them is incomplete.
        most = max((len(window) for window in windows), default=0)
        return [sum(window) / 1e3 for window in windows if window and len(window) == most]

    def _mark(self, times: int) -> None:
        for _ in range(times):
            sleep_on_device(1)

    def _lead_in(self) -> None:
        # A profile may lose the first kernels of a session, which must not be those that are measured.
        for _ in range(10):
            self._flush.max()
        self.synchronize()

    def _marker_name(self) -> str | None:
        try:
            with _quiet_profile([ProfilerActivity.CUDA]) as profiler:
                self._lead_in()
                self._mark(3)
                self.synchronize()
            counts: dict[str, int] = {}
            for name, _, _ in _device_events(profiler):
                counts[name] = counts.get(name, 0) + 1
            # The lead-in runs a reduction of one or two kernels ten times, of which the profile may lose some. The
            # marker runs three times.
            names = [name for name in counts if "spin_kernel" in name]
            names = names or [name for name, count in counts.items() if count == 3]
            return names[0] if len(names) == 1 else None
        except (AttributeError, RuntimeError):
            return None

    def _event_ms(self, bound: BoundProvider) -> float:
        """Return the device time between two events, which replaces the profiler if that records nothing.

        The GPU sleeps until the host has queued the whole call.
        """
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare(bound)
        # This takes about 2 ms.
        sleep_on_device(4_000_000)
        start.record()
        result = bound()
        stop.record()
        self.synchronize()
        del result
        return start.elapsed_time(stop)

    def _median_seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        times = []
        for _ in range(3 + repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            self.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(times[3:])


def make_meter(device: torch.device) -> Meter:
    """Return the meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else Meter(device)


# --- reading a profile ---------------------------------------------------------------------------

# Name, start and duration; both times are in microseconds.
DeviceEvent = tuple[str, float, float]

# These entries of the timeline of the GPU are not its work.
_NOT_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event", "ProfilerStep", "## Call")


@contextlib.contextmanager
def _quiet_profile(activities: list[ProfilerActivity], **options: Any) -> Iterator[profile]:
    # Without this setting, Kineto writes lines between those of the progress bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        # torch warns that a profile without a schedule has one cycle only.
        warnings.simplefilter("ignore")
        with profile(activities=activities, **options) as profiler:
            yield profiler


def _device_events(profiler: profile) -> list[DeviceEvent]:
    """Return kernels, copies and fills of the GPU in order of their start, without host operators and annotations."""
    events = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(_NOT_WORK)
    ]
    return sorted(events, key=lambda event: event[1])


def kernel_windows(events: Iterable[DeviceEvent], marker: str) -> list[list[float]]:
    """Return the durations of the kernels in each window.

    Two markers in a row open a window, and a single marker closes it. There is no window if the profile has lost one of
    the three.
    """
    runs = [(mark, [event[2] for event in run]) for mark, run in groupby(events, lambda event: event[0] == marker)]
    return [
        window
        for (opens, opening), (_, window), (_, closing) in zip(runs, runs[1:], runs[2:], strict=False)
        if opens and len(opening) == 2 and len(closing) == 1
    ]
