"""Which tensors `lean(offload=True)` copies out and back, and when. On a CPU clones replace the transfers."""

import gc
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from memory.steps import Step, assert_same_bits
from tigon.memory import offload
from tigon.memory.offload import OffloadConfig, Offloader, Segment
from tigon.runtime.tuning import tuned

# Bytes of an activation.
SIZE = 4 * 64 * 16


class Record:
    """The offloaders of a test, the numbers of copies, and the largest number of prefetched bytes."""

    def __init__(self) -> None:
        self.offloaders: list[Offloader] = []
        self.copies_out = self.copies_back = self.max_prefetched_bytes = 0


@pytest.fixture
def record(monkeypatch) -> Iterator[Record]:
    """Copy every tensor of 1 KiB or more after one further activation, and free it after another one."""
    monkeypatch.setattr(offload, "can_offload", lambda device: True)
    record, copy, init, prefetch = Record(), offload._copy, Offloader.__init__, Offloader.prefetch_before

    def counted(source, direction, *rest):
        record.copies_out += direction == "out"
        record.copies_back += direction == "back"
        return copy(source, direction, *rest)

    def watched(self: Offloader, segment: Segment) -> None:
        prefetch(self, segment)
        record.max_prefetched_bytes = max(record.max_prefetched_bytes, self.prefetched_bytes)

    monkeypatch.setattr(offload, "_copy", counted)
    monkeypatch.setattr(Offloader, "prefetch_before", watched)
    monkeypatch.setattr(Offloader, "__init__", lambda self: (init(self), record.offloaders.append(self))[0])
    with tuned(OffloadConfig, smallest=1024, window=2 * SIZE, window_tensors=1):
        yield record


def chain(step: Step, layers: int = 6) -> Tensor:
    """Compute products and squares. Each layer saves two activations."""
    x, w = step.leaf(64, 16) * 1.0, step.weight(layers, 16, 16)
    for i in range(layers):
        y = F.linear(x, w[i])
        step.watch(**{f"x{i}": x, f"y{i}": y})
        x = y.square() * 0.05
    return x.sum()


def run(offloaded: bool, forward=chain, times: int = 1) -> tuple[Step, list]:
    step = Step()
    with tigon.lean(offload=offloaded):
        loss = forward(step)
    step.alive_after_forward = step.alive()
    for i in range(times):
        loss.backward(retain_graph=i < times - 1)
    return step, [loss.detach(), *step.gradients()]


def assert_all_is_freed(record: Record) -> None:
    gc.collect()
    for offloader in record.offloaders:
        assert not any(segment() for segment in offloader.segments)
        assert offloader.prefetched_bytes == 0
        assert not offloader.segments_by_key
        assert not offloader.copy_queue.segments


def test_all_tensors_but_the_last_are_offloaded(record):
    expected = run(False)[1]
    step, actual = run(True)
    assert_same_bits(actual, expected)
    assert step.alive_after_forward == {"x5", "y5"}
    assert record.copies_out == 11
    assert record.copies_back == 10
    assert record.max_prefetched_bytes == 2 * SIZE
    assert_all_is_freed(record)


def test_a_window_is_prefetched(record):
    with tuned(OffloadConfig, window=4 * SIZE):
        step, actual = run(True)
    assert_same_bits(actual, run(False)[1])
    assert step.alive_after_forward == {"x4", "y4", "x5", "y5"}
    assert record.max_prefetched_bytes == 4 * SIZE
    assert record.copies_out == 10
    assert record.copies_back == 8
    assert_all_is_freed(record)


@pytest.mark.parametrize("times", [2, 3])
def test_every_backward_copies_back(record, times):
    """A later backward copies everything back, even tensors that were still on the device in the first backward."""
    assert_same_bits(run(True, times=times)[1], run(False, times=times)[1])
    assert record.copies_out == 11
    assert record.copies_back == 10 + 11 * (times - 1)
    assert_all_is_freed(record)


