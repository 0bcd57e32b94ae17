"""Models of the BERT and BART families: the MLP of a layer is one op, with the gradients of the stock model."""

import pytest
import torch

import tigon

pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step
from hf.tiny import VOCABULARY, tiny_model
from tigon.memory.lean import lean
from tigon.recognition.parts import two_layer_mlps
from tigon.runtime.device import runs_kernels
from tigon.tools.inspect.inspection import has_mlp_statements

# Each type writes the MLP in another way: statements of one layer (nested and separate), two children, two children
# with a norm in the first, and two children after a norm in the same method.
TYPES = ["bart", "biogpt", "bert", "roberta-prelayernorm", "xlm-roberta-xl"]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Return a list with one element for each MLP that the op has computed."""
    compute, names = two_layer_mlps.mlp_by_kernels, []

    def counted(*args):
        names.append(args[-1])
        return compute(*args)

    monkeypatch.setattr(two_layer_mlps, "mlp_by_kernels", counted)
    return names


@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type, calls):
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert any(map(has_mlp_statements, report.replaced)), report
    assert_within_noise(step(model, batch), expected, allowed, report)
    assert bool(calls) == runs_kernels(torch.empty(1))
    with lean(mlp=True):
        assert_within_noise(step(model, batch), expected, allowed, report)
    report.restore()
    calls.clear()
    restored = step(model, batch)
    assert not calls
    assert all(torch.equal(restored[name], value) for name, value in expected.items())


@pytest.mark.parametrize("model_type", ["bart", "bert"])
def test_checkpointed_layers_have_stock_gradients(model_type, calls):
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    report = tigon.patch(model)
    assert_within_noise(step(model, batch), expected, allowed, report)
    assert bool(calls) == runs_kernels(torch.empty(1))
