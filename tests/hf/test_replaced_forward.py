"""If the forward of a patched model is replaced later, one warning says that the loss and the level are not used."""

import functools
import types
import warnings

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")


def other_forward(self, input_ids, labels=None, **kwargs):
    """Call the body and compute another loss, as the trainers of TRL do."""
    logits = self.lm_head(self.base_model(input_ids).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def replace_on_the_instance(model):
    model.forward = types.MethodType(other_forward, model)


def replace_by_a_partial(model):
    model.forward = functools.partial(other_forward, model)


def delete_the_forward(model):
    del model.forward


def warnings_of(calls) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [str(w.message) for w in caught if "was replaced" in str(w.message)]


@pytest.mark.parametrize("replace", [replace_on_the_instance, replace_by_a_partial, delete_the_forward])
def test_a_replaced_forward_warns_once(make_model, batch, replace):
    model = make_model()
    tigon.patch(model, memory="lean")
    model(**batch)
    replace(model)
    messages = warnings_of(lambda: (model(**batch), model(**batch)))
    assert len(messages) == 1
    assert messages[0].startswith("tigon: the forward of LlamaForCausalLM was replaced (by ")
    assert "so the loss in its head and memory='lean' are not used" in messages[0]


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"memory": "lean+mlp"}, "the loss in its head and memory='lean+mlp' are"),
        ({"memory": "lean", "loss": False}, "memory='lean' is"),
        ({}, "the loss in its head is"),
    ],
)
def test_the_warning_names_the_features_that_are_lost(make_model, batch, options, lost):
    model = make_model()
    tigon.patch(model, **options)
    replace_on_the_instance(model)
    (message,) = warnings_of(lambda: model(**batch))
    assert lost in message


def test_a_model_that_keeps_its_forward_is_silent(make_model, batch):
    model = make_model()
    tigon.patch(model, memory="lean")
    assert warnings_of(lambda: (model(**batch), model.base_model(batch["input_ids"]))) == []


def test_a_wrapper_around_the_patched_forward_is_silent(make_model, batch):
    model = make_model()
    tigon.patch(model)
    patched_forward = model.forward

    @functools.wraps(patched_forward)
    def wrapped(*args, **kwargs):
        return patched_forward(*args, **kwargs)

    model.forward = wrapped
    assert warnings_of(lambda: model(**batch)) == []


def test_restore_removes_the_check_of_the_forward(make_model, batch):
    model = make_model()
    report = tigon.patch(model)
    report.restore()
    assert "forward" not in vars(model.base_model)
    replace_on_the_instance(model)
    assert warnings_of(lambda: model(**batch)) == []
