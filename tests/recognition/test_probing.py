"""Probes run on the CPU, whatever the default device of the caller is."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tigon.recognition.probing.standin import probing
from tigon.runtime.compat.operators import function_modes

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


class OnMeta(TorchFunctionMode):
    """A mode of the user that gives every tensor without a device to the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def test_hooks_of_the_caller_see_no_tensor_of_a_probe():
    """A probe of adapters that are added after the patch may run in a checkpointed region, which counts tensors."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x), probing(), torch.enable_grad():
        torch.ones(2, requires_grad=True).exp().sum().backward()
    assert not saved


def assert_probes_are_on_cpu() -> None:
    with probing():
        assert torch.empty(1).device.type == "cpu"


def test_without_a_mode_no_context_is_needed():
    with probing():
        assert function_modes() == 0
    assert_probes_are_on_cpu()


# No tensor is made on these devices, so a machine need not have them.
@pytest.mark.parametrize("device", ["meta", "cpu", "cuda", "mps"])
def test_a_device_context_of_the_caller_is_ignored(device):
    with torch.device(device):
        assert_probes_are_on_cpu()
        with torch.device("meta"):
            assert_probes_are_on_cpu()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_the_default_device_is_ignored(device):
    torch.set_default_device(device)
    try:
        assert_probes_are_on_cpu()
        with torch.device("meta"):
            assert_probes_are_on_cpu()
    finally:
        torch.set_default_device(None)


def test_a_mode_of_the_user_is_ignored():
    with OnMeta():
        assert torch.empty(1).device.type == "meta"
        assert_probes_are_on_cpu()
