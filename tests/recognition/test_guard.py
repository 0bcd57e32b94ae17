"""A forward with hidden state or side effects stays stock. A setting that changes is used in the next call."""

import collections
import copy
import dataclasses
import functools
import heapq
import itertools
import logging
import os
import pickle
import random
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn

import tigon
from tigon.recognition.guard import Guard

LOG: list[float] = []
LOGGER = logging.getLogger(__name__)
SCALE = 1.0
COUNTS = {"calls": 0}


def activation(x: Tensor) -> Tensor:
    return F.silu(x)


ACTIVATION = activation


def record(log: list, x: Tensor) -> None:
    log.append(float(x.detach().abs().mean()))


class MLP(nn.Module):
    """A gated MLP with the settings that the tests change."""

    table_of_class = (1.0,)
    scale_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)
        self.log: list[float] = []
        self.statistics = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.down(self.act(self.gate(x)) * self.up(x)))

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def finish(self, y: Tensor) -> Tensor:
        return y


def variant(name: str, **members) -> type[MLP]:
    return type(name, (MLP,), members)


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
    assert entry.detail == f"its forward writes .last (sets_attribute, test_guard.py:{line})"


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


def iterator(mlp):
    mlp.source = itertools.cycle([1.0])
    return lambda self, x: F.silu(x) * next(self.source)


@pytest.mark.parametrize("source", [own_generator, numpy_generator, numpy_module, python_random, iterator])
def test_a_forward_whose_state_cannot_be_watched_stays_stock(source):
    mlp = MLP()
    mlp.__class__ = variant("Random", act=source(mlp))
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.ModuleList([mlp]))
    assert "its forward uses" in report.left_alone[0].detail
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


# --- conditions that no probe changes -----------------------------------------------------------------------


def is_long(x: Tensor) -> bool:
    return x.shape[-2] > 4096


CONDITIONS = {
    "length": lambda self, x: x.shape[-2] > 4096,
    "length in a variable": lambda self, x: [n for n in (x.shape[-2],) if n > 4096],
    "length in a function": lambda self, x: is_long(x),
    "number of elements": lambda self, x: x.numel() > 10**6,
    "batch": lambda self, x: len(x) == 7,
    "device": lambda self, x: x.device.type == "cuda",
    "values": lambda self, x: bool((x == 0.125).all()),
    "two conditions": lambda self, x: self.training and x.dim() == 3 and x.size(0) > 64,
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_forward_that_decides_by_its_input_stays_stock(condition, scale):
    act = lambda self, x: F.silu(x) * (scale if condition(self, x) else 1.0)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Decides", act=act)()])).left_alone
    assert "its forward decides by its input (" in entry.detail
    assert "test_guard.py:" in entry.detail


def logs(self, x):
    LOGGER.info("called")
    return F.silu(x)


def logs_to_the_root(self, x):
    if x.dtype == torch.float64:
        logging.warning("called")
    return F.silu(x)


def warns(self, x):
    if x.dtype == torch.float64:
        warnings.warn("called", stacklevel=2)
    return F.silu(x)


@pytest.mark.parametrize("act", [logs, logs_to_the_root, warns])
def test_a_forward_that_writes_a_message_stays_stock(act, caplog):
    caplog.set_level(logging.INFO)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Logs", act=act)()])).left_alone
    assert "its forward uses " in entry.detail
    assert not caplog.records, "a probe has written to the log"


MODES = {
    "gradients": lambda x: torch.is_grad_enabled(),
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "a name of its own": lambda x: is_grad_enabled(),
    "default dtype": lambda x: torch.get_default_dtype() == torch.float16,
    "number of GPUs": lambda x: torch.cuda.is_available() * 1,
    "a flag of a tensor": lambda x: x.is_cuda * 1,
    "a graph": lambda x: x.grad_fn is None,
    "compilation": lambda x: torch.compiler.is_compiling(),
    "compilation, by its other name": lambda x: torch._dynamo.is_compiling(),
    "export": lambda x: torch.compiler.is_exporting(),
    "tracing": lambda x: torch.jit.is_tracing(),
    "scripting": lambda x: torch.jit.is_scripting(),
    "state of tracing": lambda x: torch._C._get_tracing_state() is not None,
    "warnings of determinism": lambda x: torch.is_deterministic_algorithms_warn_only_enabled(),
}


@pytest.mark.parametrize("read_mode", MODES.values(), ids=MODES)
def test_a_forward_that_reads_a_mode_stays_stock(read_mode):
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(
            nn.ModuleList([variant("Asks", act=lambda self, x: F.silu(x) * (1.0 + 0.0 * read_mode(x)))()])
        ).left_alone
    assert "its forward reads " in entry.detail


@pytest.mark.parametrize("function", [id, hash])
def test_a_forward_that_reads_an_address_stays_stock(function):
    act = {id: lambda self, x: F.silu(x) * (1 + 0 * id(x)), hash: lambda self, x: F.silu(x) * (1 + 0 * hash(x))}
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([variant("Reads", act=act[function])()])).left_alone
    assert f"its forward calls {function.__name__} (" in entry.detail


