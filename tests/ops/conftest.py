import pytest


@pytest.fixture(autouse=True)
def _poison(poisoned):
    """Let a test fail if an op does not write all of an output or gradient."""


@pytest.fixture(autouse=True)
def _leave_ignored_tokens_out_of_small_products(monkeypatch):
    """Leave ignored tokens out of the smallest products too, where a GPU would compute them because it is faster."""
    monkeypatch.setattr("tigon.ops.head.chunks.WORTH_COUNTING", 0)
