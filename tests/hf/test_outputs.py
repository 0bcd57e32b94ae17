"""Fused training keeps what a model adds to its outputs. Any use of the logits that do not exist raises an error."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import tigon
from tigon.hf.logits import SKIPPED_LOGITS

transformers = pytest.importorskip("transformers")
accelerate_operations = pytest.importorskip("accelerate.utils.operations")

REFUSAL = r"tigon: .* needs the logits of this call.*skip_logits=False"


def with_forward(change):
    """Return a function that lets the outputs of a model's forward go through `change(model, outputs, labels)`."""

    def apply(model):
        class Changed(type(model)):
            def forward(self, *args, labels=None, **kwargs):
                return change(self, super().forward(*args, labels=labels, **kwargs), labels)

        model.__class__ = Changed

    return apply


# --- what a model adds ---------------------------------------------------------------------------


@dataclasses.dataclass
class WithPenalty(transformers.modeling_outputs.CausalLMOutputWithPast):
    penalty: torch.Tensor | None = None


def add_key(model, outputs, labels):
    outputs["penalty"] = outputs.loss * 0.1 if outputs.loss is not None else None
    return outputs


def add_attribute(model, outputs, labels):
    outputs.penalty = outputs.loss * 0.1 if outputs.loss is not None else None
    return outputs


def add_field(model, outputs, labels):
    return WithPenalty(loss=outputs.loss, logits=outputs.logits, penalty=None if labels is None else outputs.loss * 0.1)


@pytest.mark.parametrize("change", [add_key, add_attribute, add_field])
def test_additions_of_a_model_to_its_output_are_kept(pair, batch, change):
    model, stock = pair(change=with_forward(change))
    outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    torch.testing.assert_close(outputs.penalty, expected.penalty)
    assert list(outputs.keys()) == list(expected.keys())


# --- what is computed from logits within the model -----------------------------------------------


def count_tokens(model, outputs, labels):
    outputs.extra = outputs.logits.shape[0] * outputs.logits.shape[1]
    return outputs


def size_of_the_vocabulary(model, outputs, labels):
    outputs.extra = outputs.logits.size(-1), outputs.logits.float().size(dim=1)
    return outputs


def loss_of_each_sequence(model, outputs, labels):
    outputs.loss = outputs.loss / outputs.logits.size()[0]
    outputs.extra = outputs.loss
    return outputs


@pytest.mark.parametrize("change", [count_tokens, size_of_the_vocabulary, loss_of_each_sequence])
def test_a_model_may_read_the_shape_of_its_logits(pair, batch, change):
    model, stock = pair()
    with_forward(change)(model), with_forward(change)(stock)
    outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits is SKIPPED_LOGITS
    torch.testing.assert_close(outputs.extra, expected.extra)


def return_unchanged(logits, labels):
    return logits


def detach(logits, labels):
    return logits.detach()


def write_labels_late(logits, labels):
    write(labels)
    return logits


def halve_the_gradient(logits, labels):
    logits.register_hook(lambda gradient: gradient / 2)
    return logits


def retain_the_gradient(logits, labels):
    logits.retain_grad()
    return logits


class Switched(transformers.LlamaForCausalLM):
    """A model whose forward passes its logits to the function `treat`."""

    treat = return_unchanged

    def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
        logits = self.lm_head(self.model(input_ids=input_ids, attention_mask=attention_mask)[0])
        logits = type(self).treat(logits, labels)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("treat", [detach, halve_the_gradient, retain_the_gradient])
def test_a_model_that_starts_to_change_the_gradient_of_its_logits_raises(make_model, batch, monkeypatch, treat):
    model = make_model()
    model.__class__ = Switched
    tigon.patch(model)
    assert model(**batch).logits is SKIPPED_LOGITS
    monkeypatch.setattr(Switched, "treat", treat)
    with pytest.raises(RuntimeError, match=REFUSAL):
        model(**batch)


def accuracy(model, outputs, labels):
    outputs.extra = None if labels is None else (outputs.logits.argmax(-1) == labels).float().mean()
    return outputs


def count_large(model, outputs, labels):
    outputs.extra = (outputs.logits > 0).sum()
    return outputs


def entropy(model, outputs, labels):
    outputs.extra = torch.distributions.Categorical(logits=outputs.logits).entropy()
    return outputs


def top_two(model, outputs, labels):
    outputs.extra = torch.topk(outputs.logits, 2, -1).indices
    return outputs


def last_token(model, outputs, labels):
    outputs.extra = outputs.logits[:, -1]
    return outputs


def to_numpy(model, outputs, labels):
    outputs.extra = outputs.logits.detach().numpy()
    return outputs


def any_large(model, outputs, labels):
    outputs.extra = bool((outputs.logits.detach() * 2).max() > 1)
    return outputs


