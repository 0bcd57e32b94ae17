"""The forward of a patched model does not make the host wait for a question whose answer is known."""

import copy
import pickle
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.hf.positions import NumberingForward

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")
create_causal_mask = masking_utils.create_causal_mask

TYPES = ["llama", "gemma2", "qwen3"]


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value of the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads_of(model, **inputs):
    with Reads() as reads:
        output = model.base_model(**inputs).last_hidden_state
    return reads.count, output


@pytest.mark.parametrize("model_type", TYPES)
def test_the_host_reads_nothing_where_the_model_numbers_the_tokens(make_model, batch, model_type):
    model = make_model(model_type)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    expected_reads, expected = reads_of(model, **inputs)
    tigon.patch(model, rms_norm=False, glu=False, rope=False, fused_statements=False)
    reads, output = reads_of(model, **inputs)
    # Without this, a version of transformers that asks nothing would pass.
    assert expected_reads > 0
    assert reads == 0
    assert torch.equal(output, expected)


def test_positions_and_masks_of_the_caller_are_looked_at(make_model, batch):
    model, stock = make_model(), make_model()
    tokens = batch["input_ids"][:1]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]])
    tigon.patch(model)
    for inputs in ({"position_ids": packed}, {"attention_mask": batch["attention_mask"][1:2]}):
        ours, theirs = (m.base_model(tokens, use_cache=False, **inputs).last_hidden_state for m in (model, stock))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # The packed sequences do not see each other, so the positions change the result.
    plain = model.base_model(tokens, use_cache=False).last_hidden_state
    assert (plain - model.base_model(tokens, position_ids=packed, use_cache=False).last_hidden_state).abs().max() > 1e-2


def test_another_model_in_a_hook_is_looked_at(make_model, batch):
    model, other = make_model(), make_model()
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]])
    answers, model_of_hook = [], []

    def hook(*_):
        if model_of_hook:
            answers.append(model_of_hook.pop().base_model(tokens, position_ids=packed, use_cache=False)[0])

    tokens = batch["input_ids"][:1]
    tigon.patch(model)
    model.base_model.get_input_embeddings().register_forward_hook(hook)
    for inner in (other, model):
        expected = inner.base_model(tokens, position_ids=packed, use_cache=False)[0]
        model_of_hook[:] = [inner]
        model.base_model(batch["input_ids"], use_cache=False)
        assert torch.equal(answers.pop(), expected)


def transformers_globals(model):
    """Return the globals of the files that the forward of a body uses."""
    files = masking_utils, sys.modules[type(model.base_model).__module__]
    return [dict(vars(file)) for file in files]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.sampled(3)
def test_no_module_of_transformers_is_changed(make_model, batch, model_type):
    """This holds during a call, because another thread may run a stock model, and after it, also if the call fails."""
    model = make_model(model_type)
    before = transformers_globals(model)
    report = tigon.patch(model)
    states = [transformers_globals(model)]
    handle = model.base_model.layers[0].register_forward_hook(lambda *_: states.append(transformers_globals(model)))
    model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(batch["input_ids"], use_cache=False)
    states.append(transformers_globals(model))
    failing = model.base_model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch["input_ids"], use_cache=False)
    failing.remove()
    handle.remove()
    states.append(transformers_globals(model))
    report.restore()
    assert len(states) == 6
    assert all(state == before for state in [*states, transformers_globals(model)])


def test_a_function_for_masks_that_the_user_assigns_runs(make_model, batch, monkeypatch):
    model = make_model()
    file, calls = sys.modules[type(model.base_model).__module__], []
    stock = file.create_causal_mask
    tigon.patch(model)
    model.base_model(batch["input_ids"], use_cache=False)
    monkeypatch.setattr(file, "create_causal_mask", lambda **kwargs: calls.append(kwargs) or stock(**kwargs))
    reads, _ = reads_of(model, input_ids=batch["input_ids"], use_cache=False)
    assert isinstance(calls[0]["position_ids"], torch.Tensor)
    assert reads > 0


def test_a_forward_that_is_assigned_to_the_class_runs(make_model, batch, monkeypatch):
    model = make_model()
    body, calls = type(model.base_model), []
    stock = body.forward
    tigon.patch(model)
    model.base_model(batch["input_ids"], use_cache=False)
    monkeypatch.setattr(
        body, "forward", lambda self, *args, **kwargs: calls.append(self) or stock(self, *args, **kwargs)
    )
    model.base_model(batch["input_ids"], use_cache=False)
    assert calls == [model.base_model]


def test_a_copy_of_a_model_causes_no_host_synchronisation(make_model, batch):
    model = make_model()
    tigon.patch(model)
    model.base_model(batch["input_ids"], use_cache=False)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert reads_of(clone, input_ids=batch["input_ids"], use_cache=False)[0] == 0


def forward_of_padding(self, input_ids, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens  # noqa: F821
    for position_ids in input_ids:  # noqa: B007
        pass
    return create_causal_mask(position_ids=position_ids)


def forward_of_mask(self, attention_mask, position_ids=None):
    position_ids = attention_mask.long().cumsum(-1) - 1
    return create_causal_mask(position_ids=position_ids)


def forward_of_other_positions(self, inputs_embeds, others, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    return position_ids, create_causal_mask(position_ids=others)


def forward_of_positions_in_dict(self, inputs_embeds, others, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    arguments = {"position_ids": others}
    return position_ids, create_causal_mask(**arguments)


def forward_without_positions(self, position_ids):
    return create_causal_mask(position_ids=position_ids)


def forward_without_mask(self, inputs_embeds, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    return position_ids


OTHERS = [
    forward_of_padding,
    forward_of_mask,
    forward_of_other_positions,
    forward_of_positions_in_dict,
    forward_without_positions,
    forward_without_mask,
    len,
]


@pytest.mark.parametrize("forward", OTHERS, ids=lambda forward: forward.__name__)
def test_other_forwards_are_looked_at(forward):
    assert NumberingForward(forward).exchanged is None


def forward_of_count(self, inputs_embeds, others, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    arguments = {"position_ids": position_ids}
    return others, create_causal_mask(**arguments)


def forward_of_lambdas(self, inputs_embeds, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
    return {"full": lambda: create_causal_mask(position_ids=position_ids)}


@pytest.mark.parametrize("forward", [forward_of_count, forward_of_lambdas], ids=lambda forward: forward.__name__)
def test_a_forward_that_numbers_its_tokens_is_recognised(forward):
    assert NumberingForward(forward).exchanged is not None
