"""Layers with random adapters of PEFT, and how their results are compared."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from op_cases import DEVICE

peft = pytest.importorskip("peft")

INPUTS, OUTPUTS, RANK = 48, 64, 4


def adapt(model: nn.Module, names: tuple[str, ...], *adapters: str, **options: Any) -> nn.Module:
    """Add random adapters to the children of these names, and freeze all other parameters."""
    torch.manual_seed(0)
    config = {"r": RANK, "lora_alpha": 6, "target_modules": list(names), "init_lora_weights": False} | options
    for adapter in adapters or ("default",):
        peft.inject_adapter_in_model(peft.LoraConfig(**config), model, adapter)
    return model


def make(inputs: int = INPUTS, outputs: int = OUTPUTS, **options: Any) -> Any:
    """Return a layer with the adapters `first`, which is active, and `second`."""
    layer: Any = adapt(nn.Sequential(nn.Linear(inputs, outputs)), ("0",), "first", "second", **options)[0]
    layer.set_adapter("first")
    return layer


def to_dtypes(layer: nn.Module, base: torch.dtype = torch.bfloat16, other: torch.dtype = torch.float32) -> Any:
    """Return the layer with its base in one dtype and its adapters in another one."""
    layer.to(DEVICE, other).base_layer.to(base)
    return layer


def input_for(dtype: torch.dtype = torch.bfloat16, hidden: int = INPUTS) -> Tensor:
    return torch.randn(2, 5, hidden, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


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


def spy_on(monkeypatch: pytest.MonkeyPatch, node: type) -> list[int]:
    """Return a list that grows by one at each call of an autograd node."""
    calls: list[int] = []
    apply = node.apply
    monkeypatch.setattr(node, "apply", staticmethod(lambda *args: (calls.append(1), apply(*args))[1]))
    return calls
