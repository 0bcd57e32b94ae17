"""Heads in wrappers of adapter libraries: the loss is fused if a call only runs a linear layer; adapters still work."""

import contextlib

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from tigon.hf.logits import SKIPPED_LOGITS


@pytest.fixture
def assert_step(assert_same_step):
    """Return assert_step(model, stock, batch, fused): it compares a step with stock, and checks the fusion."""

    def check(model, stock, batch, fused: bool) -> None:
        assert (model(**batch).logits is SKIPPED_LOGITS) == fused
        assert_same_step(model, stock, batch)

    return check


def details_of_loss(report) -> list[str]:
    return [entry.detail for entry in report.entries if entry.part == "loss"]


class Choice(nn.Module):
    """A wrapper that calls one of two heads, or both."""

    def __init__(self, head: nn.Linear, other: nn.Linear) -> None:
        super().__init__()
        self.heads, self.chosen = nn.ModuleDict({"a": head, "b": other}), ["a"]

    def forward(self, x, *args):
        outputs = [self.heads[name](x) for name in self.chosen]
        return outputs[0] if len(outputs) == 1 else sum(outputs)


def wrap(model) -> Choice:
    torch.manual_seed(1)
    head = model.lm_head
    model.lm_head = Choice(head, nn.Linear(head.in_features, head.out_features, bias=False))
    return model.lm_head


def test_the_loss_uses_the_head_that_the_wrapper_calls(make_model, clone, batch, assert_step):
    model = make_model("gemma2")
    wrap(model)
    stock = clone(model)
    report = tigon.patch(model)
    for chosen, fused in ((["a"], True), (["b"], True), (["a", "b"], False), (["a"], True)):
        model.lm_head.chosen = stock.lm_head.chosen = chosen
        expectation = contextlib.nullcontext() if fused else pytest.warns(UserWarning, match="was changed")
        with expectation:
            assert_step(model, stock, batch, fused)
    report.restore()
    assert_step(model, stock, batch, fused=False)


ORDERS = ("patched first", "adapted first")


@pytest.fixture
def adapted(make_model, clone):
    """Return adapted(order, **lora): a patched and a stock model with the same adapter, and the report."""

    def adapt(model, target_modules=("q_proj", "down_proj"), **options):
        return with_adapters(model, [*target_modules], seed=1, **options)

    def make(order: str, model_type: str = "gemma2", **options):
        model = make_model(model_type, tie_word_embeddings=False)
        stock = adapt(clone(model), **options)
        if order == "patched first":
            report = tigon.patch(model)
            return adapt(model, **options), stock, report
        model = adapt(model, **options)
        return model, stock, tigon.patch(model)

    return make


@pytest.mark.parametrize("order", ORDERS)
def test_a_head_in_modules_to_save_works_as_in_stock(adapted, batch, assert_step, order):
    """PEFT trains a copy of the head, and can switch between copies and the original head."""
    model, stock, report = adapted(order, modules_to_save=["lm_head"])
    assert "linear_cross_entropy in the head, softcap 7" in details_of_loss(report)
    assert_step(model, stock, batch, fused=True)
    trained = model.base_model.model.lm_head.modules_to_save.default
    assert trained.weight.grad is not None
    for each in (model, stock):
        torch.manual_seed(2)
        each.add_adapter("second", each.peft_config["default"])
        each.set_adapter("second")
        each.base_model.model.lm_head.modules_to_save.second.weight.data.mul_(1.5)
    assert_step(model, stock, batch, fused=True)
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    report.restore()
    assert_step(model, stock, batch, fused=False)
    assert details_of_loss(tigon.patch(model)) == ["linear_cross_entropy in the head, softcap 7"]
    assert_step(model, stock, batch, fused=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}],
    ids=["plain", "scaling", "bias", "dropout"],
)
@pytest.mark.sampled(2)
def test_the_loss_is_fused_with_an_adapter_on_the_head(adapted, batch, step, assert_step, order, options):
    model, stock, report = adapted(order, target_modules=["q_proj", "lm_head"], **options)
    assert "linear_cross_entropy in the head, softcap 7" in details_of_loss(report)
    assert model(**batch).logits is SKIPPED_LOGITS
    results = []
    for each in (model, stock):
        torch.manual_seed(3)
        results.append(step(each, batch))
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
    model.eval(), stock.eval()
    # Without labels the head and its adapter give logits.
    ids = {"input_ids": batch["input_ids"]}
    torch.testing.assert_close(model(**ids).logits, stock(**ids).logits)
    report.restore()
    assert model(**batch).logits is not SKIPPED_LOGITS


def test_an_adapter_on_the_head_may_change_between_calls(adapted, batch, assert_step):
    """While a merged adapter is disabled, PEFT removes it from the weight inside the call, so the loss is stock."""
    peft = pytest.importorskip("peft")
    model, stock, _ = adapted("patched first", target_modules=["q_proj", "lm_head"])
    assert_step(model, stock, batch, fused=True)
    with model.disable_adapter(), stock.disable_adapter():
        assert model(**batch).logits is SKIPPED_LOGITS
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    for each in (model, stock):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        each.add_adapter("second", config)
        each.base_model.set_adapter(["default", "second"])
    assert_step(model, stock, batch, fused=True)
    for each in (model, stock):
        each.base_model.set_adapter("default")
        each.merge_adapter()
    assert model(**batch).logits is SKIPPED_LOGITS
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    # PEFT does not add the adapter to the weight again afterwards.
    with model.disable_adapter(), stock.disable_adapter(), pytest.warns(UserWarning, match="was changed"):
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    assert_step(model, stock, batch, fused=True)
    model, stock = model.merge_and_unload(), stock.merge_and_unload()
    assert model(**batch).logits is SKIPPED_LOGITS
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)


def test_the_loss_is_stock_with_another_kind_of_adapter_on_the_head(adapted, batch, assert_step):
    model, stock, report = adapted("adapted first", target_modules=["q_proj", "lm_head"], use_dora=True)
    assert details_of_loss(report) == ["its head (Linear) does more than call one linear layer"]
    assert_step(model, stock, batch, fused=False)
