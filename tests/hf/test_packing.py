"""Packed samples in models with recurrent layers: a note in the report, and one warning in training."""

import copy
import pickle
import warnings

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from tigon.hf import packing  # noqa: E402
from tigon.hf.packing import PackingWarning, add_boundaries, recurrent_layers, separated_layers  # noqa: E402
from tigon.hf.transformers_private import model_facts  # noqa: E402
from tigon.recognition.parts import mixers  # noqa: E402

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
    model = tiny_model("lfm2_moe").train()
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


@pytest.mark.parametrize("model_type", ["rwkv", "jamba", "minimax", "lfm2_moe"])
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


JUMP = torch.cat([torch.arange(9), torch.arange(20, 27)])[None]
# The arguments of a body, and the boundaries that the hook adds; None if it adds none.
CALLS = {
    "positions": ({"position_ids": POSITIONS}, [0, 9, 16]),
    "positions and sample numbers": ({"position_ids": POSITIONS} | PACKED["sample numbers"], [0, 9, 16]),
    "positions and boundaries of keys": ({"position_ids": POSITIONS, "cu_seq_lens_k": BOUNDARIES}, [0, 9, 16]),
    "boundaries": ({"position_ids": POSITIONS, "cu_seq_lens_q": BOUNDARIES}, None),
    "a jump": ({"position_ids": JUMP}, [0, 9, 16]),
    "a jump in the text axis": ({"position_ids": torch.stack([JUMP, *[POSITIONS] * 3])}, [0, 9, 16]),
    "a jump after an image": ({"position_ids": JUMP.expand(3, 1, 16)}, None),
    "one row for two": ({"position_ids": POSITIONS, "input_ids": TOKENS.repeat(2, 1)}, [0, 9, 16, 25, 32]),
    "one row for two, embedded": (
        {"position_ids": POSITIONS, "input_ids": None, "inputs_embeds": torch.ones(2, 16, 4)}, [0, 9, 16, 25, 32]
    ),
    "a mask": ({"position_ids": POSITIONS, "attention_mask": torch.ones(1, 1, 16, 16)}, None),
    "masks of each layer": ({"position_ids": POSITIONS, "attention_mask": {}}, None),
    "a cache": ({"position_ids": POSITIONS, "past_key_values": object()}, None),
    "decoding": ({"position_ids": torch.tensor([[3], [5]]), "input_ids": TOKENS[:, :2].T}, None),
    "no positions": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "boundaries"), CALLS.values(), ids=CALLS)
def test_the_hook_adds_boundaries_where_transformers_looks_for_them(arguments, boundaries, monkeypatch):
    call = lambda: add_boundaries(torch.nn.Identity(), (), {"input_ids": TOKENS} | arguments)
    result = call()
    assert (result and result[1]["cu_seq_lens_q"].tolist()) == boundaries
    # A CUDA graph refuses only calls that may need boundaries.
    monkeypatch.setattr(packing, "is_capturing", lambda x: True)
    if boundaries is None and arguments.keys() != {"position_ids"}:
        assert call() is None
    else:
        with pytest.raises(RuntimeError, match="pass cu_seq_lens_q too"):
            call()


def test_a_mask_that_is_passed_by_position_is_seen():
    args = TOKENS, torch.ones(1, 16)
    assert add_boundaries(torch.nn.Identity(), args, {"position_ids": POSITIONS}) is None
    assert add_boundaries(torch.nn.Identity(), args[:1], {"position_ids": POSITIONS}) is not None


class Layers(torch.nn.Module):
    """Passes all arguments on to its layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, input_ids, **kwargs):
        for i, layer in enumerate(self.layers[:2]):
            input_ids = layer(input_ids, layer_number=i, **kwargs)
        return input_ids


class Silent(Layers):
    """Takes keyword arguments and passes none of them on."""

    def forward(self, input_ids, **kwargs):
        for layer in self.layers:
            input_ids = layer(input_ids)
        return input_ids


def test_all_modules_between_the_body_and_a_layer_pass_boundaries_on():
    model = tiny_model("qwen3_next")
    tigon.patch(model)
    layers = recurrent_layers([*model.modules()], model_facts(model))
    assert separated_layers(model.model, layers) == separated_layers(Layers(model.model.layers), layers) == layers != {}
    assert separated_layers(Silent(model.model.layers), layers) == {}


@pytest.mark.thorough
def test_a_compiled_body_warns_of_positions():
    model = tiny_model("qwen3_next")
    tigon.patch(model, **dict.fromkeys(("rms_norm", "glu", "mlp", "experts", "rope", "fused_statements"), False))
    for arguments, count in (({}, 0), ({"position_ids": POSITIONS}, 1)):
        mixers._warn_once.cache_clear()
        torch.compiler.reset()
        compiled = torch.compile(model.model, backend="eager")
        call = lambda compiled=compiled, arguments=arguments: compiled(TOKENS, use_cache=False, **arguments)
        assert [warnings_of_packing(call) for _ in range(2)] == [count, 0]


def test_generation_from_a_padded_batch_is_stock_and_looks_for_no_samples(monkeypatch):
    stock = tiny_model("qwen3_5_text").eval()
    model = copy.deepcopy(stock)
    tigon.patch(model, **dict.fromkeys(("rms_norm", "glu", "mlp", "experts", "rope", "fused_statements"), False))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    # No call reads positions.
    monkeypatch.delattr(packing, "_begins")
    expected, ours = (each.generate(TOKENS.repeat(2, 1), **options) for each in (stock, model))
    assert all(map(torch.equal, ours.logits, expected.logits))


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
