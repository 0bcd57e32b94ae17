"""The loss in the head gives the results of stock for every call of a model, and runs stock code where it must."""

import numpy
import pytest
import torch
import transformers
from torch import nn

import tigon
from hf.changes import LOSS_ALONE, is_fused, loss_entry
from hf.same_step import assert_same
from hf.tiny import tiny_config
from tigon.hf.logits import SKIPPED_LOGITS

SHIFTED = torch.arange(33).view(3, 11)
FUSED = {
    "labels": {},
    "items": {"num_items_in_batch": 17},
    "items in a tensor": {"num_items_in_batch": torch.tensor(17)},
    "ignore_index": {"ignore_index": 5},
    "shift_labels": {"shift_labels": SHIFTED},
    "all three": {"shift_labels": SHIFTED, "num_items_in_batch": 9, "ignore_index": 4},
    "options that stock ignores": {"label_smoothing": 0.3, "reduction": "sum"},
    "hidden states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "skip_logits"])
@pytest.mark.parametrize("extra", FUSED.values(), ids=FUSED)
@pytest.mark.sampled(3)
def test_options_of_the_loss_work_as_in_stock(pair, batch, step, extra, training):
    """With `skip_logits=True`, evaluation is fused too, and has gradients."""
    model, stock = (each.train(training) for each in pair("gemma2"))
    if "ignore_index" in extra:
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, extra["ignore_index"])
    batch |= extra
    skip = {} if training else {"skip_logits": True}
    outputs, expected = model(**batch, **skip), stock(**batch)
    assert is_fused(outputs)
    assert type(outputs) is type(expected)
    assert outputs.keys() == expected.keys()
    for states in zip(outputs.hidden_states or (), expected.hidden_states or (), strict=True):
        assert torch.equal(*states)
    assert_same(step(model, batch | skip), step(stock, batch))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch, **skip).loss, expected.loss)


