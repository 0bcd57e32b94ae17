"""A layer with adapters runs the code of PEFT wherever the op would compute something else."""

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tigon
from op_cases import DEVICE
from recognition.lora_layers import INPUTS, OUTPUTS, adapt, input_for, make, to_dtypes
from recognition.modules import reason


def pair(*dtypes: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Return a patched and a stock layer."""
    layer = to_dtypes(make(**options), *dtypes)
    stock = copy.deepcopy(layer)
    tigon.patch(layer)
    return layer, stock


class DoubledWeight(nn.Parameter):
    """A weight whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["base_layer", "lora_A.first", "lora_B.first"])
def test_a_weight_of_another_class_computes_its_own_product(name):
    layer, stock = pair()
    for each in (layer, stock):
        owner = each.get_submodule(name)
        owner._parameters["weight"] = torch.Tensor._make_subclass(DoubledWeight, owner.weight.detach())
    expected = stock(input_for())
    torch.testing.assert_close(layer(input_for()), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.kernels
@pytest.mark.parametrize("case", ["no tokens", "a vector", "another autocast", "no active adapter"])
def test_a_call_that_no_op_takes_runs_the_code_of_the_layer(case):
    layer = to_dtypes(make())
    if case == "no active adapter":
        layer._active_adapter = ["third"]
    stock, x = copy.deepcopy(layer), input_for()
    tigon.patch(layer)
    x = {"no tokens": x[:0], "a vector": x[0, 0]}.get(case, x)
    with pytest.raises(RuntimeError), torch.no_grad():
        layer(x.new_ones(()))
    with torch.autocast(torch.device(DEVICE).type, torch.float16, enabled=case == "another autocast"):
        assert torch.equal(layer(x), stock(x))


@pytest.mark.kernels
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_of_torch_func_run_stock(transform):
    (layer, stock), x = pair(torch.float16, torch.float16), input_for(torch.float16)
    run = {
        "grad": lambda layer: torch.func.grad(lambda x: layer(x).float().sum())(x),
        "vmap": lambda layer: torch.func.vmap(layer)(x),
        "jvp": lambda layer: torch.func.jvp(layer, (x,), (x,))[1],
    }[transform]
    torch.testing.assert_close(run(layer), run(stock), rtol=0, atol=0)


@pytest.mark.kernels
def test_an_input_of_inference_mode_trains_fp32_adapters():
    """Eager code saves a copy of the input in fp32, which is no inference tensor."""
    layer, stock = pair()
    with torch.inference_mode():
        x = input_for().clone()
    for each in (layer, stock):
        each(x).float().sum().backward()
    torch.testing.assert_close(layer.lora_A["first"].weight.grad, stock.lora_A["first"].weight.grad)


@pytest.mark.kernels
def test_a_function_mode_sees_the_functions_of_the_forward():
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is nn.functional.linear else result

    (layer, stock), x = pair(), input_for()
    with Doubling():
        assert torch.equal(layer(x), stock(x))


@pytest.mark.kernels
def test_global_hooks_see_the_calls_of_children():
    layer = to_dtypes(make())
    tigon.patch(layer)
    classes: list[type] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, y: classes.append(type(module)))
    try:
        layer(input_for())
    finally:
        hook.remove()
    assert classes.count(nn.Linear) == 3


@pytest.mark.kernels
def test_dropout_draws_one_mask_for_forward_and_backward():
    """The gradient of A is that of the mask which the output shows, also in a checkpointed region."""
    layer = to_dtypes(make(lora_dropout=0.5))
    tigon.patch(layer)
    layer.base_layer.weight.data.zero_()
    layer.base_layer.bias.data.zero_()
    x = input_for()

    def run(checkpointed: bool) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(), layer.lora_A["first"].weight]
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


class Quantised(nn.Module):
    """A layer of another library with frozen weights of 8 bits and a factor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("codes", torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * (x.new_tensor(0.01) / 127 * 12)
        return x @ weight.t()


class Returns32(Quantised):
    """A layer whose output has another dtype than its input."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).float()


@pytest.mark.kernels
def test_a_base_whose_output_has_another_dtype_runs_once():
    layer = make(lora_bias=True, lora_dropout=0.5)
    layer.base_layer = Returns32(INPUTS, OUTPUTS)
    stock, x = copy.deepcopy(to_dtypes(layer)), input_for()
    tigon.patch(layer)
    outputs = []
    for each in (layer, stock):
        torch.manual_seed(1)
        outputs.append(each(x))
    assert torch.equal(*outputs)
    assert layer.base_layer.calls == 1


@pytest.mark.kernels
def test_adapters_draw_masks_of_their_own():
    """Two adapters that cancel each other give another sum if each of them has a dropout, as in PEFT."""
    layer = to_dtypes(make(lora_dropout=0.5))
    layer.set_adapter(["first", "second"])
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.base_layer.bias.zero_()
        layer.lora_A["second"].weight.copy_(-layer.lora_A["first"].weight)
        layer.lora_B["second"].weight.copy_(layer.lora_B["first"].weight)
    tigon.patch(layer)
    assert layer(input_for()).abs().max() > 0.05
    assert layer.eval()(input_for()).abs().max() < 0.01


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


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        y = self.fc(h)
        h += 1
        return y + h


def with_adapters(module: nn.Module, names: tuple[str, ...], **options: Any) -> nn.Module:
    """Return a module in bf16 on the device, whose children of these names have fp32 adapters."""
    adapt(module.to(torch.bfloat16), names, **options).to(DEVICE)
    for name in names:
        to_dtypes(getattr(module, name))
    return module


@pytest.mark.kernels
@pytest.mark.parametrize("module", [MLP, Heads])
def test_hooks_on_adapted_projections_run(module):
    """A hook of a layer with adapters sees its output, so the layer is called."""
    model = with_adapters(module(), tuple(module()._modules))
    name = "up_proj" if module is MLP else "k_proj"
    x = input_for(hidden=32)
    tigon.patch(model)
    expected = getattr(model, name)(x)
    outputs: list[Tensor] = []
    getattr(model, name).register_forward_hook(lambda layer, args, output: outputs.append(output))
    model(x)
    assert len(outputs) == 1
    torch.testing.assert_close(outputs[0], expected)


def test_an_input_that_is_overwritten_afterwards_keeps_the_forward():
    """Eager code saves a copy of the input in fp32, and the op would save the input itself."""
    model = with_adapters(Overwrites(), ("fc",))
    assert "changed in place" in reason(model)
    model(input_for(hidden=32)).float().sum().backward()


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "q_proj"])
def test_a_projection_may_become_any_module_or_a_builtin_function(name):
    model = (Heads if name == "q_proj" else MLP)().to(DEVICE, torch.bfloat16)
    stock = copy.deepcopy(model)
    tigon.patch(model)
    for each in (model, stock):
        layer = each._modules.pop(name)
        if name == "q_proj":
            object.__setattr__(each, name, torch.relu)
        else:
            setattr(each, name, nn.Sequential(layer, nn.Tanh()))
    x = input_for(hidden=32)
    torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)