PROBED_CONDITIONS = {
    "dtype": lambda self, x: F.silu(x) if x.dtype == torch.bfloat16 else F.silu(x) * 1.0,
    "dimensions": lambda self, x: F.silu(x) if x.dim() == 4 else F.silu(x) * 1.0,
    "type": lambda self, x: F.silu(x) if isinstance(x, Tensor) else x[0],
    "a setting": lambda self, x: F.silu(x) * (2.0 if self.scale_of_class > 3 else 1.0),
    "training": lambda self, x: F.silu(x) * (2.0 if self.training and self.scale_of_class == 7 else 1.0),
    "nothing": lambda self, x: F.silu(x) if x is not None else x,
}


@pytest.mark.parametrize("act", PROBED_CONDITIONS.values(), ids=PROBED_CONDITIONS)
def test_a_condition_on_probed_properties_and_settings_is_no_decision(act):
    assert tigon.patch(nn.ModuleList([variant("Settled", act=act)()]))


def test_a_with_block_is_no_decision():
    def act(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.silu(x)

    assert tigon.patch(nn.ModuleList([variant("With", act=act)()]))


# --- settings that a forward reads ------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: types.SimpleNamespace = dataclasses.field(default_factory=lambda: types.SimpleNamespace(scale=1.0))


class CallableObject:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return F.silu(x) * self.scale


def by_function(mlp):
    mlp.function = activation
    return lambda self, x: self.function(x), lambda m: setattr(m, "function", F.gelu)


def by_partial(mlp):
    mlp.function = functools.partial(F.gelu, approximate="none")
    return lambda self, x: self.function(x), lambda m: setattr(
        m, "function", functools.partial(F.gelu, approximate="tanh")
    )


def by_callable_object(mlp):
    mlp.function = CallableObject()
    return lambda self, x: self.function(x), lambda m: setattr(m.function, "scale", 2.0)


def by_config(mlp):
    mlp.config = types.SimpleNamespace(scale=1.0)
    return lambda self, x: F.silu(x) * self.config.scale, lambda m: setattr(m.config, "scale", 2.0)


def by_config_in_a_variable(mlp):
    mlp.config = Settings()

    def act(self, x):
        config = self.config
        inner = config.inner
        return F.silu(x) * inner.scale

    return act, lambda m: setattr(m.config.inner, "scale", 2.0)


def by_another_config(mlp):
    mlp.config = Settings()
    return lambda self, x: F.silu(x) * self.config.scale, lambda m: setattr(m, "config", Settings(2.0))


def by_getattr(mlp):
    mlp.scale = 1.0
    return lambda self, x: F.silu(x) * getattr(self, "scale", 1.0), lambda m: setattr(m, "scale", 2.0)


def by_list(mlp):
    mlp.table = [1.0, 3.0]
    return lambda self, x: F.silu(x) * self.table[0], lambda m: m.table.reverse()


def by_dict(mlp):
    mlp.table = {"scale": 1.0}
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.update(scale=2.0)


def by_nested_dict(mlp):
    mlp.table = {"a": {"scale": [1.0]}}
    return lambda self, x: F.silu(x) * self.table["a"]["scale"][0], lambda m: m.table["a"]["scale"].insert(0, 2.0)


def by_set(mlp):
    mlp.flags = {"plain"}
    return lambda self, x: F.silu(x) * (2.0 if "double" in self.flags else 1.0), lambda m: m.flags.add("double")


def by_class_attribute(mlp):
    return lambda self, x: F.silu(x) * self.scale_of_class, lambda m: setattr(m, "scale_of_class", 2.0)


def by_attribute_of_the_class(mlp):
    return lambda self, x: F.silu(x) * self.scale_of_class, lambda m: setattr(type(m), "scale_of_class", 2.0)


def by_method_of_the_instance(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(m, "act", F.gelu)


def by_method_of_the_class(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(type(m), "finish", lambda self, y: 2 * y)


def by_method_of_the_base(mlp):
    def finish(self, y):
        return super(type(self), self).finish(y)

    mlp.__class__.finish = finish
    return lambda self, x: F.silu(x), lambda m: setattr(MLP, "finish", lambda self, y: 2 * y)


def by_property(mlp):
    mlp._scale = 1.0
    mlp.__class__.scale = property(lambda self: self._scale)
    return lambda self, x: F.silu(x) * self.scale, lambda m: setattr(m, "_scale", 2.0)


class Meta(type):
    @property
    def gain(cls):
        return SCALE


def by_property_of_the_metaclass(mlp):
    mlp.__class__ = Meta("Gains", (type(mlp),), {})
    return lambda self, x: F.silu(x) * type(self).gain, lambda m: globals().update(SCALE=2.0)


def by_lookup_of_the_metaclass(mlp):
    meta = type("Looks", (type,), {"__getattr__": lambda cls, name: SCALE})
    mlp.__class__ = meta("Gains", (type(mlp),), {})
    return lambda self, x: F.silu(x) * type(self).gain, lambda m: globals().update(SCALE=2.0)


def by_global(mlp):
    return lambda self, x: F.silu(x) * SCALE, lambda m: globals().update(SCALE=2.0)


def by_global_function(mlp):
    return lambda self, x: activation(x), lambda m: globals().update(activation=F.gelu)


def by_code_of_a_function(mlp):
    return lambda self, x: activation(x), lambda m: setattr(ACTIVATION, "__code__", (lambda x: 2 * x).__code__)


def by_function_of_torch(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(F, "silu", F.gelu)


def by_cell(mlp):
    scale = 1.0

    def change(m):
        nonlocal scale
        scale = 2.0

    return lambda self, x: F.silu(x) * scale, change


def by_default(mlp):
    def act(self, x, scale=1.0):
        return F.silu(x) * scale

    return act, lambda m: setattr(act, "__defaults__", (2.0,))


def by_child(mlp):
    mlp.child = nn.SiLU()
    return lambda self, x: self.child(x), lambda m: setattr(m, "child", nn.GELU())


def by_forward_of_the_childs_class(mlp):
    mlp.child = type("Act", (nn.SiLU,), {"forward": lambda self, x: F.silu(x)})()
    return lambda self, x: self.child(x), lambda m: setattr(type(m.child), "forward", lambda self, x: F.gelu(x))


def by_computed_name(mlp):
    mlp.scale_1 = 1.0
    return lambda self, x: F.silu(x) * getattr(self, "scale_" + str(1)), lambda m: setattr(m, "scale_1", 2.0)


def by_name_in_an_attribute(mlp):
    mlp.chosen, mlp.scale_1 = "scale_1", 1.0
    return lambda self, x: F.silu(x) * getattr(self, self.chosen), lambda m: setattr(m, "scale_1", 2.0)


def by_user_dict(mlp):
    mlp.table = collections.UserDict(scale=1.0)
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.update(scale=2.0)


def by_chain_map(mlp):
    mlp.table = collections.ChainMap({}, {"scale": 1.0})
    return lambda self, x: F.silu(x) * self.table["scale"], lambda m: m.table.maps[1].update(scale=2.0)


class Equal:
    limit = 1.0

    def __eq__(self, other):
        return other < self.limit

    __hash__ = object.__hash__


def by_comparison(mlp):
    mlp.small = Equal()
    return lambda self, x: F.silu(x) * (2.0 if self.small == 1.5 else 1.0), lambda m: setattr(m.small, "limit", 2.0)


def by_class(mlp):
    return lambda self, x: F.silu(x), lambda m: setattr(m, "__class__", variant("Other", act=lambda self, x: F.gelu(x)))


CHANGES = [
    *(by_function, by_partial, by_callable_object, by_config, by_config_in_a_variable, by_another_config, by_getattr),
    *(by_list, by_dict, by_nested_dict, by_set, by_class_attribute, by_attribute_of_the_class, by_property),
    *(by_method_of_the_instance, by_method_of_the_class, by_method_of_the_base, by_global, by_global_function),
    *(by_code_of_a_function, by_function_of_torch, by_cell, by_default, by_child, by_forward_of_the_childs_class),
    *(by_computed_name, by_name_in_an_attribute, by_user_dict, by_chain_map, by_comparison, by_class),
    *(by_property_of_the_metaclass, by_lookup_of_the_metaclass),
]


@pytest.fixture
def unchanged(monkeypatch):
    """Undo the changes that a test makes to this file, to torch and to the class."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(globals(), "activation", activation)
    monkeypatch.setattr(F, "silu", F.silu)
    monkeypatch.setattr(MLP, "finish", MLP.finish)
    code = ACTIVATION.__code__
    yield
    ACTIVATION.__code__ = code


@pytest.mark.parametrize("how", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("moved", [False, True], ids=["the module", "a copy"])
def test_a_setting_that_changes_after_the_patch_is_used(how, moved, unchanged):
    mlp, x = MLP(), torch.randn(2, 8, 16)
    mlp.__class__ = variant("Settings")
    act, change = how(mlp)
    type(mlp).act = act
    model = nn.ModuleList([mlp])
    assert [entry.part for entry in tigon.patch(model).replaced] == ["glu"]
    before = model[0](x)
    if moved:
        model = copy.deepcopy(model)
    change(model[0])
    expected = type(model[0]).forward(model[0], x)
    assert not torch.equal(expected, before), "the change changes nothing"
    assert torch.equal(model[0](x), expected)


class Pickled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.table = [1.0]

    def act(self, x):
        return activation(x) * self.table[0] * SCALE


@pytest.mark.parametrize("change", [lambda m: m.table.insert(0, 2.0), lambda m: globals().update(SCALE=2.0)])
def test_a_pickled_module_sees_changes(change, unchanged):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model = pickle.loads(pickle.dumps(model))
    assert guard_of(model[0]).holds(model[0])
    change(model[0])
    assert not guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))


def test_a_change_between_pickling_and_loading_is_used(unchanged):
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    data = pickle.dumps(model)
    globals()["SCALE"] = 2.0
    model = pickle.loads(data)
    assert not guard_of(model[0]).holds(model[0])


def guard_of(module: nn.Module) -> Guard:
    return vars(module)["forward"].guard


def test_the_op_runs_again_after_a_setting_is_put_back():
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model[0].table[0] = 2.0
    assert not guard_of(model[0]).holds(model[0])
    model[0].table = [1.0]
    assert guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))


def test_an_equal_setting_is_no_change():
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    model[0].table = [float("1.0")]
    assert guard_of(model[0]).holds(model[0])


def test_a_setting_that_the_forward_does_not_read_is_no_change():
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    model[0].note, model[0].log = "other", [1.0]
    check = guard_of(model[0]).check
    assert guard_of(model[0]).holds(model[0])
    assert guard_of(model[0]).check is check, "the state was read anew"


def test_a_forward_that_reads_hundreds_of_settings_stays_stock():
    mlp = MLP()
    mlp.table = [1.0] * 500
    mlp.__class__ = variant("Table", act=lambda self, x: F.silu(x) * self.table[7])
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([mlp])).left_alone
    assert entry.detail == "its forward reads self.table, which holds 500 elements, too many to check"


# --- unusual values ---------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

    def forward(self, x):
        return self.compute(x, self.weight)

    def compute(self, x, w):
        return w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


UNUSUAL = {
    "NaN of the output": lambda self, x, w: torch.nan_to_num(Norm.compute(self, x, w)),
    "NaN of the input": lambda self, x, w: Norm.compute(self, torch.nan_to_num(x, posinf=torch.inf), w),
    "infinity": lambda self, x, w: Norm.compute(self, x.clamp(-6e4, 6e4), w),
    "zeros": lambda self, x, w: Norm.compute(self, x, w) + (x == 0).all(-1, keepdim=True).to(x.dtype),
    "large weights": lambda self, x, w: Norm.compute(self, x, w.clamp(-100, 100)),
    "tiny inputs": lambda self, x, w: Norm.compute(self, torch.where(x.abs() < 1e-20, 0.0, x).to(x.dtype) * 2 - x, w),
    "one dimension": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.dim() == 1 else 1),
    "four dimensions": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.dim() == 4 else 1),
    "inputs that need a gradient": lambda self, x, w: Norm.compute(self, x, w) * (2 if x.requires_grad else 1),
    "inputs that need none": lambda self, x, w: Norm.compute(self, x, w) * (1 if x.requires_grad else 2),
}


@pytest.mark.parametrize("compute", UNUSUAL.values(), ids=UNUSUAL)
def test_norms_that_differ_at_unusual_values_stay_stock(compute):
    norm = type("Unusual", (Norm,), {"compute": compute})()
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(norm)
    assert report.left_alone[0].detail == "computes something else than rms_norm or layer_norm"


UNUSUAL_MLPS = {
    "NaN": lambda self, y: torch.nan_to_num(y),
    "infinity": lambda self, y: y.clamp(-6e4, 6e4),
    "two dimensions": lambda self, y: y * (2 if y.dim() == 2 else 1),
    "one dimension": lambda self, y: y * (2 if y.dim() == 1 else 1),
    "four dimensions": lambda self, y: y * (2 if y.dim() == 4 else 1),
    "evaluation": lambda self, y: y * (1 if self.training else 2),
}


@pytest.mark.parametrize("finish", UNUSUAL_MLPS.values(), ids=UNUSUAL_MLPS)
def test_mlps_that_differ_at_unusual_values_stay_stock(finish):
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.ModuleList([variant("Unusual", finish=finish)()]))
    assert report.left_alone[0].detail == "computes something else than silu, gelu or gelu-tanh gates"


def test_an_mlp_that_accepts_only_three_dimensions_is_replaced_for_these():
    def finish(self, y):
        batch, length, width = y.shape
        return y.view(batch, length, width)

    model = nn.ModuleList([variant("Strict", finish=finish)()])
    assert tigon.patch(model)
    assert model[0](torch.randn(2, 3, 16)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        model[0](torch.randn(3, 16))


def test_dtypes_that_were_not_compared_run_the_stock_forward():
    """The norm rounds fp64 to fp32, and the op would not."""
    norm, x = Norm(), torch.randn(4, 48, dtype=torch.float64)
    assert tigon.patch(norm)
    torch.testing.assert_close(norm(x), Norm.forward(norm, x), rtol=0, atol=0)


@pytest.mark.parametrize("eps", [torch.tensor(0.5), 2, 0.5], ids=str)
def test_an_epsilon_of_another_type_is_used(eps):
    norm, x = Norm(), torch.randn(4, 48)
    assert tigon.patch(norm)
    norm.eps = eps
    torch.testing.assert_close(norm(x), Norm.forward(norm, x), rtol=1e-6, atol=1e-6)


def test_a_deleted_weight_raises_the_error_of_the_stock_module():
    norm = Norm()
    assert tigon.patch(norm)
    norm.weight = None
    with pytest.raises(TypeError, match="NoneType"):
        norm(torch.randn(4, 48))


# --- under a compiler ----------------------------------------------------------------------------


def by_forward_of_the_class(mlp):
    def forward(self, x):
        return 2 * MLP.forward(self, x)

    return lambda self, x: F.silu(x), lambda m: setattr(type(m), "forward", forward)


def by_hook_of_a_child(mlp):
    mlp.child = nn.SiLU()
    return lambda self, x: self.child(x), lambda m: m.child.register_forward_hook(lambda m, args, y: 2 * y)


def compiled_outputs(how, backend: str, fullgraph: bool = False) -> list[Tensor]:
    """Return the output of a compiled module before and after a change, and then the output of its class."""
    torch.manual_seed(0)
    mlp, x = MLP(), torch.randn(2, 8, 16)
    mlp.__class__ = variant("Settings")
    act, change = how(mlp)
    type(mlp).act = act
    assert tigon.patch(nn.ModuleList([mlp]))
    torch.compiler.reset()
    compiled = torch.compile(mlp, backend=backend, fullgraph=fullgraph)
    before = compiled(x)
    change(mlp)
    after = compiled(x)
    return [before, after, type(mlp).forward(mlp, x)]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", [*CHANGES, by_forward_of_the_class, by_hook_of_a_child], ids=lambda f: f.__name__)
def test_a_compiled_module_is_compiled_again_after_a_change(how, backend, unchanged):
    before, after, expected = compiled_outputs(how, backend)
    assert not torch.equal(expected, before), "the change changes nothing"
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("how", [by_list, by_cell, by_config, by_partial, by_chain_map], ids=lambda f: f.__name__)
def test_the_guard_breaks_no_graph(how, unchanged):
    _, after, expected = compiled_outputs(how, "eager", fullgraph=True)
    torch.testing.assert_close(after, expected)


@pytest.fixture
def compiled_norm():
    """Return a patched norm that reads a list and a global, and its compiled form."""
    norm = type("Compiled", (Norm,), {"compute": lambda self, x, w: Norm.compute(self, x, w) * self.table[0] * SCALE})()
    norm.table = [1.0, 3.0]
    assert tigon.patch(norm)
    torch.compiler.reset()
    return norm, torch.compile(norm, backend="eager", fullgraph=True)


def test_equal_settings_compile_once(compiled_norm, unchanged):
    norm, compiled = compiled_norm
    x = torch.randn(4, 48)
    compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        norm.table = [float("1.0"), float("3.0")]
        compiled(x)
        norm.note = "what the forward does not read"
        compiled(x)


@pytest.mark.parametrize("moved", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
def test_a_compiled_copy_sees_changes(moved, unchanged):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model = moved(model)
    torch.compiler.reset()
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    compiled(x)
    model[0].table.insert(0, 2.0)
    torch.testing.assert_close(compiled(x), Pickled.forward(model[0], x))


@pytest.mark.parametrize("moved", [False, True], ids=["the module", "a copy"])
def test_a_graph_contains_the_recipe(moved, monkeypatch, unchanged):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model = copy.deepcopy(model) if moved else model
    calls = []
    replacement = vars(model[0])["forward"]
    recipe = replacement.recipe
    # Dynamo traces this function; the append is a side effect of every run of the graph.
    replacement.recipe = lambda module, x: calls.append(1) or type(recipe).__call__(recipe, module, x)
    torch.compiler.reset()
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    compiled(x), compiled(x)
    assert calls == [1, 1]
    model[0].table[0] = 2.0
    compiled(x)
    assert calls == [1, 1], "the recipe ran after a change"
    model[0].table[0] = 1.0
    compiled(x)
    assert calls == [1, 1, 1], "the first graph runs again"


def test_a_change_inside_the_graph_is_used(unchanged):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)

    def step(x: Tensor, scale: float) -> Tensor:
        model[0].table[0] = scale
        return model[0](x)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for scale in (2.0, 3.0):
        result = compiled(x, scale)
        model[0].table[0] = scale
        torch.testing.assert_close(result, Pickled.forward(model[0], x))
        model[0].table[0] = 1.0


def test_graphs_are_stock_where_dynamo_has_other_internals(monkeypatch, unchanged):
    """The stock forward is exact, and Dynamo guards what it reads."""

    def fail(*_):
        raise AttributeError

    monkeypatch.setattr("tigon.recognition.graph_guard.install_guard", fail)
    _, after, expected = compiled_outputs(by_list, "eager", fullgraph=True)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


# --- copies and scripts --------------------------------------------------------------------------


def by_copy(module):
    return copy.copy(module)


def by_dict_of_attributes(module):
    other = type(module).__new__(type(module))
    vars(other).update(vars(module))
    return other


def by_set_state(module):
    other = type(module).__new__(type(module))
    other.__setstate__(vars(module).copy())
    return other


@pytest.mark.parametrize("shallow", [by_copy, by_dict_of_attributes, by_set_state], ids=lambda f: f.__name__)
def test_a_patch_gives_a_shallow_copy_a_forward_of_its_own(shallow):
    norm, x = Norm(), torch.randn(4, 48)
    report = tigon.patch(norm)
    other = shallow(norm)
    assert tigon.patch(other)
    other.eps = 0.5
    assert vars(other)["forward"].__self__ is other
    assert vars(norm)["forward"].__self__ is norm
    torch.testing.assert_close(other(x), Norm.forward(other, x))
    torch.testing.assert_close(norm(x), Norm.forward(norm, x))
    report.restore()
    assert vars(other)["forward"].recipe is not None


@pytest.mark.parametrize("shallow", [by_copy, by_dict_of_attributes, by_set_state], ids=lambda f: f.__name__)
def test_a_shallow_copy_of_a_restored_module_is_stock(shallow):
    norm, x = Norm(), torch.randn(4, 48)
    tigon.patch(norm).restore()
    other = shallow(norm)
    other.eps = 0.5
    assert torch.equal(other(x), Norm.forward(other, x))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["the module", "a child"])
def test_scripting_a_patched_module_raises_an_error_that_names_the_remedy(wrap):
    model, x = wrap(Scripted()), torch.randn(4, 48)
    report = tigon.patch(model)
    assert report
    with pytest.raises(AttributeError, match=r"call report\.restore\(\) first"):
        torch.jit.script(model)
    report.restore()
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
