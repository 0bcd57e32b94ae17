"""Fixtures of tests that train tiny models."""

from collections.abc import Iterator

import pytest

from memory.steps import paged
from remembered import remembers_probes  # noqa: F401
from tigon.memory import layer_inputs
from tigon.memory.host_pages import HostPages, PagedCopy


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture
def copies(monkeypatch) -> Iterator[list[tuple[str, int]]]:
    """Move tensors of tiny layers on a CPU. Return a list of all copies: "out" or "back", and their bytes."""
    monkeypatch.setattr(layer_inputs, "can_offload", lambda device: True)
    # The gradients of tiny layers are larger than their inputs.
    monkeypatch.setattr(layer_inputs, "_future_gradient_bytes", lambda layers, device: 0)
    directions: list[tuple[str, int]] = []
    copy_out, copy_back = HostPages.copy, PagedCopy.copy_to
    monkeypatch.setattr(HostPages, "copy", lambda *a: (directions.append(("out", a[1].nbytes)), copy_out(*a))[1])
    monkeypatch.setattr(PagedCopy, "copy_to", lambda *a: (directions.append(("back", a[0].nbytes)), copy_back(*a))[1])
    # The log-sum-exp takes 384 bytes.
    with paged(256):
        yield directions
