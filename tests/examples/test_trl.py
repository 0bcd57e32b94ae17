"""examples/trl_sft.py trains with the losses of TRL without Tigon."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import tigon

for package in ("datasets", "matplotlib", "tokenizers", "transformers", "trl"):
    pytest.importorskip(package)
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory")
FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _clean(one_thread, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    tigon.integrations.trl.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_the_losses_are_those_of_trl(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i}: the square of {i} is {i * i}" for i in range(4000)))
    losses = []
    for words in (["--stock"], ["--memory", "lean"]):
        options = ["--text", str(text), "--steps", "2", "--seq", "64"]
        monkeypatch.setattr(sys, "argv", ["trl_sft.py", *options, *words])
        runpy.run_path(str(FOLDER / "trl_sft.py"), run_name="__main__")
        losses.append([float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", capsys.readouterr().out, re.M)])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert tigon.integrations.trl.is_enabled()
