"""The private name of torch for products in FP8."""

import pytest
import torch

from tigon.runtime.compat.products import multiply_scaled

HAS_UNITS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = "cuda" if HAS_UNITS else "cpu"


@pytest.mark.no_interpreter("No kernel runs.")
@pytest.mark.parametrize("is_rowwise", [False, True], ids=["one scale", "a scale for each row and column"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_it_multiplies_by_the_scales(is_rowwise, dtype):
    """torch computes it on a CPU too, where Tigon does not use it."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 64, generator=generator).to(DEVICE) for n in (7, 48))
    a, b = a.to(dtype), b.to(torch.float8_e4m3fn)
    scales = [torch.rand((n, 1) if is_rowwise else 1, generator=generator).to(DEVICE) + 0.5 for n in (7, 48)]
    scale_b = scales[1].view(1, -1) if is_rowwise else scales[1]
    y = multiply_scaled(a, b.t(), scales[0], scale_b, None, out_dtype=torch.bfloat16, use_fast_accum=True)
    expected = (scales[0].view(-1, 1) * a.double()) @ (scales[1].view(-1, 1) * b.double()).t()
    assert y.dtype == torch.bfloat16
    assert (y.double() - expected).norm() < 0.01 * expected.norm()
