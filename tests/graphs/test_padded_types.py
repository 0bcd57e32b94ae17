"""Tiny models of every decoder type of transformers: padded calls have the loss and the gradients of stock calls."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.parts import BUILT  # noqa: E402
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import VOCABULARY, tiny_model  # noqa: E402
from tigon.hf.parts import PARTS  # noqa: E402

pytestmark = pytest.mark.no_interpreter("The padding launches no kernel.")

LENGTH = 12
# The types whose calls are not padded: their attention has no mask of transformers or chooses tokens by scores, or they
# read patches of bytes.
NOT_PADDED = """
    axk2 blt deepseek_v32 deepseek_v4 doge glm_moe_dsa hy_v4 minimax_m3_vl_text moshi openai-gpt qwen4_exp
    qwen4_exp_text
""".split()  # noqa: SIM905
# `make test` trains each of these types in half of the cases, and `make test-thorough` each other type in one case, so
# that every case has many types: what pads a call knows no types, and a type decides only what mask its attention gets.
TRAINED = ["gpt2", "falcon_h1", "gpt_oss", "olmo2"]
CASES = [*itertools.product(["no mask", "right", "left"], ["eager", "sdpa"])]


def parameters() -> list:
    pairs = [(name, case) for i, name in enumerate(TRAINED) for case in CASES[i % 2 :: 2]]
    cases = [pytest.param(name, *case, id="-".join((name, *case))) for name, case in pairs]
    for i, name in enumerate(name for name in BUILT if name not in TRAINED):
        case = CASES[i % len(CASES)]
        cases.append(pytest.param(name, *case, id="-".join((name, *case)), marks=pytest.mark.thorough))
    return cases


def make(model_type: str, attention: str) -> nn.Module:
    """Return a model without dropout, whose random numbers depend on the length."""
    model = tiny_model(model_type)
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            names = [name for name in getattr(holder, "__dict__", {}) if "drop" in name or name == "p"]
            for name in names:
                if isinstance(getattr(holder, name), float):
                    setattr(holder, name, 0.0)
    # Some types have eager attention only.
    with contextlib.suppress(ValueError):
        model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("model_type", "case", "attention"), parameters())
def test_padded_calls_are_those_without_padding(model_type, case, attention):
    model, batch = make(model_type, attention), make_batch(VOCABULARY, length=LENGTH)
    if case != "no mask":
        mask = torch.ones_like(batch["input_ids"])
        mask[1, 8:] = 0
        mask = mask if case == "right" else mask.flip(1)
        # No masked token predicts a label.
        labels = batch["input_ids"].masked_fill(mask.roll(1, 1) * mask == 0, -100)
        batch |= {"attention_mask": mask, "labels": labels}
    expected = step(model, batch)
    if any(value.isnan().any() for value in expected.values()):
        pytest.skip("the stock model gives NaN")
    allowed = noise(model, batch, expected)
    report = tigon.patch(model, pad_to=2 * LENGTH, **dict.fromkeys(PARTS, False))
    assert_within_noise(step(model, batch), expected, allowed, report)
    is_padded = not any("not padded" in note for note in report.notes)
    assert is_padded == (model_type not in NOT_PADDED), report
