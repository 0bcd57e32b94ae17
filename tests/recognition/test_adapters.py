"""Layers with low-rank adapters of any class are recognised, and every call computes what their own code computes."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import tigon
from op_cases import DEVICE, assert_as_accurate_as_eager
from tigon.ops.adapters import lora, lora_mlp
from tigon.recognition.parts.adapter_memo import RUNS_BEFORE_EXPLORATION
from tigon.recognition.parts.adapters import AdapterRecipe, recognise_adapters
from tigon.recognition.parts.dequantisation import DequantisationConfig, WeightReader
from tigon.recognition.replacement import find_replacement
from tigon.runtime.device import runs_kernels
from tigon.runtime.tuning import tuned

INPUTS, OUTPUTS, RANK = 48, 64, 4


class Adapted(nn.Module):
    """A frozen linear layer and a dict of adapters, of which some are active."""

    def __init__(self, base: nn.Module, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.base, self.scaling, self.active = base, {"first": 2.0, "second": 0.5}, ["first"]
        self.in_features, self.out_features = base.in_features, base.out_features
        self.dropout = nn.Dropout(dropout)
        self.a = nn.ModuleDict({name: nn.Linear(base.in_features, RANK, bias=False) for name in self.scaling})
        self.b = nn.ModuleDict({name: nn.Linear(RANK, base.out_features, bias=bias) for name in self.scaling})
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for name in self.active:
            hidden = self.a[name](self.dropout(x.to(self.a[name].weight.dtype)))
            result = result + self.b[name](hidden) * self.scaling[name]
        return result.to(x.dtype)


class OwnWeight(nn.Module):
    """A module that has the base weight itself, and an adapter. The scaling is the left factor of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS) * INPUTS**-0.5, requires_grad=False)
        self.dropout, self.alpha = nn.Identity(), 16
        self.a, self.b = nn.Linear(INPUTS, RANK, bias=False), nn.Linear(RANK, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + (self.alpha / RANK) * self.b(self.a(self.dropout(x)))


def make_adapted(**options: Any) -> Adapted:
    return Adapted(nn.Linear(INPUTS, OUTPUTS), **options)


def to_dtypes(layer: nn.Module, base: torch.dtype = torch.bfloat16, other: torch.dtype = torch.float32) -> nn.Module:
    """Return the layer with large weights in one dtype and adapters in another one."""
    layer.to(DEVICE, other)
    (layer.base if hasattr(layer, "base") else layer).to(base)
    return layer


def input_for(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 5, layer.a.in_features if isinstance(layer, OwnWeight) else layer.in_features,
                       generator=generator).to(DEVICE, dtype)  # fmt: skip


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of all parameters that are trained."""
    leaves = [x.detach().clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    torch.manual_seed(1)
    y = layer(leaves[0])
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)]


def assert_same(layer: nn.Module, stock: nn.Module, x: Tensor) -> None:
    """Assert that two layers agree up to rounding."""
    for a, b in zip(results(layer, x), results(stock, x), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def assert_accurate(layer: nn.Module, stock: nn.Module, x: Tensor) -> None:
    """Assert that a layer is as accurate as a stock layer, in its output and in the gradients that it computes."""
    used = [f".{name}." for name in layer.active]
    names = [n for n, p in layer.named_parameters() if n.startswith("base") or any(each in n for each in used)]
    parameters = [layer.get_parameter(name) for name in names]
    run = lambda module: lambda x, *values: torch.func.functional_call(module, dict(zip(names, values, strict=True)), x)
    assert_as_accurate_as_eager(run(layer), run(stock), [x.requires_grad_(), *parameters])


def spy_on(monkeypatch: pytest.MonkeyPatch, node: type) -> list[int]:
    """Return a list that grows by one at each call of an autograd node."""
    calls: list[int] = []
    apply = node.apply
    monkeypatch.setattr(node, "apply", staticmethod(lambda *args: (calls.append(1), apply(*args))[1]))
    return calls


# --- what is recognised ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [make_adapted, lambda: make_adapted(dropout=0.3), lambda: make_adapted(bias=True), OwnWeight],
    ids=["dict", "dropout", "bias", "own weight"],
)
def test_layers_with_adapters_are_recognised(make):
    layer = make()
    before = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    assert isinstance(recognise_adapters(layer), AdapterRecipe)
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), before[0].values(), strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])


class WithReLU(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b["first"](torch.relu(self.a["first"](x)))


class Residual(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b["first"](self.a["first"](x)) + 1


class Twice(Adapted):
    """The input of the adapter is the output of the base layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b["first"](self.a["first"](self.base(x)[..., :INPUTS]))


class KeepsResult(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x) + self.b["first"](self.a["first"](x))
        self.last = result
        return result


class CatchesErrors(Adapted):
    """It catches the exception of a run without values."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            largest = float(x.max())
        except Exception:
            largest = 0.0
        return self.base(x) + self.b["first"](self.a["first"](x)) * (1.0 + (largest > 1.0))


class InPlace(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x) + self.b["first"](self.a["first"](x))
        x *= 0
        return result


class OtherByType(Adapted):
    """It computes something else for a tensor of another type than torch's."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 3.0 if type(x) is Tensor else 1.0
        return self.base(x) + self.b["first"](self.a["first"](x)) * factor


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 0.1


class CallsFunction(Adapted):
    """It passes its input to C++ code, which would read a `Deferred` as the memory of a tensor and crash."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b["first"](self.a["first"](ScaledGradient.apply(x)))


class Counts(Adapted):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


OTHERS = [WithReLU, Residual, Twice, KeepsResult, CatchesErrors, InPlace, OtherByType, CallsFunction, Counts]


@pytest.mark.parametrize("cls", OTHERS)
def test_other_layers_are_left_alone_with_a_reason(cls):
    layer = cls(nn.Linear(INPUTS, OUTPUTS))
    reason = recognise_adapters(layer)
    assert isinstance(reason, str)
    assert "layer with low-rank adapters" in reason
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = tigon.patch(nn.Sequential(layer))
    (entry,) = report.left_alone
    assert entry.part == "adapters"
    assert find_replacement(layer) is None


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Sequential(nn.Linear(8, 8))])
def test_other_modules_are_no_layers_with_adapters(module):
    assert recognise_adapters(module) is None


def test_hooks_on_children_keep_the_forward():
    layer = make_adapted()
    layer.a["first"].register_forward_hook(lambda module, args, output: output * 2)
    assert recognise_adapters(layer) == "has hooks on its children, or their call or forward was replaced"


# --- what a patched layer computes -------------------------------------------------------------------


@pytest.fixture(params=["bf16-fp32", "bf16", "fp16-fp32"])
def dtypes(request) -> tuple[torch.dtype, torch.dtype]:
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    base, *other = request.param.split("-")
    return kinds[base], kinds[other[0] if other else base]


@pytest.mark.kernels
@pytest.mark.parametrize("active", [["first"], ["second", "first"]], ids=["one", "two"])
def test_an_op_computes_the_layer_as_accurately_as_its_own_code(dtypes, active, monkeypatch):
    calls = spy_on(monkeypatch, lora._LoRALinears)
    layer = to_dtypes(make_adapted(bias=True), *dtypes)
    layer.active = active
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    assert_accurate(layer, stock, input_for(layer, dtypes[0]))
    assert calls


CHANGES: dict[str, Callable[[Any], object]] = {
    "none are active": lambda layer: layer.active.clear(),
    "another is active": lambda layer: setattr(layer, "active", ["second"]),
    "two are active": lambda layer: layer.active.append("second"),
    "scaling": lambda layer: layer.scaling.update(first=-0.25),
    "adapters are cast": lambda layer: layer.a.to(torch.bfloat16) and layer.b.to(torch.bfloat16),
    "another base": lambda layer: setattr(layer, "base", to_dtypes(nn.Linear(INPUTS, OUTPUTS))),
    "another class of base": lambda layer: setattr(layer, "base", nn.Sequential(layer.base, nn.Tanh())),
    "a hook of a child": lambda layer: layer.b["first"].register_forward_hook(lambda m, args, output: output * 3),
    "a hook of the base": lambda layer: layer.base.register_forward_hook(lambda m, args, output: output * 3),
    "a forward of a child": lambda layer: setattr(layer.a["first"], "forward", lambda x: x[..., :RANK].float() * 2),
    "an activation": lambda layer: layer.b.update({"first": nn.Sequential(layer.b["first"], nn.Tanh())}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_patch_applies_at_the_next_call(change):
    torch.manual_seed(0)
    layer = to_dtypes(make_adapted())
    stock, x = copy.deepcopy(layer), input_for(layer)
    tigon.patch(layer)
    assert_same(layer, stock, x)
    # The layer recalls what its forward has computed in earlier calls (`recognition.adapter_memo`).
    for _ in range(RUNS_BEFORE_EXPLORATION + 2):
        before = layer(x)
    assert (find_replacement(layer).recipe.recall(layer, x) is not None) == runs_kernels(x)
    for each in (layer, stock):
        torch.manual_seed(2)
        CHANGES[change](each)
    assert_same(layer, stock, x)
    if change != "adapters are cast":
        assert (layer(x) - before).abs().max() > 0.1 * before.abs().max()


def mark(x: Any) -> None:
    with contextlib.suppress(AttributeError):
        x.tag = 1


class Switching(Adapted):
    """It computes something else, or does more, after its mode has changed."""

    mode = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode != "no gradients of the base"):
            result = self.base(x)
        dropped = self.dropout(x.to(self.a["first"].weight.dtype))
        if self.mode == "function":
            dropped = ScaledGradient.apply(dropped)
        if self.mode == "checkpoint":
            dropped = torch.utils.checkpoint.checkpoint(torch.tanh, dropped, use_reentrant=False)
        if self.mode == "text":
            self.log.append(f"{dropped}")
        if self.mode == "copy":
            self.log.append(type(copy.copy(dropped)))
        if self.mode == "attribute":
            mark(dropped)
        if self.mode == "except":
            try:
                dropped.abs()
            except Exception:
                self.log.append("failed")
        with torch.autocast(x.device.type, torch.float16, enabled=self.mode == "autocast"):
            for name in self.active:
                result = result + (self.b[name](self.a[name](dropped)) * self.scaling[name]).to(x.dtype)
        return result


MODES = "no gradients of the base", "function", "checkpoint", "text", "copy", "attribute", "except", "autocast"


@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_changes_after_the_patch_counts(mode):
    layer = to_dtypes(Switching(nn.Linear(INPUTS, OUTPUTS)))
    stock = copy.deepcopy(layer)
    assert tigon.patch(layer)
    layer.mode = stock.mode = mode
    assert_same(layer, stock, input_for(layer))
    assert [type(value) for value in layer.log] == [type(value) for value in stock.log]
    assert "Deferred" not in str(layer.log)


@pytest.mark.kernels
def test_adapters_that_share_a_dropout_share_its_mask():
    layer = to_dtypes(Switching(nn.Linear(INPUTS, OUTPUTS), dropout=0.5))
    with torch.no_grad():
        layer.base.weight.zero_()
        layer.base.bias.zero_()
        layer.a["second"].weight.copy_(-layer.a["first"].weight)
        layer.b["second"].weight.copy_(layer.b["first"].weight)
    tigon.patch(layer)
    layer.active, layer.scaling = ["first", "second"], {"first": 1.0, "second": 1.0}
    assert layer(input_for(layer)).abs().max() == 0


@pytest.mark.parametrize("case", ["no tokens", "a vector", "another autocast", "no active adapter"])
def test_the_code_of_a_layer_runs_once_in_a_call_that_no_op_takes(case):
    layer = to_dtypes(make_adapted())
    stock, x = copy.deepcopy(layer), input_for(layer)
    tigon.patch(layer)
    runs: list[int] = []

    class Active(list):
        def __iter__(self) -> Any:
            runs.append(1)
            return super().__iter__()

    x = {"no tokens": x[:0], "a vector": x[0, 0]}.get(case, x)
    layer.active = Active([] if case == "no active adapter" else ["first"])
    stock.active = list(layer.active)
    runs.clear()
    with torch.autocast(torch.device(DEVICE).type, torch.float16, enabled=case == "another autocast"):
        y, expected = layer(x), stock(x)
    assert len(runs) == 1
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


class Doubled(nn.Parameter):
    """A weight whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["base", "a.first", "b.first"])
