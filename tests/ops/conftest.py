import pytest

from tigon.ops.head.computed_rows import CountConfig
from tigon.runtime.tuning import tuned


@pytest.fixture(autouse=True)
def _poison(poisoned):
    """Fail each test in which an op does not write an output or a gradient."""


@pytest.fixture(autouse=True)
def _count_valid_rows_of_small_products():
    """Remove ignored tokens from the smallest products too, on a GPU. These tests are not about speed."""
    with tuned(CountConfig, min_multiplications=0):
        yield
