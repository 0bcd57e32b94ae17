"""LoRA layers of PEFT are recognised by their attributes, which every call reads."""

import copy
import gc
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from recognition.lora_layers import INPUTS, OUTPUTS, RANK, make
from recognition.modules import define
from tigon.ops.adapters.lora import eager_output
from tigon.ops.adapters.projection import Projection
from tigon.recognition.parts import adapter_probes
from tigon.recognition.parts.adapters import AdapterRecipe, recognise_adapters
from tigon.recognition.replacement import find_replacement, installed_recipe

lora_layer = pytest.importorskip("peft.tuners.lora.layer")
pytestmark = pytest.mark.no_interpreter("The tests launch no kernel.")

X = torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.3}, {"lora_bias": True}], ids=["plain", "dropout", "bias"])
def test_layers_of_peft_are_recognised(options):
    layer = make(**options)
    before = copy.deepcopy(layer.state_dict()), copy.deepcopy(layer.scaling), torch.get_rng_state()
    assert isinstance(recognise_adapters(layer), AdapterRecipe)
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), before[0].values(), strict=True))
    assert layer.scaling == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


class OwnForward(lora_layer.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def as_code_of_peft(body: str) -> type:
    """Return a class whose forward could be that of another version of PEFT."""
    return type("Linear", (lora_layer.Linear,), {
        "gate": 1.0, "forward": define(body, vars(lora_layer), "self, x, *args, **kwargs", "forward"),
    })  # fmt: skip


FACTORS = "a, b = (table[self.active_adapters[0]] for table in (self.lora_A, self.lora_B))"
ReadsMore = as_code_of_peft(
    f"{FACTORS}; return self.base_layer(x) + b(a(x)) * self.scaling[self.active_adapters[0]] * self.gate"
)
Assigns = as_code_of_peft("self.last_shape = x.shape; return self.base_layer(x)")
Subtracts = as_code_of_peft("""result = self.base_layer(x)
for name in self.active_adapters:
    if name in self.lora_A: result = result - self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
return result""")
Fails = as_code_of_peft("raise RuntimeError('not today')")
OTHERS = {
    OwnForward: "its forward is not that of PEFT",
    ReadsMore: "its forward reads or assigns gate",
    Assigns: "its forward reads or assigns last_shape",
    Subtracts: "computes something else than a linear layer with low-rank adapters",
    Fails: "cannot be run by itself (RuntimeError: not today)",
}


def test_threads_compare_a_class_once(monkeypatch):
    cls = type("Linear", (lora_layer.Linear,), {"__module__": lora_layer.__name__})
    layers, learn, calls = [make() for _ in range(4)], adapter_probes._learn, []
    monkeypatch.setattr(adapter_probes, "_learn", lambda *args: calls.append(1) or learn(*args))
    for layer in layers:
        layer.__class__ = cls
    with ThreadPoolExecutor(len(layers)) as pool:
        assert all(isinstance(recipe, AdapterRecipe) for recipe in pool.map(recognise_adapters, layers))
    assert calls == [1]


@pytest.mark.parametrize("cls", OTHERS)
def test_other_forwards_are_left_alone_with_a_reason(cls):
    layer = make()
    layer.__class__ = cls
    assert OTHERS[cls] in recognise_adapters(layer)
    stock = copy.deepcopy(layer)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.Sequential(layer))
    (entry,) = report.left_alone
    assert entry.part == "adapters"
    assert find_replacement(layer) is None
    if cls is not Fails:
        assert torch.equal(layer(X), stock(X))


def test_an_adapter_of_another_kind_keeps_the_forward_while_it_is_active():
    layer = make()
    layer.lora_variant["second"] = Variant
    patched(layer)
    for active, is_read in (("first", True), ("second", False), (["first", "second"], False), ("first", True)):
        layer.set_adapter(active)
        assert (read(layer) is not None) == is_read
        assert_stock(layer)


