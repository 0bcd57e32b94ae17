"""The measurements contain the work of a call and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.ops import measure
from benchmarks.ops.accuracy import BoundProvider
from benchmarks.ops.cases import make_inputs
from benchmarks.ops.measure import CudaMeter, Roofline, Samples
from benchmarks.ops.providers import Provider
from benchmarks.workloads import Case
from tigon.runtime.compat import names

CPU = torch.device("cpu")


def test_floor_is_the_slower_of_memory_and_products():
    roofline = Roofline(bytes_per_second=4e12, flops_per_second=8e14)
    assert roofline.floor_ms(4_000_000_000, None) == pytest.approx(1.0)
    assert roofline.floor_ms(None, 1_600_000_000_000) == pytest.approx(2.0)


def make_provider(op="swiglu", shape=(64, 1024), **options):
    """Return a provider with fp32 inputs that allocates one output, and one gradient for each input."""
    inputs = make_inputs(Case("tiny", shape, op=op, dtype=torch.float32), CPU)
    return BoundProvider(Provider("double", lambda case: None, **options), lambda gate, up: (gate * up,), inputs)


def test_without_gradients_only_the_forward_pass_runs_and_autograd_is_off():
    inputs = make_inputs(Case("tiny", (8, 4, 16), op="linear_cross_entropy", no_grad=True), CPU)
    modes = []

    def run(*tensors):
        modes.append(torch.is_grad_enabled())
        return (tensors[0].sum(),)

    bound = BoundProvider(Provider("test", lambda case: None), run, inputs)
    outputs, gradients = bound()
    assert (len(outputs), gradients, modes) == (1, (), [False])
    assert list(bound.results()) == ["output 0"]
    assert bound.gradient_bytes == 0


@pytest.fixture
def gpu(monkeypatch):
    """Let the CPU appear as a GPU whose events are 7 ms apart; return the meter and the list of its actions."""
    actions = []
    for name, value in {
        "get_device_properties": lambda device: SimpleNamespace(total_memory=2**30, L2_cache_size=2**10),
        "synchronize": lambda device=None: None,
        "Event": lambda **_: SimpleNamespace(record=lambda: actions.append("event"), elapsed_time=lambda other: 7.0),
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 350,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measure, "sleep_on_device", lambda cycles: actions.append("sleep"))
    meter = CudaMeter(CPU)
    meter._flush = SimpleNamespace(max=lambda: actions.append("flush"))
    return meter, actions


def observed(actions):
    """Return a call that notes its resets of an overwritten input and its runs."""
    bound = make_provider(overwrites=("gate",))
    run, restore = bound._run, bound.restore
    bound._run = lambda *tensors: actions.append("call") or run(*tensors)
    bound.restore = lambda: actions.append("reset") or restore()
    return bound


def test_kernel_time_excludes_the_reset_of_inputs_and_the_flush(gpu):
    meter, actions = gpu
    assert meter._kernel_ms(observed(actions), 0.1) == 7.0
    assert actions == ["reset", "flush", "sleep", "event", "call", "event"]
    assert meter.peak_bytes(observed(actions)) == 250


def test_a_gpu_that_cannot_sleep_is_not_measured(monkeypatch):
    monkeypatch.setattr(names, "missing", {})
    monkeypatch.delattr(torch.cuda, "_sleep")
    with pytest.raises(RuntimeError, match=r"has no torch\.cuda\._sleep, which Tigon needs here"):
        measure.sleep_on_device(1)


@pytest.mark.parametrize(("calls", "unmeasured_calls"), [(1, 1), (4, 4), (20, 0)])
def test_long_calls_run_unmeasured_before_a_round(gpu, calls, unmeasured_calls):
    meter, actions = gpu
    samples = Samples()
    meter.measure_round(observed(actions), calls, samples)
    assert actions.count("call") == 2 * calls + unmeasured_calls
    assert len(samples.wall) == len(samples.host) == len(samples.kernel) == calls
    assert all(host <= wall for host, wall in zip(samples.host, samples.wall, strict=True))
