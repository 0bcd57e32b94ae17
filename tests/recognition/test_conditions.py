"""A forward that decides by its input, reads a mode or writes a message stays stock."""

import contextlib
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

import tigon
from recognition.modules import variant

LOGGER = logging.getLogger(__name__)


def is_long(x: Tensor) -> bool:
    return x.shape[-2] > 4096


def catches_any_error(self, x: Tensor) -> bool:
    try:
        return {500: True}[x.shape[-2]]
    except Exception:
        return False


class HalvesLongGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy if dy.shape[1] < 100 else dy / 2


CUDA = torch.device("cuda", 0)
CONDITIONS = {
    "length": lambda self, x: x.shape[-2] > 4096,
    "length in a variable": lambda self, x: [n for n in (x.shape[-2],) if n > 4096],
    "length in a function": lambda self, x: is_long(x),
    "number of elements": lambda self, x: x.numel() > 10**6,
    "batch": lambda self, x: len(x) == 7,
    "device": lambda self, x: x.device.type == "cuda",
    "a device": lambda self, x: x.device == CUDA,
    "type of a size": lambda self, x: isinstance(x.shape[0], int) and x.numel() > 10**4,
    "a handler": catches_any_error,
    "values": lambda self, x: bool((x == 0.125).all()),
    "length and gradients": lambda self, x: x.requires_grad and x.numel() > 10**6,
    "two conditions": lambda self, x: self.training and x.dim() == 3 and x.size(0) > 64,
    "three conditions": lambda self, x: not self.training and x.dim() == 4 and x.dtype == torch.half and len(x) > 64,
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_forward_that_decides_by_its_input_stays_stock(condition):
    act = lambda self, x: F.silu(x) * (2.0 if condition(self, x) else 1.0)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Decides", act=act)()])).left_alone
    assert "its forward decides by its input (" in entry.detail
    assert "test_conditions.py:" in entry.detail


def logs(self, x):
    LOGGER.info("called")
    return F.silu(x)


def logs_to_the_root(self, x):
    if x.dtype == torch.float64:
        logging.warning("called")
    return F.silu(x)


def warns(self, x):
    if x.dtype == torch.float64:
        warnings.warn("called", stacklevel=2)
    return F.silu(x)


@pytest.mark.parametrize("act", [logs, logs_to_the_root, warns])
def test_a_forward_that_writes_a_message_stays_stock(act, caplog):
    caplog.set_level(logging.INFO)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Logs", act=act)()])).left_alone
    assert "its forward uses " in entry.detail
    assert not caplog.records, "a probe has written to the log"


def hides_errors(x: Tensor) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool((x == 3.0).all())
    return False


READS = {
    "stride": lambda x: x.stride(-1) != 1,
    "contiguity": lambda x: not x.is_contiguous(),
    "offset": lambda x: x.storage_offset() > 0,
    "view": lambda x: x._base is not None,
    "symbol": lambda x: not isinstance(x.shape[1], torch.SymInt) and x.shape[1] > 400,
    "symbolic function": lambda x: statically_known_true(x.numel() > 10**4),
    "hidden error": hides_errors,
    "backward": lambda x: HalvesLongGradients.apply(x) is None,
    "computed name": lambda x: getattr(x, f"is_{CUDA.type}"),
}


@pytest.mark.parametrize("condition", READS.values(), ids=READS)
def test_a_forward_that_reads_what_no_probe_shows_stays_stock(condition):
    act = lambda self, x: F.silu(x) * (2.0 if condition(x) else 1.0)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Reads", act=act)()])).left_alone
    assert "its forward " in entry.detail


MODES = {
    "gradients": lambda x: torch.is_grad_enabled(),
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "an imported name": lambda x: is_grad_enabled(),
    "default dtype": lambda x: torch.get_default_dtype() == torch.float16,
    "number of GPUs": lambda x: torch.cuda.is_available() * 1,
    "a flag of a tensor": lambda x: x.is_cuda * 1,
    "a graph": lambda x: x.grad_fn is None,
    "compilation": lambda x: torch.compiler.is_compiling(),
    "compilation, by its other name": lambda x: torch._dynamo.is_compiling(),
    "export": lambda x: torch.compiler.is_exporting(),
    "tracing": lambda x: torch.jit.is_tracing(),
    "scripting": lambda x: torch.jit.is_scripting(),
    "state of tracing": lambda x: torch._C._get_tracing_state() is not None,
    "warnings of determinism": lambda x: torch.is_deterministic_algorithms_warn_only_enabled(),
}


@pytest.mark.parametrize("read_mode", MODES.values(), ids=MODES)
def test_a_forward_that_reads_a_mode_stays_stock(read_mode):
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(
            nn.ModuleList([variant("Asks", act=lambda self, x: F.silu(x) * (1.0 + 0.0 * read_mode(x)))()])
        ).left_alone
    assert "its forward reads " in entry.detail


@pytest.mark.parametrize("function", [id, hash])
def test_a_forward_that_reads_an_address_stays_stock(function):
    act = {id: lambda self, x: F.silu(x) * (1 + 0 * id(x)), hash: lambda self, x: F.silu(x) * (1 + 0 * hash(x))}
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Reads", act=act[function])()])).left_alone
    assert f"its forward calls {function.__name__} (" in entry.detail


PROBED_CONDITIONS = {
    "dtype": lambda self, x: F.silu(x) if x.dtype == torch.bfloat16 else F.silu(x) * 1.0,
    "dimensions": lambda self, x: F.silu(x) if x.dim() == 4 else F.silu(x) * 1.0,
    "type": lambda self, x: F.silu(x) if isinstance(x, Tensor) else x[0],
    "a setting": lambda self, x: F.silu(x) * (2.0 if self.scale_of_class > 3 else 1.0),
    "training": lambda self, x: F.silu(x) * (2.0 if self.training and self.scale_of_class == 7 else 1.0),
    "nothing": lambda self, x: F.silu(x) if x is not None else x,
}


@pytest.mark.parametrize("act", PROBED_CONDITIONS.values(), ids=PROBED_CONDITIONS)
@pytest.mark.sampled(2)
def test_a_condition_on_probed_properties_and_settings_is_no_decision(act):
    assert tigon.patch(nn.ModuleList([variant("Settled", act=act)()]))


def test_a_with_block_is_no_decision():
    def act(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.silu(x)

    assert tigon.patch(nn.ModuleList([variant("With", act=act)()]))


ACTIVATION_CONDITIONS = {
    "truth of a mean in evaluation": lambda self, x: not self.training and x.mean(),
    "length in evaluation": lambda self, x: not self.training and x.numel() > 10**6,
    "a large width": lambda self, x: x.shape[-1] > 10**5,
    "a width and a fraction": lambda self, x: x.shape[-1] > 1e3,
    "one token in bf16": lambda self, x: x.dtype == torch.bfloat16 and x.dim() == 3 and x.shape[1] == 1,
    "values of one dimension": lambda self, x: x.dim() == 1 and bool(x.sum() == 0.125),
}


@pytest.mark.parametrize("condition", ACTIVATION_CONDITIONS.values(), ids=ACTIVATION_CONDITIONS)
def test_an_activation_that_decides_by_its_input_stays_stock(condition):
    forward = lambda self, x: F.gelu(x) * (2.0 if condition(self, x) else 1.0)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        assert not tigon.patch(nn.ModuleList([type("Decides", (nn.Module,), {"forward": forward})()])).replaced