def test_hooks_methods_and_variants_of_a_layer_are_reasons():
    for name in ("base_layer", "lora_A.first", "lora_B.second", "lora_dropout.first"):
        layer = make()
        layer.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
        assert recognise_adapters(layer) == "has hooks on its children, or their call or forward was replaced"
    layer = make()
    layer._cast_input_dtype = lambda x, dtype: x * 2
    assert recognise_adapters(layer) == f"{adapter_probes.DIFFERENT}: a method of its class was replaced on the layer"
    assert recognise_adapters(make(use_dora=True)) == f"{adapter_probes.DIFFERENT}: DoraLinearVariant"


def patched(layer: Any) -> Any:
    tigon.patch(nn.Sequential(layer))
    assert isinstance(installed_recipe(layer), AdapterRecipe)
    return layer


def read(layer: Any, x: Tensor = X) -> Any:
    return installed_recipe(layer).read(layer, x)


def call(layer: Any, x: Tensor = X) -> Tensor:
    """Return the output of a layer as its recipe computes it where kernels run, by the reference of the op."""
    torch.manual_seed(1)
    projection = read(layer, x)
    return eager_output(x, projection) if isinstance(projection, Projection) else type(layer).forward(layer, x)


def assert_stock(layer: Any, x: Tensor = X) -> None:
    actual = call(layer, x)
    torch.manual_seed(1)
    torch.testing.assert_close(actual, type(layer).forward(layer, x), rtol=1e-5, atol=1e-5)


def replace_data(layer: Any) -> None:
    """Give the parameters of an adapter another rank. They are the same objects."""
    layer.lora_A["first"].weight.data = torch.randn(7, INPUTS)
    layer.lora_B["first"].weight.data = torch.randn(OUTPUTS, 7)


def exchange_code(layer: Any) -> None:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.base_layer(x) * 9.0

    type(layer).forward.__code__ = forward.__code__


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Variant:
    @staticmethod
    def forward(layer: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        return result * 3


class Other(nn.ModuleDict):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__("second")


def assign(name: str, value: Any, of_class: bool = False) -> Callable[[Any], None]:
    """Return a change that assigns an attribute of a layer, of one of its children, or of its class."""
    child, _, attribute = name.rpartition(".")
    return lambda layer: setattr(type(layer) if of_class else layer.get_submodule(child), attribute, value)


# Each change, and whether the recipe reads the changed layer. If not, PEFT's forward runs.
CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "an active adapter": (assign("_active_adapter", "second"), True),
    "an element": (lambda layer: layer._active_adapter.append("second"), True),
    "scaling": (lambda layer: layer.scaling.update(first=-0.25), True),
    "scaling by a tensor": (lambda layer: layer.scaling.update(first=torch.tensor(-0.25)), False),
    "another kind of adapter": (lambda layer: layer.lora_variant.update(first=Variant), False),
    "a forward of the class": (assign("forward", lambda self, x: self.base_layer(x), of_class=True), False),
    "the code of the forward": (exchange_code, False),
    "a method of the class": (assign("_cast_input_dtype", lambda self, x, dtype: x * 2, of_class=True), False),
    "a method of the instance": (assign("_cast_input_dtype", lambda x, dtype: x * 2), False),
    "a property of the class": (assign("active_adapters", property(lambda self: []), of_class=True), False),
    "another base": (assign("base_layer", nn.Linear(INPUTS, OUTPUTS)), True),
    "a module as base": (assign("base_layer", nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh())), True),
    "the class of the base": (assign("base_layer.__class__", Doubled), True),
    "a child of a dict": (assign("lora_B.first", nn.Linear(RANK, OUTPUTS, bias=False)), True),
    "another dict": (assign("lora_A.__class__", Other), False),
    "an activation": (assign("lora_dropout.first", nn.Tanh()), False),
    "a dropout": (assign("lora_dropout.first", nn.Dropout(0.5)), True),
    "a hook": (lambda layer: layer.lora_B["first"].register_forward_hook(lambda m, args, y: y * 3), False),
    "a hook before a forward": (lambda layer: layer.base_layer.register_forward_pre_hook(lambda m, a: a[0] * 3), False),
    "a hook of a dropout": (lambda layer: layer.lora_dropout["first"].register_forward_hook(lambda m, a, y: -y), False),
    "a forward of a child": (assign("lora_A.first.forward", lambda x: x[..., :RANK]), False),
    "a call of a child": (assign("base_layer._call_impl", lambda x: x.new_ones(2, 5, OUTPUTS)), False),
    "a parameter": (assign("lora_A.first.weight", nn.Parameter(torch.ones(RANK, INPUTS))), True),
    "the data of parameters": (replace_data, True),
    "a broadcast bias": (assign("lora_B.first.bias", nn.Parameter(torch.full((1,), 3.0))), False),
    "a bias of A": (assign("lora_A.first.bias", nn.Parameter(torch.ones(RANK))), False),
}


