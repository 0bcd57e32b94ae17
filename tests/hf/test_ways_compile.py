"""`torch.compile(fullgraph=True)` of a patched model has no graph break, and gives the loss and gradients of stock."""

import pytest
import torch

import tigon
from hf.changes import with_adapters
from hf.ways import assert_same
from tigon.hf.logits import SKIPPED_LOGITS

# A model of one layer compiles in half the time.
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_close_to_stock(actual: dict, expected: dict) -> None:
    assert_same({name.removeprefix("_orig_mod."): value for name, value in actual.items()}, expected)


# The test below compiles Qwen3, whose queries and keys have norms.
@pytest.mark.parametrize(
    "model_type", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma2", "phi3"))]
)
def test_no_type_breaks_the_graph(make_model, model_type, batch, step):
    model, stock = (make_model(model_type, **ONE_LAYER) for _ in range(2))
    tigon.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch["num_items_in_batch"] = torch.tensor(7)
    assert compiled(**batch).logits is SKIPPED_LOGITS
    assert_close_to_stock(step(compiled, batch), step(stock, batch))
    # The guards of the graph hold.
    with torch._dynamo.config.patch(error_on_recompile=True):
        step(compiled, batch)


@pytest.mark.thorough
def test_many_lengths_need_two_graphs(make_model, batch, step):
    """The second graph has symbolic sizes, so a third length needs no third graph."""
    model, stock = (make_model("qwen3", **ONE_LAYER) for _ in range(2))
    tigon.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    shorten = lambda length: {name: value[:, :length].contiguous() for name, value in batch.items()}
    step(compiled, shorten(11)), step(compiled, shorten(9))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (7, 10):
            assert_close_to_stock(step(compiled, shorten(length)), step(stock, shorten(length)))
    tokens = batch["input_ids"]
    assert torch.equal(compiled.eval()(tokens).logits, stock.eval()(tokens).logits)


@pytest.mark.thorough
def test_adapters_give_the_results_of_stock(make_model, batch, step):
    model, stock = (make_model("gemma2", **ONE_LAYER) for _ in range(2))
    tigon.patch(model)
    model, stock = with_adapters(model), with_adapters(stock)
    # The model inside is compiled, because the wrapper of peft has a graph break.
    model.base_model.model.compile(fullgraph=True, backend="aot_eager")
    assert model(**batch).logits is SKIPPED_LOGITS
    assert_close_to_stock(step(model, batch), step(stock, batch))


@pytest.mark.thorough
def test_autocast_is_as_accurate_as_stock(make_model, batch, step):
    """The results are as close to fp32 as those of stock."""
    model, stock = (make_model("llama", **ONE_LAYER) for _ in range(2))
    tigon.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    exact = step(stock, batch)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = step(compiled, batch), step(stock, batch)
        assert compiled(**batch).logits is SKIPPED_LOGITS
    for name, value in exact.items():
        value_compiled = actual[name if name == "loss" else f"_orig_mod.{name}"]
        allowed = 2 * (expected[name] - value).abs().max() + 0.01 * value.abs().max()
        assert (value_compiled - value).abs().max() <= allowed, name
