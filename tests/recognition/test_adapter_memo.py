"""A layer with adapters recalls an earlier run only while nothing that its forward reads has changed."""

import copy
import functools
import gc
import importlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tigon
from tigon.ops.adapters.lora import eager_output
from tigon.ops.adapters.projection import Projection
from tigon.recognition.parts import adapter_memo
from tigon.recognition.parts.adapters import AdapterRecipe
from tigon.recognition.replacement import installed_recipe
from tigon.runtime.state import reach

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")

INPUTS, OUTPUTS, RANK = 24, 32, 4
X = torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(3))


class Adapted(nn.Module):
    """A frozen linear layer and a dict of adapters, of which some are active."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scaling, self.active = nn.Linear(INPUTS, OUTPUTS), {"first": 2.0, "second": 0.5}, ["first"]
        self.in_features, self.out_features = INPUTS, OUTPUTS
        self.dropout = nn.Dropout(0.0)
        self.a = nn.ModuleDict({name: nn.Linear(INPUTS, RANK, bias=False) for name in self.scaling})
        self.b = nn.ModuleDict({name: nn.Linear(RANK, OUTPUTS, bias=False) for name in self.scaling})
        self.base.requires_grad_(False)

    def scale(self, name: str) -> float:
        return self.scaling[name] * self.factor

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for name in self.active:
            hidden = self.a[name](self.dropout(x.to(self.a[name].weight.dtype)))
            result = result + self.b[name](hidden) * self.scale(name)
        return result.to(x.dtype)


def make(cls: type = Adapted) -> Any:
    torch.manual_seed(0)
    layer = cls()
    tigon.patch(nn.Sequential(layer))
    assert isinstance(installed_recipe(layer), AdapterRecipe)
    return layer


def make_peft(**options: Any) -> Any:
    """Return one layer of PEFT with the adapters "default" and "second"."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    config = peft.LoraConfig(**({"r": RANK, "target_modules": ["0"], "init_lora_weights": False} | options))
    model = peft.get_peft_model(model, config)
    model.add_adapter("second", config)
    tigon.patch(model)
    return model.base_model.model[0]


def recall(layer: Any, x: Tensor = X) -> Any:
    return installed_recipe(layer).recall(layer, x)


def call(layer: Any, x: Tensor = X) -> Tensor:
    """Return the output of a layer as its recipe computes it where kernels run, by the references of the ops."""
    torch.manual_seed(1)
    linear = installed_recipe(layer).read(layer, x)
    return eager_output(x, linear) if isinstance(linear, Projection) else type(layer).forward(layer, x)


def call_stock(layer: Any, x: Tensor = X) -> Tensor:
    torch.manual_seed(1)
    return type(layer).forward(layer, x)


def warm_up(layer: Any, x: Tensor = X) -> None:
    for _ in range(adapter_memo.RUNS_BEFORE_EXPLORATION + 2):
        call(layer, x)
    assert recall(layer, x) is not None


def assert_stock(layer: Any, x: Tensor = X) -> None:
    torch.testing.assert_close(call(layer, x), call_stock(layer, x), rtol=1e-5, atol=1e-5)


# --- changes ---------------------------------------------------------------------------------------


def replace_weight(layer: Any) -> None:
    layer.a["first"].weight = nn.Parameter(torch.randn(RANK, INPUTS))


def replace_data(layer: Any) -> None:
    """Give the parameters of an adapter another rank. They are the same objects."""
    layer.a["first"].weight.data, layer.b["first"].weight.data = torch.randn(7, INPUTS), torch.randn(OUTPUTS, 7)


def exchange_code(layer: Any) -> None:
    def scale(self: Any, name: str) -> float:
        return 9.0

    layer.scale.__func__.__code__ = scale.__code__