def test_a_weight_of_another_class_computes_its_own_product(name):
    layer = to_dtypes(make_adapted())
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    for each in (layer, stock):
        owner = each.get_submodule(name)
        owner._parameters["weight"] = torch.Tensor._make_subclass(Doubled, owner.weight.detach())
    x = input_for(layer)
    expected = stock(x)
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.kernels
def test_a_bias_that_is_broadcast_is_left_to_torch():
    layer = to_dtypes(make_adapted(bias=True))
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    for each in (layer, stock):
        each.b["first"].bias = nn.Parameter(torch.full((1,), 3.0, device=DEVICE))
    x = input_for(layer)[0]
    torch.testing.assert_close(layer(x), stock(x), rtol=2e-2, atol=5e-2)


@pytest.mark.kernels
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_of_torch_func_run_stock(transform):
    layer = to_dtypes(make_adapted(), torch.float16, torch.float16)
    stock, x = copy.deepcopy(layer), input_for(layer, torch.float16)
    tigon.patch(layer)
    run = {
        "grad": lambda layer: torch.func.grad(lambda x: layer(x).float().sum())(x),
        "vmap": lambda layer: torch.func.vmap(layer)(x),
        "jvp": lambda layer: torch.func.jvp(layer, (x,), (x,))[1],
    }[transform]
    torch.testing.assert_close(run(layer), run(stock), rtol=0, atol=0)


