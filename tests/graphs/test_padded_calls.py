"""`tigon.patch(model, pad_to=N)`: layers get padded sequences, and the caller gets the results of the stock model."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, noise, step  # noqa: E402
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from op_cases import one_in  # noqa: E402
from tigon.hf.padded_calls import MOST_NOTES  # noqa: E402

pytestmark = pytest.mark.no_interpreter("The padding launches no kernel.")

BATCH, LENGTH, PADDED = 2, 11, 16
TOKENS = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(TOKENS)
RIGHT = ONES.clone()
RIGHT[1, 8:] = 0
LEFT = RIGHT.flip(1)
PACKED = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0])
ENDS = torch.tensor([0, 4, 10, 11], dtype=torch.int32)

masked = lambda mask: {"attention_mask": mask, "labels": TOKENS.masked_fill(mask == 0, -100)}
CALLS = {
    "no mask": {},
    "ones": masked(ONES),
    "right": masked(RIGHT),
    "left": masked(LEFT),
    "right, labels there": {"attention_mask": RIGHT},
    "packed": {"position_ids": PACKED.repeat(BATCH, 1), "use_cache": False},
    "positions and mask": {"position_ids": torch.arange(LENGTH).repeat(BATCH, 1), "attention_mask": RIGHT},
    "items": {"num_items_in_batch": 9},
}


def build(model_type: str = "llama", attention: str = "sdpa", **settings) -> nn.Module:
    """Return a model without dropout. Its kernels of attention compute a causal mask if there is no other one."""
    model = tiny_model(model_type)
    model.set_attn_implementation(attention)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def seen_lengths(module: nn.Module) -> list[int]:
    """Return a list to which each call of a module adds the length of its first input."""
    lengths: list[int] = []
    module.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    return lengths


def check_same(model: nn.Module, batch: dict, is_padded: bool = True, **options) -> tigon.hf.Report:
    """Compare a padded step with a stock step of a model."""
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model, pad_to=PADDED, **options)
    lengths = seen_lengths(model.base_model.norm)
    assert_within_noise(step(model, batch), expected, allowed, report)
    assert lengths == [PADDED if is_padded else LENGTH], report
    return report


def batch_of(call: str = "no mask", **arguments) -> dict:
    return {"input_ids": TOKENS, "labels": TOKENS, **CALLS[call], **arguments}


@one_in(8, call=[*CALLS], model_type=["llama", "qwen3", "gemma3_text", "mixtral"])
def test_loss_and_gradients_are_those_without_padding(model_type, call):
    # The loss that balances experts counts all tokens that are not masked. A mask would join packed samples.
    is_mixture = model_type == "mixtral"
    model = build(model_type, output_router_logits=is_mixture)
    check_same(model, batch_of(call), is_padded=not (is_mixture and call == "packed"))


def test_recurrent_layers():
    check_same(build("qwen3_next"), batch_of("left"))


@pytest.mark.parametrize("options", [{"loss": False}, {"memory": "lean"}, {"memory": "checkpoint"}], ids=str)
@pytest.mark.parametrize("call", ["no mask", "right", "right, labels there", "left"])
@pytest.mark.sampled(5)
def test_other_options_of_the_patch(call, options):
    """With the stock loss, the caller also gets logits."""
    model = build()
    logits = model(**batch_of(call)).logits
    check_same(model, batch_of(call), **options)
    if "loss" in options:
        torch.testing.assert_close(model(**batch_of(call)).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("call", ["no mask", "right", "left"])
@pytest.mark.sampled(5)
def test_attention_that_is_not_causal_gets_a_mask(call, attention):
    """Without the mask, true tokens would read the padding."""
    model = tiny_model("gemma3_text")
    config = copy.deepcopy(model.config)
    config.use_bidirectional_attention = True
    model = type(model)._from_config(config, attn_implementation=attention).train()
    check_same(model, batch_of(call), is_padded=(attention, call) != ("eager", "left"))


def test_attention_that_adds_a_bias_to_a_mask():
    """It adds large negative numbers too, whatever the name of the attention is."""
    check_same(build("inkling_text"), batch_of("left"), is_padded=False)
    check_same(build("inkling_text"), batch_of("right"))


@pytest.mark.parametrize("reads_padding", [True, False])
def test_eager_attention_of_padding_on_the_left(reads_padding):
    """Padding on the left attends to nothing, which eager attention computes as the mean of all tokens."""
    labels = TOKENS.masked_fill(LEFT == 0, -100)
    if not reads_padding:
        labels[:, 3] = -100
    report = check_same(build(attention="eager"), batch_of("left", labels=labels), is_padded=not reads_padding)
    assert reads_padding == any("padding on the left" in note for note in report.notes)


def test_token_types_of_a_model_with_images():
    config = transformers.Gemma3Config(
        text_config=tiny_model("gemma3_text").config.to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=0, boi_token_index=1, eoi_token_index=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).train()
    batch = batch_of(token_type_ids=torch.zeros_like(TOKENS))
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model, pad_to=PADDED)
    lengths = seen_lengths(model.model.language_model.norm)
    assert_within_noise(step(model, batch), expected, allowed, report)
    assert lengths == [PADDED]


def test_embeddings_and_boundaries_of_packed_samples():
    model = build()
    embeds = model.get_input_embeddings()(TOKENS).detach()
    check_same(model, {"inputs_embeds": embeds, "labels": TOKENS})
    packed = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 6, "max_length_k": 6}
    packed |= {"use_cache": False, "input_ids": TOKENS[:1], "labels": TOKENS[:1], "position_ids": PACKED[None]}
    check_same(build(), packed)


def test_outputs_have_the_true_length():
    """Calls without labels return logits, and any call may return hidden states and attention."""
    model = build(attention="eager")
    batch = batch_of(labels=None, output_hidden_states=True, output_attentions=True)
    expected = model(**batch)
    tigon.patch(model, pad_to=PADDED)
    actual = model(**batch)
    assert expected.keys() - actual.keys() == {"past_key_values"}
    for name in ("logits", "hidden_states", "attentions"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)
    kept = model(input_ids=TOKENS, logits_to_keep=3).logits
    torch.testing.assert_close(kept, expected.logits[:, -3:], rtol=1e-4, atol=1e-5)
    as_tuple = model(TOKENS, return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters(adapters_first):
    """PEFT calls the model inside its wrapper."""
    peft = pytest.importorskip("peft")
    model = build()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    stock = peft.get_peft_model(copy.deepcopy(model), config)
    expected = step(stock, batch_of("right"))
    allowed = noise(stock, batch_of("right"), expected)
    torch.manual_seed(0)
    if adapters_first:
        model = peft.get_peft_model(model, config)
        tigon.patch(model, pad_to=PADDED)
    else:
        tigon.patch(model, pad_to=PADDED)
        model = peft.get_peft_model(model, config)
    lengths = seen_lengths(model.base_model.model.model.norm)
    assert_within_noise(step(model, batch_of("right")), expected, allowed, "")
    assert lengths == [PADDED]
    # An activated LoRA counts the tokens from the end.
    model.peft_config["default"].alora_invocation_tokens = [1]
    model(**batch_of())
    assert lengths == [PADDED, LENGTH]


def test_a_trainer_may_call_the_body():
    model = build()
    expected = model.model(input_ids=TOKENS, attention_mask=LEFT).last_hidden_state
    tigon.patch(model, pad_to=PADDED)
    lengths = seen_lengths(model.model.norm)
    states = model.model(input_ids=TOKENS, attention_mask=LEFT).last_hidden_state
    assert lengths == [PADDED]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


KEEP = lambda model: None
ADD_NOISE = lambda model: setattr(model.model.embed_tokens, "neftune_noise_alpha", 5.0)
REPLACE_LOSS = lambda model: setattr(model, "loss_function", lambda logits, labels, **_: logits.sum())


@pytest.mark.parametrize(
    ("prepare", "arguments", "reason"),
    [
        (KEEP, {"use_cache": True}, "it has a cache"),
        (KEEP, {"position_ids": PACKED.repeat(BATCH, 1)}, "with a cache transformers does not separate samples"),
        (KEEP, {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH)}, "attention_mask"),
        (KEEP, {"weights": torch.ones(BATCH, LENGTH)}, "the argument weights may"),
        (ADD_NOISE, {}, "the noise of NEFTune depends"),
        (REPLACE_LOSS, {}, "its loss function"),
    ],
    ids=["cache", "packed with a cache", "mask", "weights", "NEFTune", "loss"],
)
@pytest.mark.filterwarnings("ignore:tigon. the loss function of")
def test_calls_that_are_not_padded(prepare, arguments, reason):
    model = build()
    report = tigon.patch(model, pad_to=PADDED)
    prepare(model)
    lengths = seen_lengths(model.model.norm)
    for _ in range(2):
        model(**batch_of(**arguments))
    assert lengths == [LENGTH, LENGTH]
    assert sum(reason in note for note in report.notes) == 1
    assert f"a call of {type(model).__name__} was not padded: " in str(report)


def test_the_report_does_not_grow_with_every_call():
    model = build()
    report = tigon.patch(model, pad_to=PADDED)
    for i in range(1, 20):
        model(TOKENS, **{f"weights{i}": TOKENS})
    assert sum("was not padded" in note for note in report.notes) == MOST_NOTES


def test_only_training_is_padded():
    model = build()
    tigon.patch(model, pad_to=PADDED)
    lengths = seen_lengths(model.model.norm)
    with torch.no_grad():
        model(TOKENS)
    model.eval()(TOKENS)
    model.generate(TOKENS, max_new_tokens=2, do_sample=False)
    assert lengths == [LENGTH, LENGTH, LENGTH, 1]
    model.train()(TOKENS[:, :PADDED])
    assert lengths[-1] == PADDED


def test_positions_that_have_no_embedding():
    model = build("gpt2")
    tigon.patch(model, pad_to=48)
    lengths = seen_lengths(model.transformer.ln_f)
    tokens = TOKENS.repeat(1, 6)
    for count in (40, 50):
        model(input_ids=tokens[:, :count], labels=tokens[:, :count])
    assert lengths == [48, 50]


class Mixer(nn.Module):
    """Adds the mean of all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


