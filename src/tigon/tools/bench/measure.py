"""Time and memory of one forward + backward.

- kernel time: durations of the GPU kernels (and copies and fills) that the call launches, summed, from the profiler;
- host time: until the call returns, with an idle GPU; wall time: until the GPU is done too;
- peak memory: what is allocated at the highest point above the inputs: activations, temporaries, gradients.

On a GPU the L2 cache is emptied before each call; what a call overwrites is renewed before it. Neither is measured.
Before long calls are measured, as many go unmeasured: at its power limit a GPU lowers its clock within milliseconds,
by how much depends on what it has just computed, and each provider is to be seen at the clock of its own work.
"""

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch.profiler import ProfilerActivity, profile

from tigon.tools.bench.accuracy import Bound

__all__ = ["Meter", "Roofline", "Samples", "make_meter"]

MOST_CALLS = 20  # of a provider in one round


@dataclass
class Samples:
    """What was measured of one provider on one case: milliseconds a call, and bytes."""

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    kernel_source: str = ""  # "profiler" or "events"
    peak_bytes: int | None = None
    gradient_bytes: int = 0  # of the gradients that a call returns

    @staticmethod
    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Roofline:
    """What the machine reaches: bytes a second in a big copy (read + written), operations a second in a big product."""

    bytes_per_second: float
    flops_per_second: float

    def floor_ms(self, bytes: int | None, flops: int | None) -> float:
        """The least time the work takes."""
        return 1e3 * max((bytes or 0) / self.bytes_per_second, (flops or 0) / self.flops_per_second)


