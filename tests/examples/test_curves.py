"""examples/curves_fp32.py runs on a CPU and writes its table and its JSON."""

import json
import runpy
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "examples" / "curves_fp32.py"


@pytest.fixture(autouse=True)
def _restore_settings():
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)
    torch.use_deterministic_algorithms(False)


def test_the_script_writes_its_table_and_its_json(tmp_path, monkeypatch, one_thread):
    out = tmp_path / "curves.json"
    options = ["--types", "gpt_oss", "--size", "tiny", "--device", "cpu", "--out", str(out)]
    options += ["--steps", "2", "--batch", "2", "--length", "16", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *options])
    # The script imports only installed packages, so it runs in this process, which has imported them already.
    runpy.run_path(str(SCRIPT), run_name="__main__")
    runs = json.loads(out.read_text())["results"]["gpt_oss"]["runs"]
    assert {"stock", "stock moved 0", "stock in halves", "tigon", "tigon from moved 0"} <= runs.keys()
    assert runs["stock again"]["max"] == 0
    assert runs["tigon"]["max"] < 1e-5
    assert "== gpt_oss" in out.with_suffix(".txt").read_text()