def test_models_whose_tokens_may_read_to_the_right_are_not_padded():
    model = build()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Mixer())
    report = check_same(model, batch_of(), is_padded=False)
    assert "calls of LlamaForCausalLM are not padded: its Mixer (of " in str(report)
    # Without a mask of the caller, this attention is not causal.
    assert "its attention is not known to be causal" in str(tigon.patch(tiny_model("moshi"), pad_to=PADDED))
    assert "depend on the length of a call (by keep_window_size)" in str(tigon.patch(tiny_model("doge"), pad_to=PADDED))
    encoder = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    assert "not padded" in str(tigon.patch(encoder, pad_to=PADDED))
    assert "there is no causal language model" in str(tigon.patch(nn.Sequential(nn.LayerNorm(8)), pad_to=4))


def test_a_compiled_model_is_not_padded():
    model = build()
    # A model of one layer compiles in half the time.
    model.config.num_hidden_layers = 1
    expected = model(**batch_of()).loss
    tigon.patch(model, pad_to=PADDED)
    torch._dynamo.reset()
    loss = torch.compile(model, backend="eager", fullgraph=True)(**batch_of(use_cache=False)).loss
    torch.testing.assert_close(loss, expected)


def test_restore_copies_and_later_patches():
    model = build()
    expected = step(model, batch_of())
    report = tigon.patch(model, pad_to=PADDED)
    assert "calls of LlamaForCausalLM in training are padded to a multiple of 16 tokens" in str(report)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        lengths = seen_lengths(each.model.norm)
        step(each, batch_of())
        assert lengths == [PADDED]
    lengths = seen_lengths(model.model.norm)
    later = tigon.patch(model, pad_to=24, memory="lean")
    step(model, batch_of())
    later.restore()
    step(model, batch_of())
    report.restore()
    actual = step(model, batch_of())
    assert lengths == [24, PADDED, LENGTH]
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert not {"forward"} & (vars(model).keys() | vars(model.model).keys())


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "patch: pad_to must be positive"),
        (-64, ValueError, "patch: pad_to must be positive"),
        (64.0, TypeError, "patch: pad_to must be an int, got 64.0"),
        (True, TypeError, "patch: pad_to must be an int, got True"),
        ("64", TypeError, "patch: pad_to must be an int, got '64'"),
    ],
)
def test_wrong_values_are_refused(value, error, message):
    model = build()
    with pytest.raises(error, match=message):
        tigon.patch(model, pad_to=value)
    assert "forward" not in vars(model)


def test_a_patch_that_only_pads_is_no_empty_patch():
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = tigon.patch(model, pad_to=PADDED, **dict.fromkeys(tigon.hf.parts.PARTS, False))
    lengths = seen_lengths(model.model.norm)
    expected = step(build(), batch_of())
    assert step(model, batch_of()).keys() == expected.keys()
    assert lengths == [PADDED]
    report.restore()
