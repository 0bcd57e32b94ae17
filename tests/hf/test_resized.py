"""After `resize_token_embeddings`, and with heads that PEFT trains and ties, the loss is still computed in the head."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import tigon
from hf.changes import with_adapters
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.recognition.replacement import find_replacement

RESIZES = {"larger": {"new_num_tokens": 150}, "smaller": {"new_num_tokens": 120}, "padded": {"pad_to_multiple_of": 64}}


def resize(model, how: str) -> None:
    model.resize_token_embeddings(**RESIZES[how])


def inside(batch, how: str):
    """Return the batch with tokens that every size of the vocabulary has."""
    return {name: value.clamp(max=119) for name, value in batch.items()}


def fused(model, batch) -> bool:
    return model(**batch).logits is SKIPPED_LOGITS


@pytest.fixture
def assert_fused_as_stock(step, assert_same_step, batch):
    """Return a function that asserts that the loss is fused, without a warning, with the results of a stock model."""

    def check(model, stock, how: str) -> None:
        stock.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fused(model, inside(batch, how))
        assert not fused(stock, inside(batch, how))
        assert_same_step(model, stock, inside(batch, how))

    return check


@pytest.mark.parametrize("how", RESIZES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"], ids=["untied", "tied", "soft cap"])
@pytest.mark.sampled(4)
def test_the_loss_of_a_resized_model_stays_in_the_head(make_model, assert_fused_as_stock, batch, model_type, how):
    """The same holds for a copy whose new head has not been called. The report keeps no weight of the old head."""
    model, stock = make_model(model_type), make_model(model_type)
    report = tigon.patch(model, memory="lean" if how == "padded" else "default")
    old = weakref.ref(model.lm_head.weight)
    fused(model, batch)
    resize(model, how)
    resize(stock, how)
    copied = copy.deepcopy(model)
    assert_fused_as_stock(model, stock, how)
    gc.collect()
    # A tied weight stays the same object.
    assert model_type != "llama" or old() is None
    # A second resize, after a call.
    twice = copy.deepcopy(stock)
    for each in (model, twice):
        each.resize_token_embeddings(140)
    assert_fused_as_stock(model, twice, how)
    report.restore()
    assert all(find_replacement(module) is None for module in model.modules())
    assert not fused(model, inside(batch, how))
    assert_fused_as_stock(copied, stock, how)


@pytest.mark.parametrize("by_type", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_models_of_a_patched_type_and_models_resized_before_the_patch_are_fused(
    make_model, assert_fused_as_stock, by_type
):
    stock = make_model("qwen3")
    with tigon.patched("qwen3") if by_type else contextlib.nullcontext():
        model = make_model("qwen3")
    resize(model, "smaller")
    resize(stock, "smaller")
    if not by_type:
        tigon.patch(model)
    assert_fused_as_stock(model, stock, "smaller")


@pytest.mark.thorough
def test_a_second_patch_prepares_a_resized_head_for_compiled_code(make_model, batch):
    """A compiled call cannot replace the forward of the new head."""
    model = make_model(num_hidden_layers=1)
    tigon.patch(model)
    resize(model, "larger")
    assert find_replacement(model.lm_head) is None
    tigon.patch(model)
    outputs = torch.compile(model, backend="eager")(**inside(batch, "larger"))
    assert outputs.logits is SKIPPED_LOGITS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.config, "vocab_size", 130), "config.vocab_size of LlamaForCausalLM was changed"),
        (lambda model: setattr(model, "lm_head", nn.Linear(64, 150, bias=False)), "vocab_size of LlamaForCausalLM was"),
        (lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(150, 64))), "vocab_size of LlamaForC"),
        (lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head, nn.Tanh())), "the head of LlamaForC"),
    ],
    ids=["config", "head", "weight", "another head"],
)
def test_a_head_of_another_size_than_the_config_runs_the_stock_code(make_model, batch, change, message):
    model = make_model()
    tigon.patch(model)
    change(model)

    def run() -> None:
        # The stock loss cuts the logits into rows of config.vocab_size, so it raises errors of torch.
        with contextlib.suppress(RuntimeError, ValueError):
            assert isinstance(model(**batch).logits, torch.Tensor)

    with pytest.warns(UserWarning, match=message):
        run()


def test_a_new_weight_of_the_head_is_used_at_once(make_model, batch, assert_same_step):
    """The size is that of the weight, also where the attribute of the layer is stale."""
    model, stock = make_model(), make_model()
    tigon.patch(model)
    for each in (model, stock):
        each.lm_head.weight = nn.Parameter(torch.full((150, 64), 0.01).cumsum(0))
        each.config.vocab_size = each.vocab_size = 150
    assert fused(model, batch)
    assert_same_step(model, stock, batch)


TRAINED = {
    "head": {"modules_to_save": ["lm_head"]},
    "head, kept tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "embedding, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both, kept tied": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
}


def adapt(model, **options):
    return with_adapters(model, ["q_proj"], r=2, **options)


@pytest.mark.parametrize("is_patched_first", [True, False], ids=["patch first", "PEFT first"])
@pytest.mark.parametrize(
    ("trained", "is_tied"), [*((trained, True) for trained in TRAINED), ("head", False)], ids=[*TRAINED, "untied head"]
)
@pytest.mark.sampled(5)
def test_a_head_in_modules_to_save_is_fused(make_model, batch, assert_same_step, trained, is_tied, is_patched_first):
    build = lambda: make_model("llama", tie_word_embeddings=is_tied)
    model, stock = build(), adapt(build(), **TRAINED[trained])
    if is_patched_first:
        report = tigon.patch(model)
        model = adapt(model, **TRAINED[trained])
    else:
        model = adapt(model, **TRAINED[trained])
        report = tigon.patch(model)
    assert not [entry for entry in report.left_alone if entry.part == "loss"]
    assert fused(model, batch)
    assert_same_step(model, stock, batch)
    with model.disable_adapter(), stock.disable_adapter():
        outputs = model(**batch)
        assert outputs.logits is SKIPPED_LOGITS
        torch.testing.assert_close(outputs.loss, stock(**batch).loss)
    report.restore()
    assert not fused(model, batch)
    assert all(find_replacement(module) is None for module in model.modules())


@pytest.mark.parametrize("is_resized_first", [True, False], ids=["resize first", "PEFT first"])
@pytest.mark.sampled(2)
def test_a_resized_model_with_adapters_is_fused(make_model, batch, assert_same_step, is_resized_first):
    models = []
    for is_patched in (True, False):
        model = make_model()
        if is_patched:
            tigon.patch(model)
        torch.manual_seed(1)
        if is_resized_first:
            resize(model, "larger")
            model = adapt(model, modules_to_save=["lm_head"])
        else:
            model = adapt(model)
            torch.manual_seed(1)
            resize(model, "larger")
        models.append(model)
    assert fused(models[0], batch)
    assert_same_step(*models, batch)
