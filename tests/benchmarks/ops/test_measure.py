"""The measurements contain the work of a call and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.ops import measure
from benchmarks.ops.accuracy import BoundProvider
from benchmarks.ops.cases import Case
from benchmarks.ops.measure import CudaMeter, Meter, Roofline, Samples, kernel_windows
from benchmarks.ops.providers import Provider

CPU = torch.device("cpu")


def test_windows_open_at_two_markers_and_close_at_one():
    names = ["flush", "m", "m", "a", "b", "m", "copy", "flush", "m", "m", "c", "m", "flush"]
    events = [(name, float(start), 10.0 + start) for start, name in enumerate(names)]
    assert kernel_windows(events, "m") == [[13.0, 14.0], [20.0]]


@pytest.mark.parametrize(
    "names",
    ["m a m flush m m b m", "a m flush m m b m", "m flush m m b m", "m m a flush m m b m", "m m b m flush m m a flush"],
)
def test_a_window_that_lost_a_marker_is_dropped(names):
    assert len(kernel_windows([(name, 0.0, 1.0) for name in names.split()], "m")) == 1


def test_floor_is_the_slower_of_memory_and_products():
    roofline = Roofline(bytes_per_second=4e12, flops_per_second=8e14)
    assert roofline.floor_ms(4_000_000_000, None) == pytest.approx(1.0)
    assert roofline.floor_ms(None, 1_600_000_000_000) == pytest.approx(2.0)


def make_provider(op="swiglu", shape=(64, 1024), **options):
    """Return a provider with fp32 inputs that allocates one output, and one gradient for each input."""
    inputs = Case(op, "tiny", shape, dtype=torch.float32).make(CPU)
    return BoundProvider(Provider("double", lambda case: None, **options), lambda gate, up: (gate * up,), inputs)


def test_peak_memory_on_a_cpu_counts_outputs_and_gradients_not_inputs():
    size = 64 * 1024 * 4
    assert Meter(CPU).peak_bytes(make_provider()) == pytest.approx(3 * size, abs=4096)
    # The copies of overwritten tensors count as inputs.
    assert Meter(CPU).peak_bytes(make_provider(overwrites=("gate", "up"))) == pytest.approx(3 * size, abs=4096)


def test_without_gradients_only_the_forward_pass_runs_and_autograd_is_off():
    inputs = Case("linear_cross_entropy", "tiny", (8, 4, 16), no_grad=True).make(CPU)
    modes = []

    def run(*tensors):
        modes.append(torch.is_grad_enabled())
        return (tensors[0].sum(),)

    bound = BoundProvider(Provider("test", lambda case: None), run, inputs)
    outputs, gradients = bound()
    assert (len(outputs), gradients, modes) == (1, (), [False])
    assert list(bound.results()) == ["output 0"]
    assert bound.gradient_bytes == 0


def test_only_the_loss_among_several_outputs_is_differentiated():
    inputs = Case("cross_entropy", "tiny", (8, 16)).make(CPU)
    run = lambda input, target: (input.sum(), 2 * input)
    outputs, (gradient,) = BoundProvider(Provider("test", lambda case: None), run, inputs)()
    assert len(outputs) == 2
    assert gradient.eq(1).all()


def test_a_round_on_a_cpu_samples_wall_time():
    samples, meter = Samples(), Meter(CPU)
    meter.measure_round(make_provider(), 4, samples)
    assert len(samples.wall) == 4
    assert samples.kernel == samples.host == []
    assert meter.calls(0.001) == 20
    assert meter.calls(1e4) == 1


class FakeGpu:
    """A stand-in for torch.cuda and the profiler, with a timeline of the launched kernels, each of 1 us."""

    def __init__(self, monkeypatch, marker="at::cuda::(anonymous namespace)::spin_kernel(long)"):
        self.timeline, self.clock = [], 0.0
        properties = SimpleNamespace(total_memory=2**30, L2_cache_size=2**10)
        for name, value in {
            "get_device_properties": lambda device: properties,
            "synchronize": lambda device=None: None,
            "Event": lambda **_: SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 7.0),
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: 100,
            "max_memory_allocated": lambda device: 350,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(measure, "sleep_on_device", lambda cycles: self.launch(marker))
        monkeypatch.setattr(measure, "_device_events", lambda profiler: self.timeline)
        original = measure._quiet_profile

        def profile(activities, **options):
            self.timeline = []
            return original([torch.profiler.ProfilerActivity.CPU], **options)

        monkeypatch.setattr(measure, "_quiet_profile", profile)

    def launch(self, name):
        self.clock += 1.0
        self.timeline.append((name, self.clock, 1.0))

    def bound(self, kernels=3):
        """Return a call that launches `kernels` kernels and overwrites an input, whose reset launches one more."""
        bound = make_provider(overwrites=("gate",))
        run, restore = bound._run, bound.restore

        def launching(*tensors):
            for _ in range(kernels):
                self.launch("kernel")
            return run(*tensors)

        bound._run, bound.restore = launching, lambda: (self.launch("copy"), restore())
        return bound

    def meter(self):
        meter = CudaMeter(CPU)
        flush = SimpleNamespace(max=lambda: self.launch("reduce"))
        meter._flush = flush
        return meter


def test_kernel_time_excludes_the_reset_of_inputs_and_the_flush(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    samples, meter = Samples(), gpu.meter()
    meter.measure_round(gpu.bound(), 4, samples)
    meter.measure_round(gpu.bound(), 4, samples)
    assert samples.kernel == [pytest.approx(3e-3)] * 8
    assert samples.kernel_source == "profiler"
    assert len(samples.wall) == len(samples.host) == 8
    assert all(host <= wall for host, wall in zip(samples.host, samples.wall, strict=True))
    assert meter.peak_bytes(gpu.bound()) == 250


@pytest.mark.parametrize(("calls", "unmeasured_calls"), [(1, 2), (4, 8), (20, 0)])
def test_long_calls_run_unmeasured_before_each_part_of_a_round(monkeypatch, calls, unmeasured_calls):
    gpu, samples, call_log = FakeGpu(monkeypatch), Samples(), []
    meter, bound = gpu.meter(), gpu.bound()
    run = bound._run
    monkeypatch.setattr(bound, "_run", lambda *tensors: call_log.append(1) or run(*tensors))
    meter.measure_round(bound, calls, samples)
    assert len(call_log) == 2 * calls + unmeasured_calls
    assert len(samples.wall) == len(samples.host) == len(samples.kernel) == calls


def test_without_a_marker_events_time_the_call(monkeypatch):
    # The marker has the name of the flush, so the profile does not show where a call begins.
    gpu = FakeGpu(monkeypatch, marker="reduce")
    meter = gpu.meter()
    meter._marker = None
    samples = Samples()
    meter.measure_round(gpu.bound(), 2, samples)
    assert (samples.kernel, samples.kernel_source) == ([7.0, 7.0], "events")


def test_a_call_whose_kernels_were_lost_does_not_count(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    meter = gpu.meter()
    # The first three calls are not measured.
    kernel_counts = iter([3, 3, 3, 3, 2, 3])
    bound = gpu.bound()
    monkeypatch.setattr(
        bound, "_run", lambda gate, up: [gpu.launch("kernel") for _ in range(next(kernel_counts))] and (gate * up,)
    )
    assert meter._kernel_ms(bound, 3) == [pytest.approx(3e-3)] * 2
