"""examples/trl_sft.py trains with the losses of TRL without Tigon, and time_trl.py counts what is at work."""

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


def test_the_script_that_times_counts_the_level_and_the_loss(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["time_trl.py", "--model", "tiny", "--seq", "32", "--steps", "3"])
    runpy.run_path(str(FOLDER / "time_trl.py"), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert [re.search(r"lean (\d+), loss (\d+)$", line).groups() for line in lines] == [("3", "3")] * 2 + [
        ("0", "0")
    ] * 2
    losses = [float(re.search(r"  loss (\S+)", line)[1]) for line in lines]
    assert losses == pytest.approx([losses[2]] * 4, rel=2**-8)
