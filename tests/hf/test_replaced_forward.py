"""If the forward or the loss of a patched model is replaced later, one warning says that the loss is not used."""

import functools
import types
import warnings

import pytest
import torch

import tigon
from tigon.memory.lean import is_lean

transformers = pytest.importorskip("transformers")


def other_forward(self, input_ids, labels=None, **kwargs):
    """Call the body and compute another loss, as the trainers of TRL do."""
    logits = self.lm_head(self.base_model(input_ids).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def warnings_of(calls) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [str(w.message) for w in caught if "was replaced" in str(w.message)]


def replace_by_trl(model):
    """Assign a forward whose code belongs to a module of the package `trl`."""
    names = {**globals(), "__name__": "trl.trainer.utils"}
    model.forward = types.MethodType(types.FunctionType(other_forward.__code__, names, argdefs=(None,)), model)


def replace_on_the_instance(model):
    model.forward = types.MethodType(other_forward, model)


def mean_of_logits(logits, labels, vocab_size, **options):
    return logits.float().mean()


CALL_IT = "let the new code call the one that it replaces"
REPLACEMENTS = {
    "on the instance": (replace_on_the_instance, "the forward", CALL_IT),
    "a partial": (lambda m: setattr(m, "forward", functools.partial(other_forward, m)), "the forward", CALL_IT),
    "deleted": (lambda m: delattr(m, "forward"), "the forward", CALL_IT),
    "TRL": (replace_by_trl, "the forward", "call tigon.integrations.trl.enable() before the trainer is built"),
    "the loss function": (lambda m: setattr(m, "loss_function", mean_of_logits), "the loss function", CALL_IT),
}


@pytest.mark.parametrize(("replace", "what", "advice"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replaced_function_warns_once_and_the_report_says_it(make_model, batch, replace, what, advice):
    model = make_model()
    report = tigon.patch(model, memory="lean")
    assert warnings_of(lambda: (model(**batch), model.base_model(batch["input_ids"]))) == []
    replace(model)
    # Evaluation and generation are silent.
    model.eval()
    with torch.no_grad():
        assert warnings_of(lambda: model(**batch)) == []
    model.train()
    (message,) = warnings_of(lambda: (model(**batch), model(**batch)))
    assert message.startswith(f"tigon: {what} of LlamaForCausalLM was replaced (by ")
    assert "so the loss in its head is not used" in message
    assert advice in message
    assert message.removeprefix("tigon: ") in str(report)


class Caller:
    """An object that calls a forward. Its attributes do not show that it wraps one."""

    def __init__(self, forward) -> None:
        self.calls = [forward]

    def __call__(self, *args, **kwargs):
        return self.calls[0](*args, **kwargs)


@pytest.mark.parametrize("wrap", [Caller, lambda f: lambda *args, **kwargs: f(*args, **kwargs)])
def test_a_wrapper_around_the_patched_forward_is_silent(make_model, batch, wrap):
    model = make_model()
    tigon.patch(model)
    model.forward = wrap(model.forward)
    assert warnings_of(lambda: model(**batch)) == []


def test_a_model_with_another_forward_gets_the_level_on_its_body(make_model, batch):
    model = make_model()
    replace_on_the_instance(model)
    levels = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: levels.append(is_lean()))
    report = tigon.patch(model, memory="lean")
    assert "its forward was already replaced" in str(report)
    model(**batch)
    report.restore()
    model(**batch)
    assert levels == [True, False]
