"""Packed samples in models with recurrent layers: a note in the report, and one warning in training."""

import copy
import pickle
import warnings

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.parts import BUILT  # noqa: E402
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from tigon.hf.packing import PackingWarning, recurrent_layers  # noqa: E402

TOKENS = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(9), torch.arange(7)])[None]
BOUNDARIES = torch.tensor([0, 9, 16], dtype=torch.int32)
PACKED = {
    "positions": {"position_ids": POSITIONS},
    "positions of images": {"position_ids": POSITIONS.expand(3, 1, 16)},
    "boundaries": {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES, "max_length_q": 9, "max_length_k": 9},
    "sample numbers": {"seq_idx": torch.cat([torch.zeros(9), torch.ones(7)])[None].int()},
}
NOT_PACKED = {
    "no positions": {},
    "one sample": {"position_ids": torch.arange(16)[None]},
    # The second axis holds the rows of an image of 2 x 2 patches.
    "an image": {"position_ids": torch.tensor([[[0, 1, 1, 1, 1, 3]], [[0, 1, 1, 2, 2, 3]], [[0, 1, 2, 1, 2, 3]]])},
    "left padding": {
        "position_ids": torch.cat([torch.ones(4), torch.arange(12)])[None].long(),
        "attention_mask": torch.cat([torch.zeros(4), torch.ones(12)])[None].long(),
    },
}


def warnings_of_packing(call) -> int:
    """Return the number of warnings about packed samples while `call` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum("packed samples are not independent" in str(warning.message) for warning in caught)


def train(model, **arguments) -> None:
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **arguments).loss.backward()


@pytest.mark.parametrize("arguments", PACKED.values(), ids=PACKED)
def test_the_first_packed_batch_warns_once(arguments):
    hook = PackingWarning("packed samples are not independent")
    module = torch.nn.Linear(2, 2).train()
    assert warnings_of_packing(lambda: hook(module, (), arguments)) == 1
    assert warnings_of_packing(lambda: hook(module, (), arguments)) == 0


@pytest.mark.parametrize("arguments", NOT_PACKED.values(), ids=NOT_PACKED)
def test_other_batches_do_not_warn(arguments):
    hook = PackingWarning("packed samples are not independent")
    assert warnings_of_packing(lambda: hook(torch.nn.Linear(2, 2).train(), (), arguments)) == 0


@pytest.mark.parametrize("way", ["evaluation", "no gradients"])
def test_only_training_warns(way):
    hook, module = (
        PackingWarning("packed samples are not independent"),
        torch.nn.Linear(2, 2).train(way != "evaluation"),
    )
    with torch.set_grad_enabled(way != "no gradients"):
        assert warnings_of_packing(lambda: hook(module, (), PACKED["positions"])) == 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "minimax", "lfm2_moe", "rwkv"])
@pytest.mark.sampled(4)
def test_the_report_names_the_recurrent_layers_and_training_warns(model_type):
    model = tiny_model(model_type).train()
    report = tigon.patch(model)
    (note,) = [note for note in report.notes if note.startswith("packed samples")]
    assert next(iter(recurrent_layers(model).values())) in note
    assert warnings_of_packing(lambda: train(model)) == 0
    if model_type != "rwkv":
        assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 1
        assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 0


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "phi4_multimodal"])
@pytest.mark.sampled(3)
def test_models_without_recurrent_layers_have_no_note(model_type):
    model = tiny_model(model_type).train()
    report = tigon.patch(model)
    assert not any("packed samples" in note for note in report.notes)
    assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 0


def hooks(model) -> int:
    """Return the number of hooks that wait for a packed batch."""
    return sum(isinstance(hook, PackingWarning) for m in model.modules() for hook in m._forward_pre_hooks.values())


def test_copies_warn_and_the_last_restore_removes_the_hook():
    model = tiny_model("qwen3_next").train()
    report = tigon.patch(model)
    assert hooks(model) == 1
    again = tigon.patch(model, memory="lean")
    assert any(note.startswith("packed samples") for note in again.notes)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert warnings_of_packing(lambda other=other: train(other, **PACKED["positions"])) == 1
    report.restore()
    assert hooks(model) == 1
    assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 1
    again.restore()
    assert hooks(model) == 0


# `model_type in BUILT` excludes types that an older transformers does not have.
HEADS = {"qwen3_next": "^mtp.*", "deepseek_v4": r"(^|\.)mtp\..*", "mimo_v2_flash": r"^model\.mtp\."}


@pytest.mark.parametrize("model_type", [name for name in HEADS if name in BUILT])
def test_the_report_names_heads_that_are_not_loaded(model_type):
    report = tigon.patch(tiny_model(model_type))
    (note,) = [note for note in report.notes if "multi-token prediction" in note]
    assert HEADS[model_type] in note


def test_a_layer_after_the_last_one_is_a_head_that_is_not_loaded():
    model = tiny_model("deepseek_v3")
    assert not any("multi-token" in note for note in tigon.patch(model).notes)
    model = tiny_model("deepseek_v3")
    model.config.num_hidden_layers = 61
    assert any(r"match model\.layers\.61" in note for note in tigon.patch(model).notes)
