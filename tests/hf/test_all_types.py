"""Every decoder type of transformers, tiny: patched, its loss and gradients are those of the stock model.

How far two right ways to compute a gradient lie apart depends on the model: a gradient that is zero by its maths (a
key's bias under a softmax) is all noise. So the stock model says how large that is: its parameters are moved by about a
unit in their last place, and its gradients move by so much.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

BUILT = [name for name in TYPES if name not in WITHOUT]


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two sequences of twelve tokens (some state-space models want a multiple of four), some without labels."""
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """The loss and every gradient; the same dropout each time."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def noise(model: nn.Module, batch: dict, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each result moves when every parameter moves by about a unit in its last place."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = dict.fromkeys(expected, 0.0)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + torch.finfo(torch.float32).eps * torch.randn(p.shape, generator=generator)
        for name, value in step(model, batch).items():
            moved[name] = max(moved[name], (value - expected[name]).abs().max().item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
    return moved


@pytest.mark.parametrize("model_type", BUILT)
def test_loss_and_gradients_are_stock_and_restore_is_exact(model_type, batch):
    model = tiny_model(model_type)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    given = step(model, batch)
    assert given.keys() == expected.keys(), str(report)
    for name, value in expected.items():
        tolerance = 4 * allowed[name] + 16 * torch.finfo(torch.float32).eps * value.abs().max().item()
        worst = (given[name] - value).abs().max().item()
        assert worst <= tolerance, f"{name}: {worst:.3g} apart, {tolerance:.3g} allowed\n{report}"
    report.restore()
    restored = step(model, batch)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())


def test_no_type_is_left_out_in_silence():
    assert set(WITHOUT) <= set(TYPES)
    assert len(TYPES) == 143
    assert len(BUILT) >= 120


def test_coverage():
    """What of the decoder types runs on Tigon: the counts that docs/models.md states, none given away."""
    counts: Counter[str] = Counter()
    for model_type in BUILT:
        parts = {entry.part for entry in tigon.patch(tiny_model(model_type)).replaced}
        mlp = bool(parts & {"glu", "experts"})
        counts.update(parts, mlp=mlp, all=mlp and {"rms_norm", "rope", "loss"} <= parts)
    least = {"rms_norm": 106, "mlp": 95, "rope": 95, "loss": 125, "all": 75}
    assert all(counts[part] >= n for part, n in least.items()), dict(counts)
