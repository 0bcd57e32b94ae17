"""Fused training keeps what a model adds to its outputs. Any use of the logits that do not exist raises an error."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from hf.changes import COMPUTATIONS, is_fused, with_extra, with_logits, with_outputs
from tigon.hf.logits import SKIPPED_LOGITS

transformers = pytest.importorskip("transformers")
accelerate_operations = pytest.importorskip("accelerate.utils.operations")

REFUSAL = r"tigon: .* needs the logits of this call.*skip_logits=False"


@dataclasses.dataclass
class WithPenalty(transformers.modeling_outputs.CausalLMOutputWithPast):
    penalty: torch.Tensor | None = None


def penalty_of(outputs):
    return None if outputs.loss is None else outputs.loss * 0.1


ADDITIONS = {
    "key": lambda model, outputs, labels: outputs.__setitem__("penalty", penalty_of(outputs)) or outputs,
    "attribute": lambda model, outputs, labels: setattr(outputs, "penalty", penalty_of(outputs)) or outputs,
    "field": lambda model, outputs, labels: WithPenalty(outputs.loss, outputs.logits, penalty=penalty_of(outputs)),
}


@pytest.mark.parametrize("change", ADDITIONS.values(), ids=ADDITIONS)
def test_additions_of_a_model_to_its_output_are_kept(pair, batch, change):
    model, stock = pair(change=with_outputs(change))
    outputs, expected = model(**batch), stock(**batch)
    assert is_fused(outputs)
    torch.testing.assert_close(outputs.penalty, expected.penalty)
    assert list(outputs.keys()) == list(expected.keys())


@pytest.mark.parametrize(
    "read",
    [lambda x, _: x.shape[0] * x.shape[1], lambda x, _: (x.size(-1), x.float().size(dim=1)), lambda x, _: x.size()[0]],
)
def test_a_model_may_read_the_shape_of_its_logits(pair, batch, read):
    model, stock = pair()
    for each in (model, stock):
        with_extra(read)(each)
    outputs, expected = model(**batch), stock(**batch)
    assert is_fused(outputs)
    assert outputs.extra == expected.extra


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 7.0}], ids=["plain", "soft cap"])
@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
@pytest.mark.sampled(2)
def test_a_model_that_starts_to_compute_from_its_logits_raises(pair, batch, compute, config):
    model, stock = pair("gemma2", **config)
    for each in (model, stock):
        with_extra(compute)(each)
    with pytest.raises(RuntimeError, match=REFUSAL):
        model(**batch)
    with torch.no_grad():
        expected, outputs = stock(**batch), model(**batch, skip_logits=False)
    assert np.array_equal(np.asarray(outputs.extra), np.asarray(expected.extra))


TREATMENTS = {
    "detach": (lambda model, logits: logits.detach(), REFUSAL),
    "halve the gradient": (lambda model, logits: logits.register_hook(lambda g: g / 2) and logits, REFUSAL),
    "retain the gradient": (lambda model, logits: logits.retain_grad() or logits, REFUSAL),
    "compute before the loss": (lambda model, logits: (logits.square().mean(), logits)[1], REFUSAL),
    "write the labels": (lambda model, logits: write(model.written_labels) or logits, "wrote into its labels"),
    "call the head again": (lambda model, logits: model.lm_head(model.hidden), "called its head twice"),
}


@pytest.mark.parametrize(("treat", "message"), TREATMENTS.values(), ids=TREATMENTS)
def test_a_model_that_starts_to_treat_its_logits_in_another_way_raises(pair, batch, treat, message):
    """A head that is called twice computes the loss first, and then returns logits, which the loss function gets."""
    model, _ = pair()
    assert is_fused(model(**batch))
    model.written_labels = batch["labels"]
    model.lm_head.register_forward_pre_hook(lambda head, args: setattr(model, "hidden", args[0]))
    with_logits(treat)(model)
    with pytest.raises(RuntimeError, match=message):
        model(**batch)


def write(labels) -> None:
    labels.masked_fill_(labels % 3 == 0, -100)


PLACES = {
    "before the body": lambda model, labels: model.register_forward_pre_hook(
        lambda module, args, kwargs: write(kwargs["labels"]), with_kwargs=True
    ),
    "before the layers": lambda model, labels: model.model.register_forward_pre_hook(lambda *_: write(labels)),
    "before the head": lambda model, labels: model.model.norm.register_forward_hook(lambda *_: write(labels)),
}


@pytest.mark.parametrize("argument", ["labels", "shift_labels"])
@pytest.mark.parametrize("write_labels", PLACES.values(), ids=PLACES)
def test_labels_may_be_written_before_the_head(pair, batch, write_labels, argument):
    losses = []
    for model in pair():
        labels = batch["labels"].clone()
        shifted = {"shift_labels": labels} if argument == "shift_labels" else {}
        write_labels(model, labels)
        losses.append(model(input_ids=batch["input_ids"], labels=labels, **shifted).loss)
    torch.testing.assert_close(*losses)


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
