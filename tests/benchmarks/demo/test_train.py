"""The training process of the demo: the state before its first step, and its losses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.demo.demo_plan import make_job
from benchmarks.demo.demo_presets import DEMO_PRESETS, build_model
from benchmarks.training.job import Point
from benchmarks.training.worker import create_states, serve

PRESET = replace(
    DEMO_PRESETS["cpu"], vocab_size=512, hidden_size=32, intermediate_size=64, head_dim=8, batch=2, seq=16, steps=3
)

POINT = Point(batch=2, seq=16).to_json()


def test_all_states_are_created_without_training():
    model = build_model("llama", PRESET, "cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1, fused=True)
    state_bytes = create_states(model, optimizer, torch.arange(8)[None])
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad.count_nonzero() == 0
        assert all(state.count_nonzero() == 0 for state in optimizer.state[parameter].values())
    assert optimizer.param_groups[0]["lr"] == 1.0
    elements = sum(value.numel() for value in before)
    # Each parameter has a step counter too.
    assert state_bytes == pytest.approx(4 * 4 * elements, abs=64 * len(before))


def test_runs_of_one_seed_have_equal_losses_and_reversed_runs_differ_by_rounding(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 512, 4096, dtype=np.uint32))

    def losses(**options) -> list[float]:
        events = []
        job = replace(make_job("llama", PRESET, "cpu", 0, tmp_path / "tokens.npy"), **options)
        assert serve(job, 0, iter([POINT] * 3), lambda event, **fields: events.append({"event": event, **fields}))
        assert [event["event"] for event in events] == ["ready", *["step", "point"] * 3]
        return [event["loss"] for event in events if event["event"] == "step"]

    stock = losses()
    assert losses() == pytest.approx(stock, rel=1e-6)
    assert losses(reverse=True) == pytest.approx(stock, rel=1e-5)
    assert losses(provider="tigon") == pytest.approx(stock, rel=1e-5)


def test_the_end_of_the_points_ends_the_run(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(64, dtype=np.uint32))
    events = []
    job = make_job("llama", PRESET, "cpu", 0, tmp_path / "tokens.npy")
    assert serve(job, 0, iter([POINT, ""]), lambda event, **_: events.append(event))
    assert events == ["ready", "step", "point"]
