"""Tests of counters and numbers that are allocated in advance. CPU tensors stand for those of a GPU."""

import contextlib

import pytest
import torch

from tigon.runtime import counters as module
from tigon.runtime.counters import LARGEST_SCRATCH, NUMBERS, scratch, zero_number

pytestmark = pytest.mark.no_interpreter(reason="no kernel runs")


class OnDevice:
    """Stands for a tensor on the first GPU."""

    def get_device(self) -> int:
        return 0


@pytest.fixture
def kept_on_cpu(monkeypatch):
    """Let zeros of the CPU be kept, as those of the default stream of a GPU."""
    shared = module._Shared()
    monkeypatch.setattr(module, "_find_shared", lambda x: shared)


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


def test_launches_share_counters_and_partial_sums(kept_on_cpu):
    x = torch.empty(1)
    first = scratch(x, 100, 7)
    assert scratch(x, 4000, 3) is first
    for more in (scratch(x, 5000, 1), scratch(x, 1, 9000)):
        assert more is not first
        assert len(more[0]) >= 5000
        assert not more[0].any()
    assert more[1].dtype == torch.float32
    assert len(more[1]) >= 9000
    assert scratch(x, 5000, 9000) is more
    # The memory of a large launch is not shared.
    assert len(scratch(x.to("meta"), 1, LARGEST_SCRATCH + 1)[1]) > LARGEST_SCRATCH
    assert scratch(x, 1, 1) is more


def test_a_thread_that_needs_less_memory_takes_none_from_another_one(kept_on_cpu, monkeypatch):
    """The end of the block of inference mode is where the other thread runs."""
    inference_mode, x = torch.inference_mode, torch.empty(1)

    @contextlib.contextmanager
    def interrupted(mode):
        monkeypatch.setattr(torch, "inference_mode", inference_mode)
        with inference_mode(mode):
            yield
        scratch(x, 1, 10)

    monkeypatch.setattr(torch, "inference_mode", interrupted)
    assert len(scratch(x, 1, 1000)[1]) >= 1000
    assert len(scratch(x, 1, 1000)[1]) >= 1000


def test_zeros_of_inference_mode_serve_outside_of_it_too(kept_on_cpu):
    x = torch.empty(1)
    with torch.inference_mode():
        zeros = zero_number(x), *scratch(x, 1, 1)
    assert not any(zero.is_inference() for zero in (*zeros, zero_number(x)))


@pytest.mark.parametrize(
    ("stream", "is_capturing", "is_shared"), [(0, False, True), (7, False, False), (0, True, False)],
    ids=["default stream", "side stream", "capture"],
)  # fmt: skip
def test_memory_is_shared_on_the_default_stream_only(monkeypatch, stream, is_capturing, is_shared):
    monkeypatch.setattr(module, "_default", {})
    monkeypatch.setattr(module, "current_raw_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert (module._find_shared(OnDevice()) is not None) == is_shared
    assert module._find_shared(OnDevice()) is module._find_shared(OnDevice())


def test_launches_of_one_graph_share_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(module, "_default", {})
    monkeypatch.setattr(module, "current_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    eager = module._find_shared(OnDevice())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with module.shared_in_capture():
        first = module._find_shared(OnDevice())
        assert first is module._find_shared(OnDevice())
    with module.shared_in_capture():
        assert first is not module._find_shared(OnDevice())
    assert first is not eager
    assert module._find_shared(OnDevice()) is None


def test_nothing_is_kept_on_a_cpu(monkeypatch):
    monkeypatch.setattr(module, "_default", {})
    x = torch.empty(1)
    assert [len(memory) for memory in scratch(x, 3, 5)] == [3, 5]
    assert zero_number(x).shape == (1,)
    assert not module._default