@pytest.mark.kernels
def test_an_input_of_inference_mode_trains_fp32_adapters():
    """Eager code saves a copy of the input in fp32, which is no inference tensor."""
    layer = to_dtypes(make_adapted())
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    with torch.inference_mode():
        x = input_for(layer).clone()
    for each in (layer, stock):
        each(x).float().sum().backward()
    torch.testing.assert_close(layer.a["first"].weight.grad, stock.a["first"].weight.grad)


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        y = self.fc(h)
        h += 1
        return y + h


def test_an_input_that_is_overwritten_afterwards_keeps_the_forward():
    """Eager code saves a copy of the input in fp32, and the op would save the input itself."""
    model = with_adapters(Overwrites(), ("fc",))
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(model).left_alone
    assert "changed in place" in entry.detail
    model(torch.randn(2, 6, 32).to(DEVICE, torch.bfloat16)).float().sum().backward()


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_projection_of_an_mlp_may_become_any_module(name):
    model = MLP().to(DEVICE, torch.bfloat16)
    stock = copy.deepcopy(model)
    tigon.patch(model)
    for each in (model, stock):
        setattr(each, name, nn.Sequential(getattr(each, name), nn.Tanh()))
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)


@pytest.mark.kernels
def test_a_projection_may_become_a_builtin_function():
    model = Heads().to(DEVICE, torch.bfloat16)
    stock = copy.deepcopy(model)
    tigon.patch(model)
    for each in (model, stock):
        del each.q_proj
        object.__setattr__(each, "q_proj", torch.relu)
    x = torch.randn(2, 6, 32).to(DEVICE, torch.bfloat16)
    torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)