@pytest.mark.parametrize("is_tuple", [False, True])
def test_labels_may_be_passed_by_position(pair, batch, is_tuple):
    model, stock = pair()
    args = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    outputs, expected = (each(*args, return_dict=not is_tuple) for each in (model, stock))
    assert (outputs[1] if is_tuple else outputs.logits) is SKIPPED_LOGITS
    assert len(outputs) == len(expected)
    torch.testing.assert_close(outputs[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["gemma2", "mixtral"])
def test_a_tuple_has_skipped_logits_in_place_of_the_logits(make_model, clone, batch, model_type, dtype):
    """A mixture of experts has its auxiliary loss between the loss and the logits."""
    model = make_model(model_type, dtype)
    stock = clone(model)
    tigon.patch(model)
    extra = {"return_dict": False} | ({"output_router_logits": True} if model_type == "mixtral" else {})
    actual, expected = model(**batch, **extra), stock(**batch, **extra)
    is_logits = [isinstance(x, torch.Tensor) and x.shape[-1:] == (131,) for x in expected]
    assert sum(is_logits) == 1
    assert [x is SKIPPED_LOGITS for x in actual] == is_logits
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_shift_labels_alone_give_a_loss_if_skip_logits_is_set(pair, batch, training):
    """Without skip_logits, the caller gets the logits, and may compute another loss from them."""
    model, stock = (each.train(training) for each in pair())
    shifted = batch.pop("labels").roll(-1, 1)
    expected = stock(**batch, labels=shifted, shift_labels=shifted)
    outputs = model(**batch, shift_labels=shifted, skip_logits=True)
    assert is_fused(outputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    outputs = model(**batch, shift_labels=shifted)
    assert outputs.loss is None
    assert torch.equal(outputs.logits, expected.logits)


def test_context_parallel_losses_add_up_and_a_rank_may_have_no_valid_token(pair, batch, step):
    """Each rank has a part of the shifted labels, and all ranks divide by the same number, which is a tensor."""
    model, stock = pair("gemma2")
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    items = (shifted != -100).sum()
    totals: dict[str, torch.Tensor] = {}
    for columns in (slice(0, 6), slice(6, 11), slice(11, 11)):
        part = torch.full_like(shifted, -100)
        part[:, columns] = shifted[:, columns]
        call = {**batch, "labels": part, "shift_labels": part, "num_items_in_batch": items}
        assert is_fused(model(**call))
        for name, value in step(model, call).items():
            totals[name] = totals.get(name, 0) + value
            torch.testing.assert_close(value, step(stock, call)[name])
    for name, value in step(stock, {**batch, "num_items_in_batch": items}).items():
        torch.testing.assert_close(totals[name], value)


def add_head_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn(model.lm_head.out_features))


def freeze(is_trained):
    return lambda model: [p.requires_grad_(is_trained(name)) for name, p in model.named_parameters()]


# The model type, options of its config, a change before the patch, and the end of the line about the loss.
MODELS = {
    "frozen head": ("llama", {}, freeze(lambda name: "lm_head" not in name), "in the head"),
    "frozen trunk": ("llama", {}, freeze(lambda name: "lm_head" in name), "in the head"),
    "bias": ("llama", {}, add_head_bias, "in the head"),
    "scale": ("cohere", {"logit_scale": 0.3}, None, "scale 0.3"),
    "divisor": ("granite", {"logits_scaling": 7.0}, None, "scale 0.142857"),
    "soft cap": ("gemma2", {"final_logit_softcapping": 5.0}, None, "softcap 5"),
    "no soft cap": ("gemma2", {"final_logit_softcapping": None}, None, "in the head"),
    "reads the dtype of its head": ("mamba", {}, None, "in the head"),
    "router loss": ("mixtral", {"output_router_logits": True, "num_local_experts": 4}, None, "load_balancing_loss"),
}


@pytest.mark.parametrize(("model_type", "config", "change", "detail"), MODELS.values(), ids=MODELS)
@pytest.mark.sampled(2)
def test_heads_scales_soft_caps_and_router_losses_work_as_in_stock(
    make_model, clone, batch, assert_same_step, model_type, config, change, detail
):
    model = make_model(model_type, **config)
    if change is not None:
        change(model)
    stock = clone(model)
    assert loss_entry(tigon.patch(model)).detail.endswith(detail)
    assert is_fused(model(**batch))
    assert_same_step(model, stock, batch)
    if model_type == "llama":
        with torch.no_grad():
            inputs = stock.get_input_embeddings()(batch.pop("input_ids"))
        assert_same_step(model, stock, {**batch, "inputs_embeds": inputs})


def test_a_model_on_meta_that_embeds_its_tokens_itself_is_supported():
    """Its forward calls a method of its body. Recognition runs it on a stand-in of the body, and reads no weight."""
    config = tiny_config(transformers.AutoConfig.for_model("qwen2_5_omni_thinker"), {})
    config.vision_start_token_id, config.audio_start_token_id = 5, 6
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert loss_entry(tigon.patch(model, **LOSS_ALONE)).detail == "linear_cross_entropy in the head"


def test_the_loss_is_zero_if_all_labels_are_ignored(pair, batch):
    model, _ = pair()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not any(p.grad.any() for p in model.parameters())


def test_a_call_inside_a_call_has_its_own_loss(pair, batch, assert_same_step):
    model, stock = pair()
    inner = []

    def call_again(layer, args):
        if not inner:
            inner.append(None)
            inner[0] = model(batch["input_ids"]).logits, model(**batch).loss

    model.model.layers[0].register_forward_pre_hook(call_again)
    assert_same_step(model, stock, batch)
    assert torch.equal(inner[0][0], stock(batch["input_ids"]).logits)
    torch.testing.assert_close(inner[0][1], stock(**batch).loss)


# The arguments of a call, and whether the model is in training mode.
STOCK = {
    "evaluation": ({}, False),
    "skip_logits=False": ({"skip_logits": False}, True),
    "no labels": ({"labels": None}, True),
    "no labels, but skip_logits": ({"labels": None, "skip_logits": True}, True),
    "no labels, but skip_logits, evaluation": ({"labels": None, "skip_logits": True}, False),
    "shift_labels alone": ({"labels": None, "shift_labels": SHIFTED}, True),
    "logits_to_keep": ({"labels": SHIFTED[:, -4:], "logits_to_keep": 4}, True),
    "indices in logits_to_keep": ({"labels": SHIFTED[:, -4:], "logits_to_keep": torch.tensor([7, 8, 9, 10])}, True),
    "shift_labels without a batch dimension": ({"shift_labels": torch.arange(33)}, True),
    "two numbers of items": ({"num_items_in_batch": torch.tensor([3.0, 4.0])}, True),
    "items of numpy": ({"num_items_in_batch": numpy.int64(3)}, True),
}


@pytest.mark.parametrize(("extra", "training"), STOCK.values(), ids=STOCK)
def test_other_calls_are_stock(pair, batch, extra, training):
    model, stock = (each.train(training) for each in pair("gemma2"))
    outputs = model(**batch | extra)
    expected = stock(**{name: value for name, value in (batch | extra).items() if name != "skip_logits"})
    assert torch.equal(outputs.logits, expected.logits)
    assert outputs.logits.shape[1] == (4 if "logits_to_keep" in extra else 11)
    assert (outputs.loss is None) == (expected.loss is None)
    assert outputs.loss is None or torch.equal(outputs.loss, expected.loss)
    del batch["attention_mask"]
    assert is_fused(model.train()(**batch))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_generation_is_stock(pair, batch, training):
    model, stock = pair("gemma")
    options = {"max_new_tokens": 5, "do_sample": False}
    prompt = {name: batch[name][:1] for name in ("input_ids", "attention_mask")}
    tokens = model.train(training).generate(**prompt, **options)
    assert torch.equal(tokens, stock.train(training).generate(**prompt, **options))


def test_errors_are_those_of_stock_and_have_no_later_effect(pair, batch):
    model, stock = pair()
    wrong = {**batch, "labels": batch["labels"][:, :5]}
    for each in (model, stock):
        with pytest.raises(ValueError, match="batch_size"):
            each(**wrong)
    with pytest.raises(IndexError):
        model(torch.full_like(batch["input_ids"], 999), labels=batch["labels"])
    del batch["labels"]
    assert torch.equal(model(**batch).logits, stock(**batch).logits)


@pytest.mark.parametrize(
    "change", [lambda kwargs: {"num_items_in_batch": 99}, lambda kwargs: {"labels": kwargs["labels"].roll(1, 1)}]
)
def test_a_model_that_passes_other_arguments_to_its_loss_raises(pair, batch, change):
    model, _ = pair()
    # The same object was assigned again, so the loss is fused.
    model.loss_function = model.loss_function

    class Meddling(type(model)):
        def forward(self, **kwargs):
            return super().forward(**kwargs | change(kwargs))

    model.__class__ = Meddling
    with pytest.raises(RuntimeError, match="other arguments than the model itself received"):
        model(**batch, num_items_in_batch=3)
