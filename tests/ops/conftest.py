import pytest


@pytest.fixture(autouse=True)
def _poison(poisoned):
    """An output or gradient that an op leaves unwritten fails its test."""


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch):
    """On a GPU, ignored tokens are left out of the smallest products: what pays is not what these tests are about."""
    monkeypatch.setattr("tigon.ops.head.chunks.WORTH_COUNTING", 0)
