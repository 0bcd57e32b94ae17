"""Arguments are padded by what they mean, and outputs are cut to the true length."""

import re
import types

import pytest
import torch

from tigon.graphs.padding import PaddingRules, bucket_length, cut_output, ladder_length, pad_call

pytestmark = pytest.mark.no_interpreter("The tests launch no kernel.")

TOKENS = torch.arange(1, 11).reshape(2, 5)


def padded(rules: PaddingRules | None = None, length: int = 8, **arguments):
    """Return the arguments of a padded call of 2 x 5 tokens."""
    call = pad_call({"input_ids": TOKENS, **arguments}, length, rules)
    assert not isinstance(call, str), call
    return call.arguments


def config(**values) -> PaddingRules:
    return PaddingRules(config=types.SimpleNamespace(**values), skips_logits=True)


def test_lengths_of_buckets():
    assert [bucket_length(n, 64) for n in (1, 64, 65)] == [64, 64, 128]
    ladder = sorted({ladder_length(n) for n in range(1, 5000)})
    assert ladder == [
        64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120
    ]  # fmt: skip
    assert all(ladder_length(n) == n for n in ladder)


def test_padding_has_no_labels_and_no_mask():
    labels = TOKENS.clone()
    arguments = {"labels": labels, "shift_labels": labels, "num_items_in_batch": 7, "ignore_index": -3}
    result = padded(PaddingRules(token=4), **arguments)
    assert result["input_ids"].tolist() == [[1, 2, 3, 4, 5, 4, 4, 4], [6, 7, 8, 9, 10, 4, 4, 4]]
    for name in ("labels", "shift_labels"):
        assert result[name][:, :5].equal(TOKENS)
        assert (result[name][:, 5:] == -3).all()
    assert (padded(labels=labels)["labels"][:, 5:] == -100).all()
    assert result["num_items_in_batch"] == 7
    assert result["use_cache"] is False
    assert "attention_mask" not in result
    assert labels.equal(TOKENS)


def test_embeddings_are_padded_with_zeros():
    embeds = torch.ones(2, 5, 3)
    call = pad_call({"inputs_embeds": embeds, "input_ids": None}, 8)
    assert call.arguments["inputs_embeds"][:, :5].equal(embeds)
    assert call.arguments["inputs_embeds"].shape == (2, 8, 3)
    assert not call.arguments["inputs_embeds"][:, 5:].any()
    assert call.arguments["input_ids"] is None
    assert (call.length, call.padded) == (5, 8)


@pytest.mark.parametrize(
    ("mask", "labels", "is_kept"),
    [
        ([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], None, False),
        ([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], False),
        ([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], [[1, 2, 3, 4, 5], [1, 2, 3, -100, -100]], False),
        # The loss reads the result of a masked token.
        ([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], True),
        # The caller reads the logits.
        ([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], None, True),
        # Padding on the left, and a hole.
        ([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], [[1, 2, 3, 4, 5], [-100, -100, 3, 4, 5]], True),
        ([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], [[1, 2, 3, 4, 5], [1, -100, 3, 4, 5]], True),
    ],
    ids=["no zeros", "no zeros, labels", "right", "right, with labels there", "right, no labels", "left", "hole"],
)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_is_left_out_if_it_has_no_effect(mask, labels, is_kept, dtype):
    mask = torch.tensor(mask, dtype=dtype)
    arguments = {"attention_mask": mask} | ({} if labels is None else {"labels": torch.tensor(labels)})
    result = padded(config(), **arguments)["attention_mask"]
    assert (result is not None) == is_kept
    if is_kept:
        assert result[:, :5].equal(mask)
        assert not result[:, 5:].any()
        assert result.dtype == dtype
    # Hidden states of masked tokens would change, and the packed samples that positions may show.
    for name, value in (("output_hidden_states", True), ("skip_logits", False), ("position_ids", TOKENS)):
        kept = padded(config(), **arguments, **{name: value})["attention_mask"] is not None
        assert kept == (is_kept or name == "position_ids" or not mask.all())


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"output_router_logits": True}, {}),
        ({}, {"output_router_logits": True}),
        ({"is_causal": False}, {}),
        ({"use_bidirectional_attention": True}, {}),
        ({}, {"token_type_ids": torch.zeros(2, 5)}),
    ],
    ids=["router loss", "router loss of the call", "not causal", "bidirectional", "token types"],
)
def test_a_mask_excludes_the_padding_where_causal_attention_does_not(settings, arguments):
    expected = [[1] * 5 + [0] * 3] * 2
    assert padded(config(**settings), **arguments)["attention_mask"].tolist() == expected
    ones = torch.ones(2, 5, dtype=torch.long)
    assert padded(config(**settings), attention_mask=ones, **arguments)["attention_mask"].tolist() == expected
    reason = pad_call({"input_ids": TOKENS, "position_ids": TOKENS, **arguments}, 8, config(**settings))
    assert "may be packed" in reason
    if settings.get("output_router_logits"):
        assert padded(config(**settings), output_router_logits=False).get("attention_mask") is None


def test_positions_continue_or_begin_again():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert padded(position_ids=positions)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    # They would exceed a limit.
    rules = PaddingRules(position_limits=(4,))
    assert padded(rules, position_ids=positions)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    axes = torch.stack((TOKENS, TOKENS + 1, TOKENS))
    result = padded(position_ids=axes)["position_ids"]
    assert result.shape == (3, 2, 8)
    assert result[1, 1].tolist() == [7, 8, 9, 10, 11, 12, 13, 14]


