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
@pytest.mark.sampled(2)
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
    assert reads_of(pickle.loads(pickle.dumps(copy.deepcopy(model))), **inputs)[0] == 0


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


def test_functions_that_the_user_assigns_run(make_model, batch, monkeypatch):
    """They replace the function for masks in the file of a model, and the forward of its body."""
    model = make_model()
    body, file, calls = type(model.base_model), sys.modules[type(model.base_model).__module__], []
    stock, stock_forward = file.create_causal_mask, body.forward
    tigon.patch(model)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    model.base_model(**inputs)
    with monkeypatch.context() as patch:
        patch.setattr(file, "create_causal_mask", lambda **kwargs: calls.append(kwargs) or stock(**kwargs))
        assert reads_of(model, **inputs)[0] > 0
    assert isinstance(calls[0]["position_ids"], torch.Tensor)
    monkeypatch.setattr(body, "forward", lambda self, **kwargs: calls.append(self) or stock_forward(self, **kwargs))
    model.base_model(**inputs)
    assert calls[1:] == [model.base_model]


NUMBERS = "position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)"
# The parameters and the statements of a forward, and whether it is recognised as one that numbers its tokens.
FORWARDS = {
    "a dict": ("", [NUMBERS, 'arguments = {"position_ids": position_ids}', "create_causal_mask(**arguments)"], True),
    "a lambda": ("", [NUMBERS, 'return {"full": lambda: create_causal_mask(position_ids=position_ids)}'], True),
    "a loop": (
        "", [NUMBERS, "for position_ids in inputs_embeds: pass", "create_causal_mask(position_ids=position_ids)"],
        False,
    ),
    "a mask": (
        "attention_mask, ",
        ["position_ids = attention_mask.long().cumsum(-1) - 1", "create_causal_mask(position_ids=position_ids)"], False,
    ),
    "other positions": ("others, ", [NUMBERS, "return position_ids, create_causal_mask(position_ids=others)"], False),
    "other positions in a dict": (
        "others, ", [NUMBERS, 'arguments = {"position_ids": others}', "create_causal_mask(**arguments)"], False,
    ),
    "no positions": ("", ["create_causal_mask(position_ids=position_ids)"], False),
    "no mask": ("", [NUMBERS, "return position_ids"], False),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "statements", "is_recognised"), FORWARDS.values(), ids=FORWARDS)
def test_only_forwards_that_number_their_tokens_are_recognised(tmp_path, parameters, statements, is_recognised):
    header = f"def forward(self, inputs_embeds, {parameters}position_ids=None):"
    file = tmp_path / "forward_of_test.py"
    file.write_text("\n    ".join([header, *statements]) + "\n")
    scope = {"__name__": "forward_of_test", "torch": torch, "create_causal_mask": create_causal_mask}
    exec(compile(file.read_text(), file, "exec"), scope)
    body = type("Body", (torch.nn.Module,), {"forward": scope["forward"]})
    assert (NumberingForward(body).forward_for(body.forward) is not None) == is_recognised
