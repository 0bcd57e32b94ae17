"""A forward that writes state, or whose state changes by itself, stays stock with a reason."""

import heapq
import itertools
import operator
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.modules import MLP, variant

SCALE = 1.0
COUNTS = {"calls": 0}


def record(log: list, x: Tensor) -> None:
    log.append(float(x.detach().abs().mean()))


# --- forwards that write -----------------------------------------------------------------------


def sets_attribute(self, x):
    self.last = x.detach()
    return F.silu(x)


def sets_by_setattr(self, x):
    setattr(self, "last", x.detach())  # noqa: B010
    return F.silu(x)


def sets_by_object(self, x):
    object.__setattr__(self, "last", x.detach())
    return F.silu(x)


def appends(self, x):
    self.log.append(1.0)
    return F.silu(x)


def appends_by_a_function(self, x):
    record(self.log, x)
    return F.silu(x)


def appends_rarely(self, x):
    if x.numel() > 10**6:
        self.log.append(1.0)
    return F.silu(x)


def counts(self, x):
    self.statistics["calls"] += 1
    return F.silu(x)


def counts_in_a_global(self, x):
    COUNTS["calls"] += 1
    return F.silu(x)


def writes_a_global(self, x):
    global SCALE
    SCALE = 1.0
    return F.silu(x)


def counts_in_the_class(self, x):
    type(self).scale_of_class = 1.0
    return F.silu(x)


def writes_its_dict(self, x):
    self.__dict__["last"] = x.detach()
    return F.silu(x)


def writes_its_buffers(self, x):
    self._buffers["last"] = x.detach()
    return F.silu(x)


def store(table: dict, x: Tensor) -> None:
    table.update(last=x.detach())


def writes_its_buffers_by_a_function(self, x):
    store(self._buffers, x)
    return F.silu(x)


def writes_its_buffers_by_a_computed_name(self, x):
    if x.numel() > 0:
        store(getattr(self, "_buf" + "fers"), x)
    return F.silu(x)


def adds_to_an_alias(self, x):
    log = self.log
    log += [1.0]
    return F.silu(x)


def appends_through_the_class(self, x):
    list.append(self.log, 1.0)
    return F.silu(x)


def pushes_to_a_heap(self, x):
    if x.numel() > 10**6:
        heapq.heappush(self.log, 1.0)
    return F.silu(x)


def appends_by_a_bound_method(self, x):
    if x.numel() > 10**6:
        self.push(1.0)
    return F.silu(x)


def saves_to_a_file(self, x):
    torch.save(x, os.devnull)
    return F.silu(x)


def seeds_the_generator(self, x):
    torch.manual_seed(0)
    return F.silu(x)


def prints(self, x):
    if x.numel() > 10**6:
        print(x.shape)
    return F.silu(x)


def uses_a_cell():
    calls = 0

    def act(self, x):
        nonlocal calls
        calls += 1
        return F.silu(x)

    return act


@pytest.mark.parametrize(
    "act",
    [
        sets_attribute,
        sets_by_setattr,
        sets_by_object,
        appends,
        appends_by_a_function,
        appends_rarely,
        counts,
        counts_in_a_global,
        writes_a_global,
        counts_in_the_class,
        writes_its_dict,
        writes_its_buffers,
        writes_its_buffers_by_a_function,
        writes_its_buffers_by_a_computed_name,
        adds_to_an_alias,
        appends_through_the_class,
        pushes_to_a_heap,
        appends_by_a_bound_method,
        saves_to_a_file,
        seeds_the_generator,
        prints,
        uses_a_cell(),
    ],
    ids=lambda f: f.__name__,
)
def test_a_forward_that_writes_state_stays_stock_with_a_reason(act):
    mlp = variant("Impure", act=act)()
    mlp.push = mlp.log.append
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.ModuleList([mlp]))
    (entry,) = report.left_alone
    assert entry.part == "glu"
    assert "its forward" in entry.detail
    # No probe has changed the user's objects.
    assert mlp.log == []
    assert not mlp.statistics
    assert COUNTS == {"calls": 0}
    assert not hasattr(mlp, "last")


def test_the_reason_names_the_attribute_and_the_line():
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Impure", act=sets_attribute)()])).left_alone
    line = sets_attribute.__code__.co_firstlineno + 1
    assert entry.detail == f"its forward writes .last (sets_attribute, test_writes.py:{line})"


def test_a_forward_that_writes_its_input_stays_stock():
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            x.clamp_(-1e30, 1e30)
            return self.weight * y.to(x.dtype)

    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(Clamps()).left_alone
    assert entry.detail == "its forward writes to its input or to a parameter"


# --- state that changes by itself ----------------------------------------------------------------------


def own_generator(mlp):
    mlp.source = torch.Generator().manual_seed(0)
    return lambda self, x: F.silu(x) + 0 * torch.rand(1, generator=self.source)


def numpy_generator(mlp):
    mlp.source = np.random.default_rng(0)
    return lambda self, x: F.silu(x) + 0 * float(self.source.random())


def numpy_module(mlp):
    return lambda self, x: F.silu(x) * (1.0 if np.random.rand() < 2 else 0.0)


def python_random(mlp):
    return lambda self, x: F.silu(x) * (1.0 if random.random() < 2 else 0.0)


GAIN = operator.attrgetter("table_of_class")
FIRST = operator.itemgetter("calls")


def attrgetter(mlp):
    return lambda self, x: F.silu(x) * GAIN(self)[0]


def itemgetter(mlp):
    return lambda self, x: F.silu(x) + FIRST(COUNTS)


def iterator(mlp):
    mlp.source = itertools.cycle([1.0])
    return lambda self, x: F.silu(x) * next(self.source)


def bytes_that_change(mlp):
    mlp.source = bytearray(1)

    def act(self, x):
        self.source[0] += 1
        return F.silu(x)

    return act


@pytest.mark.parametrize(
    "source",
    [own_generator, numpy_generator, numpy_module, python_random, attrgetter, itemgetter, iterator, bytes_that_change],
)
def test_a_forward_whose_state_cannot_be_watched_stays_stock(source):
    mlp = MLP()
    mlp.__class__ = variant("Random", act=source(mlp))
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.ModuleList([mlp]))
    assert "its forward uses" in report.left_alone[0].detail
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
