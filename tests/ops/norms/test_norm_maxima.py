"""The maxima that the kernels of norms find, for ops that quantise what these kernels write."""

import math

import pytest
import torch

from op_cases import DEVICE, DTYPES
from tigon.ops.norms.kernels import NormConfig, norm_backward, norm_forward
from tigon.runtime.maxima import NO_NEEDS, MaximaNeeds
from tigon.runtime.tuning import tuned

pytestmark = pytest.mark.kernels

NEEDS = {
    "tensor": MaximaNeeds(tensor=True),
    "rows": MaximaNeeds(rows=True),
    "columns": MaximaNeeds(columns=True),
    "all": MaximaNeeds(True, True, True),
}
all_needs = pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
# Rows that fill no tile, one row, a width that needs masks, and one that does not.
shapes = pytest.mark.parametrize("shape", [(37, 80), (1, 16), (19, 128)], ids=str)
# So few programs that each one computes several tiles.
FEW = {"block_m": 2, "programs": 3, "num_warps": 8, "backward_warps": 8}


def _randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def _assert_maxima(x: torch.Tensor, maxima, needs: MaximaNeeds) -> None:
    """Check the maxima of x against those of torch. NaN is larger than any number."""
    size = x.float().abs().nan_to_num(nan=math.inf, posinf=math.inf)
    expected = size.amax().view(1), size.amax(1), size.amax(0)
    for actual, value, need in zip(maxima, expected, needs, strict=True):
        assert (actual is not None) == need
        if actual is not None:
            assert torch.equal(actual.view(torch.float32).nan_to_num(nan=math.inf, posinf=math.inf), value)


def _equal(a, b) -> bool:
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@shapes
@all_needs
def test_the_forward_finds_them_and_writes_the_same_bits(needs, shape, dtype, has_residual):
    x, residual = (_randn(*shape, dtype=dtype, seed=seed) for seed in range(2))
    weight = _randn(shape[1], dtype=dtype)
    # With an epsilon of zero, rstd is infinite in the rows of a tile that do not exist.
    arguments = x, residual if has_residual else None, weight, None, 0.0, 0.0, False, True
    with tuned(NormConfig, **FEW):
        *results, maxima = norm_forward(*arguments, needs)
        *expected, none = norm_forward(*arguments, NO_NEEDS)
    assert all(map(_equal, results, expected))
    assert not any(m is not None for m in none)
    _assert_maxima(results[0], maxima, needs)


@pytest.mark.parametrize("has_dtotal", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@shapes
@all_needs
def test_the_backward_finds_them_and_writes_the_same_bits(needs, shape, dtype, has_dtotal):
    z, dy, dtotal = (_randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    weight = _randn(shape[1], dtype=dtype)
    with tuned(NormConfig, **FEW):
        statistics = norm_forward(z, None, weight, None, 1e-5, 0.0, False, True, NO_NEEDS)[2]
        arguments = dy, dtotal if has_dtotal else None, z, weight, statistics, 0.0, False, True, dtype, None
        *results, maxima = norm_backward(*arguments, needs)
        *expected, _ = norm_backward(*arguments, NO_NEEDS)
    assert all(map(_equal, results, expected))
    _assert_maxima(results[0], maxima, needs)


@pytest.mark.parametrize("options", [{}, {"splits": True, "columns": 64}], ids=["one launch", "two launches"])
def test_a_frozen_weight_and_a_second_launch_for_dw(options):
    z, dy = (_randn(37, 80, dtype=torch.float32, seed=seed) for seed in range(2))
    weight, needs = _randn(80, dtype=torch.float32), MaximaNeeds(True, True, True)
    with tuned(NormConfig, **FEW, **options):
        statistics = norm_forward(z, None, weight, None, 1e-5, 0.0, False, True, NO_NEEDS)[2]
        for dw_dtype in (None, torch.float32):
            dz, _, _, maxima = norm_backward(dy, None, z, weight, statistics, 0.0, False, True, dw_dtype, None, needs)
            _assert_maxima(dz, maxima, needs)
        # Without dz there is nothing to find.
        *_, maxima = norm_backward(dy, None, z, weight, statistics, 0.0, False, False, torch.float32, None, needs)
        assert not any(m is not None for m in maxima)


def test_wide_rows_have_no_column_maxima_in_backward():
    z = _randn(2, 5120, dtype=torch.float32)
    statistics = norm_forward(z, None, None, None, 1e-5, 0.0, False, True, NO_NEEDS)[2]
    for needs, has_any in ((NEEDS["all"], False), (NEEDS["tensor"], True)):
        *_, maxima = norm_backward(z, None, z, None, statistics, 0.0, False, True, None, None, needs)
        assert any(m is not None for m in maxima) == has_any


# The interpreter multiplies by numpy, which warns of infinity times zero.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_nan_and_infinity_are_the_largest_values(value):
    x, needs = _randn(7, 48, dtype=torch.float32), MaximaNeeds(True, True, True)
    x[3, 5] = value
    y, _, statistics, maxima = norm_forward(x, None, None, None, 1e-5, 0.0, False, True, needs)
    _assert_maxima(y, maxima, needs)
    dz, _, _, maxima = norm_backward(x, None, x, None, statistics, 0.0, False, True, None, None, needs)
    _assert_maxima(dz, maxima, needs)


def test_a_layer_norm_finds_them_too():
    x, needs = _randn(37, 80, dtype=torch.float32), MaximaNeeds(True, True, True)
    weight, bias = (_randn(80, dtype=torch.float32, seed=seed) for seed in range(2))
    with tuned(NormConfig, **FEW):
        y, _, statistics, maxima = norm_forward(x, None, weight, bias + 9, 1e-5, 0.0, True, False, needs)
        _assert_maxima(y, maxima, needs)
        dz, _, _, maxima = norm_backward(x, None, x, weight, statistics, 0.0, True, True, x.dtype, x.dtype, needs)
    _assert_maxima(dz, maxima, needs)


def test_no_rows():
    x = _randn(0, 48, dtype=torch.float32)
    *_, statistics, maxima = norm_forward(x, None, None, None, 1e-5, 0.0, False, True, NEEDS["all"])
    assert [m.numel() for m in maxima] == [1, 0, 48]
    *_, maxima = norm_backward(x, None, x, None, statistics, 0.0, False, True, None, None, NEEDS["all"])
    assert [m.numel() for m in maxima] == [1, 0, 48]
