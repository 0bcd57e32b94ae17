"""Options of a call with the loss in the head: `skip_logits`, labels that are shifted already, tuples."""

import pytest
import torch

import tigon
from tigon.hf.logits import SKIPPED_LOGITS


def is_fused(outputs) -> bool:
    return outputs.logits is SKIPPED_LOGITS


# --- skip_logits ---------------------------------------------------------------------------------


def test_skip_logits_returns_only_the_loss_in_evaluation(pair, batch):
    model, stock = pair("gemma2")
    outputs, expected = model.eval()(**batch, skip_logits=True), stock.eval()(**batch)
    assert is_fused(outputs)
    assert outputs.keys() == expected.keys()
    torch.testing.assert_close(outputs.loss, expected.loss)
    with torch.no_grad():
        options = {**batch, "num_items_in_batch": torch.tensor(7)}
        torch.testing.assert_close(model(**options, skip_logits=True).loss, stock(**options).loss)


def test_skip_logits_has_gradients_in_evaluation(pair, batch, step):
    model, stock = pair()
    actual, expected = step(model.eval(), {**batch, "skip_logits": True}), step(stock.eval(), batch)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)


def test_skip_logits_false_is_stock_in_training(pair, batch):
    model, stock = pair()
    outputs, expected = model(**batch, skip_logits=False), stock(**batch)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_skip_logits_without_labels_changes_nothing(pair, batch, training):
    model, stock = pair()
    del batch["labels"]
    assert torch.equal(model.train(training)(**batch, skip_logits=True).logits, stock.train(training)(**batch).logits)


def test_skip_logits_never_reaches_the_stock_forward(pair, batch, monkeypatch):
    model, _ = pair()
    calls = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **kwargs: calls.append(kwargs) or forward(self, **kwargs))
    for labels in (batch["labels"], None):
        model(**{**batch, "labels": labels}, skip_logits=True)
    assert len(calls) == 2
    assert not any("skip_logits" in kwargs for kwargs in calls)


# --- labels that are shifted already -------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_shift_labels_alone_give_a_loss_if_skip_logits_is_set(pair, batch, training):
    model, stock = pair()
    shifted = batch.pop("labels").roll(-1, 1)
    expected = stock.train(training)(**batch, labels=shifted, shift_labels=shifted)
    outputs = model.train(training)(**batch, shift_labels=shifted, skip_logits=True)
    assert is_fused(outputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    # Without skip_logits, the caller gets the logits, and may compute another loss from them.
    outputs = model(**batch, shift_labels=shifted)
    assert outputs.loss is None
    assert torch.equal(outputs.logits, expected.logits)


def test_context_parallel_losses_add_up_and_a_rank_may_have_no_valid_token(pair, batch, step):
    """Each rank has a part of the shifted labels, and all ranks divide by the same number, which is a tensor."""
    model, stock = pair("gemma2")
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    items = (shifted != -100).sum()
    expected = step(stock, {**batch, "num_items_in_batch": items})
    totals: dict[str, torch.Tensor] = {}
    for columns in (slice(0, 6), slice(6, 11), slice(11, 11)):
        part = torch.full_like(shifted, -100)
        part[:, columns] = shifted[:, columns]
        call = {**batch, "labels": part, "shift_labels": part, "num_items_in_batch": items}
        assert is_fused(model(**call))
        for name, value in step(model, call).items():
            totals[name] = totals.get(name, 0) + value
            torch.testing.assert_close(value, step(stock, call)[name])
    for name, value in expected.items():
        torch.testing.assert_close(totals[name], value)


# --- tuples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["gemma2", "mixtral"])
def test_a_tuple_has_skipped_logits_in_place_of_the_logits(make_model, clone, batch, model_type, dtype):
    """A mixture of experts has its auxiliary loss between the loss and the logits."""
    model = make_model(model_type, dtype)
    stock = clone(model)
    tigon.patch(model)
    extra = {"return_dict": False} | ({"output_router_logits": True} if model_type == "mixtral" else {})
    actual, expected = model(**batch, **extra), stock(**batch, **extra)
    is_logits = [isinstance(x, torch.Tensor) and x.shape[-1:] == (131,) for x in expected]
    assert sum(is_logits) == 1
    assert [x is SKIPPED_LOGITS for x in actual] == is_logits
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