def test_global_hooks_see_the_calls_of_children(monkeypatch):
    layer = to_dtypes(make_adapted())
    tigon.patch(layer)
    called_classes: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: called_classes.append(type(module).__name__)
    )
    try:
        layer(input_for(layer))
    finally:
        hook.remove()
    assert called_classes.count("Linear") == 3


def test_errors_are_those_of_the_layer():
    layer = to_dtypes(make_adapted())
    tigon.patch(layer)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        layer(torch.zeros(3, INPUTS + 1, device=DEVICE, dtype=torch.bfloat16))


def test_restore_gives_the_forward_back():
    layer = to_dtypes(Adapted(Quantised(INPUTS, OUTPUTS)))
    before = dict(vars(layer)), dict(vars(layer.base))
    report = tigon.patch(layer)
    assert vars(layer) != before[0]
    report.restore()
    assert (vars(layer), vars(layer.base)) == before


@pytest.mark.kernels
def test_dropout_draws_one_mask_for_forward_and_backward():
    """The gradient of A is that of the mask which the output shows, also in a checkpointed region."""
    layer = to_dtypes(make_adapted(dropout=0.5))
    tigon.patch(layer)
    layer.base.weight.data.zero_()
    layer.base.bias.data.zero_()
    x = input_for(layer)

    def run(checkpointed: bool) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(), layer.a["first"].weight]
        torch.manual_seed(4)
        call = lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y = call(leaves[0])
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    plain, repeated = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))
    y, dx, _ = plain
    # The layer is linear in x, so the product of x and dx, the gradient of the sum of y^2, is twice this sum. This
    # holds only if backward uses the dropout mask of forward.
    torch.testing.assert_close((x.float() * dx.float()).sum(), 2 * y.float().square().sum(), rtol=2e-2, atol=0.0)


