"""Direct launches: when they are used, and that they are not used if Triton launches kernels otherwise."""

import contextlib
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tigon.runtime import launch, self_check
from tigon.runtime.compat import triton as triton_private

pytestmark = pytest.mark.no_interpreter("The interpreter launches nothing directly.")


class _OnDevice(torch.Tensor):
    """A CPU tensor that looks like one of a GPU, and finds itself by its address."""

    by_address: ClassVar[dict[int, torch.Tensor]] = {}
    is_cuda = True

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        self.by_address[address := super().data_ptr()] = self
        return address


def _on_device(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(_OnDevice)


class _Launcher:
    """A launcher as in Triton 3.4 to 3.6, whose function in C takes the arguments one by one."""

    def __init__(self, kernel) -> None:
        self.kernel, self.launch = kernel, kernel.launch

    def __call__(self, x, y, z, stream, function, *arguments):
        self.kernel.runs += 1
        self.launch(x, y, z, stream, function, "options", *arguments)


class _PackedLauncher(_Launcher):
    """A launcher as in Triton 3.7 and later, whose function in C takes the arguments in a tuple."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.kernel.runs += 1
        self.launch(x, y, z, stream, function, "options", metadata, None, None, None, arguments)


class _AllocatingLauncher(_Launcher):
    """A launcher that allocates memory for each launch."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.kernel.runs += 1
        self.launch(x, y, z, stream, function, object(), *arguments)


class _SwappedLauncher(_Launcher):
    """A launcher that takes the metadata before the stream."""

    def __call__(self, x, y, z, metadata, stream, function, *arguments):
        super().__call__(x, y, z, stream, function, metadata, *arguments)


class _Kernel:
    """A fake kernel that runs a function, and counts the launches through Triton and the calls of its launcher.

    With `changed_result`, launches through Triton compute another result. With `properties`, Triton compiles a variant
    for each value of an argument.
    """

    def __init__(self, function, arg_names, launcher, changed_result=False, properties=False) -> None:
        self.function, self.arg_names, self.launcher = function, arg_names, launcher(self)
        self.changed_result, self.properties, self.compiled = changed_result, properties, {}
        self.params = [SimpleNamespace(do_not_specialize=False) for _ in arg_names]
        self.launches = self.through_triton = self.runs = 0

    def launch(self, x, y, z, stream, *arguments):
        assert (y, z, stream) == (1, 1, 5)
        values = arguments[-1] if isinstance(arguments[-1], tuple) else arguments[-len(self.arg_names) :]
        self.launches += 1
        # Direct launches pass addresses.
        self.function(x, *[_OnDevice.by_address.get(v, v) if type(v) is int else v for v in values])

    def __getitem__(self, grid):
        def run(*arguments, num_warps, enable_fp_fusion=True, **constants):
            self.through_triton += 1
            values = *arguments, *constants.values()
            if isinstance(self.launcher, _SwappedLauncher):
                self.launcher(grid[0], 1, 1, "metadata", 5, "handle", None, None, None, *values)
            else:
                self.launcher(grid[0], 1, 1, 5, "handle", "metadata", None, None, None, *values)
            if self.changed_result:
                arguments[2].add_(1)
            variant = arguments[3] if self.properties else None
            return self.compiled.setdefault(variant, SimpleNamespace())

        return run


def _check(programs, x, absent, out, stride, n, one, even, wide, factor, BLOCK, SHIFT, KIND, AXES):
    assert (absent, KIND, AXES) == (None, "plain", None)
    positions = torch.arange(min(n, programs * BLOCK))
    out[positions] = x[positions * stride] * factor + SHIFT + 1000.0 * (positions // BLOCK) + one + even + wide % 64


@pytest.fixture
def fake_device(monkeypatch):
    """Return a function that installs a fake device. It takes options of the check kernel, and returns both kernels."""

    def install(launcher: type[_Launcher] = _Launcher, **options):
        def check_tensors(device):
            x = torch.arange(1000.0)
            return _on_device(x), _on_device(torch.stack([torch.full((300,), v) for v in (-1.0, -2.0)]))

        check = _Kernel(_check, self_check._check_kernel.arg_names, launcher, **options)
        driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
        monkeypatch.setattr(triton_private, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
        monkeypatch.setattr(self_check, "_check_kernel", check)
        monkeypatch.setattr(self_check, "_make_check_tensors", check_tensors)
        monkeypatch.setattr(launch, "_variants", {})
        monkeypatch.setattr(launch, "_split_functions", {})
        monkeypatch.setattr(launch, "_verdicts", {})
        for module in (launch, self_check):
            monkeypatch.setattr(module, "current_raw_stream", lambda device: 5)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        return _Kernel(lambda programs, x, BLOCK: x.add_(BLOCK), ["x_ptr", "BLOCK"], launcher), check

    return install


def _launch(kernel, times: int, *others: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(4)
    for _ in range(times):
        launch.launch(kernel, 1, _on_device(x), *others, BLOCK=2, num_warps=4)
    return x


@pytest.mark.parametrize("launcher", [_Launcher, _PackedLauncher, _AllocatingLauncher])
def test_every_launch_after_the_first_is_direct(fake_device, launcher):
    kernel, check = fake_device(launcher)
    assert (_launch(kernel, 4) == 8).all()
    assert (kernel.through_triton, kernel.launches) == (1, 4)
    assert (check.through_triton, check.launches) == (2, 3), "the self-check runs once"
    assert launch.launch_method().startswith("direct")


@pytest.mark.parametrize("launcher", [_Launcher, _PackedLauncher])
def test_direct_launches_call_the_function_in_c(fake_device, launcher):
    kernel, _ = fake_device(launcher)
    _launch(kernel, 1)
    before = kernel.runs
    _launch(kernel, 3)
    assert kernel.runs == before


def test_planned_launches_are_direct_from_the_second_one_on(fake_device):
    kernel, _ = fake_device()
    plan, x = launch.Plan(kernel, 1, BLOCK=2, num_warps=4), torch.zeros(4)
    for _ in range(3):
        plan.launch(_on_device(x))
    assert (x == 6).all()
    assert (kernel.through_triton, kernel.launches, len(plan.variants)) == (1, 3, 1)


def test_a_plan_has_a_variant_for_each_choice_of_tensors_that_are_none(fake_device):
    """A variant reads no address of a tensor that was None when it was compiled."""
    kernel, _ = fake_device()
    kernel.function, kernel.arg_names = lambda programs, x, y, z, BLOCK: None, ["x_ptr", "y_ptr", "z_ptr", "BLOCK"]
    plan, x = launch.Plan(kernel, 1, BLOCK=2, num_warps=4), _on_device(torch.zeros(4))
    for others in ((x, None), (None, x)):
        for _ in range(3):
            plan.launch(x, *others)
    assert (kernel.through_triton, kernel.launches) == (2, 6)


def test_no_launch_with_a_tensor_of_the_host_is_direct(fake_device):
    """The address of such a tensor would be read by the GPU, where Triton raises an error."""
    kernel, _ = fake_device()
    kernel.function, kernel.arg_names = lambda programs, x, y, BLOCK: x.add_(BLOCK), ["x_ptr", "y_ptr", "BLOCK"]
    _launch(kernel, 1, torch.zeros(4))
    _launch(kernel, 2, torch.zeros(4))
    assert kernel.through_triton == 3


@pytest.mark.parametrize(
    "options", [{"launcher": _SwappedLauncher}, {"changed_result": True}, {"properties": True}],
    ids=["other order of arguments", "other result", "more variants"],
)  # fmt: skip
def test_direct_launches_are_off_after_a_failed_self_check(fake_device, options, caplog):
    kernel, check = fake_device(**options)
    assert (_launch(kernel, 3) == 6).all()
    assert (kernel.through_triton, kernel.launches) == (3, 3)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert "self-check failed" in launch.launch_method()
    if "launcher" in options:
        assert check.launches == check.through_triton, "a launcher of unknown form is never called directly"


def test_no_launch_is_direct_without_a_launcher_in_python(fake_device, monkeypatch):
    kernel, _ = fake_device()
    monkeypatch.setattr(triton_private.triton.runtime.driver, "active", SimpleNamespace())
    assert (_launch(kernel, 3) == 6).all()
    assert kernel.through_triton == 3
    assert "self-check failed" in launch.launch_method()


def test_self_check_does_not_run_while_a_stream_captures(fake_device, monkeypatch):
    kernel, check = fake_device()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _launch(kernel, 2)
    assert kernel.through_triton == 2
    assert check.launches == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _launch(kernel, 2)
    assert kernel.through_triton == 3, "the first launch after the capture runs the self-check"


def test_no_self_check_in_the_synchronisation_debug_mode(fake_device, monkeypatch):
    kernel, check = fake_device()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    _launch(kernel, 2)
    assert kernel.through_triton == 2
    assert check.launches == 0


def test_no_self_check_in_a_dispatch_mode(fake_device):
    from torch.utils.flop_counter import FlopCounterMode

    kernel, check = fake_device()
    with FlopCounterMode(display=False):
        _launch(kernel, 2)
    assert check.launches == 0


@pytest.mark.parametrize(("launcher", "expected"), [(_Launcher, "direct"), (_SwappedLauncher, "self-check failed")])
def test_the_environment_runs_the_self_check_on_each_device(fake_device, monkeypatch, launcher, expected):
    _, check = fake_device(launcher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for _ in range(2):
        assert expected in launch.launch_method(runs_self_checks=True)
    assert check.through_triton <= 2, "the self-check runs once"


def test_only_launches_of_this_thread_are_recorded(fake_device):
    kernel, _ = fake_device()
    run = kernel[(1,)]
    arguments = torch.zeros(4), 2
    with triton_private.recorded_launches() as records:
        thread = threading.Thread(target=run, args=arguments, kwargs={"num_warps": 4, "enable_fp_fusion": True})
        thread.start()
        thread.join()
    assert kernel.launches == 1
    assert records == []
    assert "__call__" in vars(_Launcher)
    assert _Launcher.__call__.__name__ == "__call__", "the class of the launcher is as before"
