"""A loss function that is chosen after the patch, in any way that transformers offers, is used."""

import pytest
import torch

import tigon
from hf.changes import COPIES, is_fused
from op_cases import one_in

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")

MAPPING = loss_utils.LOSS_MAPPING
stock_loss = loss_utils.ForCausalLMLoss
stock_cross_entropy = loss_utils.fixed_cross_entropy


def doubled(logits, labels, vocab_size, **options):
    return 2.0 * stock_loss(logits, labels, vocab_size, **options)


class Chosen:
    """A property that a class may have in place of the property of transformers."""

    @property
    def loss_function(self):
        return doubled

    @loss_function.setter
    def loss_function(self, value):
        self._loss_function = value


class Wrapping:
    """A property that reads the property of its base class."""

    @property
    def loss_function(self):
        inner = super().loss_function
        return lambda *args, **options: 2.0 * inner(*args, **options)


def new_loss_type(models, patch):
    patch.setitem(MAPPING, "Doubled", doubled)
    assign("loss_type", "Doubled")(models, patch)


def no_loss_type(models, patch):
    patch.setitem(MAPPING, "ForCausalLM", doubled)
    assign("loss_type", None)(models, patch)


def assign(name, value):
    return lambda models, patch: [setattr(model, name, value) for model in models]


CHANGES = {
    "the entry": lambda models, patch: patch.setitem(MAPPING, "ForCausalLM", doubled),
    "the table": lambda models, patch: patch.setattr(
        transformers.modeling_utils, "LOSS_MAPPING", {**MAPPING, "ForCausalLM": doubled}
    ),
    "a new loss type": new_loss_type,
    "no loss type": no_loss_type,
    "a property of transformers": lambda models, patch: patch.setattr(
        transformers.PreTrainedModel, "loss_function", Chosen.loss_function
    ),
    "a property of the class": lambda models, patch: patch.setattr(
        type(models[0]), "loss_function", Chosen.loss_function, raising=False
    ),
    "code of the loss": lambda models, patch: patch.setattr(
        loss_utils, "fixed_cross_entropy", lambda *args, **options: 2.0 * stock_cross_entropy(*args, **options)
    ),
    "the loss": assign("loss_function", doubled),
    "the slot": assign("_loss_function", doubled),
}
WAYS = {
    "same": ("same", None),
    "a pickle, changed later": ("before", "pickle"),
    "pickled later": ("after", "pickle"),
    "a copy, changed later": ("before", "deepcopy"),
    "copied later": ("after", "deepcopy"),
}


@pytest.mark.filterwarnings("ignore:tigon. the loss function")
@one_in(5, change=CHANGES, way=WAYS)
def test_another_loss_is_used(pair, batch, assert_same_step, monkeypatch, change, way):
    when, way = way
    model, stock = pair()
    expected = stock(**batch).loss
    model = COPIES[way](model) if when == "before" else model
    change([model, stock], monkeypatch)
    model = COPIES[way](model) if when == "after" else model
    torch.testing.assert_close(model(**batch).loss, 2 * expected)
    assert_same_step(model, stock, batch)
    model.eval(), stock.eval()
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_a_property_that_wraps_the_property_of_its_base_is_supported(make_model, batch, clone):
    model = make_model()
    model.__class__ = type("Wrapped", (Wrapping, type(model)), {})
    stock = clone(model)
    tigon.patch(model)
    assert not is_fused(outputs := model(**batch))
    assert torch.equal(outputs.loss, stock(**batch).loss)


def test_the_first_loss_is_fused_again_and_a_direct_call_runs_the_current_one(make_model, batch, monkeypatch):
    """A trainer may call `model.loss_function` on logits that it has computed itself."""
    model = make_model()
    report = tigon.patch(model)
    arguments = torch.randn(2, 5, 7), torch.arange(10).view(2, 5) % 7, 7
    expected = model.loss_function(*arguments)
    with monkeypatch.context() as patch:
        patch.setitem(MAPPING, "ForCausalLM", doubled)
        with pytest.warns(UserWarning, match="the loss function of LlamaForCausalLM was changed, so the stock code"):
            assert not is_fused(model(**batch))
        torch.testing.assert_close(model.loss_function(*arguments), 2 * expected)
    assert is_fused(model(**batch))
    # This name stands for the same function, and transformers does not read the setting after the model was built.
    model.loss_type, model.config.loss_type = "ForConditionalGeneration", "ForMaskedLM"
    assert all(is_fused(duplicate(model)(**batch)) for duplicate in (lambda m: m, COPIES["deepcopy"], COPIES["pickle"]))
    monkeypatch.setitem(MAPPING, "ForConditionalGeneration", doubled)
    report.restore()
    assert model.loss_function is doubled
    assert "_loss_function" not in vars(model)
