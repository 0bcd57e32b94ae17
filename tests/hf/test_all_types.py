"""Tiny models of every decoder type of transformers: a patch keeps the loss and the gradients of the stock model."""

from pathlib import Path

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.parts import BUILT, RECORDED_VERSION, kinds_of, recorded_kinds, totals  # noqa: E402
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

# `make test` trains these types, and `make test-thorough` the others. Together they show every kind of recipe and every
# kind of reason why a module is not replaced.
TRAINED = """
    bitnet blt cohere dbrx deepseek_v4 falcon falcon_mamba flex_olmo gemma3 gemma4_text glm4 glm4_moe_lite
    glm_moe_dsa gpt_oss granitemoehybrid helium kimi_linear llama4 minimax_m3_vl_text modernbert-decoder nanochat
    nemotron nemotron_h olmo phi3 qwen3_5_moe seed_oss xlstm zamba
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "model_type", [name if name in TRAINED else pytest.param(name, marks=pytest.mark.thorough) for name in BUILT]
)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type):
    """The recipes are those of the record. `make models` writes the record again."""
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    if transformers.__version__ == RECORDED_VERSION:
        assert kinds_of(report) == recorded_kinds()[model_type]
    assert_within_noise(step(model, batch), expected, allowed, report)
    report.restore()
    restored = step(model, batch)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())


def test_every_type_is_built_or_has_a_reason():
    assert set(WITHOUT) <= set(TYPES)
    assert len(TYPES) == 143
    assert len(BUILT) >= 139
    assert list(recorded_kinds()) == BUILT


def test_make_test_trains_every_kind_of_recipe_and_of_reason():
    for result in ("replaced", "left alone"):
        kinds = {name: set(record[result]) for name, record in recorded_kinds().items()}
        assert set().union(*(kinds[name] for name in TRAINED)) == set().union(*kinds.values())
    # No other mark leaves one of these types out of the run.
    marks = {mark.name: mark for mark in test_loss_and_gradients_are_stock_and_restore_is_exact.pytestmark}
    assert marks.keys() == {"parametrize"}
    assert [value for value in marks["parametrize"].args[1] if isinstance(value, str)] == TRAINED


def test_the_numbers_of_the_pages_agree_with_the_record():
    counts = totals()
    root = Path(__file__).parents[2]
    readme, page = (" ".join((root / name).read_text("utf-8").split()) for name in ("README.md", "docs/patching.md"))
    assert f"Of the {len(TYPES)} decoder types of transformers 5.17, {len(BUILT)} are trained" in readme
    assert f"Of the {len(TYPES)} decoder types of transformers 5.17, the tests build" in page
    assert f"build the {len(BUILT)} that can be built small" in page
    assert (
        f"{counts['loss']} get the fused loss, {counts['rope']} rope, {counts['rms_norm']} RMSNorm, "
        f"{counts['mlp or experts']} a fused MLP or experts, {counts['all four']} all four" in page
    )
    assert (
        f"`fused_statements` are replaced in {counts['fused_statements']} of them, and `mixers` in {counts['mixers']}"
        in page
    )
