"""Heads in the wrappers of adapter libraries: fused where a call is one of a linear layer; no adapter is lost."""

import contextlib
import pickle

import pytest
import torch
from torch import nn

import tigon
from tigon.hf.logits import SKIPPED_LOGITS


@pytest.fixture
def assert_step(assert_same_step):
    """assert_step(model, stock, batch, fused): loss and gradients are stock's, and the loss is fused or not as said."""

    def check(model, stock, batch, fused: bool) -> None:
        assert (model(**batch).logits is SKIPPED_LOGITS) == fused
        assert_same_step(model, stock, batch)

    return check


def said_of_the_loss(report) -> list[str]:
    return [entry.detail for entry in report.entries if entry.part == "loss"]


# --- wrappers of any library ---------------------------------------------------------------------


class Choice(nn.Module):
    """Calls one of two heads, or both."""

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


def test_the_head_that_a_wrapper_calls_now_is_the_one_of_the_loss(make_model, clone, batch, assert_step):
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


def test_a_wrapper_that_does_more_than_call_its_head_is_left_alone(make_model):
    model = make_model()
    wrap(model).chosen = ["a", "b"]
    assert said_of_the_loss(tigon.patch(model)) == ["its head (Choice) does more than call one linear layer"]


def test_asking_a_wrapper_what_it_calls_changes_nothing_in_it(make_model, clone, batch, step):
    class Counting(Choice):
        def forward(self, x, *args):
            self.chosen.append("b")
            return super().forward(x, *args)

    model = make_model()
    wrapper = wrap(model)
    tigon.patch(model)
    wrapper.__class__ = Counting
    wrapper.heads["b"].weight.data.zero_()
    with pytest.warns(UserWarning, match="was changed"):
        model(**batch)
    assert wrapper.chosen == ["a", "b"]  # once, by the call itself


def test_a_wrapped_head_is_pickled_with_its_model(make_model, clone, batch, assert_step):
    model = make_model()
    wrap(model)
    stock = clone(model)
    tigon.patch(model)
    assert_step(pickle.loads(pickle.dumps(model)), stock, batch, fused=True)
    assert_step(clone(model), stock, batch, fused=True)


def test_a_copy_of_the_head_that_the_model_calls_too_gives_its_logits(make_model, clone, batch, step):
    """As heads of tokens further ahead are begun from the head."""
    model = make_model()
    stock = clone(model)
    tigon.patch(model)
    for each in (model, stock):
        each.ahead = clone(each.lm_head)
        each.lm_head.register_forward_pre_hook(lambda m, args, each=each: setattr(each, "seen", each.ahead(*args)))
    given, expected = step(model, batch), step(stock, batch)
    torch.testing.assert_close(given["loss"], expected["loss"])
    assert torch.equal(model.seen, stock.seen)


# --- PEFT ----------------------------------------------------------------------------------------

ORDERS = ("patched first", "adapted first")


@pytest.fixture
def adapted(make_model, clone):
    """adapted(order, **lora) -> a patched model with an adapter, a stock one with the same, the report."""
    peft = pytest.importorskip("peft")

    def adapt(model, **options):
        torch.manual_seed(1)  # of the adapter's weights, which are not zero
        options = {"target_modules": ["q_proj", "down_proj"], **options}
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)

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
def test_lora_on_layers_of_the_body(adapted, batch, assert_step, order):
    model, stock, _ = adapted(order)
    assert_step(model, stock, batch, fused=True)


@pytest.mark.parametrize("order", ORDERS)
def test_a_head_that_is_trained_and_saved_beside_an_adapter(adapted, batch, assert_step, order):
    """PEFT trains a copy of the head, and can change between copies and back to the head it copied."""
    model, stock, report = adapted(order, modules_to_save=["lm_head"])
    assert "linear_cross_entropy in the head, softcap 7" in said_of_the_loss(report)
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
    assert said_of_the_loss(tigon.patch(model)) == ["linear_cross_entropy in the head, softcap 7"]
    assert_step(model, stock, batch, fused=True)


def test_an_adapter_put_on_the_head_of_a_patched_model(adapted, batch, assert_step):
    """While the adapter takes part, the loss is stock; while it is merged or off, it is fused."""
    model, stock, _ = adapted("patched first", target_modules=["q_proj", "lm_head"])
    with pytest.warns(UserWarning, match="the head of Gemma2ForCausalLM was changed: its loss is stock"):
        assert_step(model, stock, batch, fused=False)
    with model.disable_adapter(), stock.disable_adapter():
        assert model(**batch).logits is SKIPPED_LOGITS
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    for each in (model, stock):
        each.merge_adapter()
    assert model(**batch).logits is SKIPPED_LOGITS
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    # Off while merged: PEFT takes the adapter out of the weight in the call, and puts it back in none.
    with model.disable_adapter(), stock.disable_adapter(), pytest.warns(UserWarning, match="was changed"):
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    with pytest.warns(UserWarning, match="was changed"):
        assert_step(model, stock, batch, fused=False)
    model, stock = model.merge_and_unload(), stock.merge_and_unload()
    assert model(**batch).logits is SKIPPED_LOGITS
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)


def test_an_adapter_on_the_head_before_the_patch_keeps_the_loss_stock(adapted, batch, assert_step):
    model, stock, report = adapted("adapted first", target_modules=["q_proj", "lm_head"])
    assert said_of_the_loss(report) == ["its head (Linear) does more than call one linear layer"]
    assert_step(model, stock, batch, fused=False)