CHANGES: dict[str, Callable[[Any], object]] = {
    "an element": lambda layer: layer.active.append("second"),
    "an entry": lambda layer: layer.scaling.update(first=-0.25),
    "an attribute": lambda layer: setattr(layer, "active", ["second"]),
    "an attribute that hides one of the class": lambda layer: setattr(layer, "factor", 3.0),
    "a method of the instance": lambda layer: setattr(layer, "scale", lambda name: 5.0),
    "an attribute of the class": lambda layer: setattr(type(layer), "factor", 4.0),
    "a method of the class": lambda layer: setattr(type(layer), "scale", lambda self, name: 6.0),
    "the forward of the class": lambda layer: setattr(type(layer), "forward", lambda self, x: self.base(x) * 7.0),
    "the code of a method": exchange_code,
    "a child": lambda layer: setattr(layer, "base", nn.Linear(INPUTS, OUTPUTS)),
    "a child of a dict": lambda layer: layer.b.update({"first": nn.Linear(RANK, OUTPUTS)}),
    "a child of another class": lambda layer: setattr(layer, "base", nn.Sequential(layer.base, nn.Tanh())),
    "a child without tensors": lambda layer: setattr(layer, "dropout", nn.Tanh()),
    "the class of a child": lambda layer: setattr(layer.base, "__class__", Doubled),
    "a setting of torch's child": lambda layer: setattr(layer.dropout, "p", 0.5),
    "a hook": lambda layer: layer.b["first"].register_forward_hook(lambda m, args, output: output * 3),
    "a hook before a forward": lambda layer: layer.base.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "a hook of a child without tensors": lambda layer: layer.dropout.register_forward_hook(lambda m, a, y: y * 3),
    "a forward of a child": lambda layer: setattr(layer.a["first"], "forward", lambda x: x[..., :RANK] * 2),
    "a call of a child": lambda layer: setattr(layer.base, "_call_impl", lambda x: x.new_ones(2, 5, OUTPUTS)),
    "a parameter": replace_weight,
    "the data of parameters": replace_data,
}  # fmt: skip


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_at_the_next_call(change):
    layer = make(type("Adapted", (Adapted,), {name: copy_of(vars(Adapted)[name]) for name in ("forward", "scale")}))
    warm_up(layer)
    before = call(layer)
    CHANGES[change](layer)
    assert recall(layer) is None
    assert_stock(layer)
    assert (call(layer) - before).abs().max() > 0.05
    for _ in range(8):
        assert_stock(layer)


def copy_of(function: Any) -> Any:
    """Return a function that a test may change."""
    return type(function)(function.__code__, function.__globals__, function.__name__)


PEFT_CHANGES: list[tuple[str, Callable[[Any], object]]] = [
    ("disable", lambda layer: layer.enable_adapters(False)),
    ("enable", lambda layer: layer.enable_adapters(True)),
    ("another adapter", lambda layer: layer.set_adapter("second")),
    ("both adapters", lambda layer: layer.set_adapter(["default", "second"])),
    ("scale", lambda layer: layer.scale_layer(0.5)),
    ("scaling", lambda layer: layer.scaling.update(second=-2.0)),
    ("one adapter", lambda layer: layer.set_adapter("default")),
    ("merge", lambda layer: layer.merge()),
    ("unmerge", lambda layer: layer.unmerge()),
    ("evaluation", lambda layer: layer.eval()),
    ("training", lambda layer: layer.train()),
    ("dropout", lambda layer: setattr(layer.lora_dropout["default"], "p", 0.25)),
    ("no cast", lambda layer: setattr(layer, "cast_input_dtype_enabled", False)),
    ("delete", lambda layer: layer.delete_adapter("default")),
]


def test_changes_of_a_layer_of_peft_apply_at_the_next_call():
    layer = make_peft(lora_dropout=0.5)
    warm_up(layer)
    recalls = 0
    # In the second round, the layer recalls some of the states of the first one.
    for name, change in PEFT_CHANGES[:-1] + PEFT_CHANGES:
        change(layer)
        for _ in range(6):
            recalls += recall(layer) is not None
            assert_stock(layer), name
    assert recalls > 20


