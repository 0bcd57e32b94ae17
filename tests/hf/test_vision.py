"""The whole of vision-language models: text, vision tower and loss, every part patched."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_same_step, make_batch, noise, step  # noqa: E402
from hf.test_head_models import VISION, vision_model  # noqa: E402
from hf.tiny import VOCABULARY  # noqa: E402


@pytest.mark.parametrize("model_type", VISION)
def test_every_part_on_text(model_type):
    model, batch = vision_model(model_type), make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert {"rms_norm", "rope", "loss"} <= {entry.part for entry in report.replaced}
    assert not report.left_alone
    assert_same_step(step(model, batch), expected, allowed, report)
    report.restore()
    assert all(torch.equal(value, expected[name]) for name, value in step(model, batch).items())


class Tower(nn.Module):
    """A vision tower that makes a loss of its patches."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, patches, grid):
        hidden = self.tower(patches, grid)
        hidden = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
        return SimpleNamespace(loss=hidden.float().square().mean())


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_towers_with_patches_in_one_sequence(model_type):
    """Two images of different sizes: [patches, heads, size] without a batch."""
    model = Tower(vision_model(model_type).model.visual)
    config = model.tower.config
    config.window_size = model.tower.window_size = 16  # of Qwen2.5-VL
    features = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    patches = torch.randn(int(grid.prod(-1).sum()), features, generator=torch.Generator().manual_seed(0))
    batch = {"patches": patches, "grid": grid}
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert "rope" in {entry.part for entry in report.replaced}
    assert_same_step(step(model, batch), expected, allowed, report)
