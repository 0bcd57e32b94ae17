import pytest

from tigon.ops.head import computed_rows


@pytest.fixture(autouse=True)
def _poison(poisoned):
    """Fail each test in which an op does not write an output or a gradient."""


@pytest.fixture(autouse=True)
def _count_valid_rows_of_small_products(monkeypatch):
    """Remove ignored tokens from the smallest products too, on a GPU. These tests are not about speed."""
    monkeypatch.setattr(computed_rows, "MIN_MULTIPLICATIONS", 0)