def copy_of(function: Any) -> Any:
    """Return a function or a property that a test may change."""
    if isinstance(function, property):
        return property(copy_of(function.fget))
    return types.FunctionType(function.__code__, function.__globals__)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_at_the_next_call(change):
    layer = make()
    # A test may change this class.
    names = "forward", "_cast_input_dtype", "active_adapters"
    attributes = {name: copy_of(getattr(lora_layer.Linear, name)) for name in names}
    layer.__class__ = type("Linear", (lora_layer.Linear,), {"__module__": lora_layer.__name__} | attributes)
    patched(layer)
    assert_stock(layer)
    before = call(layer)
    apply, is_read = CHANGES[change]
    apply(layer)
    assert (read(layer) is not None) == is_read
    assert_stock(layer)
    assert (call(layer) - before).abs().max() > 0.05


PEFT_CHANGES: list[tuple[str, Callable[[Any], object], bool]] = [
    ("disable", lambda layer: layer.enable_adapters(False), False),
    ("enable", lambda layer: layer.enable_adapters(True), True),
    ("another adapter", lambda layer: layer.set_adapter("second"), True),
    ("both adapters", lambda layer: layer.set_adapter(["first", "second"]), True),
    ("scale", lambda layer: layer.scale_layer(0.5), True),
    ("one adapter", lambda layer: layer.set_adapter("first"), True),
    ("merge", lambda layer: layer.merge(), False),
    ("unmerge", lambda layer: layer.unmerge(), True),
    ("evaluation", lambda layer: layer.eval(), True),
    ("training", lambda layer: layer.train(), True),
    ("dropout", lambda layer: setattr(layer.lora_dropout["first"], "p", 0.25), True),
    ("no cast", lambda layer: setattr(layer, "cast_input_dtype_enabled", False), True),
    ("delete", lambda layer: layer.delete_adapter("first"), True),
]


def test_changes_by_methods_of_peft_apply_at_the_next_call():
    layer = patched(make(lora_dropout=0.5))
    for name, change, is_read in PEFT_CHANGES:
        change(layer)
        assert (read(layer) is not None) == is_read, name
        assert_stock(layer)


def test_the_dtypes_and_the_width_of_the_input_count():
    layer = patched(make())
    with torch.autocast("cpu", torch.bfloat16):
        assert read(layer) is not None
        assert read(layer, X.bfloat16()) is not None
    assert read(layer, X.double()) is None
    assert read(layer, X[..., :12]) is None
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        layer(X[..., :12])
    layer.lora_A.bfloat16()
    # torch refuses to multiply by an A in bf16 and a B in fp32.
    assert read(layer) is None
    layer.lora_B.bfloat16()
    # PEFT rounds the input to bf16.
    assert read(layer) is None
    layer.base_layer.bfloat16()
    assert read(layer, X.bfloat16()) is not None
    layer.base_layer.bias.data = layer.base_layer.bias.data.float()
    assert read(layer, X.bfloat16()) is None


@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize(("owner", "name"), [
    (F, "linear"), (F, "dropout"), (nn.Dropout, "forward"), (nn.Identity, "forward"),
])  # fmt: skip
def test_a_function_of_torch_that_is_replaced_runs(monkeypatch, owner, name, probability):
    layer = patched(make(lora_dropout=probability)).eval()
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: function(*args, **options) * 2)
    assert read(layer) is None


def test_a_layer_and_its_removed_adapters_are_freed():
    layer = patched(make())
    call(layer)
    removed = weakref.ref(layer.lora_A["first"].weight)
    gc.collect()
    gc.disable()
    try:
        layer.set_adapter("second")
        layer.delete_adapter("first")
        assert removed() is None
        reference = weakref.ref(layer)
        del layer
        assert reference() is None
    finally:
        gc.enable()
