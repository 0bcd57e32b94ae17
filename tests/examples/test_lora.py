"""examples/lora.py: patched and stock models have the same losses, and the adapter that it writes can be loaded."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("matplotlib", "tokenizers", "typer"):
    pytest.importorskip(package)
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "examples" / "lora.py"


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """Remove the state of accelerate, which the Trainer leaves behind for the other tests of the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Return the global names that the script defines. Its main function does not run."""
    return runpy.run_path(str(SCRIPT))


def run(monkeypatch, folder: Path, *words: str) -> int:
    """Run the script in this process, which has imported its packages already, and return the exit code."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(folder), "--batch", "4", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code or 0


@pytest.mark.parametrize("quantised", [False, True], ids=["LoRA", "QLoRA"])
@pytest.mark.sampled(2)
def test_the_losses_are_those_of_stock_and_the_adapter_can_be_loaded(quantised, tmp_path, monkeypatch, capsys):
    if quantised:
        pytest.importorskip("bitsandbytes")
    assert run(monkeypatch, tmp_path, "--compare", "--steps", "8", *["--qlora"] * quantised) == 0
    output = capsys.readouterr().out
    assert f"adapters          {'Linear4bit' if quantised else 'Linear'}" in output
    assert "left alone" not in output
    assert f"Written to {tmp_path}: adapter/" in output
    report = json.loads((tmp_path / "loss.json").read_text())
    stock, patched = report["losses"]["stock"], report["losses"]["tigon"]
    assert len(stock) == 8
    # The adapters learn: the last losses are far below the first one, which is that of random weights.
    assert sum(stock[-3:]) / 3 < stock[0] - 0.3
    assert patched == pytest.approx(stock, rel=1e-5)
    assert report["agree"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-llama")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(trained) == 14
    assert all(p.abs().max() > 0 for p in trained)


def test_the_script_trains_on_a_file_with_a_model_from_a_folder(script, tmp_path, monkeypatch, capsys):
    examples = script["make_examples"](32)
    script["save_tiny_model"](tmp_path / "model", examples)
    lines = [{"prompt": example.prompt, "answer": example.answer} for example in examples]
    lines.append({"prompt": "long " * 200, "answer": "This example is left out."})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--seq", "64"]
    assert run(monkeypatch, tmp_path / "out", *words, "--steps", "2", "--rank", "3") == 0
    assert "32 examples (1 longer ones left out)" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "loss.json").read_text())
    assert list(report["losses"]) == ["tigon"]
    assert json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize("line", ["no JSON", '{"prompt": "no answer"}', '["a list"]'])
def test_the_error_names_a_line_that_is_no_example(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    assert run(monkeypatch, tmp_path / "out", "--data", str(tmp_path / "data.jsonl")) == 2
    assert "line 2" in capsys.readouterr().err


def test_the_loss_counts_the_answer_and_its_end_only(script, tmp_path):
    examples = script["make_examples"](8)
    script["save_tiny_model"](tmp_path, examples)
    tokenizer = script["load_tokenizer"](str(tmp_path))
    for example in examples:
        row = script["to_row"](example, tokenizer)
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        assert tokenizer.decode(ids) == f"<|user|>\n{example.prompt}<|end|>\n<|assistant|>\n{example.answer}<|end|>\n"
        assert tokenizer.decode(ids[labels != -100]) == f"{example.answer}<|end|>\n"
        assert torch.equal(labels[labels != -100], ids[labels != -100])
