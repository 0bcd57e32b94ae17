"""Adapters that PEFT adds after the patch get their recipes at the next call, and keep no module in memory."""

import gc
import weakref

import tigon
from hf.lora_models import TOKENS, make_llama, with_lora
from op_cases import DEVICE
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