def share_one_input(step: Step) -> Tensor:
    """Compute three products of one activation, which save it whole or as a view."""
    x = step.leaf(64, 16) * 1.0
    y = [F.linear(x, step.weight(3, 16)), F.linear(x.view(8, 8, 16), step.weight(3, 16))]
    y.append(F.linear(x.t(), step.leaf(3, 64)))
    big = step.leaf(64, 16) * 1.0
    return sum(z.square().sum() for z in y) + (big.square() * 2).sum()


def test_nodes_that_save_one_tensor_share_its_copy(record):
    assert_same_bits(run(True, share_one_input)[1], run(False, share_one_input)[1])
    assert record.copies_out == 1
    # The products themselves are too small.
    assert len(record.offloaders[0].segments) == 2
    assert_all_is_freed(record)


def parts(step: Step) -> Tensor:
    """Compute with thirds of one product, like query, key and value. The thirds have offsets, and some have gaps."""
    x = step.leaf(3 * 64, 16) * 1.0
    y = sum((part.sin() * part[:, ::2].sum()).sum() for part in x.chunk(3))
    z = (step.leaf(64, 48) * 1.0).chunk(3, -1)
    return y + sum((a.sin() * b).sum() for a, b in itertools.pairwise(z)) + chain(step, 2)


def test_parts_of_a_tensor_are_offloaded(record):
    assert_same_bits(run(True, parts)[1], run(False, parts)[1])
    assert record.copies_back
    assert_all_is_freed(record)


