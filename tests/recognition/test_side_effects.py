"""Writes to tensors, constructors, reads of children with weights and hidden decisions keep a module stock."""

import collections
import copy
import dataclasses
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.modules import MLP
from tigon.hf.report import Report

CALLS, TOTALS, WEIGHTS = torch.zeros(2), {"rows": [torch.zeros(3)]}, torch.ones(4)
HISTORY: list[float] = []


def make_variant(**members) -> MLP:
    """Return an MLP of a class of this file, because a forward of another file counts as replaced by a library."""
    return type("Variant", (MLP,), members)()


def patch(module: nn.Module) -> Report:
    return tigon.patch(nn.ModuleList([module]))


def reason(module: nn.Module) -> str:
    """Return the reason why a module keeps its forward."""
    with pytest.warns(UserWarning, match="nothing was replaced"):
        return patch(module).left_alone[0].detail


# --- tensors besides parameters ------------------------------------------------------------------


def subtracts(self, x):
    CALLS.sub_(1.0)
    return F.silu(x)


def fills_an_element_of_a_list(self, x):
    TOTALS["rows"][0].fill_(7.0)
    return F.silu(x)


def writes_a_slice(self, x):
    CALLS[1:] = 5.0
    return F.silu(x)


def writes_by_an_option(self, x):
    torch.add(CALLS, 1.0, out=CALLS)
    return F.silu(x)


def writes_by_data(self, x):
    CALLS.data.mul_(3.0).add_(1.0)
    return F.silu(x)


def writes_by_numpy(self, x):
    CALLS.numpy()[0] += 1.0
    return F.silu(x)


WRITES = [subtracts, fills_an_element_of_a_list, writes_a_slice, writes_by_an_option, writes_by_data, writes_by_numpy]


@pytest.mark.parametrize("act", WRITES, ids=lambda f: f.__name__)
def test_a_write_to_a_tensor_leaves_the_module_stock_and_the_tensor_unchanged(act):
    before = [CALLS.clone(), TOTALS["rows"][0].clone()]
    assert "its forward " in reason(make_variant(act=act))
    assert all(torch.equal(a, b) for a, b in zip(before, [CALLS, TOTALS["rows"][0]], strict=True))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)
        self.register_buffer("seen", torch.zeros(1))


class CountsBuffer(Counter):
    def forward(self, x):
        self.seen += 1
        return x


class CountsAttribute(Counter):
    def forward(self, x):
        self.calls.copy_(self.calls + 1)
        return x


