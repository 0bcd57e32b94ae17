"""Probes run on the CPU, whatever the default device of the caller is, and see every size that a forward reads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from recognition.modules import Norm, define, reason
from tigon.recognition.probing.standin import probing
from tigon.recognition.probing.symbolic import reads_no_size

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


READS = {
    "shape": lambda x: x.shape, "len": len, "rows": tuple, "slice": lambda x: x[:4096], "dim": lambda x: x.dim(),
    "last row": lambda x: [*x][-1], "value": lambda x: bool(x.sum() > 0),
    "method": lambda x: x.__getitem__(0), "transpose": lambda x: x.T, "array": lambda x: x.numpy(),
    "sum over a batch": lambda x: x.cumsum(0), "reshape": lambda x: x.reshape(-1),
}  # fmt: skip


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_mode_sees_that_a_size_may_be_read(read):
    assert not reads_no_size(lambda x: (read(x), x * 2)[1], (torch.ones(2, 3),))


def test_an_error_that_a_forward_catches_reveals_a_size():
    def forward(x):
        try:
            return x + torch.ones(7)
        except RuntimeError:
            return x

    assert not reads_no_size(forward, (torch.ones(2, 3),))


def test_a_norm_reads_no_size():
    norm = lambda x, gate: (1 - x * torch.rsqrt(x.float().pow(2).mean(-1) + 1)).to(x.dtype) * F.silu(gate) / 2
    assert reads_no_size(norm, (torch.ones(3), torch.ones(3)))


def mul(x, y):
    """Count the rows of x. The name is that of a function of torch."""
    count = 0
    for _ in x:
        count = count + 1
    return y * 2 if count > 4096 else y


def count_unseen(self, x):
    with self.off():
        return mul(x, self.compute(x, self.weight))


def drop_one_row(self, x):
    """Add numbers in evaluation if there is one row."""
    is_single = torch.where(x.float().var(0, keepdim=True).isnan(), 1.0, 0.0)
    return self.compute(x, self.weight) + (nn.Dropout.forward(self, torch.ones_like(x)) * is_single).to(x.dtype)


TABLE = {"off": torch._C.DisableTorchFunction}
# Attributes, and a forward that learns a size by them where no mode of Python sees it.
UNSEEN = {
    "no modes": ({"off": torch._C.DisableTorchFunction}, count_unseen),
    "no modes, from a table": (
        {},
        define("with TABLE['off'](): return mul(x, self.compute(x, self.weight))", globals()),
    ),
    "dispatch": (
        {"send": torch.overrides.handle_torch_function},
        lambda self, x: self.send(mul, (x,), x, self.compute(x, self.weight)),
    ),
    "count": (
        {"count": torch.numel},
        lambda self, x: self.compute(x, self.weight) * 2 ** (self.count(x) // (48 * 4097)),
    ),
    "dropout of a base class": ({"p": 1.0, "inplace": False}, drop_one_row),
}


@pytest.mark.parametrize(("attributes", "forward"), UNSEEN.values(), ids=UNSEEN)
def test_a_forward_with_functions_of_torch_in_its_attributes_stays_stock(attributes, forward):
    bases = (Norm, nn.Dropout) if "p" in attributes else (Norm,)
    norm = type("Unseen", bases, {"forward": forward})()
    vars(norm).update(attributes)
    assert reason(norm)