@pytest.mark.parametrize("change", [accuracy, count_large, entropy, top_two, last_token, any_large])
def test_a_model_that_computes_from_its_logits_keeps_its_loss(make_model, change):
    model = make_model()
    with_forward(change)(model)
    loss = next(entry for entry in tigon.patch(model).entries if entry.part == "loss")
    assert not loss.replaced
    assert loss.detail.startswith("its forward computes more than its loss from its logits (")


@pytest.mark.parametrize("change", [accuracy, count_large, entropy, top_two, last_token, to_numpy, any_large])
def test_a_model_that_starts_to_compute_from_its_logits_raises(pair, batch, change):
    model, stock = pair()
    with_forward(change)(model), with_forward(change)(stock)
    with pytest.raises(RuntimeError, match=REFUSAL):
        model(**batch)
    with torch.no_grad():
        expected, outputs = (
            stock(**batch),
            model(**batch, skip_logits=False),
        )
    assert np.array_equal(np.asarray(outputs.extra), np.asarray(expected.extra))


# --- labels written in the forward pass ----------------------------------------------------------


def write(labels):
    labels.masked_fill_(labels % 3 == 0, -100)


def write_before_the_body(model, labels):
    model.register_forward_pre_hook(lambda module, args, kwargs: write(kwargs["labels"]), with_kwargs=True)


def write_before_the_layers(model, labels):
    model.model.register_forward_pre_hook(lambda module, args: write(labels))


def write_before_the_head(model, labels):
    model.model.norm.register_forward_hook(lambda module, args, output: write(labels))


@pytest.mark.parametrize("argument", ["labels", "shift_labels"])
@pytest.mark.parametrize("write_labels", [write_before_the_body, write_before_the_layers, write_before_the_head])
def test_labels_may_be_written_before_the_head(pair, batch, write_labels, argument):
    losses = []
    for model in pair():
        labels = batch["labels"].clone()
        shifted = {"shift_labels": labels} if argument == "shift_labels" else {}
        write_labels(model, labels)
        losses.append(model(input_ids=batch["input_ids"], labels=labels, **shifted).loss)
    torch.testing.assert_close(*losses)


def test_labels_that_are_written_between_the_head_and_the_loss_raise(make_model, batch, monkeypatch):
    model = make_model()
    model.__class__ = Switched
    tigon.patch(model)
    assert model(**batch).logits is SKIPPED_LOGITS
    monkeypatch.setattr(Switched, "treat", write_labels_late)
    with pytest.raises(RuntimeError, match="wrote into its labels"):
        model(**batch)


# --- what is computed from logits outside --------------------------------------------------------

USES = {
    "index": lambda logits: logits[:, -1],
    "method": lambda logits: logits.argmax(-1),
    "shape": lambda logits: logits.shape,
    "function of torch": lambda logits: torch.softmax(logits, -1),
    "function of nn": lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(2)),
    "comparison": lambda logits: logits > 0,
    "sum": lambda logits: logits + 1,
    "scale": lambda logits: 2 * logits,
    "negative": lambda logits: -logits,
    "length": len,
    "truth": bool,
    "iteration": list,
    "number": float,
    "numpy": np.asarray,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_logits_of_fused_training_raise_when_they_are_used(pair, batch, use):
    model, _ = pair()
    for logits in (model(**batch).logits, model(**batch, return_dict=False)[1]):
        with pytest.raises(RuntimeError, match=REFUSAL):
            use(logits)


@pytest.mark.parametrize(
    "handle",
    [
        copy.copy,
        lambda outputs: pickle.loads(pickle.dumps(outputs)),
        lambda outputs: pytree.tree_map(lambda x: x, outputs),
        accelerate_operations.convert_to_fp32,
        lambda outputs: accelerate_operations.send_to_device(outputs, "cpu"),
        dataclasses.replace,
        repr,
    ],
    ids=["copy", "pickle", "pytree", "fp32", "device", "dataclass", "repr"],
)
def test_engines_may_copy_and_move_skipped_logits(pair, batch, handle):
    model, _ = pair()
    outputs = handle(model(**batch))
    assert isinstance(outputs, str) or outputs.logits is SKIPPED_LOGITS


# --- probes --------------------------------------------------------------------------------------

HISTORY: list[float] = []


@pytest.mark.parametrize("where", ["instance", "class", "global", "buffer"])
def test_recognition_does_not_change_the_objects_of_the_user(make_model, batch, where):
    model = make_model()

    def record_loss(model, outputs, labels):
        if outputs.loss is not None:
            if where == "buffer":
                model.steps += 1
            else:
                {"instance": model.history, "class": type(model).shared, "global": HISTORY}[where].append(
                    outputs.loss.item()
                )
        return outputs

    with_forward(record_loss)(model)
    model.history, type(model).shared = [], []
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    HISTORY.clear()
    tigon.patch(model)
    records = {"instance": model.history, "class": type(model).shared, "global": HISTORY}
    assert all(each == [] for each in records.values())
    assert model.steps == 0
    model(**batch)
    assert model.steps == 1 if where == "buffer" else len(records[where]) == 1
