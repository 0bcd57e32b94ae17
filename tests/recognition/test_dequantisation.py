"""An op multiplies by the dequantised weight of a layer in 4 bits only if the code of the layer does so too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import tigon
from op_cases import DEVICE
from recognition.lora_layers import make, spy_on
from tigon.ops.adapters import lora
from tigon.recognition.parts import dequantisation
from tigon.recognition.parts.dequantisation import read_weight

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def dequantises_few_rows(monkeypatch):
    """The tests have few rows, for which quantised layers would compute their own products."""
    monkeypatch.setattr(dequantisation, "MIN_ROWS", 1)


# The CPU code of bitsandbytes dequantises bf16 weights correctly only if the inputs are a multiple of a block of 64.
INPUTS, OUTPUTS = 64, 48


def to_4bit(linear: nn.Linear, cls: Any = None) -> Any:
    layer = (cls or bnb.nn.Linear4bit)(INPUTS, OUTPUTS, linear.bias is not None, compute_dtype=torch.bfloat16)
    layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
    layer.bias = linear.bias
    return layer.to(DEVICE)


def make_layer(cls: Any = None) -> Any:
    """Return a layer with adapters in fp32, whose base has 4 bits."""
    layer = make(INPUTS, OUTPUTS, lora_bias=True).to(DEVICE)
    layer.base_layer = to_4bit(layer.base_layer.bfloat16(), cls)
    return layer


def input_of(rows: int = 10) -> Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.bfloat16)


def exchange_product(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let the products of bitsandbytes return `change(x, y)` in place of y."""
    multiply = bnb.matmul_4bit
    monkeypatch.setattr(bnb, "matmul_4bit", lambda x, *args, **options: change(x, multiply(x, *args, **options)))


def round_input(x: Tensor, y: Tensor) -> Tensor:
    """Return a product whose input was rounded to 8 bits, as products of integers do."""
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    rounding = ((x / scale).round() * scale - x).detach()
    return y + rounding.mean(-1, keepdim=True) * 10


class Scaled(bnb.nn.Linear4bit):
    """A layer of another library. Its factor may change at any time."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class WithChild(bnb.nn.Linear4bit):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.child = nn.Linear(INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("cls", "change", "is_product"),
    [
        (None, lambda x, y: y, True),
        (None, lambda x, y: y * 1.02, False),
        (None, round_input, False),
        (Scaled, lambda x, y: y, False),
        (WithChild, lambda x, y: y, False),
    ],
    ids=["plain", "scaled", "rounded input", "another forward", "a child"],
)
def test_the_product_of_a_dense_weight_must_be_that_of_the_layer(monkeypatch, cls, change, is_product):
    calls = [spy_on(monkeypatch, node) for node in (lora._LoRALinears, lora._AddAdapters)]
    exchange_product(monkeypatch, change)
    layer = make_layer(cls)
    stock = copy.deepcopy(layer)
    report = tigon.patch(layer)
    assert [entry.part for entry in report.replaced] == ["adapters"]
    x = input_of()
    # A non-reentrant checkpoint counts the tensors that a forward saves.
    y = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    y.float().sum().backward()
    expected = stock(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=2**-6 * expected.abs().max().item())
    assert [bool(each) for each in calls] == [is_product, not is_product]


@pytest.mark.parametrize("compared_rows", [64, 129])
def test_as_many_rows_are_compared_as_training_has(monkeypatch, compared_rows):
    """On a GPU, bitsandbytes has other kernels for few rows, which round in other places."""
    calls = spy_on(monkeypatch, lora._LoRALinears)
    exchange_product(monkeypatch, lambda x, y: y * 1.02 if x.shape[:-1].numel() <= 64 else y)
    layer = make_layer()
    tigon.patch(layer)
    monkeypatch.setitem(dequantisation.COMPARED_ROWS, torch.device(DEVICE).type, compared_rows)
    layer(input_of(129))
    assert bool(calls) == (compared_rows == 129)


def test_a_weight_that_another_thread_replaces_during_a_comparison_is_compared(monkeypatch):
    layer, x = make_layer().base_layer, input_of()
    compare, compared_weights = dequantisation.compare, []

    def replace_and_compare(layer: Any, dtype: torch.dtype) -> Any:
        compared_weights.append(layer.weight)
        if len(compared_weights) > 1:
            return compare(layer, dtype)
        layer.weight = copy.deepcopy(layer.weight)
        assert read_weight(layer, x) is not None
        return compare(layer, dtype)._replace(computes_product=False)

    monkeypatch.setattr(dequantisation, "compare", replace_and_compare)
    assert read_weight(layer, x) is None
    assert read_weight(layer, x) is not None


def test_a_trained_weight_is_not_read():
    layer = make_layer().base_layer
    layer.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, device=DEVICE, dtype=torch.bfloat16))
    assert read_weight(layer, input_of()) is None
