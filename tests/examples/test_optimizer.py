"""The scripts about optimizers run on a CPU: the times of all formats, their loss curves, and the times of Muon."""

import json
import runpy
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch, script: str, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [script, *options])
    # The script imports only installed packages, so it runs in this process, which has imported them already.
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def test_every_format_is_timed(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setenv("OUT", str(tmp_path))
    run(monkeypatch, "time_adamw.py", "--device", "cpu", "--model", "tiny")
    results = json.loads((tmp_path / "adamw.json").read_text())["tiny"]
    assert "Error" not in capsys.readouterr().out
    assert {
        "torch.optim.AdamW(fused=True)",
        "clip_grad_norm_ and torch",
        "8bit, bf16+8",
        "fp32, fp32",
    } <= results.keys()
    assert all(x["ms"] > 0 for x in results.values())
    # Moments and corrections are 3 bytes of each parameter. Small parameters, of which this model has many, have 9.
    parameters = results["fp32, fp32"]["states"] / 12
    assert 3 < results["8bit, bf16+8"]["states"] / parameters < 4


def test_muon_is_timed(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setenv("OUT", str(tmp_path))
    run(monkeypatch, "time_muon.py", "--device", "cpu", "--model", "tiny")
    results = json.loads((tmp_path / "muon.json").read_text())
    assert "Error" not in capsys.readouterr().out
    assert {"tigon.Muon", "(16, 32) orthogonalisation", "(64, 32) 14 of R Z, one half"} <= results.keys()
    errors = results["(64, 32) Gaussian"]["errors"]
    assert 0 < errors["tigon"] < 0.05


def test_the_curves_of_formats_are_near_the_reference(tmp_path, monkeypatch, capsys, one_thread):
    verbosity = transformers.logging.get_verbosity()
    options = ["--size", "tiny", "--steps", "8", "--batch", "2", "--seq", "16", "--device", "cpu", "--lr", "3e-3"]
    text = tmp_path / "text.py"
    text.write_text("".join(f"def add_{i}(x, y):\n    return x + y * {i}\n" for i in range(400)))
    options += ["--formats", "fp32, fp32", "8bit, bf16+8", "--out", str(tmp_path), "--text", str(text)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        run(monkeypatch, "optimizer_states.py", *options)
    finally:
        transformers.logging.set_verbosity(verbosity)
    runs = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert list(runs) == ["fp32, fp32 seed 0", "fp32, fp32 seed 1", "8bit, bf16+8"]
    reference, other_seed, ours = (torch.tensor(x["losses"]) for x in runs.values())
    # The loss falls, and the formats are nearer to the reference than another seed is.
    assert reference[-3:].mean() < reference[:3].mean() - 0.5
    assert (ours - reference).abs().max() < (other_seed - reference).abs().max()
    assert "bytes/p" in capsys.readouterr().out
    if pytest.importorskip("matplotlib"):
        assert (tmp_path / "curves.png").stat().st_size > 10_000
