"""Adapters that PEFT adds after the patch get their recipes at the next call, and keep no module in memory."""

import gc
import weakref
from typing import Any

from torch import nn

import tigon
from hf.lora_models import MLP, TOKENS, make_llama, with_lora
from op_cases import DEVICE
from tigon.hf.body_watch import WatchedBody
from tigon.recognition.replacement import find_replacement


def test_later_adapters_are_freed_when_they_are_removed():
    model = make_llama()
    # The report is kept, as a user does who wants to restore the model.
    report = tigon.patch(model)
    weights = []
    for _ in range(2):
        adapted = with_lora(model)
        adapted(input_ids=TOKENS.to(DEVICE))
        layer = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        assert find_replacement(layer) is not None
        weights.append(weakref.ref(layer.lora_A))
        model = adapted.unload()
        del adapted, layer
        model(input_ids=TOKENS.to(DEVICE))
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
    assert "low-rank adapters, added after the patch" in str(report)
    report.restore()
    assert not any(find_replacement(module) for module in model.modules())


def test_the_parts_of_a_layer_with_adapters_are_not_watched():
    """A model of 8 billion parameters has 672 modules in its layers with adapters, and 64 that may get new ones."""
    model = with_lora(make_llama())
    tigon.patch(model)
    replacements = [find_replacement(module) for module in model.modules()]
    (body,) = [each.recipe for each in replacements if each is not None and type(each.recipe) is WatchedBody]
    names = {name.rpartition(".")[2] for name in body.adapters.parents}
    assert {"self_attn", "mlp"} <= names <= {"self_attn", "mlp", "model"}


class Unreadable:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("unreadable")


def test_a_later_layer_that_cannot_be_read_runs():
    model = make_llama()
    tigon.patch(model)
    model = with_lora(model)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    layer.__dict__["setting"] = Unreadable()
    assert model(input_ids=TOKENS.to(DEVICE)).logits.isfinite().all()
    assert find_replacement(layer) is None


class WithoutBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    @property
    def base_model(self) -> nn.Module:
        raise RuntimeError("there is no body")


def test_a_body_that_raises_is_not_watched():
    assert tigon.patch(WithoutBody())
