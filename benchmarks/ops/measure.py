"""Measurement of time and memory of one forward and backward pass.

- Kernel time lasts from the start of the first kernel, copy or fill of the call to the end of the last one. The GPU
  sleeps until the host has queued the whole call, so the time of the host is not part of it.
- Host time lasts until the call returns, with an idle GPU. Wall time lasts until the GPU is done too.
- Peak memory is the most that is allocated above the inputs: activations, temporaries and gradients.

On a GPU the L2 cache is emptied before each call. Each round of long calls begins with the same number of calls that
are not measured: at its power limit a GPU lowers its clock within milliseconds, and how far depends on the work that it
has just done. So each provider is measured at the clock of its own work.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.benchmark import Timer

from benchmarks.ops.accuracy import BoundProvider
from tigon.runtime.compat.names import find

# The most calls of a provider in one round.
MOST_CALLS = 20
# The clock of a GPU makes at most about this many cycles in a millisecond.
CYCLES_PER_MS = 2_000_000


def sleep_on_device(cycles: int) -> None:
    """Let the current stream wait for a number of clock cycles, which gives the host time to queue a call. A torch
    without this private function, seen in 2.8 to 2.13, measures no GPU."""
    find("cuda._sleep")(cycles)


@dataclass
class Samples:
    """The measurements of one provider on one case: milliseconds of each call, and bytes. `gradient_bytes` is the size
    of the gradients that a call returns."""

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
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
        return 1e3 * max((bytes or 0) / self.bytes_per_second, (flops or 0) / self.flops_per_second)


class Meter:
    """Measures wall time on the CPU. `CudaMeter` adds the measurements of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A provider is called for this long in one round, and at least once.
        self.busy_ms = 100.0
        # The sizes of the copy and of the product that measure the roofline.
        self.copy_bytes, self.matmul_size = 2**27, 1024

    def synchronize(self) -> None:
        """Wait for the device."""

    def prepare(self, bound: BoundProvider) -> None:
        bound.restore()
        self.synchronize()

    def warm_up(self, bound: BoundProvider) -> float:
        """Call twice, so that later calls compile and allocate nothing new, and return the ms of the second call."""
        self._wall(bound)
        return self._wall(bound)[0]

    def calls(self, milliseconds: float) -> int:
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
        """Return the peak of allocated memory during a call, its results included; a CPU does not measure it."""
        return None

    def roofline(self) -> Roofline:
        """Measure a big copy and a big bf16 product of random data, each as the median of several."""
        generator = torch.Generator(self.device).manual_seed(0)
        normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        source, n = normal(self.copy_bytes // 2), self.matmul_size
        target = torch.empty_like(source)
        a, b = normal(n, n), normal(n, n)
        return Roofline(
            2 * source.nbytes / median_seconds(lambda: target.copy_(source)), 2 * n**3 / median_seconds(lambda: a @ b)
        )


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call that works long enough for the launch not to matter."""
    # The timer warms up, and waits for the device after each block of calls.
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.2).median


class CudaMeter(Meter):
    """Adds kernel time, host time and the memory of the CUDA allocator. It serves ROCm too, which torch calls cuda."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        properties = torch.cuda.get_device_properties(device)
        self.copy_bytes, self.matmul_size = min(2**32, properties.total_memory // 16), 8192
        # Reading this much evicts everything else from L2, so no kernel has to write back older data.
        size = max(4 * getattr(properties, "L2_cache_size", 0), 2**28)
        self._flush = torch.ones(size // 4, dtype=torch.int32, device=device)

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
        into.kernel += [self._kernel_ms(bound, statistics.median(into.host[-calls:])) for _ in range(calls)]

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

    def _kernel_ms(self, bound: BoundProvider, host_ms: float) -> float:
        """Return the device time of a call that the host queues within `host_ms`, between two events."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare(bound)
        # The GPU sleeps twice as long as the host needs, and at least 1 ms.
        sleep_on_device(int(CYCLES_PER_MS * (1.0 + 2.0 * host_ms)))
        start.record()
        result = bound()
        stop.record()
        self.synchronize()
        del result
        return start.elapsed_time(stop)


def make_meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else Meter(device)
