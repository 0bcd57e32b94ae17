"""What `lean(offload=True)` moves and brings again, and when; on a CPU, with copies in place of transfers."""

import gc
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from memory.steps import Step, assert_same_bits
from tigon.memory import offload
from tigon.memory.offload import Offloader, _Segment

SIZE = 4 * 64 * 16  # bytes of an activation


class Record:
    """The passes of a test, and how often something was copied out and brought."""

    def __init__(self) -> None:
        self.passes: list[Offloader] = []
        self.out = self.brought = self.most = 0


@pytest.fixture
def record(monkeypatch) -> Record:
    """Everything of 1 KiB and more is copied one activation later, and leaves after another."""
    monkeypatch.setattr(offload, "can_offload", lambda device: True)
    monkeypatch.setattr(offload, "SMALLEST", 1024)
    monkeypatch.setattr(offload, "WINDOW", 2 * SIZE)
    monkeypatch.setattr(offload, "WINDOW_TENSORS", 1)
    record, copy, init, bring = Record(), offload._copy, Offloader.__init__, Offloader.prefetch_before

    def counted(given, direction, *rest):
        record.out, record.brought = record.out + (direction == "out"), record.brought + (direction == "back")
        return copy(given, direction, *rest)

    def watched(self: Offloader, segment: _Segment) -> None:
        bring(self, segment)
        record.most = max(record.most, self.prefetched_bytes)

    monkeypatch.setattr(offload, "_copy", counted)
    monkeypatch.setattr(Offloader, "prefetch_before", watched)
    monkeypatch.setattr(Offloader, "__init__", lambda self: (init(self), record.passes.append(self))[0])
    return record


def chain(step: Step, layers: int = 6) -> Tensor:
    """Products and squares: of each layer two activations are saved."""
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
    step.left = step.kept()
    for i in range(times):
        loss.backward(retain_graph=i < times - 1)
    return step, [loss.detach(), *step.gradients()]


def assert_nothing_is_left(record: Record) -> None:
    gc.collect()
    for offloader in record.passes:
        assert not any(segment() for segment in offloader.segments)
        assert offloader.prefetched_bytes == 0
        assert not offloader.segments_by_key
        assert not offloader.copy_queue.segments


def test_all_but_the_last_leave(record):
    expected = run(False)[1]
    step, given = run(True)
    assert_same_bits(given, expected)
    assert step.left == {"x5", "y5"}
    assert record.out == 11
    assert record.brought == 10
    assert record.most == 2 * SIZE
    assert_nothing_is_left(record)


