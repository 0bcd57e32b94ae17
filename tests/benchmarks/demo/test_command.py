"""`benchmarks.demo` from the command line: a whole run, an interrupted run, and bad options."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.demo import demo_runs
from benchmarks.demo.demo_presets import DEMO_PRESETS, build_model, demo_config
from tigon.cli.main import INTERRUPTED

TINY = ["--device", "cpu", "--vocab", "512", "--batch", "2", "--seq", "32"]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app(), ["demo", *arguments])


def test_demo_writes_a_report_and_says_that_the_curves_agree(text, cache, tmp_path, capfd):
    result = invoke(*TINY, "--steps", "4", "--text", str(text), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.json", "loss.png", "speed_memory.png"}

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    stock, tigon = report["runs"]["stock"], report["runs"]["tigon"]
    assert len(stock["losses"]) == len(tigon["losses"]) == len(tigon["step_seconds"]) == 4
    assert report["comparison"]["agree"] is True
    assert len(report["comparison"]["differences"]) == 4
    assert stock["losses"][-1] < stock["losses"][0]
    assert stock["state_bytes"] == tigon["state_bytes"] >= 16 * stock["parameters"]
    assert stock["peak_bytes_above_state"] > 0
    assert stock["patch"] is None
    assert "linear_cross_entropy" in tigon["patch"]
    assert report["text"]["source"] == str(text)
    assert len(list(cache.iterdir())) == 1

    output = re.sub(r"\s+", " ", result.output)
    for part in ("LlamaForCausalLM", "Tigon step 4/4", "tokens/s", "The curves agree", str(tmp_path / "out")):
        assert part in output


def test_demo_exits_with_1_if_the_curves_differ(text, cache, tmp_path, monkeypatch):
    """No process runs. The loss of the patched run is wrong by 1 %."""

    def train_runs(runs: list[demo_runs.DemoRun], folder: Path, console: Console) -> bool:
        for run, loss in zip(runs, (2.0, 2.02), strict=True):
            run.facts = {"state_bytes": 500}
            run.measurement.add({
                "seconds": [1.0], "host_seconds": [1.0], "losses": [loss], "allocated": 1500, "reserved": None
            })  # fmt: skip
        return True

    monkeypatch.setattr(demo_runs, "train_runs", train_runs)
    result = invoke(*TINY, "--text", str(text), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "The curves differ: 1.0e-02 of the loss at step 1, where 1e-05 is allowed" in re.sub(
        r"\s+", " ", result.output
    )
    assert json.loads((tmp_path / "out" / "report.json").read_text())["comparison"]["agree"] is False


@pytest.mark.thorough
def test_ctrl_c_keeps_the_steps_that_were_done(text, child_environment, tmp_path):
    out = tmp_path / "out"
    arguments = [*TINY, "--steps", "100000", "--text", str(text), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment,
        start_new_session=True,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Tigon    step 1/" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED == 130, "".join(lines) + rest
    assert "Interrupted" in rest
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"] is True
    assert 1 <= len(report["runs"]["tigon"]["losses"]) < 100_000
    assert (out / "loss.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--batch", "-1"], "--batch: must be at least 1, got -1"),
        (["--seq", "1"], "--seq: must be at least 2, got 1"),
        (["--vocab", "100"], "--vocab: must be at least 512, got 100"),
        (["--seed", "-1"], r"--seed: must be at least 0 and below 2\*\*64, got -1"),
        (["--seed", str(2**64)], f"--seed: .* got {2**64}"),
        (["--dtype", "float16"], "--dtype: must be one of float32, bfloat16, got 'float16'"),
        (["--device", "tpu"], "--device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "mps"], "--device: must be auto, cpu, cuda or cuda:N, got 'mps'"),
        (["--device", "cuda:99"], "--device: must be a device that torch sees"),
        (["--model-type", "lama"], "--model-type: must be a model type that transformers has .* got 'lama'"),
        (["--memory", "none at all"], "--memory: .*none at all"),
        (["--text", "not/there"], "--text: must be a file or a folder that exists, got 'not/there'"),
        (["--out", __file__], "--out: must be a folder that can be written, got .*test_command.py"),
        (["--seq", "100000"], "--text: must hold at least one sequence of 100000 tokens, got"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_demo_refuses_bad_values_before_anything_runs(arguments, message, text, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*TINY, "--text", str(text), *arguments)
    assert result.exit_code == 2
    output = re.sub(r"[\s│]+", " ", result.output)
    assert re.search(message, output), output
    assert not (tmp_path / "runs").exists()


def test_demo_refuses_a_cache_that_it_cannot_write(text, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = invoke(*TINY, "--text", str(text))
    assert result.exit_code == 2
    assert "the cache must be a folder that can be written" in re.sub(r"[\s│]+", " ", result.output)


def test_demo_refuses_a_model_that_does_not_fit(text, cache, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1_000_000}))
    result = invoke(*TINY, "--text", str(text))
    assert result.exit_code == 2
    assert "must be a model that fits" in result.output


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma2", "mistral", "phi3", "qwen2", "gemma", "olmo2", "gpt2"]
)
def test_every_model_type_gets_the_shape_of_the_preset(model_type):
    """The head size matches too, the embeddings are tied, and no memory is allocated."""
    preset = DEMO_PRESETS["cuda"]
    config = demo_config(model_type, preset)
    model = build_model(model_type, preset, "meta")
    assert type(model).__name__.lower().startswith(model_type)
    assert (config.hidden_size, config.num_hidden_layers) == (preset.hidden_size, preset.num_hidden_layers)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight.shape == (preset.vocab_size, preset.hidden_size)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    if model_type == "llama":
        # Llama 3.2 1B has 1,235,814,400 parameters.
        assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
