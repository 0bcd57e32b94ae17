"""The norm of all gradients is compared with fp64, and the factor with torch's clipping."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from op_cases import DEVICE
from tigon.ops.optim import grad_norm, tensor_table
from tigon.ops.optim.grad_norm import clip_factor, sum_of_squares, total_norm

DEVICE_OF_SUM = torch.device(DEVICE)


def make_gradients(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).to(DEVICE, dtype) for n in sizes]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_sum_of_squares_is_exact_to_fp32(dtype):
    """The lengths are just below, at and above those of a block and of a span. Some are zero."""
    gradients = make_gradients([1, 63, 64, 65, 0, 127, 128, 129, 16, 1000], dtype)
    exact = sum(g.double().square().sum() for g in gradients)
    tables = {}
    with (
        patch.object(tensor_table, "BLOCK_BYTES", 64 * dtype.itemsize),
        patch.object(grad_norm, "SPAN", 2),
        patch.object(grad_norm, "launch", wraps=grad_norm.launch) as launches,
    ):
        total = sum_of_squares(gradients, DEVICE_OF_SUM, tables)
        again = sum_of_squares(gradients, DEVICE_OF_SUM, tables)
    # Tensors whose length is a multiple of 16 have a launch of their own.
    assert launches.call_count == 4
    assert total.dtype == torch.float64
    assert torch.equal(total, again)
    torch.testing.assert_close(total, exact, rtol=1e-6, atol=0.0)


@pytest.mark.kernels
def test_the_sum_reads_nothing_outside_of_a_gradient():
    base = torch.full((1002,), 1e10, device=DEVICE)
    base[1:-1] = 1.0
    assert sum_of_squares([base[1:-1]], DEVICE_OF_SUM, {}).item() == 1000.0


def test_other_gradients_are_summed_by_torch():
    x = torch.randn(6, 8, device=DEVICE)
    gradients = [x[:, ::2], x.T, x.double(), x.to(torch.complex64) * 1j]
    exact = sum(g.abs().double().square().sum() for g in gradients)
    torch.testing.assert_close(total_norm(gradients, {}).double(), exact.sqrt(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("max_norm", [0.1, 1e3, float("inf")])
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan"), 0.0])
def test_the_factor_is_that_of_torch(max_norm, value):
    p = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    p.grad = torch.ones_like(p)
    p.grad[0, 0] = value
    if value == 0:
        p.grad.zero_()
    norm = total_norm([p.grad], {})
    gradient = p.grad * clip_factor(norm, max_norm)
    expected = nn.utils.clip_grad_norm_([p], max_norm)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    torch.testing.assert_close(gradient, p.grad, equal_nan=True)


def test_no_gradients_have_the_norm_zero():
    assert total_norm([], {}).item() == 0.0