def test_a_window_comes_before_it_is_asked_for(record, monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", 4 * SIZE)
    step, given = run(True)
    assert_same_bits(given, run(False)[1])
    assert step.left == {"x4", "y4", "x5", "y5"}
    assert record.most == 4 * SIZE
    assert record.out == 10
    assert record.brought == 8
    assert_nothing_is_left(record)


@pytest.mark.parametrize("times", [2, 3])
def test_backward_again(record, times):
    """Brings everything again that was copied: also what had not left by the first."""
    assert_same_bits(run(True, times=times)[1], run(False, times=times)[1])
    assert record.out == 11
    assert record.brought == 10 + 11 * (times - 1)
    assert_nothing_is_left(record)


def shared(step: Step) -> Tensor:
    """One activation for three products, whole and as parts."""
    x = step.leaf(64, 16) * 1.0
    y = [F.linear(x, step.weight(3, 16)), F.linear(x.view(8, 8, 16), step.weight(3, 16))]
    y.append(F.linear(x.t(), step.leaf(3, 64)))
    big = step.leaf(64, 16) * 1.0
    return sum(z.square().sum() for z in y) + (big.square() * 2).sum()


def test_one_copy_for_all_who_saved_it(record):
    assert_same_bits(run(True, shared)[1], run(False, shared)[1])
    assert record.out == 1
    assert len(record.passes[0].segments) == 2  # the products are too small
    assert_nothing_is_left(record)


def parts(step: Step) -> Tensor:
    """Query, key and value of one product; each saves its third, at an offset and with gaps."""
    x = step.leaf(3 * 64, 16) * 1.0
    y = sum((part.sin() * part[:, ::2].sum()).sum() for part in x.chunk(3))
    z = (step.leaf(64, 48) * 1.0).chunk(3, -1)
    return y + sum((a.sin() * b).sum() for a, b in itertools.pairwise(z)) + chain(step, 2)


def test_parts(record):
    assert_same_bits(run(True, parts)[1], run(False, parts)[1])
    assert record.brought
    assert_nothing_is_left(record)


def test_a_half_is_moved_as_all_and_less_as_it_is():
    whole = torch.empty(64, 16)
    assert offload._byte_range(whole[:32]) == (0, 4096)
    assert offload._byte_range(whole[33:40]) == (33 * 64 // 512 * 512, 40 * 64)
    assert offload._byte_range(whole.t()) == (0, 4096)
    assert offload._byte_range(whole.view(-1)[1000:1003]) == (4000 // 512 * 512, 4012)


def test_parameters_stay(record):
    """And views of them, and casts for autocast; what is cast of an activation moves."""
    w = torch.nn.Parameter(torch.randn(32, 32))
    x = torch.randn(32, 32, requires_grad=True)
    with tigon.lean(offload=True):
        y = F.linear(x, w) + F.linear(x, w.t()) + w * w.view(-1).view(32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x, w)
    assert not record.passes[0].segments
    (y.sum() + z.sum()).backward()
    with tigon.lean(offload=True), torch.autocast("cpu", torch.bfloat16):
        F.linear(x * 1.0, w)
    assert len(record.passes[1].segments) == 1


def test_small_ones_stay(record):
    x = torch.randn(255, requires_grad=True)
    with tigon.lean(offload=True):
        (x * 1.0).square()
    assert not record.out


def test_together_with_recipes(record):
    """What a norm is given moves; the norm's output and the product are made of what was brought."""

    def layers(step: Step) -> Tensor:
        x = step.leaf(64, 16) * 1.0
        for _ in range(3):
            norm, mlp = step.weight(16), [step.weight(24, 16), step.weight(24, 16), step.weight(16, 24)]
            y = tigon.rms_norm(x, norm)
            x = x + F.linear(tigon.swiglu(F.linear(y, mlp[0]), F.linear(y, mlp[1])), mlp[2])
            step.watch(y=y)
            del y
        return x.square().sum()

    step, given = run(True, layers)
    assert_same_bits(given, run(False, layers)[1])
    assert not step.left
    assert record.brought
    assert_nothing_is_left(record)


def test_written_on_its_way(record):
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        h = x * 1.0
        y = h.square()
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[64, 16\]\]"):
        y.sum().backward()


def test_written_after_it_has_left(record):
    """Then the copy has what was saved."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        h = x * 1.0
        y = h.square()
        others = (x * 2.0).square(), (x * 3.0).square()  # take the window
        h.add_(1)
        z = h.square()  # saves what it is now
    assert all(other.requires_grad for other in others)
    (y.sum() + z.sum()).backward()
    assert torch.equal(x.grad, 2 * x.detach() + 2 * (x.detach() + 1))


def test_one_that_is_far_larger_stays(record, monkeypatch):
    """As the gradient of a head; the window is as wide for the others as without it."""
    monkeypatch.setattr(offload, "WINDOW_TENSORS", 2)

    def forward(step: Step) -> Tensor:
        return (step.leaf(6400, 16) * 1.0).square().sum() + chain(step)

    assert_same_bits(run(True, forward)[1], run(False, forward)[1])
    assert record.passes[0].window == 2 * SIZE
    assert record.out == 11


@pytest.mark.parametrize("how", ["dropped", "one gradient", "raises"])
def test_what_is_not_asked_for_is_let_go(record, how):
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
    assert_nothing_is_left(record)


def test_what_came_for_a_backward_that_failed_is_let_go(record):
    step = Step()
    with tigon.lean(offload=True):
        x = chain(step) * step.leaf(64, 16)
        x.register_hook(lambda grad: 1 / 0)
        for _ in range(3):
            x = x.sin()
        loss = x.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert record.brought
    del x, loss
    assert_nothing_is_left(record)


def test_exceptions_in_the_forward_pass(record):
    with pytest.raises(RuntimeError, match="shape"), tigon.lean(offload=True):
        F.linear(chain(Step()).expand(3), torch.ones(2, 2))
    assert_nothing_is_left(record)
    assert_same_bits(run(True)[1], run(False)[1])


def test_nested(record):
    """The inner block's pass ends with it, and what is saved after it stays."""
    step = Step()
    with tigon.lean():
        with tigon.lean(offload=True), tigon.lean(offload=True):
            loss = chain(step)
        out = record.out
        loss = loss + chain(step)
    assert len(record.passes) == 1
    assert record.out == out == 11
    loss.backward()
    with tigon.lean(offload=False):
        expected = chain(other := Step()) + chain(other)
    expected.backward()
    assert_same_bits(step.gradients(), other.gradients())


def test_hooks_around_it_take_what_is_left(record):
    with torch.autograd.graph.save_on_cpu():
        run(True)
    assert not record.out


def test_threads(record):
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
    assert_nothing_is_left(record)


def test_an_address_is_not_taken_for_another_tensor(record):
    """Storages come and go; each that is saved has its own values."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        total = sum((x * i).square().sum() for i in range(20))
    total.backward()
    assert torch.allclose(x.grad, 2 * x.detach() * sum(i * i for i in range(20)))
    assert record.out == 19


def test_on_a_cpu_nothing_moves(monkeypatch):
    copied = []
    monkeypatch.setattr(offload, "_copy", lambda *args: copied.append(args))
    monkeypatch.setattr(offload, "SMALLEST", 0)
    assert_same_bits(run(True)[1], run(False)[1])
    assert not copied


def test_who_holds_what_moves(record):
    """Neither the block nor the segments that were saved before keep a storage alive."""
    x = torch.randn(64, 16, requires_grad=True)
    with tigon.lean(offload=True):
        y = (x * 1.0).square()
        segment = record.passes[0].segments[0]
        storage = StorageWeakRef(segment().device_data.untyped_storage())
        del y
        assert segment() is None
        assert storage.expired()
