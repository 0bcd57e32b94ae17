"""If the forward or the loss of a patched model is replaced later, one warning says that the loss is not used."""

import functools
import types
import warnings

import pytest
import torch

import tigon
from tigon.memory import lean as lean_module
from tigon.memory.block import Block
from tigon.memory.lean import _block, is_lean

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
def test_a_replaced_forward_warns_once_and_the_report_says_it(make_model, batch, replace):
    model = make_model()
    report = tigon.patch(model, memory="lean")
    model(**batch)
    replace(model)
    messages = warnings_of(lambda: (model(**batch), model(**batch)))
    assert len(messages) == 1
    assert messages[0].startswith("tigon: the forward of LlamaForCausalLM was replaced (by ")
    assert "so the loss in its head is not used" in messages[0]
    assert "let the new code call the one that it replaces" in messages[0]
    assert messages[0].removeprefix("tigon: ") in str(report)


def test_the_warning_for_trl_names_the_function_to_call(make_model, batch):
    """The code of TRL's forward belongs to a module of the package `trl`."""
    model = make_model()
    tigon.patch(model)
    names = {**globals(), "__name__": "trl.trainer.utils"}
    model.forward = types.MethodType(types.FunctionType(other_forward.__code__, names, argdefs=(None,)), model)
    (message,) = warnings_of(lambda: model(**batch))
    assert "call tigon.integrations.trl.enable() before the trainer is built" in message


def test_a_replaced_loss_function_warns_once_and_the_report_says_it(make_model, batch):
    model = make_model()
    report = tigon.patch(model)
    model.loss_function = lambda logits, labels, vocab_size, **options: logits.float().mean()
    messages = warnings_of(lambda: (model(**batch), model(**batch)))
    assert len(messages) == 1
    assert messages[0].startswith("tigon: the loss function of LlamaForCausalLM was replaced (by ")
    assert messages[0].removeprefix("tigon: ") in str(report)


@pytest.mark.parametrize("memory", ["lean", "lean+mlp"])
def test_a_call_of_the_body_has_the_level(make_model, batch, memory):
    """A level is in one block, which a call of the model and a call of its body enter."""
    model = make_model()
    blocks = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: blocks.append(_block()))
    report = tigon.patch(model, memory=memory)
    model(**batch)
    model.base_model(batch["input_ids"])
    assert [type(block) for block in blocks] == [Block, Block]
    assert blocks[0] is not blocks[1]
    report.restore()
    assert "forward" not in vars(model.base_model)
    model.base_model(batch["input_ids"])
    assert blocks[2] is None


def test_one_call_of_the_model_enters_one_block(make_model, batch, monkeypatch):
    model, blocks = make_model(), []
    tigon.patch(model, memory="lean+mlp")

    class CountedBlock(Block):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            blocks.append(self)

    monkeypatch.setattr(lean_module, "Block", CountedBlock)
    model(**batch)
    assert len(blocks) == 1
    model.base_model(batch["input_ids"])
    assert len(blocks) == 2


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


def test_another_level_replaces_the_level_of_the_body(make_model, batch):
    model = make_model()
    tigon.patch(model, memory="lean+mlp")
    tigon.patch(model, memory="lean")
    blocks = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: blocks.append(_block().mlp))
    model.base_model(batch["input_ids"])
    assert blocks == [False]


def test_a_model_that_keeps_its_forward_is_silent(make_model, batch):
    model = make_model()
    tigon.patch(model, memory="lean")
    assert warnings_of(lambda: (model(**batch), model.base_model(batch["input_ids"]))) == []


class Caller:
    """An object that calls a forward. Its attributes do not show that it wraps one."""

    def __init__(self, forward) -> None:
        self.calls = [forward]

    def __call__(self, *args, **kwargs):
        return self.calls[0](*args, **kwargs)


@pytest.mark.parametrize(
    "wrap", [Caller, lambda f: functools.wraps(f)(Caller(f)), lambda f: lambda *args, **kwargs: f(*args, **kwargs)]
)
def test_a_wrapper_around_the_patched_forward_is_silent(make_model, batch, wrap):
    model = make_model()
    tigon.patch(model)
    model.forward = wrap(model.forward)
    assert warnings_of(lambda: model(**batch)) == []


def test_evaluation_and_generation_are_silent(make_model, batch):
    model = make_model()
    tigon.patch(model)
    replace_on_the_instance(model)
    model.eval()
    with torch.no_grad():
        assert warnings_of(lambda: model(**batch)) == []


def test_restore_removes_the_check_of_the_forward(make_model, batch):
    model = make_model()
    report = tigon.patch(model)
    report.restore()
    assert "forward" not in vars(model.base_model)
    replace_on_the_instance(model)
    assert warnings_of(lambda: model(**batch)) == []