def test_a_trained_weight_gets_its_gradient_at_the_next_call():
    layer = make()
    warm_up(layer)
    layer.base.weight.requires_grad_(True)
    layer.a["first"].weight.requires_grad_(False)
    call(layer).sum().backward()
    assert layer.base.weight.grad is not None
    assert layer.a["first"].weight.grad is None


def test_the_dtypes_the_width_of_the_input_and_the_modes_count():
    layer = make()
    warm_up(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert recall(layer) is None
        assert_stock(layer)
    with torch.no_grad():
        assert recall(layer) is None
    assert recall(layer, X.double()) is None
    assert recall(layer, X[..., :12]) is None
    assert recall(layer, X[:1, :3]) is not None
    layer.a.bfloat16()
    assert recall(layer) is None
    with pytest.raises(RuntimeError, match="dtype"):
        call(layer)


def test_functions_of_torch_that_are_replaced_run(monkeypatch):
    layer = make()
    warm_up(layer)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: linear(*args) * 2)
    assert recall(layer) is None
    monkeypatch.undo()
    dropout = F.dropout
    monkeypatch.setattr(F, "dropout", lambda *args: dropout(*args) * 2)
    assert recall(layer) is None


def test_a_function_mode_sees_the_functions_of_the_forward():
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch._C._nn.linear else result

    layer = make()
    warm_up(layer)
    with Doubling():
        assert recall(layer) is None


# --- forwards that always run ----------------------------------------------------------------------

COUNTS: list[int] = []


class Counts(Adapted):
    def scale(self, name: str) -> float:
        COUNTS.append(1)
        return super().scale(name)


class StoresAnAttribute(Adapted):
    def scale(self, name: str) -> float:
        self.last = name
        return super().scale(name)


class RunsUnknownCode(Adapted):
    """The search for reachable state does not find the function that it calls."""

    def scale(self, name: str) -> float:
        return importlib.import_module(__name__).scale_elsewhere()


SETTINGS = {"scale": 2.0}


@functools.cache
def cached_scale() -> float:
    return SETTINGS["scale"]


class Owner:
    def scale(self) -> float:
        return SETTINGS["scale"]


cached_method = functools.lru_cache(Owner().scale)


class ReadsCache(Adapted):
    def scale(self, name: str) -> float:
        return cached_scale()


class ReadsCachedMethod(Adapted):
    def scale(self, name: str) -> float:
        return cached_method()


class ReadsFlag(Adapted):
    def scale(self, name: str) -> float:
        return 3.0 if torch.backends.cudnn.benchmark else 2.0


class ReadsFlagOfDynamo(Adapted):
    def scale(self, name: str) -> float:
        return float(torch._dynamo.config.recompile_limit)


