"""The loss that balances experts: a patched model computes it by the op, and no other model changes."""

import inspect

import pytest
import torch

import tigon
from hf.changes import is_fused, loss_entry, record_calls
from hf.same_step import assert_within_noise, noise, step
from hf.tiny import tiny_model
from tigon.recognition.parts import router_losses

modeling_qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

pytestmark = pytest.mark.no_interpreter("It calls no kernel.")

DETAIL = "linear_cross_entropy in the head, load_balancing_loss"


@pytest.fixture
def op_calls(monkeypatch) -> list:
    """Return the list to which each call of the op adds its arguments."""
    return record_calls(monkeypatch, router_losses, "load_balancing_loss")


@pytest.fixture
def routed(batch) -> dict:
    """Return a batch in which the last tokens of the first sequence are padding."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "labels": labels, "attention_mask": mask, "output_router_logits": True}


# These types have experts with routers of several forms.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v4", "mixtral", "jamba", "gpt_oss", "phimoe"])
@pytest.mark.sampled(4)
def test_the_op_computes_the_auxiliary_loss(model_type, routed, op_calls):
    """A model of the same type and a restored model run the function of transformers."""
    model, other = tiny_model(model_type), tiny_model(model_type)
    expected, evaluated = step(model, routed), model.eval()(**routed)
    allowed = noise(model.train(), routed, expected)
    file_globals = inspect.unwrap(type(model).forward).__globals__
    stock_function = file_globals["load_balancing_loss_func"]
    report = tigon.patch(model)
    assert loss_entry(report).detail == DETAIL
    op_calls.clear()
    outputs = model(**routed)
    (arguments,) = op_calls
    assert arguments[0] is outputs.router_logits
    assert is_fused(outputs)
    assert outputs.aux_loss > 0
    assert outputs.loss > model(**routed | {"output_router_logits": False}).loss
    assert_within_noise(step(model, routed), expected, allowed, report)
    op_calls.clear()
    outputs = model.eval()(**routed)
    assert len(op_calls) == 1
    torch.testing.assert_close(outputs.aux_loss, evaluated.aux_loss)
    torch.testing.assert_close(outputs.logits, evaluated.logits)
    assert file_globals["load_balancing_loss_func"] is stock_function
    op_calls.clear()
    other(**routed)
    report.restore()
    model(**routed)
    tigon.patch(model, loss=False)
    model(**routed)
    assert not op_calls


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
