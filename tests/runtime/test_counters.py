"""Tests of counters and numbers that are allocated in advance. CPU tensors stand for those of a GPU."""

import pytest
import torch

from tigon.runtime import counters as module
from tigon.runtime.counters import NUMBERS, zero_counters, zero_number

pytestmark = pytest.mark.no_interpreter(reason="no kernel runs")


@pytest.fixture
def kept_on_cpu(monkeypatch):
    """Let zeros of the CPU be kept, as those of the default stream of a GPU."""
    for name in ("_counters", "_numbers"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "_may_keep", lambda x: True)


def test_each_number_is_a_zero_of_its_own(kept_on_cpu):
    x = torch.empty(1)
    numbers = [zero_number(x) for _ in range(2 * NUMBERS + 1)]
    for i, number in enumerate(numbers):
        assert number.shape == (1,)
        assert number.item() == 0
        number.fill_(i + 1)
    assert [number.item() for number in numbers] == list(range(1, len(numbers) + 1))
    # Triton compiles one variant of a kernel for addresses that are multiples of 16 bytes, and another one for others.
    assert all(number.data_ptr() % 16 == 0 for number in numbers)


def test_counters_are_those_of_the_launch_before(kept_on_cpu):
    x = torch.empty(1)
    first = zero_counters(x, 100)
    assert zero_counters(x, 4000) is first
    more = zero_counters(x, 5000)
    assert len(more) >= 5000
    assert not more.any()


def test_zeros_of_inference_mode_serve_outside_of_it_too(kept_on_cpu):
    x = torch.empty(1)
    with torch.inference_mode():
        zeros = zero_number(x), zero_counters(x, 1)
    assert not any(zero.is_inference() for zero in (*zeros, zero_number(x)))


@pytest.mark.parametrize(
    ("stream", "is_capturing", "may_keep"), [(0, False, True), (7, False, False), (0, True, False)],
    ids=["default stream", "side stream", "capture"],
)  # fmt: skip
def test_zeros_are_kept_on_the_default_stream_only(monkeypatch, stream, is_capturing, may_keep):
    class OnDevice:
        def get_device(self) -> int:
            return 0

    monkeypatch.setattr(module, "current_raw_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert module._may_keep(OnDevice()) == may_keep


def test_nothing_is_kept_on_a_cpu(monkeypatch):
    for name in ("_counters", "_numbers"):
        monkeypatch.setattr(module, name, {})
    x = torch.empty(1)
    assert zero_counters(x, 3).shape == (3,)
    assert zero_number(x).shape == (1,)
    assert not module._counters
    assert not module._numbers
