"""The loss that balances experts: a patched model computes it by the op, and no other model changes."""

import copy
import inspect
import pickle

import pytest
import torch

import tigon
from hf.same_step import assert_within_noise, noise, step
from hf.tiny import tiny_model
from tigon.hf.logits import SKIPPED_LOGITS

modeling_qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

pytestmark = pytest.mark.no_interpreter("It calls no kernel.")

DETAIL = "linear_cross_entropy in the head, load_balancing_loss"


@pytest.fixture
def op_calls(monkeypatch) -> list:
    """Return the list to which each call of the op adds its arguments."""
    recorded, op = [], tigon.recognition.parts.router_losses.load_balancing_loss
    monkeypatch.setattr(
        tigon.recognition.parts.router_losses, "load_balancing_loss", lambda *args: recorded.append(args) or op(*args)
    )
    return recorded


@pytest.fixture
def routed(batch) -> dict:
    """Return a batch in which the last tokens of the first sequence are padding."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "labels": labels, "attention_mask": mask, "output_router_logits": True}


def details(report) -> list[str]:
    return [entry.detail for entry in report.entries if entry.part == "loss"]


# These types have experts with routers of several forms.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v4", "jamba"])
def test_the_op_computes_the_auxiliary_loss(model_type, routed, op_calls):
    model = tiny_model(model_type)
    expected = step(model, routed)
    allowed = noise(model, routed, expected)
    file_globals = inspect.unwrap(type(model).forward).__globals__
    stock_function = file_globals["load_balancing_loss_func"]
    report = tigon.patch(model)
    assert details(report) == [DETAIL]
    op_calls.clear()
    outputs = model(**routed)
    (arguments,) = op_calls
    assert arguments[0] is outputs.router_logits
    assert outputs.logits is SKIPPED_LOGITS
    assert_within_noise(step(model, routed), expected, allowed, report)
    assert file_globals["load_balancing_loss_func"] is stock_function


def test_other_models_and_restored_models_run_the_stock_function(routed, op_calls):
    model, other = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    report = tigon.patch(model)
    op_calls.clear()
    other(**routed)
    assert not op_calls
    report.restore()
    model(**routed)
    assert not op_calls
    report = tigon.patch(model, loss=False)
    model(**routed)
    assert not op_calls
    report.restore()


def test_calls_that_compute_logits_run_the_op(routed, op_calls):
    model = tiny_model("qwen3_moe")
    expected = model.eval()(**routed)
    tigon.patch(model)
    op_calls.clear()
    outputs = model(**routed)
    assert len(op_calls) == 1
    torch.testing.assert_close(outputs.aux_loss, expected.aux_loss)
    torch.testing.assert_close(outputs.logits, expected.logits)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_run_the_op(duplicate, routed, op_calls):
    model = tiny_model("qwen3_moe")
    tigon.patch(model)
    # A call of the model adds hooks of transformers that cannot be pickled.
    twin = duplicate(model)
    expected = model(**routed)
    op_calls.clear()
    outputs = twin(**routed)
    assert len(op_calls) == 1
    assert torch.equal(outputs.aux_loss, expected.aux_loss)


def test_a_function_that_replaces_that_of_transformers_is_used(routed, op_calls, monkeypatch):
    model = tiny_model("qwen3_moe")
    tigon.patch(model)
    op_calls.clear()
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *args: torch.tensor(2.0))
    outputs = model(**routed)
    assert outputs.aux_loss == 2.0
    assert outputs.logits is SKIPPED_LOGITS
    assert not op_calls


def test_a_type_of_models_runs_the_op(routed, op_calls):
    report = tigon.patch("qwen3_moe")
    try:
        model = tiny_model("qwen3_moe").train()
    finally:
        report.restore()
    op_calls.clear()
    model(**routed)
    assert len(op_calls) == 1


@pytest.mark.thorough
def test_a_mixture_compiles_without_a_graph_break(routed):
    """The function of transformers counts tokens by `bincount`, which breaks the graph."""
    model = tiny_model("mixtral")
    model.config.use_cache = False
    tigon.patch(model)
    del routed["attention_mask"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected, outputs = model(**routed), compiled(**routed)
    torch.testing.assert_close(outputs.aux_loss, expected.aux_loss)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch._dynamo.reset()


def test_a_model_without_routers_has_no_such_loss(make_model):
    assert details(tigon.patch(make_model())) == ["linear_cross_entropy in the head"]
