"""Direct launches: when they are used, and that they are not used if Triton launches kernels otherwise."""

from types import SimpleNamespace

import pytest
import torch

from tigon.runtime import launch

pytestmark = pytest.mark.no_interpreter("The interpreter launches nothing directly.")


class _OnDevice(torch.Tensor):
    """A CPU tensor whose `get_device` returns 0."""

    def get_device(self) -> int:
        return 0


def _on_device(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(_OnDevice)


class _Kernel:
    """A fake kernel that runs a function and records whether each launch went through Triton or was direct.

    `swapped`: the direct launcher takes the arguments in another order. `broken`: it takes other arguments.
    """

    def __init__(self, function, arg_names, swapped=False, broken=False) -> None:
        self.function, self.arg_names, self.swapped, self.broken = function, arg_names, swapped, broken
        self.params = [SimpleNamespace(do_not_specialize=False) for _ in arg_names]
        self.methods = []

    def __getitem__(self, grid):
        def run(*arguments, num_warps, enable_fp_fusion, **constants):
            self.methods.append("triton")
            self.function(grid[0], *arguments, **constants)
            return SimpleNamespace(run=self._run, function="handle", packed_metadata="metadata")

        return run

    def _run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        if self.broken:
            raise TypeError("function takes exactly 12 arguments")
        assert (y, z, stream, function, metadata) == (1, 1, 5, "handle", "metadata")
        self.methods.append("direct")
        arguments = list(arguments)
        if self.swapped:
            arguments[3], arguments[4] = arguments[4], arguments[3]
        self.function(x, *arguments)


def _check(programs, x, absent, out, stride, n, factor, BLOCK, SHIFT):
    assert absent is None
    positions = torch.arange(min(n, programs * BLOCK))
    out[positions] = x[positions * stride] * factor + SHIFT + 1000.0 * (positions // BLOCK)


@pytest.fixture
def fake_device(monkeypatch):
    """Return a function that installs a fake device. It takes options of the check kernel, and returns both kernels."""

    def install(version: str = "3.7.1", **options):
        def check_tensors(device):
            x = torch.arange(600.0)
            return _on_device(x), _on_device(torch.stack([torch.full((300,), v) for v in (-1.0, -2.0)]))

        check = _Kernel(
            _check, ["x_ptr", "absent_ptr", "out_ptr", "stride", "n", "factor", "BLOCK", "SHIFT"], **options
        )
        monkeypatch.setattr(launch, "_check_kernel", check)
        monkeypatch.setattr(launch, "_make_check_tensors", check_tensors)
        monkeypatch.setattr(launch, "_variants", {})
        monkeypatch.setattr(launch, "_key_functions", {})
        monkeypatch.setattr(launch, "_verdicts", {})
        monkeypatch.setattr(launch, "current_raw_stream", lambda device: 5)
        monkeypatch.setattr(launch, "has_direct_launch", lambda real=launch.has_direct_launch: real(version))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        return _Kernel(lambda programs, x, BLOCK: x.add_(BLOCK), ["x_ptr", "BLOCK"]), check

    return install


def _launch(kernel, times: int) -> torch.Tensor:
    x = torch.zeros(4)
    for _ in range(times):
        launch.launch(kernel, 1, _on_device(x), BLOCK=2, num_warps=4)
    return x


def test_every_launch_after_the_first_is_direct(fake_device):
    kernel, check = fake_device()
    assert (_launch(kernel, 4) == 8).all()
    assert kernel.methods == ["triton", "direct", "direct", "direct"]
    assert check.methods == ["triton", "direct"], "the self-check runs once"


def test_self_check_runs_once_per_device(fake_device):
    kernel, check = fake_device()
    other, _ = _Kernel(kernel.function, kernel.arg_names), _launch(kernel, 2)
    _launch(other, 2)
    assert other.methods == ["triton", "direct"]
    assert check.methods == ["triton", "direct"]


def test_untested_versions_of_triton_launch_through_triton(fake_device):
    kernel, check = fake_device("3.8.0")
    assert (_launch(kernel, 3) == 6).all()
    assert kernel.methods == ["triton"] * 3
    assert check.methods == []


@pytest.mark.parametrize("option", ["swapped", "broken"])
def test_direct_launches_are_off_after_a_failed_self_check(fake_device, option, caplog):
    kernel, _ = fake_device(**{option: True})
    assert (_launch(kernel, 3) == 6).all()
    assert kernel.methods == ["triton"] * 3
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert "self-check failed" in launch.launch_method()


def test_self_check_does_not_run_while_a_stream_captures(fake_device, monkeypatch):
    kernel, check = fake_device()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _launch(kernel, 2)
    assert kernel.methods == ["triton"] * 2
    assert check.methods == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _launch(kernel, 2)
    assert kernel.methods[2:] == ["triton", "direct"], "the first launch after the capture runs the self-check"


def test_no_self_check_in_the_synchronisation_debug_mode(fake_device, monkeypatch):
    kernel, check = fake_device()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    _launch(kernel, 2)
    assert kernel.methods == ["triton"] * 2
    assert check.methods == []


def test_no_self_check_in_a_dispatch_mode(fake_device):
    from torch.utils.flop_counter import FlopCounterMode

    kernel, check = fake_device()
    with FlopCounterMode(display=False):
        _launch(kernel, 2)
    assert check.methods == []
