"""Packed samples in models with recurrent layers: a note in the report, and one warning in training."""

import copy
import pickle
import warnings

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from tigon.hf.packing import PackingWarning, recurrent_layers  # noqa: E402
from tigon.hf.transformers_private import model_facts  # noqa: E402

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


@pytest.mark.parametrize(("arguments", "is_packed"), [*((x, True) for x in PACKED.values()),
                                                      *((x, False) for x in NOT_PACKED.values())],
                         ids=[*PACKED, *NOT_PACKED])  # fmt: skip
def test_the_first_packed_batch_of_training_warns_once(arguments, is_packed):
    hook, module = PackingWarning("packed samples are not independent"), torch.nn.Linear(2, 2)
    call = lambda: hook(module, (), arguments)
    with torch.no_grad():
        assert warnings_of_packing(call) == 0
    module.eval()
    assert warnings_of_packing(call) == 0
    module.train()
    assert [warnings_of_packing(call) for _ in range(2)] == [is_packed, 0]


def hooks(model) -> int:
    """Return the number of hooks that wait for a packed batch."""
    return sum(isinstance(hook, PackingWarning) for m in model.modules() for hook in m._forward_pre_hooks.values())


def test_copies_warn_and_the_last_restore_removes_the_hook():
    model = tiny_model("bamba").train()
    report = tigon.patch(model)
    (note,) = [note for note in report.notes if note.startswith("packed samples")]
    assert next(iter(recurrent_layers([*model.modules()], model_facts(model)).values())) in note
    assert hooks(model) == 1
    again = tigon.patch(model, memory="lean")
    assert any(note.startswith("packed samples") for note in again.notes)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert warnings_of_packing(lambda: train(other)) == 0
    assert [warnings_of_packing(lambda: train(other, **PACKED["positions"])) for _ in range(2)] == [1, 0]
    report.restore()
    assert hooks(model) == 1
    assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 1
    again.restore()
    assert hooks(model) == 0


@pytest.mark.parametrize("model_type", ["rwkv", "bamba", "minimax", "lfm2_moe"])
@pytest.mark.sampled(4)
def test_the_report_names_the_recurrent_layers(model_type):
    model = tiny_model(model_type).train()
    (note,) = [note for note in tigon.patch(model).notes if note.startswith("packed samples")]
    assert next(iter(recurrent_layers([*model.modules()], model_facts(model)).values())) in note
    if model_type != "rwkv":
        assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 1


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "phi4_multimodal"])
@pytest.mark.sampled(4)
def test_models_without_recurrent_layers_have_no_note(model_type):
    model = tiny_model(model_type).train()
    assert not any("packed samples" in note for note in tigon.patch(model).notes)
    assert warnings_of_packing(lambda: train(model, **PACKED["positions"])) == 0


# --- heads that are not loaded ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "pattern"),
    [("qwen3_next", "^mtp.*"), ("deepseek_v4", r"(^|\.)mtp\..*"), ("mimo_v2_flash", r"^model\.mtp\.")],
)
def test_the_report_names_heads_that_are_not_loaded(model_type, pattern):
    (note,) = [note for note in tigon.patch(tiny_model(model_type)).notes if "multi-token prediction" in note]
    assert pattern in note


def test_a_layer_after_the_last_one_is_a_head_that_is_not_loaded():
    """The config of the tiny model has fewer layers than that of the checkpoint, whose last layer this is."""
    model = tiny_model("deepseek_v3")
    assert model_facts(model).dropped_heads == []
    model.config.num_hidden_layers = 61
    assert model_facts(model).dropped_heads == [r"model\.layers\.61.*"]
