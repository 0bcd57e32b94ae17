"""A forward that writes state, or whose state changes by itself, stays stock, and probes change no object of the user.

The tables hold the attacks as sources, which `define` compiles as if they stood in this file.
"""

import collections
import copy
import dataclasses
import heapq  # noqa: F401
import itertools
import operator
import os  # noqa: F401
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.modules import MLP, define, patch, reason

SCALE = 1.0
CALLS, TOTALS, COUNTS = torch.zeros(2), {"rows": [torch.zeros(3)]}, {"calls": 0}
HISTORY: list[float] = []
GAIN, FIRST = operator.attrgetter("table_of_class"), operator.itemgetter("calls")


def make_variant(**members) -> MLP:
    """Return an MLP of a class of this file, because a forward of another file counts as replaced by a library."""
    return type("Variant", (MLP,), members)()


def record(log: list, x: Tensor) -> None:
    log.append(float(x.detach().abs().mean()))


def store(table: dict, x: Tensor) -> None:
    table.update(last=x.detach())


class CountsAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.calls.copy_(self.calls + 1)
        return x


class CountsBuffer(CountsAttribute):
    def forward(self, x):
        self.seen += 1
        return x


class CountsInChild(CountsAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CountsBuffer()

    def forward(self, x):
        return self.inner(x)


class Registers:
    known = types.SimpleNamespace(count=0)

    def __init__(self) -> None:
        Registers.known.count += 1


class Marks:
    def __init__(self, layer) -> None:
        target = layer
        target.marked = True


class MarksByNew:
    def __new__(cls, layer):
        cls.last = 1
        return object.__new__(cls)


class Rebinds:
    def __init__(self, layer) -> None:
        self = layer
        self.marked = True


class Size:
    def __init__(self, rows: int) -> None:
        self.rows = rows


class Pair(collections.namedtuple("Pair", "a b")):
    def logs(self):
        HISTORY.append(1.0)
        return 1.0


class Labelled(tuple):
    def __call__(self, x):
        HISTORY.append(1.0)
        return x


@torch.jit.script
def loops(x):
    for _ in range(x.dim()):
        x = x * 1.0
    return x


class Records(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        HISTORY.append(1.0)

    @staticmethod
    def backward(ctx, dy):
        return dy


def uses_a_cell():
    calls = 0

    def act(self, x):
        nonlocal calls
        calls += 1
        return F.silu(x)

    return act


# An MLP gets these attributes if its forward names them.
OBSERVERS = (CountsBuffer(), CountsAttribute(), CountsInChild())
GIVEN: dict[str, Callable[[MLP], Any]] = {
    "push": lambda mlp: mlp.log.append,
    **{f"observers_{i}": lambda mlp, i=i: (OBSERVERS[i],) for i in range(3)},
    "labelled": lambda mlp: Labelled((1,)),
    "pair": lambda mlp: Pair(1, 2),
    "event": lambda mlp: torch.Event("cpu"),
    "generator": lambda mlp: torch.Generator().manual_seed(0),
    "random": lambda mlp: np.random.default_rng(0),
    "iterator": lambda mlp: itertools.cycle([1.0]),
    "bytes": lambda mlp: bytearray(1),
}


# Each body holds the statements that an activation runs before it returns F.silu(x).
STATEMENTS = {
    "an attribute": "self.last = x.detach()",
    "setattr": "setattr(self, 'last', x.detach())",
    "object.__setattr__": "object.__setattr__(self, 'last', x.detach())",
    "append": "self.log.append(1.0)",
    "append by a function": "record(self.log, x)",
    "a rare append": "if x.numel() > 10**6: self.log.append(1.0)",
    "a counter": "self.statistics['calls'] += 1",
    "a global dict": "COUNTS['calls'] += 1",
    "a global": "global SCALE; SCALE = 1.0",
    "the class": "type(self).scale_of_class = 1.0",
    "__dict__": "self.__dict__['last'] = x.detach()",
    "_buffers": "self._buffers['last'] = x.detach()",
    "_buffers by a function": "store(self._buffers, x)",
    "_buffers by a computed name": "if x.numel() > 0: store(getattr(self, '_buf' + 'fers'), x)",
    "an alias": "log = self.log; log += [1.0]",
    "append through the class": "list.append(self.log, 1.0)",
    "a heap": "if x.numel() > 10**6: heapq.heappush(self.log, 1.0)",
    "a bound method": "if x.numel() > 10**6: self.push(1.0)",
    "a file": "torch.save(x, os.devnull)",
    "the random state of torch": "torch.manual_seed(0)",
    "print": "if x.numel() > 10**6: print(x.shape)",
    "globals": "globals().update(LAST=1.0)",
    # Tensors besides parameters.
    "sub_": "CALLS.sub_(1.0)",
    "fill_ of an element of a list": "TOTALS['rows'][0].fill_(7.0)",
    "a slice": "CALLS[1:] = 5.0",
    "out": "torch.add(CALLS, 1.0, out=CALLS)",
    "data": "CALLS.data.mul_(3.0).add_(1.0)",
    "numpy": "CALLS.numpy()[0] += 1.0",
    "a buffer of a module in a tuple": "self.observers_0[0](x)",
    "an attribute of a module in a tuple": "self.observers_1[0](x)",
    "a child of a module in a tuple": "self.observers_2[0](x)",
    # Constructors that write to another object than their own.
    "a constructor and its class": "Registers()",
    "a constructor and its argument": "Marks(self)",
    "__new__ and its class": "MarksByNew(self)",
    "a constructor and another self": "Rebinds(self)",
    "a constructor by name": "Size.__init__(self, 3)",
    # Modes and state that changes by itself.
    "a flag of torch by a variable": "backends = torch.backends; x = 2 * x if backends.cudnn.benchmark else x",
    "a mode": "mode = torch.autograd.set_grad_enabled(True); del mode",
    "a mode of torch": "torch._C._set_grad_enabled(torch.is_grad_enabled())",
    "an event": "self.event",
    "bytes": "self.bytes[0] += 1",
    "a generator": "x = x + 0 * torch.rand(1, generator=self.generator)",
    "a generator of numpy": "x = x + 0 * float(self.random.random())",
    "a call of a tuple": "x = self.labelled(x)",
    "a scripted loop": "x = loops(x)",
    "setup_context": "x = Records.apply(x)",
}
# The numbers by which an activation multiplies F.silu(x).
FACTORS = {
    "a method of a NamedTuple": "Pair(1, 2).logs()",
    "a method of a stored NamedTuple": "self.pair.logs()",
    "an operator of quantized": "(1.0 if torch.ops.quantized else 2.0)",
    "a flag of torch": "(2 if torch.backends.mkldnn.enabled else 1)",
    "numpy.random": "(1.0 if np.random.rand() < 2 else 0.0)",
    "random": "(1.0 if random.random() < 2 else 0.0)",
    "attrgetter": "GAIN(self)[0]",
    "itemgetter": "(1 + FIRST(COUNTS))",
    "an iterator": "next(self.iterator)",
}
BODIES = {name: f"{statements}\nreturn F.silu(x)" for name, statements in STATEMENTS.items()}
BODIES |= {name: f"return F.silu(x) * {factor}" for name, factor in FACTORS.items()}


def state_of_file() -> list:
    """Return everything that an attack could change outside of its module."""
    tensors = [CALLS, *TOTALS["rows"], *(t for m in OBSERVERS for each in m.modules() for t in (each.seen, each.calls))]
    counts = dict(COUNTS), list(HISTORY), SCALE, Registers.known.count, vars(MarksByNew).get("last")
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return [*(tensor.tolist() for tensor in tensors), counts, generators, torch.is_grad_enabled()]


@pytest.mark.parametrize("attack", [*BODIES, "a cell"])
def test_a_forward_with_side_effects_stays_stock_and_no_probe_changes_anything(attack):
    body = BODIES.get(attack, "")
    mlp = make_variant(act=define(body, globals()) if body else uses_a_cell())
    for name, give in GIVEN.items():
        if f"self.{name}" in body:
            setattr(mlp, name, give(mlp))
    before, attributes = state_of_file(), vars(mlp).keys() | mlp._buffers.keys()
    assert "its forward " in reason(mlp)
    assert state_of_file() == before
    assert vars(mlp).keys() | mlp._buffers.keys() == attributes
    assert (mlp.log, mlp.statistics) == ([], {})


def test_the_reason_names_the_attribute_and_the_line():
    def sets_attribute(self, x):
        self.last = x.detach()
        return F.silu(x)

    line = sets_attribute.__code__.co_firstlineno + 1
    detail = f"its forward writes .last ({sets_attribute.__qualname__}, test_side_effects.py:{line})"
    assert reason(make_variant(act=sets_attribute)) == detail


def test_a_forward_that_writes_its_input_stays_stock():
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            x.clamp_(-1e30, 1e30)
            return self.weight * y.to(x.dtype)

    assert reason(Clamps()) == "its forward writes to its input or to a parameter"


def test_no_property_of_the_module_runs():
    runs = []

    def scale(self):
        runs.append(type(self))
        return 1.0

    mlp = make_variant(scale=property(scale), finish=lambda self, y: y * getattr(self, "scale", 1.0))
    assert "its forward " in reason(mlp)
    assert not runs


def test_a_forward_that_reads_a_tensor_of_another_object_stays_stock():
    mlp = make_variant(act=lambda self, x: F.silu(x) * self.settings["scale"].sum())
    mlp.settings = {"scale": torch.tensor([1.0, 0.0])}
    assert "a tensor that is no parameter or buffer of the module" in reason(mlp)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("copied", [False, True], ids=["the module", "a copy"])
@pytest.mark.sampled(2)
def test_a_tensor_that_is_set_later_is_used(kind, copied):
    def finish(self, y):
        return y if self.shift is None else y + self.shift

    mlp, x = make_variant(finish=finish), torch.randn(2, 3, 16)
    getattr(mlp, f"register_{kind}")("shift", None)
    assert patch(mlp)
    mlp = copy.deepcopy(mlp) if copied else mlp
    mlp.shift = nn.Parameter(torch.ones(16)) if kind != "buffer" else torch.ones(16)
    assert torch.equal(mlp(x), type(mlp).forward(mlp, x))


def test_a_bias_that_a_layer_norm_of_torch_gets_later_is_used():
    norm, x = nn.LayerNorm(48, bias=False), torch.randn(4, 48)
    assert patch(norm)
    norm.bias = nn.Parameter(torch.ones(48))
    torch.testing.assert_close(norm(x), nn.LayerNorm.forward(norm, x))


class RaisingRepr:
    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __hash__(self) -> int:
        return 1


def nested(depth: int = 5000) -> dict:
    table: dict = {}
    for _ in range(depth):
        table = {"a": [table]}
    return table


def make_unreadable(table: Any) -> MLP:
    mlp = make_variant(act=lambda self, x: F.silu(x) * len(self.table))
    mlp.table = table
    return mlp


UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "repr": lambda: make_unreadable({RaisingRepr()}),
    "deep": lambda: make_unreadable(nested()),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.SiLU())),
    "traced": lambda: torch.jit.trace(nn.SiLU(), torch.zeros(2)),
    "lazy": lambda: nn.LazyLinear(4),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_module_that_cannot_be_read_does_not_end_the_patch(kind):
    report = tigon.patch(nn.ModuleList([UNREADABLE[kind](), MLP()]))
    assert [entry.part for entry in report.replaced] == ["glu"]
    assert kind not in ("repr", "deep") or "cannot be read (" in report.left_alone[0].detail


@dataclasses.dataclass
class Config:
    approximate: str = "none"
    bias: bool = False
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenConfig:
    approximate: str = "none"


class SettingConfig:
    def __init__(self) -> None:
        setattr(self, "approximate", "none")  # noqa: B010


@pytest.mark.parametrize("cls", [Config, FrozenConfig, SettingConfig])
def test_methods_of_a_config_that_no_call_runs_are_not_read(cls):
    mlp = make_variant(act=lambda self, x: F.gelu(x, approximate=self.config.approximate))
    mlp.config = cls()
    assert patch(mlp)
    # A constructor that writes to its own object is no write either.
    assert patch(make_variant(act=lambda self, x: F.silu(x) * Size(1).rows))
