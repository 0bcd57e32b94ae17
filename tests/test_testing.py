"""The oracle accepts values that are rounded to nearest, and refuses anything worse."""

import pytest
import torch

from tigon.testing import assert_accurate


@pytest.fixture
def exact() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_values_rounded_to_nearest_pass(exact):
    assert_accurate(exact.bfloat16(), exact.bfloat16(), exact)


@pytest.mark.parametrize("factor", [1.012, 0.988])
def test_a_small_bias_fails(exact, factor):
    with pytest.raises(AssertionError, match="root mean square"):
        assert_accurate((exact * factor).bfloat16(), exact.bfloat16(), exact)


def test_one_wrong_value_fails_and_its_place_is_named(exact):
    bad = exact.bfloat16()
    bad[3, 5] += 0.1
    with pytest.raises(AssertionError, match=r"sum: at \(3, 5\)"):
        assert_accurate(bad, exact.bfloat16(), exact, msg="sum")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_fails(exact, value):
    bad = exact.bfloat16()
    bad[0, 0] = value
    with pytest.raises(AssertionError, match=r"at \(0, 0\)"):
        assert_accurate(bad, exact.bfloat16(), exact)


def test_another_shape_or_dtype_fails(exact):
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_accurate(exact[0].bfloat16(), exact.bfloat16(), exact)
    with pytest.raises(AssertionError, match="dtypes differ"):
        assert_accurate(exact.half(), exact.bfloat16(), exact)
