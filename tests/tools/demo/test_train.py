"""One training run: what priming leaves behind, and what the memory meter counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tigon.tools.demo.plan import make_job
from tigon.tools.demo.presets import PRESETS, build_model
from tigon.tools.training.job import Point
from tigon.tools.training.worker import prime, serve

PRESET = replace(
    PRESETS["cpu"], vocab_size=512, hidden_size=32, intermediate_size=64, head_dim=8, batch=2, seq=16, steps=3
)

POINT = Point(batch=2, seq=16).to_json()


def test_priming_makes_all_state_and_trains_nothing():
    model = build_model("llama", PRESET, "cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1, fused=True)
    state_bytes = prime(model, optimizer, torch.arange(8)[None])
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad.count_nonzero() == 0
        assert all(state.count_nonzero() == 0 for state in optimizer.state[parameter].values())
    assert optimizer.param_groups[0]["lr"] == 1.0
    elements = sum(value.numel() for value in before)
    assert state_bytes == pytest.approx(4 * 4 * elements, abs=64 * len(before))  # and a step counter each


def test_two_runs_of_a_seed_see_the_same_and_reversed_ones_only_round_differently(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 512, 4096, dtype=np.uint32))

    def losses(**options) -> list[float]:
        said = []
        job = replace(make_job("llama", PRESET, "cpu", 0, tmp_path / "tokens.npy"), **options)
        assert serve(job, 0, iter([POINT] * 3), lambda event, **fields: said.append({"event": event, **fields}))
        assert [line["event"] for line in said] == ["ready", "step", "step", "step"]
        return [line["loss"] for line in said[1:]]

    stock = losses()
    assert losses() == pytest.approx(stock, rel=1e-6)
    assert losses(reverse=True) == pytest.approx(stock, rel=1e-5)
    assert losses(provider="tigon") == pytest.approx(stock, rel=1e-5)


def test_a_turn_that_is_not_granted_ends_the_run(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(64, dtype=np.uint32))
    said = []
    job = make_job("llama", PRESET, "cpu", 0, tmp_path / "tokens.npy")
    assert serve(job, 0, iter([POINT, ""]), lambda event, **_: said.append(event))
    assert said == ["ready", "step"]