class CountsInChild(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CountsBuffer()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("cls", [CountsBuffer, CountsAttribute, CountsInChild])
def test_a_module_in_a_tuple_keeps_its_tensors(cls):
    mlp = make_variant(finish=lambda self, y: self.observers[0](y))
    mlp.observers = (cls(),)
    assert "its forward " in reason(mlp)
    assert not any(each.seen or each.calls for each in mlp.observers[0].modules())


def through_data(t):
    t.data.add_(1.0)


def through_numpy(t):
    t.numpy()[:] = np.float32(3.0)


def through_a_view(t):
    t.detach().view(-1)[0] = 9.0


def by_another_storage(t):
    t.data = torch.full((2, 2), 5.0)


@pytest.mark.parametrize("change", [through_data, through_numpy, through_a_view, by_another_storage])
def test_a_tensor_whose_values_change_after_the_patch_is_used(change):
    mlp, x = make_variant(act=lambda self, x: F.silu(x) * self.settings["scale"].sum()), torch.randn(2, 3, 16)
    mlp.settings = {"scale": torch.tensor([1.0, 0.0])}
    assert patch(mlp)
    change(mlp.settings["scale"])
    assert torch.equal(mlp(x), type(mlp).forward(mlp, x))


# --- constructors --------------------------------------------------------------------------------


class Registers:
    known: types.SimpleNamespace = types.SimpleNamespace(count=0)

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


def calls_a_constructor_by_name(self, x):
    Size.__init__(self, 3)
    return F.silu(x)


CONSTRUCTIONS = {
    "an object of the class": lambda self, x: (Registers(), F.silu(x))[1],
    "the argument": lambda self, x: (Marks(self), F.silu(x))[1],
    "the class": lambda self, x: (MarksByNew(self), F.silu(x))[1],
    "another self": lambda self, x: (Rebinds(self), F.silu(x))[1],
    "by name": calls_a_constructor_by_name,
}


@pytest.mark.parametrize("act", CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_a_constructor_that_writes_to_another_object_leaves_the_module_stock(act):
    mlp = make_variant(act=act)
    assert "its forward " in reason(mlp)
    assert not hasattr(mlp, "marked")


def test_a_constructor_that_writes_to_its_own_object_is_no_write():
    assert patch(make_variant(act=lambda self, x: F.silu(x) * (Size(1).rows)))


# --- parameters and buffers that are None ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["parameter", "buffer", "missing"])
@pytest.mark.parametrize("copied", [False, True], ids=["the module", "a copy"])
@pytest.mark.sampled(2)
def test_a_tensor_that_is_set_later_is_used(kind, copied):
    def finish(self, y):
        shift = getattr(self, "shift", None)
        return y if shift is None else y + shift

    mlp, x = make_variant(finish=finish), torch.randn(2, 3, 16)
    if kind != "missing":
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


# --- children with weights -----------------------------------------------------------------------


class Scaled(nn.Linear):
    scale = 1.0


def with_factor(self, y):
    layer = self.up
    return y * getattr(layer, "factor", 1.0)


def with_handler(self, y):
    try:
        return y * self.gate.factor
    except AttributeError:
        return y


CHILD_READS = {
    "an attribute": ("factor", lambda self, y: y * (self.up.factor if hasattr(self.up, "factor") else 1.0)),
    "through a variable": ("factor", with_factor),
    "by an exception": ("factor", with_handler),
}


@pytest.mark.parametrize(("name", "finish"), CHILD_READS.values(), ids=CHILD_READS)
def test_an_attribute_of_a_child_with_weights_is_read(name, finish):
    mlp, x = make_variant(finish=finish), torch.randn(2, 3, 16)
    for child in (mlp.gate, mlp.up):
        setattr(child, name, 2.0)
    assert "an attribute of a child with weights" in reason(mlp)
    for child in (mlp.gate, mlp.up):
        delattr(child, name)
    if patch(mlp).replaced:
        for child in (mlp.gate, mlp.up):
            setattr(child, name, 2.0)
        assert torch.equal(mlp(x), type(mlp).forward(mlp, x))


def match_of_a_child(self, y):
    match self.down:
        case Scaled():
            return 2 * y
    return y


def type_of_an_alias(self, y):
    layer = self.up
    return 2 * y if layer.__class__.__name__ == "Scaled" else y


TYPES = {
    "issubclass": lambda self, y: 2 * y if issubclass(type(self.gate), Scaled) else y,
    "match": match_of_a_child,
    "an alias": type_of_an_alias,
    "getattr": lambda self, y: 2 * y if isinstance(getattr(self, "down"), Scaled) else y,  # noqa: B009
}


@pytest.mark.parametrize("finish", TYPES.values(), ids=TYPES)
def test_a_forward_that_reads_the_type_of_a_child_with_weights_stays_stock(finish):
    assert "reads the type of self." in reason(make_variant(finish=finish))


# --- effects that the source of the forward does not show ----------------------------------------


class Pair(collections.namedtuple("Pair", "a b")):
    def logs(self):
        HISTORY.append(1.0)
        return 1.0

    @property
    def size(self):
        return 2.0 if HISTORY else 1.0


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


def writes_globals(self, y):
    globals().update(LAST=1.0)
    return y


def reads_a_flag_of_torch(self, y):
    return y * 2 if torch.backends.mkldnn.enabled else y


def reads_a_flag_by_a_variable(self, y):
    backends = torch.backends
    return y * 2 if backends.cudnn.benchmark else y


def changes_the_mode(self, y):
    torch._C._set_grad_enabled(torch.is_grad_enabled())
    return y


def enters_by_hand(self, y):
    mode = torch.autograd.set_grad_enabled(True)
    del mode
    return y


HIDDEN = {
    "a method of a NamedTuple": lambda self, y: y * Pair(1, 2).logs(),
    "a call of a tuple": lambda self, y: self.labelled(y),
    "a method of a stored NamedTuple": lambda self, y: y * self.pair.logs(),
    "a scripted loop": lambda self, y: loops(y),
    "setup_context": lambda self, y: Records.apply(y),
    "globals": writes_globals,
    "a mode": enters_by_hand,
    "a mode of torch": changes_the_mode,
    "an operator of quantized": lambda self, y: y * (1.0 if torch.ops.quantized else 2.0),
    "a flag of torch": reads_a_flag_of_torch,
    "a flag of torch by a variable": reads_a_flag_by_a_variable,
    "an event": lambda self, y: (self.event, y)[1],
}


@pytest.mark.parametrize("finish", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_effect_leaves_the_module_stock(finish):
    mlp = make_variant(finish=finish)
    mlp.labelled, mlp.pair, mlp.event = Labelled((1,)), Pair(1, 2), torch.Event("cpu")
    assert "its forward " in reason(mlp)
    assert not HISTORY


# --- inputs --------------------------------------------------------------------------------------


def tries_an_attribute(self, x):
    try:
        return F.silu(x) * x.temperature
    except AttributeError:
        return F.silu(x)


READS = {
    "getattr": lambda self, x: F.silu(x) * getattr(x, "temperature", 1.0),
    "a handler": tries_an_attribute,
    "in evaluation": lambda self, x: F.silu(x) if self.training else F.silu(x) * getattr(x, "temperature", 1.0),
    "the dict": lambda self, x: F.silu(x) * x.__dict__.get("temperature", 1.0),
    "a computed name": lambda self, x: F.silu(x) * getattr(x, "temp" + "erature", 1.0),
}


@pytest.mark.parametrize("act", READS.values(), ids=READS)
def test_an_attribute_of_an_input_that_tensors_do_not_have_leaves_the_module_stock(act):
    assert "its forward " in reason(make_variant(act=act))


@dataclasses.dataclass
class Shape:
    ndim: int

    def is_long(self):
        return self.ndim > 10**9 if self.ndim > 10**9 else False


def in_a_nested_function(self, y):
    rows = y.shape[0]

    def scale():
        return 2.0 if rows > 100 else 1.0

    return y * scale()


def by_a_chain(self, y):
    a = b = c = y.numel()
    return y * 2 if b > 10**9 and a == c else y


def by_a_lookup(self, y):
    entry = {10**9: 2.0}.get(y.numel())
    return y if entry is None else y * entry


def by_an_exception(self, y):
    try:
        return y * {10**9: 2.0}[y.numel()]
    except LookupError:
        return y


DECISIONS = {
    "a nested function": in_a_nested_function,
    "a chain of names": by_a_chain,
    "a walrus": lambda self, y: y * (2.0 if (n := len(y)) and n > 10**6 else 1.0),
    "a lookup": by_a_lookup,
    "an exception": by_an_exception,
    "is False": lambda self, y: y if (y.numel() > 10**9) is False else 2 * y,
    "isinstance and more": lambda self, y: 2 * y if isinstance(y, Tensor) * (y.numel() > 10**9) else y,
    "a method of an object": lambda self, y: y * (2 if Shape(y.numel()).is_long() is True else 1),
    "a field like that of a tensor": lambda self, y: y if Shape(y.numel()).ndim < 10**9 else 2 * y,
}


@pytest.mark.parametrize("finish", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_that_is_hard_to_see_leaves_the_module_stock(finish):
    assert "its forward " in reason(make_variant(finish=finish))


# --- reads that do not prevent a replacement ------------------------------------------------


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


def raises_by_a_variable(self, x):
    width = x.size(-1)
    if self.training and width != self.width:
        raise ValueError(width)
    return self.down(F.silu(self.gate(x)) * self.up(x))


# pytest would rewrite a statement of this file.
SOURCE = """
def asserts(self, x):
    assert x.size(-1) == self.width
    return self.down(F.silu(self.gate(x)) * self.up(x))
"""
exec(SOURCE, globals())


def with_default(self, x, factor: float = 1.0):
    return self.down(F.silu(self.gate(x)) * self.up(x)) * (factor if factor != 1.0 else 1.0)


def with_flag(self, x, *, aux: bool = False):
    y = self.down(F.silu(self.gate(x)) * self.up(x))
    return (y, None) if aux else y


def with_keywords(self, x, **options):
    y = self.down(F.silu(self.gate(x)) * self.up(x))
    return y * options["factor"] if options else y


def matches(self, x):
    match self.kind:
        case "tanh":
            gate = torch.tanh(self.gate(x))
        case "silu":
            gate = F.silu(self.gate(x))
        case _:
            raise ValueError
    return self.down(gate * self.up(x))


def with_names_of_torch(self, x):
    """Torch has a special Python module `config`, a logger `log` and a namespace `classes` too."""
    scale = self.config.scale * len(self.classes) * (0.5 if self.log is dist.ReduceOp else 1.0)
    return self.down(F.silu(self.gate(x)) * self.up(x)) * scale


ORDINARY = [raises_by_a_variable, globals()["asserts"], with_default, with_flag, with_keywords, matches]
ORDINARY += [with_names_of_torch]


@pytest.mark.parametrize("forward", ORDINARY, ids=lambda f: f.__name__)
@pytest.mark.sampled(2)
def test_ordinary_checks_options_and_settings_are_no_decisions(forward):
    mlp = make_variant(forward=forward)
    mlp.width, mlp.kind = 16, "silu"
    mlp.config, mlp.classes = types.SimpleNamespace(scale=0.5), [1, 2]
    assert patch(mlp)


def test_an_exception_that_the_forward_catches_is_a_decision():
    def check(self, x):
        if x.size(-1) != self.gate.in_features:
            raise ValueError

    def forward(self, x):
        try:
            self.check(x)
        except ValueError:
            return x
        return MLP.forward(self, x)

    mlp = make_variant(forward=forward, check=check)
    assert "decides by its input" in reason(mlp)


# --- modules that cannot be read ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["repr", "deep", "scripted", "traced", "lazy"])
def test_a_module_that_cannot_be_read_does_not_end_the_patch(kind):
    broken, sound = make_variant(act=lambda self, x: F.silu(x) * len(self.table)), MLP()
    broken.table = {"repr": {RaisingRepr()}, "deep": nested()}.get(kind, [1])
    if kind == "lazy":
        broken = nn.LazyLinear(4)
    if kind == "scripted":
        broken = torch.jit.script(nn.Sequential(nn.SiLU()))
    if kind == "traced":
        broken = torch.jit.trace(nn.SiLU(), torch.zeros(2))
    report = tigon.patch(nn.ModuleList([broken, sound]))
    assert [entry.part for entry in report.replaced] == ["glu"]
    assert kind in ("traced", "lazy", "scripted") or "cannot be read (" in report.left_alone[0].detail


def test_no_property_of_the_module_runs():
    runs = []

    def scale(self):
        runs.append(type(self))
        return 1.0

    mlp = make_variant(scale=property(scale), finish=lambda self, y: y * getattr(self, "scale", 1.0))
    assert "its forward " in reason(mlp)
    assert not runs