def test_padding_of_packed_samples_is_a_sample():
    ends, samples = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32)
    arguments = {
        "input_ids": TOKENS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "seq_idx": samples,
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 3, "max_length_k": torch.tensor(3),
    }  # fmt: skip
    result = pad_call(arguments, 9).arguments
    assert result["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert result["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    for side in "qk":
        assert result[f"cu_seq_lens_{side}"].tolist() == [0, 3, 5, 9]
        assert result[f"cu_seq_lens_{side}"].dtype == ends.dtype
        assert result[f"max_length_{side}"] == 4


@pytest.mark.parametrize(("kept", "expected"), [(2, slice(3, 5)), (9, slice(0, 5)), (0, 0), (-2, slice(2, 5))])
def test_kept_logits_count_from_the_true_end(kept, expected):
    assert padded(logits_to_keep=kept)["logits_to_keep"] == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"input_ids": None}, "tokens"),
        ({"input_ids": TOKENS[0]}, "tokens"),
        ({"inputs_embeds": torch.ones(2, 5, 3)}, "tokens"),
        ({"past_key_values": object()}, "cache"),
        ({"use_cache": True}, "cache"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 9)}, "attention_mask"),
        ({"attention_mask": {"full_attention": torch.ones(2, 1, 5, 5)}}, "for each token"),
        ({"logits_to_keep": torch.tensor([1, 2])}, "logits_to_keep"),
        ({"labels": torch.ones(2, 2)}, r"labels has the shape \(2, 2\)"),
        ({"position_ids": torch.ones(2, 4)}, r"position_ids has the shape \(2, 4\)"),
        ({"weights": torch.ones(2, 5)}, "the argument weights may"),
        ({"weights": torch.ones(5)}, "the argument weights may"),
        ({"extra": ({"weights": torch.ones(2, 5)},)}, r"the argument extra\[0\]\['weights'\] may"),
    ],
)
def test_calls_that_stay_as_they_are(arguments, reason):
    result = pad_call({"input_ids": TOKENS, **arguments}, 8)
    assert isinstance(result, str)
    assert re.search(reason, result)


def test_a_rank_may_have_a_part_of_a_sequence(monkeypatch):
    """Sequence parallelism gives each rank a part of the tokens, with their positions and shifted labels."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for name in ("position_ids", "shift_labels"):
        assert "part of a longer sequence" in pad_call({"input_ids": TOKENS, name: TOKENS}, 8)
    ends = torch.tensor([0, 5])
    assert padded(position_ids=TOKENS, cu_seq_lens_q=ends)["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert padded(labels=TOKENS)["labels"].shape == (2, 8)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert padded(position_ids=TOKENS)["position_ids"].shape == (2, 8)


@pytest.mark.parametrize(
    ("length", "limit", "is_dynamic", "positions", "is_padded"),
    [
        (8, 4, False, False, True),
        (8, 8, False, False, True),
        (8, 7, False, False, False),
        (8, 5, False, False, False),
        # The positions of the padding begin again.
        (8, 7, False, True, True),
        (8, 4, True, True, False),
        (8, 8, True, False, True),
    ],
)
def test_the_padding_crosses_no_limit_of_positions(length, limit, is_dynamic, positions, is_padded):
    rules = PaddingRules(position_limits=(limit,), keeps_positions=not is_dynamic)
    arguments = {"input_ids": TOKENS} | ({"position_ids": TOKENS} if positions else {})
    assert isinstance(pad_call(arguments, length, rules), str) != is_padded
    assert not isinstance(pad_call(arguments, 5, rules), str)


def test_a_call_of_the_padded_length_changes_only_a_mask_without_effect():
    ones = torch.ones(2, 5, dtype=torch.long)
    arguments = {"input_ids": TOKENS, "attention_mask": ones, "logits_to_keep": 2}
    result = pad_call(arguments, 5).arguments
    assert result == arguments | {"attention_mask": None}
    assert result["input_ids"] is TOKENS
    with pytest.raises(ValueError, match="length must be at least 5, got 4"):
        pad_call(arguments, 4)


def test_outputs_are_cut_to_the_true_length():
    states, attention, router = torch.rand(2, 8, 3), torch.rand(2, 8, 8, 8), torch.rand(16, 4)
    output = {
        "loss": torch.tensor(1.0), "logits": states, "hidden_states": (states,), "attentions": (attention,),
        "router_logits": (router,), "predicted_tokens": states[..., 0], "image_hidden_states": states,
        "past_key_values": None, "token_accuracy": torch.tensor(0.5), "kept": torch.rand(2, 2, 3),
    }  # fmt: skip
    expected = {
        **output, "logits": states[:, :5], "hidden_states": (states[:, :5],), "attentions": (attention[..., :5, :5],),
        "router_logits": (router.reshape(2, 8, 4)[:, :5].reshape(10, 4),), "predicted_tokens": states[:, :5, 0],
    }  # fmt: skip
    as_tuple, as_object = tuple(output.values()), types.SimpleNamespace(**output)
    assert cut_output(output, 8, 8) is output
    assert output["logits"] is states
    torch.testing.assert_close(cut_output(output, 5, 8), expected, rtol=0, atol=0)
    assert cut_output(as_object, 5, 8) is as_object
    torch.testing.assert_close(vars(as_object), expected, rtol=0, atol=0)
    named = {name: value for name, value in expected.items() if name != "image_hidden_states"}
    cut = {name: value for name, value in zip(output, cut_output(as_tuple, 5, 8), strict=True) if name in named}
    torch.testing.assert_close(cut, named, rtol=0, atol=0)
    assert cut_output(states, 5, 8).shape == (2, 5, 3)
    # As many experts as tokens.
    square = torch.rand(8, 8)
    assert cut_output({"router_logits": (square,)}, 5, 8)["router_logits"][0].shape == (5, 8)
