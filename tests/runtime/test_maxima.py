"""When the maxima of a tensor are used, and which maxima a producer finds."""

import copy
import gc
import pickle

import pytest
import torch

from tigon.runtime import maxima as module
from tigon.runtime.maxima import (
    NO_MAXIMA,
    NO_NEEDS,
    Maxima,
    MaximaNeeds,
    MaximaRequest,
    MaximaRequests,
    attach,
    find,
    zero_maxima,
)

pytestmark = pytest.mark.no_interpreter(reason="no kernel runs")

TENSOR, BOTH = MaximaNeeds(tensor=True), MaximaNeeds(rows=True, columns=True)


@pytest.fixture
def x() -> torch.Tensor:
    """Return a tensor [2, 3, 4] whose maximum is known."""
    return torch.ones(2, 3, 4)


@pytest.fixture
def known(x) -> Maxima:
    maxima = Maxima(torch.ones(1, dtype=torch.int32), None, None)
    attach(x, maxima, MaximaRequest())
    return maxima


# --- readers -------------------------------------------------------------------------------------


def test_the_tensor_and_views_that_are_the_same_matrix_have_the_maxima(x, known):
    for y in (x, x.reshape(-1, 4), x.view(1, 6, 4), x.view(6, 4).view(3, 2, 4)):
        assert find(y, TENSOR) is known


