"""examples/fp8_loss.py runs on a CPU, and compares runs from two folders."""

import json
import runpy
from pathlib import Path

import pytest

from tigon.hf import fp8

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[2] / "examples" / "fp8_loss.py"


@pytest.fixture
def run(tmp_path, monkeypatch, one_thread):
    """Return run(folder, runs, *options): it runs the script for a model of two small layers."""
    monkeypatch.setattr(fp8, "NARROWEST", fp8.NARROWEST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.py"
    text.write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(300)))

    def call(folder: str, runs: str, *more: str) -> Path:
        out = tmp_path / folder
        options = ["--out", out, "--runs", runs, "--size", "tiny", "--device", "cpu", "--text", text]
        options += ["--steps", "4", "--batch", "1", "--seq", "16", *more]
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *map(str, options)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return out

    return call


def test_the_script_compares_its_runs_with_bf16(run, capsys):
    first = run("first", "bf16,bf16-order-1")
    out = run("second", "rowwise", "--also", first)
    results = json.loads((out / "fp8_loss.json").read_text())["results"]
    assert results.keys() == {"bf16-order-1", "rowwise"}
    losses = {name: json.loads((folder / f"{name}.json").read_text())["losses"] for folder, name in (
        (first, "bf16"), (first, "bf16-order-1"), (out, "rowwise"),
    )}  # fmt: skip
    assert len(losses["bf16"]) == 4
    # The same sums in another order are closer than products in FP8.
    differences = {name: max(map(abs, map(float.__sub__, values, losses["bf16"]))) for name, values in losses.items()}
    assert differences["bf16-order-1"] < differences["rowwise"] < 0.05
    assert results["rowwise"]["noise_band"] >= 0
    assert results["rowwise"]["within_limit"]
    assert (out / "fp8_loss.png").stat().st_size > 10_000
    assert "rowwise" in capsys.readouterr().out


def test_fp8_may_begin_later(run):
    out = run("out", "bf16,tensorwise", "--bf16-steps", "2")
    reference, run_in_fp8 = (json.loads((out / f"{name}.json").read_text()) for name in ("bf16", "tensorwise"))
    assert reference["losses"][:2] == run_in_fp8["losses"][:2]
    assert reference["losses"][2] != run_in_fp8["losses"][2]
    assert "tensorwise FP8 products" in run_in_fp8["report"]
