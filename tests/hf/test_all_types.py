"""Tiny models of every decoder type of transformers: a patch keeps the loss and the gradients of the stock model."""

from pathlib import Path

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.parts import BUILT, recorded_parts, replaced_parts, totals  # noqa: E402
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

# `make test` trains these types, and `make test-thorough` the others. The types in the first two lines cover every
# replacement and every reason why a module is not replaced. The third line has other types that are used often.
TRAINED = """
    axk2 bitnet blt cohere2 dbrx deepseek_v3 deepseek_v4 ernie4_5 gemma3n_text glm got_ocr2 gpt_oss modernbert-decoder
    nanochat nemotron_h olmo phi4_multimodal qwen3_next xlstm zamba zaya
    gemma2 gpt2 granite llama llama4_text mamba2 mixtral olmo2 phi3 qwen3
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "model_type", [name if name in TRAINED else pytest.param(name, marks=pytest.mark.thorough) for name in BUILT]
)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type):
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert_within_noise(step(model, batch), expected, allowed, report)
    report.restore()
    restored = step(model, batch)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())


@pytest.mark.parametrize("model_type", BUILT)
def test_replaced_parts_agree_with_the_record(model_type):
    """The test fails for a type that loses or gains a part. `make models` writes the record again."""
    assert replaced_parts(model_type) == recorded_parts()[model_type]


def test_every_type_is_built_or_has_a_reason():
    assert set(WITHOUT) <= set(TYPES)
    assert len(TYPES) == 143
    assert len(BUILT) >= 139
    assert list(recorded_parts()) == BUILT
    assert len(TRAINED) == 31
    assert set(TRAINED) <= set(BUILT)


def test_the_numbers_of_the_pages_agree_with_the_record():
    counts = totals(recorded_parts())
    root = Path(__file__).parents[2]
    readme, page = (" ".join((root / name).read_text("utf-8").split()) for name in ("README.md", "docs/patching.md"))
    assert f"Of the {len(TYPES)} decoder types of transformers 5.17, {len(BUILT)} are trained" in readme
    assert f"Of the {len(TYPES)} decoder types of transformers 5.17, the tests build" in page
    assert f"build the {len(BUILT)} that can be built small" in page
    assert (
        f"{counts['loss']} get the fused loss, {counts['rope']} rope, {counts['rms_norm']} RMSNorm, "
        f"{counts['mlp or experts']} a fused MLP or experts, {counts['all four']} all four" in page
    )
    assert f"`fused_statements` are replaced in {counts['fused_statements']} of them" in page


def test_every_part_is_trained_in_make_test():
    assert totals({name: recorded_parts()[name] for name in TRAINED}).keys() == totals(recorded_parts()).keys()