OTHERS = {
    "a part": lambda x: x[:1],
    "other rows": lambda x: x.view(-1, 2),
    "a transposed view": lambda x: x.transpose(0, 1),
    "other bits": lambda x: x.view(torch.int32),
    "a copy": lambda x: x.clone(),
    "a cast": lambda x: x.half(),
    "detached": lambda x: x.detach(),
    "an equal tensor": lambda x: torch.ones_like(x),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_tensors_have_none(x, known, make):
    assert find(make(x), TENSOR) is None
    assert find(x, TENSOR) is known


WRITES = {
    "in place": lambda x: x.mul_(2),
    "through a view": lambda x: x[0].zero_(),
    "through a detached tensor": lambda x: x.detach().mul_(2),
    "another memory": lambda x: setattr(x, "data", torch.zeros(2, 3, 4)),
    "in place, by a function": lambda x: torch.nn.functional.dropout(x, inplace=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_removes_them(x, known, write):
    assert find(x, TENSOR) is known
    write(x)
    assert find(x, TENSOR) is None
    assert find(x.view(-1, 4), TENSOR) is None


def test_a_new_tensor_with_the_id_of_a_deleted_one_has_none():
    y = torch.ones(2, 3, 4)
    attach(y, Maxima(torch.ones(1, dtype=torch.int32), None, None), MaximaRequest())
    record = module._records[id(y)]
    assert record.ref() is y
    del y
    other = torch.ones(2, 3, 4)
    # This is the state in which a callback of the deleted tensor has not run yet.
    module._records[id(other)] = record
    assert find(other, TENSOR) is None
    del module._records[id(other)]


def test_records_end_with_their_tensors():
    gc.collect()
    before = len(module._records)
    tensors = [torch.ones(3, 4) for _ in range(5)]
    for y in tensors:
        attach(y, NO_MAXIMA, MaximaRequest())
    assert len(module._records) == before + 5
    del tensors, y
    assert len(module._records) == before


@pytest.mark.parametrize("is_before", [True, False], ids=["found before the capture", "found in the capture"])
def test_a_captured_graph_and_the_code_around_it_have_maxima_of_their_own(x, monkeypatch, is_before):
    maxima = Maxima(torch.ones(1, dtype=torch.int32), None, None)
    monkeypatch.setattr(module, "is_capturing", lambda x: not is_before)
    attach(x, maxima, MaximaRequest())
    assert find(x, TENSOR) is maxima
    monkeypatch.setattr(module, "is_capturing", lambda x: is_before)
    assert find(x, TENSOR) is None


def test_compiled_code_has_none(x, known, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert find(x, TENSOR) is None
    y = torch.ones(3, 4)
    attach(y, known, MaximaRequest())
    monkeypatch.undo()
    assert find(y, TENSOR) is None


def test_inference_tensors_have_none(known):
    with torch.inference_mode():
        y = torch.ones(3, 4)
        attach(y, known, MaximaRequest())
    assert find(y, TENSOR) is None


# --- gradients -----------------------------------------------------------------------------------


class _Producer(torch.autograd.Function):
    """The identity, whose gradient has maxima."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = dy * 3
        attach(dx, Maxima(torch.ones(1, dtype=torch.int32), None, None), MaximaRequest())
        return dx


class _Reader(torch.autograd.Function):
    """The identity, which records whether its upstream gradient has maxima."""

    @staticmethod
    def forward(ctx, x, results):
        ctx.results = results
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.results.append((find(dy, TENSOR) is not None, dy.clone()))
        return dy.clone(), None


def _read(run) -> list[tuple[bool, torch.Tensor]]:
    """Return what the readers in a graph find. `run` computes the result from two outputs of readers."""
    results: list = []
    leaves = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
    run(*[_Reader.apply(leaf, results) for leaf in leaves]).sum().backward()
    return results


def test_both_terms_of_a_residual_sum_read_one_gradient():
    results = _read(lambda a, b: _Producer.apply(a + b))
    assert [has_maxima for has_maxima, _ in results] == [True, True]


GRADIENTS = {
    "a sum of gradients, this one first": lambda a, b: (_Producer.apply(a) + 2 * a) + 0 * b,
    "a sum of gradients, this one last": lambda a, b: (2 * a + _Producer.apply(a)) + 0 * b,
    "two producers": lambda a, b: _Producer.apply(a) + _Producer.apply(a) + 0 * b,
    "a scaled term": lambda a, b: _Producer.apply(torch.add(0 * b, a, alpha=2)),
}


@pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_autograd_changes_have_none(run):
    # The reader of `a` gets another gradient than the one that the producer wrote, which is 3 everywhere.
    changed = [has_maxima for has_maxima, dy in _read(run) if not (dy == 3).all()]
    assert changed
    assert not any(changed)


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "another tensor"])
def test_a_gradient_that_a_hook_changes_has_none(is_in_place):
    def run(a, b):
        a.register_hook((lambda dy: dy.mul_(2)) if is_in_place else (lambda dy: dy * 2))
        return _Producer.apply(a) + 0 * b

    assert not any(has_maxima for has_maxima, _ in _read(run))


# --- producers -----------------------------------------------------------------------------------


def test_a_producer_finds_what_its_readers_looked_for():
    request, y = MaximaRequest(), torch.ones(3, 4)
    assert request.next_needs() == NO_NEEDS
    attach(y, NO_MAXIMA, request)
    assert find(y, TENSOR) is None
    assert request.next_needs() == TENSOR
    # A second reader of the result has other needs.
    find(y, BOTH)
    assert request.next_needs() == MaximaNeeds(True, True, True)
    # A reader that needs none changes nothing.
    find(y, NO_NEEDS)
    assert request.next_needs() == MaximaNeeds(True, True, True)


def test_a_producer_stops_when_nobody_looks_for_its_maxima():
    request, y = MaximaRequest(), torch.ones(3, 4)
    attach(y, NO_MAXIMA, request)
    find(y, TENSOR)
    needs = [request.next_needs() for _ in range(module.PATIENCE + 2)]
    assert needs == [TENSOR] * module.PATIENCE + [NO_NEEDS] * 2
    find(y, TENSOR)
    assert request.next_needs() == TENSOR


def test_maxima_that_do_not_cover_the_needs_are_not_returned(x, known):
    assert find(x, BOTH) is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_requests_learns_by_itself(duplicate):
    requests = MaximaRequests()
    requests.result.note(TENSOR)
    other = duplicate(requests)
    assert other.result is not requests.result
    assert other.result.next_needs() == NO_NEEDS


@pytest.mark.parametrize("needs", [NO_NEEDS, TENSOR, BOTH, MaximaNeeds(True, True, True), MaximaNeeds(rows=True)])
def test_maxima_begin_with_zeros(needs):
    maxima = zero_maxima(torch.ones(3, 16), 3, 16, needs)
    assert maxima.covers(needs)
    assert [None if m is None else tuple(m.shape) for m in maxima] == [
        shape if need else None for shape, need in zip([(1,), (3,), (16,)], needs, strict=True)
    ]
    assert all(m is None or not m.any() for m in maxima)
    # Columns begin where Triton expects an aligned address.
    assert maxima.columns is None or maxima.columns.storage_offset() % 4 == 0
