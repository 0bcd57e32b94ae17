"""The decay of a gated delta rule against eager code."""

import sys

import pytest
import torch
import torch.nn.functional as F

from op_cases import DEVICE, DTYPES
from tigon.ops.mixers.log_decay import log_decay
from tigon.testing import assert_accurate


def eager(a, a_log, bias):
    wide = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(wide).exp() * F.softplus(a.to(wide) + bias.to(wide))


def results_of(function, inputs) -> list[torch.Tensor]:
    """Return g and all gradients."""
    g = function(*inputs)
    upstream = torch.randn(g.shape, generator=torch.Generator().manual_seed(1)).to(g)
    return [g, *torch.autograd.grad(g, inputs, upstream)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), [((), 4), ((2, 35), 6), ((300,), 32), ((1, 70), 48)], ids=str)
def test_it_is_as_accurate_as_eager_code(rows, heads, dtype):
    generator = torch.Generator().manual_seed(0)
    # Half of the features of a projection, as models split it, with values far below and above zero.
    wide = 12 * torch.randn(*rows, 2 * heads, generator=generator)
    a, (a_log, bias) = wide.to(DEVICE, dtype)[..., :heads], torch.randn(2, heads, generator=generator).to(DEVICE)
    inputs = [x.detach().requires_grad_() for x in (a, a_log, bias)]
    exact = results_of(eager, [x.detach().double().requires_grad_() for x in inputs])
    for name, x, y, z in zip(("g", "da", "dA", "db"), results_of(log_decay, inputs), results_of(eager, inputs), exact,
                             strict=True):  # fmt: skip
        # The gradients of A and b are sums over rows whose terms cancel.
        assert_accurate(x, y, z, smallest=z.abs().max().item() if name in ("dA", "db") else 0.0, msg=name)


@pytest.mark.kernels
def test_frozen_parameters_cost_no_sums(monkeypatch):
    """LoRA trains the projection alone."""
    monkeypatch.setattr(sys.modules[log_decay.__module__], "sum_rows", None)
    a = torch.randn(3, 5, 4, device=DEVICE, requires_grad=True)
    g = log_decay(a, torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE))
    torch.testing.assert_close(torch.autograd.grad(g.sum(), a)[0], -a.sigmoid())


def test_extreme_values_are_those_of_eager_code():
    a = torch.tensor([[0.0, -1e4, 1e4, torch.inf, -torch.inf, torch.nan]], device=DEVICE, requires_grad=True)
    a_log, bias = (torch.zeros(6, device=DEVICE, requires_grad=True) for _ in "ab")
    for x, y in zip(*(results_of(function, [a, a_log, bias]) for function in (log_decay, eager)), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
