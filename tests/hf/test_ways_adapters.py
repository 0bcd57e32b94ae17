"""With quantised weights and adapters, the loss and every gradient are those of a stock model with the same layers."""

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from hf.lora_models import to_4bit, to_8bit
from op_cases import one_in
from tigon.hf.logits import SKIPPED_LOGITS

MODEL_TYPES = ["llama", "gemma2", "phi3"]
PARTS = {"rms_norm", "glu", "rope", "fused_statements", "loss"}


class Wrapped(nn.Module):
    """A linear layer of an unknown library: its class is another one, and it has no weight itself."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rows = nn.ParameterList(linear.weight.detach().chunk(3))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.cat(list(self.rows)), self.bias)


OTHER_WEIGHTS = {
    "4 bit": to_4bit,
    "8 bit": to_8bit,
    "of an unknown class": Wrapped,
}


def exchange(model: nn.Module, convert) -> nn.Module:
    """Convert every linear layer of a model except its head. The embeddings are trained in any case."""
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, convert(child))
    model.enable_input_require_grads()
    return model


def patch(model: nn.Module, *, has_adapters: bool = False) -> None:
    report = tigon.patch(model)
    assert {entry.part for entry in report.replaced} == PARTS | ({"adapters"} if has_adapters else set()), report
    assert not report.left_alone, report


@one_in(5, model_type=MODEL_TYPES, weights=[*OTHER_WEIGHTS], order=["patch first", "weights first"])
def test_quantised_and_wrapped_weights_give_the_results_of_stock(
    make_model, batch, assert_same_step, model_type, weights, order
):
    model, stock = make_model(model_type), make_model(model_type)
    if order == "patch first":
        patch(model)
    model, stock = (exchange(m, OTHER_WEIGHTS[weights]) for m in (model, stock))
    if order == "weights first":
        patch(model)
    assert model(**batch).logits is SKIPPED_LOGITS
    assert_same_step(model, stock, batch)


@one_in(5, model_type=MODEL_TYPES, weights=["full", "4 bit", "8 bit"], order=["patch first", "adapters first"])
def test_adapters_on_every_layer_give_the_results_of_stock(
    make_model, batch, assert_same_step, model_type, weights, order
):
    model, stock = make_model(model_type), make_model(model_type)
    if convert := OTHER_WEIGHTS.get(weights):
        model, stock = exchange(model, convert), exchange(stock, convert)
    if order == "patch first":
        patch(model)
    model, stock = with_adapters(model), with_adapters(stock)
    if order == "adapters first":
        patch(model, has_adapters=True)
    assert model(**batch).logits is SKIPPED_LOGITS
    assert any("lora_A" in name for name, p in stock.named_parameters() if p.requires_grad)
    assert_same_step(model, stock, batch)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.sampled(2)
def test_adapters_with_checkpointing_give_the_results_of_stock(make_model, batch, assert_same_step, reentrant):
    model, stock = make_model("gemma2"), make_model("gemma2")
    patch(model)
    model, stock = with_adapters(model), with_adapters(stock)
    for each in (model, stock):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_same_step(model, stock, batch)


def test_dropout_of_adapters_uses_the_random_numbers_of_stock(make_model, batch, step):
    """Dropout in the adapters uses the same random numbers as in the stock model."""
    model, stock = make_model(), make_model()
    patch(model)
    model, stock = with_adapters(model, lora_dropout=0.3), with_adapters(stock, lora_dropout=0.3)
    torch.manual_seed(1)
    actual = step(model, batch)
    torch.manual_seed(1)
    expected = step(stock, batch)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
