"""The forward of a patched model does not make the host wait for a question whose answer is known."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.hf.positions import _code_of_counting_forward

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

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
    model.set_attn_implementation("sdpa")
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


def forward_of_padding(self, input_ids, position_ids=None):
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens  # noqa: F821
    for position_ids in input_ids:  # noqa: B007
        pass


def forward_of_mask(self, attention_mask, position_ids=None):
    position_ids = attention_mask.long().cumsum(-1) - 1  # noqa: F841


def forward_without_positions(self, position_ids):
    return position_ids


@pytest.mark.parametrize("forward", [forward_of_padding, forward_of_mask, forward_without_positions, len])
def test_other_forwards_are_looked_at(forward):
    assert _code_of_counting_forward(forward) is None


def test_the_forward_of_a_model_is_known(make_model):
    assert _code_of_counting_forward(type(make_model().base_model).forward) is not None
