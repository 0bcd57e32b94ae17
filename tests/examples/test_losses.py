"""The examples of losses from hidden states print the losses that stock code computes from all logits."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("dpo.py", ["--steps", "2", "--batch", "2"]),
        ("grpo.py", ["--steps", "2", "--prompts", "2", "--group", "2", "--length", "3"]),
        ("custom_loss.py", ["--steps", "2", "--seq", "24", "--batch", "1"]),
        ("distillation.py", ["--steps", "2", "--seq", "24", "--batch", "1"]),
    ],
)
def test_the_losses_are_those_of_stock_code(monkeypatch, capsys, tmp_path, one_thread, script, options):
    monkeypatch.syspath_prepend(str(FOLDER))
    if "--seq" in options:
        text = tmp_path / "text.txt"
        text.write_text("\n".join(f"line {i}: the square of {i} is {i * i}" for i in range(4000)))
        options = [*options, "--text", str(text)]
    losses, metrics = [], []
    for words in (["--stock"], []):
        monkeypatch.setattr(sys, "argv", [script, *options, *words])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        output = capsys.readouterr().out
        losses.append([float(number) for number in re.findall(r"^step \d+  loss (\S+)", output, re.M)])
        metrics.append([float(number) for number in re.findall(r": ([-\d.]+)", output)])
    assert len(losses[0]) == int(options[1])
    assert len(metrics[0]) == (0 if script == "distillation.py" else 2 * len(losses[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    assert metrics[1] == pytest.approx(metrics[0], abs=2e-3)
