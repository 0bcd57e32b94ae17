"""If a setting that changes the logits is modified after the patch, the loss is stock or an error is raised."""

import copy

import pytest
import torch

import tigon
from hf.changes import COPIES, is_fused, with_logits
from op_cases import one_in

pytest.importorskip("transformers")


def set_config(name, value):
    return lambda model: setattr(model.config, name, value)


def exchange_the_config(model):
    model.config = copy.deepcopy(model.config)
    model.config.final_logit_softcapping = 7.001


CASES = {
    "soft cap": ("gemma2", {}, set_config("final_logit_softcapping", 7.0007)),
    "soft cap removed": ("gemma2", {}, set_config("final_logit_softcapping", None)),
    "soft cap added": ("gemma2", {"final_logit_softcapping": None}, set_config("final_logit_softcapping", 500.0)),
    "another config": ("gemma2", {}, exchange_the_config),
    "scale": ("cohere", {"logit_scale": 0.3}, lambda model: setattr(model, "logit_scale", 0.30003)),
    "divisor by one": ("granite", {"logits_scaling": 1.0}, set_config("logits_scaling", 1.0001)),
}


@pytest.mark.filterwarnings("ignore:tigon. .* was changed")
@one_in(3, case=CASES, duplicate={"same": lambda model: model, "copy": COPIES["deepcopy"], "pickle": COPIES["pickle"]})
def test_a_setting_changed_after_the_patch_is_used(pair, batch, assert_same_step, case, duplicate):
    model_type, config, change = case
    model, stock = pair(model_type, **config)
    assert is_fused(model(**batch))
    change(model), change(stock)
    model = duplicate(model)
    assert not is_fused(model(**batch))
    assert_same_step(model, stock, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_old_value_fuses_the_loss_again_and_a_copy_has_its_own_settings(make_model, batch, dtype):
    """Settings that the forward does not read are ignored."""
    model = make_model("gemma2", dtype)
    tigon.patch(model)
    for name, value in (("use_cache", False), ("pad_token_id", 5), ("attention_dropout", 0.0), ("new", 3)):
        setattr(model.config, name, value)
    duplicate = copy.deepcopy(model)
    set_config("final_logit_softcapping", 7.1)(duplicate)
    assert is_fused(model(**batch))
    with pytest.warns(UserWarning, match=r"config.final_logit_softcapping of Gemma2ForCausalLM was changed, so"):
        assert not is_fused(duplicate(**batch))
    set_config("final_logit_softcapping", float("7"))(duplicate)
    assert is_fused(duplicate(**batch))


FACTORS = {"scale": 1.0}


def scale_of(key):
    return FACTORS[key]


UNWATCHED = {
    "a table": lambda model, logits: logits * FACTORS["scale"],
    "a function": lambda model, logits: logits / scale_of("scale"),
    "cap and scale": lambda model, logits: 9.0 * torch.tanh(logits * FACTORS["scale"] / 9.0),
}


@one_in(3, process=UNWATCHED, scale=[1.0001, 0.9999, 1.004, 2.0])
def test_a_change_of_an_unwatched_value_raises(make_model, batch, monkeypatch, process, scale):
    model = make_model()
    with_logits(process)(model)
    tigon.patch(model)
    assert is_fused(outputs := model(**batch))
    assert not outputs.loss.isnan()
    monkeypatch.setitem(FACTORS, "scale", scale)
    with pytest.raises(RuntimeError, match="does not change the logits as it did when the model was patched"):
        model(**batch)


SETTINGS = {"gemma2": "final_logit_softcapping", "cohere": "logit_scale", "granite": "logits_scaling"}


@one_in(3, model_type=[*SETTINGS], value=[7.0, 333.0], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_a_change(make_model, batch, monkeypatch, model_type, value, dtype):
    """Rounding errors of fp32 raise no error, and neither does a cast that an engine may add to the head."""
    name = SETTINGS[model_type]
    model = make_model(model_type, **{name: value})
    model.lm_head.weight.data /= 1000.0
    tigon.patch(model)
    call = tigon.hf.head.HeadForward.__call__
    monkeypatch.setattr(tigon.hf.head.HeadForward, "__call__", lambda *args: call(*args).to(dtype))
    # A divisor may make the token of the placeholder logits large, and fp16 has no numbers above 65504.
    if dtype is torch.float16 and 100.0 * value > 65504 and model_type == "granite":
        with pytest.raises(RuntimeError, match="changes the logits otherwise"):
            model(**batch)
        return
    outputs = model(**batch)
    assert is_fused(outputs)
    assert torch.isfinite(outputs.loss)