class ReadsFlagOfAnAttribute(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.backend = torch.backends.mkldnn

    def scale(self, name: str) -> float:
        return 3.0 if self.backend.enabled else 2.0


def scale_elsewhere() -> float:
    return float(len(COUNTS) + 1)


class CountsInAnAttribute(Adapted):
    calls = 0

    def scale(self, name: str) -> float:
        self.calls += 1
        return super().scale(name)


class ReadsValues(Adapted):
    def scale(self, name: str) -> float:
        return 3.0 if self.b[name].weight[0, 0] > 100 else 1.0


class ReadsGradient(Adapted):
    def scale(self, name: str) -> float:
        return 3.0 if self.b[name].weight.grad is not None else 1.0


class ReadsAttributeOfWeight(Adapted):
    def scale(self, name: str) -> float:
        return getattr(self.b[name].weight, "own_scale", 1.0)


class ReadsShape(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if x.shape[1] > 3 else 2.0
        return (self.base(x) + self.b["first"](self.a["first"](x.to(self.a["first"].weight.dtype))) * factor).to(
            x.dtype
        )


class DrawsNumber(Adapted):
    def scale(self, name: str) -> float:
        return random.choice([1.0, 1.0])


class ReadsMode(Adapted):
    def scale(self, name: str) -> float:
        return float(torch.get_default_dtype().is_floating_point)


class Prints(Adapted):
    def scale(self, name: str) -> float:
        print("scale")
        return 1.0


OTHERS = [Counts, CountsInAnAttribute, StoresAnAttribute, RunsUnknownCode, ReadsValues, ReadsGradient, ReadsShape]
OTHERS += [DrawsNumber, ReadsMode, Prints, ReadsCache, ReadsCachedMethod, ReadsFlag]
OTHERS += [ReadsFlagOfDynamo, ReadsFlagOfAnAttribute]


@pytest.mark.parametrize("cls", OTHERS)
def test_a_forward_that_does_more_than_read_its_settings_runs_at_every_call(cls):
    layer = make(cls)
    for _ in range(12):
        call(layer)
        assert recall(layer) is None


class ReadsNames(Adapted):
    """It reads a global and attributes of Python modules that may be missing."""

    def scale(self, name: str) -> float:
        try:
            return GAIN  # type: ignore[name-defined]
        except NameError:
            return max(1.0, 2.0) * getattr(torch, "gain", 1.0) * getattr(peft, "gain", 1.0)


@pytest.mark.parametrize(
    ("names", "name", "value"),
    [
        (globals(), "GAIN", 9.0),
        (globals(), "max", min),
        (vars(torch), "gain", 3.0),
        (vars(peft), "gain", 3.0),
    ],
    ids=["a global", "a builtin", "an attribute of torch", "an attribute of PEFT"],
)
def test_a_name_that_appears_is_used(monkeypatch, names, name, value):
    layer = make(ReadsNames)
    warm_up(layer)
    monkeypatch.setitem(names, name, value)
    assert recall(layer) is None
    assert_stock(layer)


def test_a_cache_in_a_decorator_of_torch_is_found():
    decorated = torch.no_grad()(cached_scale)

    def function() -> float:
        return decorated()

    assert "a cache" in reach.explore(function, executed=frozenset((function.__code__,))).unwatchable[0]


def test_the_code_of_a_counting_forward_runs_at_every_call():
    layer = make(Counts)
    COUNTS.clear()
    for _ in range(12):
        installed_recipe(layer).read(layer, X)
    assert len(COUNTS) == 12


class Consumes(Adapted):
    def scale(self, name: str) -> float:
        if PENDING:
            PENDING.pop()
        return super().scale(name)


PENDING: list[str] = []


def test_a_forward_that_consumes_an_element_runs_in_a_state_that_it_has_seen():
    layer = make(Consumes)
    # The fourth run leaves the state in which the fifth run begins.
    for state in (["a"], ["a"], ["a"], ["a", "a"], ["a"], ["a"], ["a"]):
        PENDING[:] = state
        call(layer)
        assert len(PENDING) == len(state) - 1


class UsesAll(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for name in self.a:
            result = result + self.b[name](self.a[name](x.to(self.a[name].weight.dtype)))
        return result.to(x.dtype)


def test_another_adapter_in_a_dict_is_used():
    layer = make(UsesAll)
    warm_up(layer)
    layer.a["third"], layer.b["third"] = nn.Linear(INPUTS, RANK, bias=False), nn.Linear(RANK, OUTPUTS, bias=False)
    assert recall(layer) is None
    assert_stock(layer)


def test_an_attribute_of_a_weight_counts():
    layer = make(ReadsAttributeOfWeight)
    warm_up(layer)
    for value in (4.0, 5.0):
        layer.b["first"].weight.own_scale = value
        for _ in range(8):
            assert_stock(layer)


def test_the_first_states_of_a_layer_are_remembered_and_no_more(monkeypatch):
    """A layer whose state changes again and again does not read its code again and again."""
    explorations, explore = [], adapter_memo.explore
    monkeypatch.setattr(adapter_memo, "explore", lambda *a, **options: explorations.append(1) or explore(*a, **options))
    layer = make()
    for i in range(30):
        layer.scaling["first"] = 0.5 + i
        for _ in range(6):
            assert_stock(layer)
    assert len(explorations) == adapter_memo.MOST_EXPLORATIONS
    assert len(layer.__dict__["forward"].memo.entries) <= adapter_memo.MOST_ENTRIES


# --- the memo and its surroundings -----------------------------------------------------------------


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_layer_and_its_removed_adapters_are_freed(without_collector):
    layer = make_peft()
    warm_up(layer)
    removed = weakref.ref(layer.lora_A["second"].weight), weakref.ref(layer.lora_A["default"].weight)
    layer.set_adapter("second")
    layer.delete_adapter("default")
    call(layer)
    assert removed[0]() is not None
    layer_ref = weakref.ref(layer)
    del layer
    assert layer_ref() is None
    assert removed[0]() is removed[1]() is None


def test_a_replaced_base_layer_and_a_deleted_adapter_are_freed_at_the_next_call(without_collector):
    layer, adapted = make(), make_peft()
    warm_up(layer)
    warm_up(adapted)
    removed = weakref.ref(layer.base.weight), weakref.ref(adapted.lora_A["default"].weight)
    layer.base = nn.Linear(INPUTS, OUTPUTS)
    adapted.set_adapter("second")
    adapted.delete_adapter("default")
    call(layer)
    call(adapted)
    assert removed[0]() is removed[1]() is None


def test_an_observed_run_that_differs_forgets_its_own_state_only(monkeypatch):
    layer, first, second = make(), ["first"], ["second"]
    for layer.active in (first, second):
        for _ in range(adapter_memo.RUNS_BEFORE_EXPLORATION + 1):
            call(layer)
    memo = layer.__dict__["forward"].memo
    remaining = memo.entries[0]
    assert len(memo.entries) == 2
    layer.active = first
    # A destructor, for example, may run code in an observed run.
    record = AdapterRecipe.record
    monkeypatch.setattr(AdapterRecipe, "record", lambda *args: run_code() or record(*args))
    assert_stock(layer)
    assert memo.entries == [remaining]


def run_code() -> None:
    """Stand for code that runs by accident."""


def test_a_state_that_another_thread_has_forgotten_raises_no_error(monkeypatch):
    layer = make()
    for _ in range(adapter_memo.RUNS_BEFORE_EXPLORATION + 1):
        call(layer)
    memo, record = layer.__dict__["forward"].memo, AdapterRecipe.record
    assert len(memo.entries) == 1

    def record_with_another_thread(*args: Any) -> Any:
        run_code()
        memo.entries = []
        return record(*args)

    monkeypatch.setattr(AdapterRecipe, "record", record_with_another_thread)
    assert_stock(layer)


def test_the_second_layer_of_a_class_is_searched_in_one_pass(monkeypatch):
    passes, run = [], reach._Search.run
    monkeypatch.setattr(reach._Search, "run", lambda search: passes.append(search.module) or run(search))
    cls = type("Adapted", (Adapted,), {})
    layers = make(cls), make(cls)
    for layer in layers:
        passes.clear()
        warm_up(layer)
    assert len(passes) == 1
    layers[1].scaling["first"] = 3.0
    assert_stock(layers[1])


def test_a_copy_computes_with_its_own_tensors():
    layer = make()
    warm_up(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.b["first"].weight.mul_(3)
    assert_stock(twin)
    warm_up(twin)
    assert_stock(twin)
    assert_stock(layer)


def test_a_profiler_stays_and_nothing_is_learnt_under_it():
    layer, events = make(), []
    profiler = lambda *args: events.append(1)
    sys.setprofile(profiler)
    try:
        for _ in range(12):
            call(layer)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert recall(layer) is None
    warm_up(layer)
    assert sys.getprofile() is None
