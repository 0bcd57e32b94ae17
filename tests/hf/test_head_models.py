"""The loss in the head of unusual models: wrapped bodies, vision-language models, and models with auxiliary losses."""

import pytest
import torch
import transformers
from torch import nn

import tigon
from hf.same_step import assert_within_noise, noise, step
from hf.tiny import tiny_config, tiny_model
from tigon.hf.logits import SKIPPED_LOGITS
from tigon.hf.parts import PARTS


def patch_loss(model) -> str:
    """Patch only the loss, and return the detail of its entry in the report."""
    report = tigon.patch(model, **dict.fromkeys(set(PARTS) - {"loss"}, False))
    return next(entry.detail for entry in report.entries if entry.part == "loss" and entry.names == [""])


def assert_fused_and_stock(model, batch) -> None:
    """Patch the loss, and assert that it is fused, and that the loss and gradients are those of stock."""
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    detail = patch_loss(model)
    assert detail.startswith("linear_cross_entropy in the head")
    assert model(**batch).logits is SKIPPED_LOGITS
    assert_within_noise(step(model, batch), expected, allowed, detail)


# In these types, a part of the body calls the head, an attribute scales its output, or a layer follows the body.
BODIES = ["opt", "falcon_h1", "modernbert-decoder"]


@pytest.mark.parametrize("model_type", BODIES)
def test_bodies_of_any_structure_are_supported(batch, model_type):
    assert_fused_and_stock(tiny_model(model_type), batch)


def test_a_model_on_meta_that_embeds_its_tokens_itself_is_supported():
    """Its forward calls a method of its body. Recognition runs it on a stand-in of the body, and reads no weight."""
    config = tiny_config(transformers.AutoConfig.for_model("qwen2_5_omni_thinker"), {})
    config.vision_start_token_id, config.audio_start_token_id = 5, 6
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert patch_loss(model) == "linear_cross_entropy in the head"


# --- auxiliary losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "jamba", "phimoe"])
def test_the_loss_of_a_router_is_added(batch, model_type):
    model, routed = tiny_model(model_type), {**batch, "output_router_logits": True}
    assert_fused_and_stock(model, routed)
    assert model(**routed).aux_loss > 0
    assert step(model, routed)["loss"] > step(model, batch)["loss"]


def test_the_loss_is_stock_if_an_auxiliary_loss_reads_the_logits():
    model = tiny_model("bamba")
    model.z_loss_coefficient = 0.1
    assert "from its logits (logsumexp)" in patch_loss(model)


# --- models whose loss stays stock, and why ------------------------------------------------------


def test_a_loss_without_model_loss_function_stays_stock(make_model):
    model = make_model()
    stock_forward = type(model).forward

    class LossInForward(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = stock_forward(self, *args, **kwargs)
            if labels is not None:
                logits = outputs.logits[:, :-1].flatten(0, 1).float()
                outputs.loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
            return outputs

    model.__class__ = LossInForward
    assert patch_loss(model) == "its forward computes its loss without model.loss_function"


def test_a_scale_that_is_trained_inside_the_body_stays_stock(make_model):
    model = make_model()
    model.model.scale = nn.Parameter(torch.ones(()))
    stock_forward = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = stock_forward(self, *args, **kwargs)
            outputs.logits = outputs.logits * self.model.scale
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, self.config.vocab_size, **kwargs)
            return outputs

    model.__class__ = Scaled
    assert "in the head" not in patch_loss(model)


def test_a_weight_that_is_no_plain_tensor_stays_stock(make_model):
    class Quantised(torch.Tensor):
        """A subclass like those of libraries for quantised weights."""

    model = make_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Quantised))
    assert patch_loss(model) == "the weight of its head is a Quantised"
