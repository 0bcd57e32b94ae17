"""Fixtures of tests that train tiny models."""

import pytest

from remembered import remembers_probes  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass
