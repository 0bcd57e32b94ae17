"""A loss function that is chosen after the patch, in any way that transformers offers, is used."""

import pytest
import torch

import tigon
from hf.changes import COPIES, is_fused

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")

MAPPING = loss_utils.LOSS_MAPPING
stock_loss = loss_utils.ForCausalLMLoss
stock_cross_entropy = loss_utils.fixed_cross_entropy


def doubled(logits, labels, vocab_size, **options):
    return 2.0 * stock_loss(logits, labels, vocab_size, **options)


def doubled_cross_entropy(*args, **options):
    return 2.0 * stock_cross_entropy(*args, **options)


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


def exchange_the_entry(models, monkeypatch):
    monkeypatch.setitem(MAPPING, "ForCausalLM", doubled)


def exchange_the_table(models, monkeypatch):
    table = {**MAPPING, "ForCausalLM": doubled}
    monkeypatch.setattr(transformers.modeling_utils, "LOSS_MAPPING", table)


def new_loss_type(models, monkeypatch):
    monkeypatch.setitem(MAPPING, "Doubled", doubled)
    for model in models:
        model.loss_type = "Doubled"


def no_loss_type(models, monkeypatch):
    monkeypatch.setitem(MAPPING, "ForCausalLM", doubled)
    for model in models:
        model.loss_type = None


def property_of_transformers(models, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "loss_function", Chosen.loss_function)


def property_of_the_class(models, monkeypatch):
    monkeypatch.setattr(type(models[0]), "loss_function", Chosen.loss_function, raising=False)


def code_of_the_loss(models, monkeypatch):
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", doubled_cross_entropy)


def assign_the_loss(models, monkeypatch):
    for model in models:
        model.loss_function = doubled


def assign_the_slot(models, monkeypatch):
    for model in models:
        model._loss_function = doubled


CHANGES = [
    *(exchange_the_entry, exchange_the_table, new_loss_type, no_loss_type, property_of_transformers),
    *(property_of_the_class, code_of_the_loss, assign_the_loss, assign_the_slot),
]


WAYS = {"same": ("same", None), "a pickle, changed later": ("before", "pickle"), "pickled later": ("after", "pickle")}
LATER_WAYS = {"a copy, changed later": ("before", "deepcopy"), "copied later": ("after", "deepcopy")}


@pytest.mark.filterwarnings("ignore:tigon. the loss function")
@pytest.mark.parametrize(
    ("when", "way"),
    [*WAYS.values(), *(pytest.param(*each, marks=pytest.mark.thorough) for each in LATER_WAYS.values())],
    ids=[*WAYS, *LATER_WAYS],
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.sampled(5)
def test_another_loss_is_used(pair, batch, assert_same_step, monkeypatch, change, when, way):
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


@pytest.mark.thorough
def test_a_compiled_model_uses_another_loss_type(pair, batch, monkeypatch):
    torch._dynamo.reset()
    model, stock = pair(num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    assert is_fused(compiled(**batch))
    new_loss_type([model, stock], monkeypatch)
    torch.testing.assert_close(compiled(**batch).loss, stock(**batch).loss)