# --- layers whose product only their own code computes -------------------------------------------------


class Quantised(nn.Module):
    """A layer with weights of 8 bits and a factor, frozen."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("codes", torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * (x.new_tensor(0.01) / 127 * 12)
        return x @ weight.t()


@pytest.mark.kernels
def test_adapters_are_added_to_the_output_of_a_quantised_layer(monkeypatch):
    calls = spy_on(monkeypatch, lora._AddAdapters)
    torch.manual_seed(0)
    layer = to_dtypes(Adapted(Quantised(INPUTS, OUTPUTS), bias=True))
    stock = copy.deepcopy(layer)
    report = tigon.patch(layer)
    assert [entry.part for entry in report.replaced] == ["adapters"]
    assert_accurate(layer, stock, input_for(layer))
    assert calls


class Dequantisable(Quantised):
    """A quantised layer that can return its dense weight, and may multiply by another one."""

    factor = 1.0

    def dequantize(self) -> Tensor:
        return self.codes.to(torch.bfloat16) * torch.tensor(0.00094, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.dequantize().to(x.dtype) * self.factor).t()


class RoundingInput(Dequantisable):
    """A layer that rounds its input to 8 bits, as products of integers do."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        return super().forward(x + ((x / scale).round() * scale - x).detach())


class Trained(Dequantisable):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("base", "factor", "is_product"),
    [(Dequantisable, 1.0, True), (Dequantisable, 1.02, False), (RoundingInput, 1.0, False), (Trained, 1.0, False)],
)
def test_the_product_of_a_dense_weight_must_be_that_of_the_layer(monkeypatch, base, factor, is_product):
    calls = [spy_on(monkeypatch, node) for node in (lora._LoRALinears, lora._AddAdapters)]
    monkeypatch.setattr(Dequantisable, "factor", factor)
    tuning = tuned(DequantisationConfig, min_rows=1)
    torch.manual_seed(0)
    layer = to_dtypes(Adapted(base(INPUTS, OUTPUTS), bias=True))
    if base is Trained:
        layer.base.scale.requires_grad_()
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    x = input_for(layer)
    with tuning:
        # A non-reentrant checkpoint counts the tensors that a forward saves.
        y = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False)
        y.float().sum().backward()
        expected = stock(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=2**-7 * expected.abs().max().item())
        assert [bool(each) for each in calls] == [is_product, not is_product]
        # The settings of the layer count at every call.
        layer.base.factor = stock.base.factor = 3.0
        y, expected = layer(x), stock(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=2**-7 * expected.abs().max().item())