class Meter:
    """Measures on the CPU: wall time, and memory from the allocator. `CudaMeter` adds what a GPU has."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.busy_ms = 100.0  # how long a provider is called in one round, at least one call
        self.copy_bytes, self.matmul_size = 2**27, 1024  # of the roofline

    def synchronize(self) -> None:
        """Wait for the device."""

    def prepare(self, bound: Bound) -> None:
        """Before a call, unmeasured."""
        bound.restore()
        self.synchronize()

    def warm_up(self, bound: Bound) -> float:
        """Two calls, so that nothing is compiled or allocated for the first time later; -> ms of the second."""
        for _ in range(2):
            elapsed, _ = self._wall(bound)
        return elapsed

    def calls(self, milliseconds: float) -> int:
        """How many calls of that length make one round."""
        return int(min(MOST_CALLS, max(1, self.busy_ms / max(milliseconds, 1e-3))))

    def round(self, bound: Bound, calls: int, into: Samples) -> None:
        """One round: `calls` calls, each a sample of wall time."""
        for _ in range(calls):
            wall, _ = self._wall(bound)
            into.wall.append(wall)

    def _wall(self, bound: Bound) -> tuple[float, float]:
        self.prepare(bound)
        start = time.perf_counter()
        result = bound()
        returned = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        del result
        return (done - start) * 1e3, (returned - start) * 1e3

    def peak_bytes(self, bound: Bound) -> int | None:
        """Highest sum of live allocations during a call, its results included."""
        self.prepare(bound)
        with _quiet_profile([ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = bound()
        del result
        live = peak = 0
        changes = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
        for event in sorted(changes, key=lambda event: event.start_ns()):
            live += event.nbytes()  # negative when freed
            peak = max(peak, live)
        return peak

    def roofline(self) -> Roofline:
        """Measure a big copy and a big bf16 product on random data; the median of several."""
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"dtype": torch.bfloat16, "device": self.device, "generator": generator}
        source, n = torch.randn(self.copy_bytes // 2, **options), self.matmul_size
        target = torch.empty_like(source)
        a, b = torch.randn(n, n, **options), torch.randn(n, n, **options)
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
    """Adds kernel time, host time and the CUDA allocator's memory; also for ROCm, which torch names cuda."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        properties = torch.cuda.get_device_properties(device)
        self.copy_bytes, self.matmul_size = min(2**32, properties.total_memory // 16), 8192
        # Reading this much leaves nothing else in L2, and nothing that must be written back while a kernel is measured.
        size = max(4 * getattr(properties, "L2_cache_size", 0), 2**28)
        self._flush = torch.ones(size // 4, dtype=torch.int32, device=device)
        # A kernel that no provider launches stands before and behind each call in the profile; learn its name here.
        self._marker = self._marker_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def prepare(self, bound: Bound) -> None:
        bound.restore()
        self._flush.max()
        self.synchronize()

    def round(self, bound: Bound, calls: int, into: Samples) -> None:
        self._settle(bound, calls)
        for _ in range(calls):
            wall, host = self._wall(bound)
            into.wall.append(wall)
            into.host.append(host)
        times, source = self._kernel_ms(bound, calls), "profiler"
        if not times:
            times, source = [self._event_ms(bound) for _ in range(calls)], "events"
        if into.kernel_source != source:  # never a median over both: the profiler wins
            if into.kernel_source == "profiler":
                return
            into.kernel.clear()
        into.kernel_source = source
        into.kernel += times

    def peak_bytes(self, bound: Bound) -> int | None:
        self.prepare(bound)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = bound()
        self.synchronize()
        del result
        return torch.cuda.max_memory_allocated(self.device) - before

    def _settle(self, bound: Bound, calls: int) -> None:
        """Unmeasured calls, so that the clock is that of this load; the many calls of a short one need none."""
        for _ in range(calls if calls < MOST_CALLS else 0):
            bound.restore()
            self._flush.max()
            bound()

    # --- kernel time ---

    def _kernel_ms(self, bound: Bound, calls: int) -> list[float]:
        """Kernel time of each call; [] if the profiler did not see them all."""
        if self._marker is None:
            return []
        with _quiet_profile([ProfilerActivity.CUDA]) as profiler:
            self._lead_in()
            self._settle(bound, calls)
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
        # Every call launches the same kernels: a window with fewer has lost some.
        most = max((len(window) for window in windows), default=0)
        return [sum(window) / 1e3 for window in windows if window and len(window) == most]

    def _mark(self, times: int) -> None:
        for _ in range(times):
            torch.cuda._sleep(1)

    def _lead_in(self) -> None:
        # A profile may lose the first kernels of a session: let it lose these.
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
            # The lead-in has a reduction of one or two kernels, ten times (less what was lost); the marker runs thrice.
            found = [name for name in counts if "spin_kernel" in name]
            found = found or [name for name, count in counts.items() if count == 3]
            return found[0] if len(found) == 1 else None
        except (AttributeError, RuntimeError):
            return None

    def _event_ms(self, bound: Bound) -> float:
        """Device time between events, for where the profiler is blind; the GPU waits until the host has queued all."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare(bound)
        torch.cuda._sleep(4_000_000)  # about 2 ms
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
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else Meter(device)


# --- reading a profile ---------------------------------------------------------------------------

DeviceEvent = tuple[str, float, float]  # name, start, duration, both in microseconds

# Not work of the GPU, but listed on its timeline.
_NOT_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event", "ProfilerStep", "## Call")


@contextlib.contextmanager
def _quiet_profile(activities: list[ProfilerActivity], **options: object) -> Iterator[profile]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes lines of its own between those of the progress bar
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a profile without a schedule keeps one cycle only
        with profile(activities=activities, **options) as profiler:
            yield profiler


def _device_events(profiler: profile) -> list[DeviceEvent]:
    """Kernels, copies and fills on the GPU in order of start; operators of the host and annotations are left out."""
    events = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(_NOT_WORK)
    ]
    return sorted(events, key=lambda event: event[1])


def kernel_windows(events: Iterable[DeviceEvent], marker: str) -> list[list[float]]:
    """Durations of the kernels between two markers in a row, which open a window, and a single one, which closes it.

    Where the profile has lost one of the three, there is no window.
    """
    runs = [(mark, [event[2] for event in run]) for mark, run in groupby(events, lambda event: event[0] == marker)]
    return [
        window
        for (opens, opening), (_, window), (_, closing) in zip(runs, runs[1:], runs[2:], strict=False)
        if opens and len(opening) == 2 and len(closing) == 1
    ]
