"""Every decoder type of transformers, tiny: patched, its loss and gradients are those of the stock model."""

from collections import Counter

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

BUILT = [name for name in TYPES if name not in WITHOUT]


@pytest.mark.parametrize("model_type", BUILT)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type):
    model, batch = tiny_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert_within_noise(step(model, batch), expected, allowed, report)
    report.restore()
    restored = step(model, batch)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())


def test_no_type_is_left_out_in_silence():
    assert set(WITHOUT) <= set(TYPES)
    assert len(TYPES) == 143
    assert len(BUILT) >= 120


# How many types have each part: what is asked for at least, and what is measured now.
LEAST = {"rms_norm": 106, "mlp": 95, "rope": 95, "loss": 125, "all": 75}
MEASURED = {"rms_norm": 107, "mlp": 106, "rope": 115, "loss": 139, "all": 89, "layer_norm": 38}
MEASURED |= {"glu": 91, "experts": 46, "relu2": 8, "glue": 119}  # of which an "mlp" has one at least


def test_coverage():
    """A part that is lost in a type, or found in one more, shows."""
    counts: Counter[str] = Counter()
    for model_type in BUILT:
        parts = {entry.part for entry in tigon.patch(tiny_model(model_type)).replaced}
        mlp = bool(parts & {"glu", "experts"})
        counts.update(parts, mlp=mlp, all=mlp and {"rms_norm", "rope", "loss"} <= parts)
    assert dict(counts) == MEASURED
    assert all(counts[part] >= n for part, n in LEAST.items())