class OtherKernelForFewRows(Dequantisable):
    """A layer whose code for few rows rounds in other places, as that of bitsandbytes does on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 1.02 if x.shape[:-1].numel() <= 64 else y


@pytest.mark.kernels
@pytest.mark.parametrize("compared_rows", [64, 129])
def test_as_many_rows_are_compared_as_training_has(monkeypatch, compared_rows):
    calls = spy_on(monkeypatch, lora._LoRALinears)
    layer = to_dtypes(Adapted(OtherKernelForFewRows(INPUTS, OUTPUTS), bias=True))
    tigon.patch(layer)
    with tuned(DequantisationConfig, min_rows=1, compared_rows=compared_rows):
        layer(torch.randn(129, INPUTS, device=DEVICE).bfloat16())
    assert bool(calls) == (compared_rows == 129)


@pytest.mark.kernels
def test_a_result_without_values_does_not_hold_for_the_loaded_weight():
    reader, x = WeightReader(), torch.randn(8, INPUTS, device=DEVICE).bfloat16()
    layer = RoundingInput(INPUTS, OUTPUTS).to("meta")
    with tuned(DequantisationConfig, min_rows=1):
        # Without values, the reader cannot see that the layer rounds its input.
        assert reader.read(layer, x.to("meta")) is not None
        layer.codes = torch.randint(-127, 127, (OUTPUTS, INPUTS), dtype=torch.int8, device=DEVICE)
        assert reader.read(layer, x) is None


class ScalingInput(Dequantisable):
    """A layer that multiplies its input by a buffer, which is one until a state dict is loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("input_scale", torch.ones(inputs, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.input_scale)


@pytest.mark.kernels
@pytest.mark.parametrize("in_place", [True, False], ids=["written in place", "replaced"])
def test_a_buffer_that_changes_leads_to_another_comparison(in_place):
    reader, x = WeightReader(), torch.randn(8, INPUTS, device=DEVICE).bfloat16()
    layer = ScalingInput(INPUTS, OUTPUTS).to(DEVICE)
    with tuned(DequantisationConfig, min_rows=1):
        assert reader.read(layer, x) is not None
        if in_place:
            layer.load_state_dict(layer.state_dict() | {"input_scale": torch.full((INPUTS,), 2.0)})
        else:
            layer.input_scale = torch.full_like(layer.input_scale, 2.0)
        assert reader.read(layer, x) is None


class CountingCalls(Dequantisable):
    """A layer that writes to a buffer in each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.kernels
def test_a_layer_that_writes_to_its_buffers_is_compared_once():
    reader, x = WeightReader(), torch.randn(8, INPUTS, device=DEVICE).bfloat16()
    layer = CountingCalls(INPUTS, OUTPUTS).to(DEVICE)
    compare = mock.Mock(wraps=reader._compare)
    with tuned(DequantisationConfig, min_rows=1), mock.patch.object(reader, "_compare", compare):
        for _ in range(3):
            assert reader.read(layer, x) is None
            layer(x)
    assert compare.call_count == 1
    assert layer.calls == 3


class WithChild(Dequantisable):
    """A quantised layer with a trained child, whose output is zero at first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.child = nn.Linear(inputs, outputs, bias=False)
        nn.init.zeros_(self.child.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.child(x)


class Counting(Dequantisable):
    """A quantised layer that stores the largest input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max().float()))
        return super().forward(x)


@pytest.mark.kernels
@pytest.mark.parametrize("base", [WithChild, Counting])
def test_a_quantised_layer_with_other_state_computes_its_own_product(base):
    torch.manual_seed(0)
    layer = to_dtypes(Adapted(base(INPUTS, OUTPUTS), bias=True))
    if base is WithChild:
        layer.base.child.weight.requires_grad_()
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    x = input_for(layer)
    with tuned(DequantisationConfig, min_rows=1):
        for each in (layer, stock):
            each(x).float().square().sum().backward()
    if base is WithChild:
        expected = stock.base.child.weight.grad
        torch.testing.assert_close(
            layer.base.child.weight.grad, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
        )
    else:
        assert torch.equal(layer.base.largest, stock.base.largest)


@pytest.mark.kernels
def test_a_square_quantised_layer_with_two_adapters_is_computed_by_an_op(monkeypatch):
    calls = spy_on(monkeypatch, lora._LoRALinears)
    torch.manual_seed(0)
    layer = to_dtypes(Adapted(Dequantisable(INPUTS, INPUTS), bias=True))
    tigon.patch(layer)
    with tuned(DequantisationConfig, min_rows=1):
        layer(input_for(layer))
    assert calls


# --- several layers in one node ------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, hidden: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Heads(nn.Module):
    """Three projections of one input, as in an attention."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, size, bias=False) for size in (32, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return torch.cat((q, k, v), -1)


def with_adapters(module: nn.Module, names: tuple[str, ...], **options: Any) -> nn.Module:
    """Return a module in bf16 on the device, whose children of these names have fp32 adapters."""
    module.requires_grad_(False).to(DEVICE, torch.bfloat16)
    for name in names:
        setattr(module, name, to_dtypes(Adapted(getattr(module, name), **options)))
    return module


@pytest.mark.kernels
@pytest.mark.parametrize("memory", ["default", "lean", "lean+mlp"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("up_proj",)], ids=["all", "up"])
def test_a_gated_mlp_with_adapters_is_one_node(names, memory, monkeypatch):
    calls = spy_on(monkeypatch, lora_mlp._LoRAGLUMLP)
    torch.manual_seed(0)
    stock = nn.Sequential(with_adapters(MLP(), names))
    model = copy.deepcopy(stock)
    tigon.patch(model, memory=memory)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    assert_same(model, stock, x)
    assert calls == [1]


@pytest.mark.kernels
@pytest.mark.parametrize(("names", "options"), [
    (("q_proj", "k_proj", "v_proj"), {}), (("q_proj", "v_proj"), {}), (("q_proj", "k_proj"), {"bias": True}),
])  # fmt: skip
def test_projections_of_one_input_are_one_node(names, options, monkeypatch):
    calls = spy_on(monkeypatch, lora._LoRALinears)
    torch.manual_seed(0)
    stock = with_adapters(Heads(), names, **options)
    model = copy.deepcopy(stock)
    tigon.patch(model)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    assert_same(model, stock, x)
    assert calls == [1]


@pytest.mark.kernels
@pytest.mark.parametrize("part", ["glu", "fused_statements"])
def test_hooks_on_adapted_projections_run(part):
    """A hook of a layer with adapters sees its output, so the layer is called."""
    module = MLP() if part == "glu" else Heads()
    name = "up_proj" if part == "glu" else "k_proj"
    model = with_adapters(module, tuple(module._modules))
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    tigon.patch(model)
    expected = getattr(model, name)(x)
    outputs: list[Tensor] = []
    getattr(model, name).register_forward_hook(lambda layer, args, output: outputs.append(output))
    model(x)
    assert len(outputs) == 1
    torch.testing.assert_close(outputs[0], expected)


@pytest.mark.parametrize(("adapters", "glu"), [(True, False), (False, True), (True, True)])
def test_parts_are_independent(adapters, glu):
    report = tigon.patch(with_adapters(MLP(), ("up_proj",)), adapters=adapters, glu=glu)
    expected = ({"adapters"} if adapters else set()) | ({"glu"} if glu else set())
    assert {entry.part for entry in report.replaced} == expected