def test_a_view_of_half_a_storage_or_more_is_copied_as_a_whole():
    whole = torch.empty(64, 16)
    assert offload.byte_range(whole[:32]) == (0, 4096)
    assert offload.byte_range(whole[33:40]) == (33 * 64 // 512 * 512, 40 * 64)
    assert offload.byte_range(whole.t()) == (0, 4096)
    assert offload.byte_range(whole.view(-1)[1000:1003]) == (4000 // 512 * 512, 4012)


def test_parameters_stay_on_the_device(record):
    """Views of parameters and casts for autocast stay too. Casts of activations are offloaded."""
    w = torch.nn.Parameter(torch.randn(32, 32))
    x = torch.randn(32, 32, requires_grad=True)
    with tigon.lean(offload=True):
        y = F.linear(x, w) + F.linear(x, w.t()) + w * w.view(-1).view(32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x, w)
    assert not record.offloaders[0].segments
    (y.sum() + z.sum()).backward()
    with tigon.lean(offload=True), torch.autocast("cpu", torch.bfloat16):
        F.linear(x * 1.0, w)
    assert len(record.offloaders[1].segments) == 1


def test_small_tensors_stay_on_the_device(record):
    x = torch.randn(255, requires_grad=True)
    with tigon.lean(offload=True):
        (x * 1.0).square()
    assert not record.copies_out


def test_recomputed_results_read_offloaded_inputs(record):
    """The input of a norm is offloaded. Backward recomputes the norm and the gate from the copy."""

    def layers(step: Step) -> Tensor:
        x = step.leaf(64, 16) * 1.0
        for _ in range(3):
            norm, mlp = step.weight(16), [step.weight(24, 16), step.weight(24, 16), step.weight(16, 24)]
            y = tigon.rms_norm(x, norm)
            x = x + F.linear(tigon.swiglu(F.linear(y, mlp[0]), F.linear(y, mlp[1])), mlp[2])
            step.watch(y=y)
            del y
        return x.square().sum()

    step, actual = run(True, layers)
    assert_same_bits(actual, run(False, layers)[1])
    assert not step.alive_after_forward
    assert record.copies_back
    assert_all_is_freed(record)


def test_a_tensor_that_is_written_during_its_copy_is_refused(record):
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        h = x * 1.0
        y = h.square()
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[64, 16\]\]"):
        y.sum().backward()


def test_a_tensor_may_be_written_after_its_copy(record):
    """The copy has the saved values."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        h = x * 1.0
        y = h.square()
        # These fill the window.
        others = (x * 2.0).square(), (x * 3.0).square()
        h.add_(1)
        # This saves the new values.
        z = h.square()
    assert all(other.requires_grad for other in others)
    (y.sum() + z.sum()).backward()
    assert torch.equal(x.grad, 2 * x.detach() + 2 * (x.detach() + 1))


def test_a_tensor_that_is_far_larger_than_the_others_stays_on_the_device(record):
    """The gradient of a head may be such a tensor. It does not widen the window."""

    def forward(step: Step) -> Tensor:
        return (step.leaf(6400, 16) * 1.0).square().sum() + chain(step)

    with tuned(OffloadConfig, window_tensors=2):
        actual = run(True, forward)[1]
    assert_same_bits(actual, run(False, forward)[1])
    assert record.offloaders[0].window == 2 * SIZE
    assert record.copies_out == 11


@pytest.mark.parametrize("how", ["dropped", "one gradient", "raises"])
def test_tensors_that_are_never_unpacked_are_freed(record, how):
    step = Step()
    with tigon.lean(offload=True):
        loss = chain(step)
    if how == "one gradient":
        torch.autograd.grad(loss, step.leaves[1])
    elif how == "raises":
        step.leaves[1].register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    del loss
    assert_all_is_freed(record)


def test_tensors_that_a_failed_backward_prefetched_are_freed(record):
    step = Step()
    with tigon.lean(offload=True):
        x = chain(step) * step.leaf(64, 16)
        x.register_hook(lambda grad: 1 / 0)
        for _ in range(3):
            x = x.sin()
        loss = x.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert record.copies_back
    del x, loss
    assert_all_is_freed(record)


def test_an_exception_in_the_forward_pass_frees_the_copies(record):
    with pytest.raises(RuntimeError, match="shape"), tigon.lean(offload=True):
        F.linear(chain(Step()).expand(3), torch.ones(2, 2))
    assert_all_is_freed(record)
    assert_same_bits(run(True)[1], run(False)[1])


def test_offloading_ends_with_the_inner_block(record):
    """Tensors that are saved later stay on the device."""
    step = Step()
    with tigon.lean():
        with tigon.lean(offload=True), tigon.lean(offload=True):
            loss = chain(step)
        out = record.copies_out
        loss = loss + chain(step)
    assert len(record.offloaders) == 1
    assert record.copies_out == out == 11
    loss.backward()
    with tigon.lean(offload=False):
        expected = chain(other := Step()) + chain(other)
    expected.backward()
    assert_same_bits(step.gradients(), other.gradients())


def test_with_hooks_around_the_block_nothing_is_offloaded(record):
    with torch.autograd.graph.save_on_cpu():
        run(True)
    assert not record.copies_out


def test_threads_offload_separately(record):
    results = [None] * 4

    def work(i: int) -> None:
        results[i] = run(True)[1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same_bits(result, run(False)[1])
    assert_all_is_freed(record)


def test_a_new_tensor_at_an_old_address_has_its_own_copy(record):
    """Storages are freed and their addresses are reused."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        total = sum((x * i).square().sum() for i in range(20))
    total.backward()
    assert torch.allclose(x.grad, 2 * x.detach() * sum(i * i for i in range(20)))
    assert record.copies_out == 19


def test_on_a_cpu_nothing_is_offloaded(monkeypatch):
    copies = []
    monkeypatch.setattr(offload, "_copy", lambda *args: copies.append(args))
    with tuned(OffloadConfig, smallest=0):
        assert_same_bits(run(True)[1], run(False)[1])
    assert not copies


def test_an_unused_segment_is_freed(record):
    """Neither the block nor an earlier segment keeps a storage alive."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        y = (x * 1.0).square()
        segment = record.offloaders[0].segments[0]
        storage = StorageWeakRef(segment().device_data.untyped_storage())
        del y
        assert segment() is None
        assert storage.expired()
