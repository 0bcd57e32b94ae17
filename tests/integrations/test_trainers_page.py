"""The snippets of docs/trainers.md run, or name modules, functions and options that exist.

A snippet for a package that is not installed is compiled, and the names of Tigon in it are looked up.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer

import tigon

pytestmark = pytest.mark.no_interpreter("The tests show which snippets run.")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text("utf-8")
SNIPPETS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _snippet(text: str) -> str:
    (code,) = (code for _, code in SNIPPETS if text in code)
    return code


def test_the_names_on_the_page_exist():
    for module, names in re.findall(r"from tigon\.integrations\.(\w+) import (.+)", PAGE):
        assert all(hasattr(importlib.import_module(f"tigon.integrations.{module}"), name) for name in names.split(", "))
    used = re.findall(r"tigon\.integrations\.(\w+)\.(\w+)", PAGE)
    assert {"experts", "deepspeed"} <= {module for module, _ in used}
    for module, name in used:
        assert hasattr(importlib.import_module(f"tigon.integrations.{module}"), name), (module, name)


def test_each_python_snippet_compiles():
    codes = [code for language, code in SNIPPETS if language == "python"]
    assert len(codes) == 8
    for code in codes:
        compile(code, "trainers.md", "exec")


def test_the_snippet_of_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    tokens = torch.arange(12)
    variables: dict[str, Any] = {
        "Trainer": Trainer,
        "model": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "arguments": transformers.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True),
        "dataset": [{"input_ids": tokens, "labels": tokens}] * 8,
    }
    exec(_snippet("integrations.trainer"), variables)
    variables["trainer"].train()
    assert "forward" in vars(variables["model"].model.norm)


def test_the_snippet_of_the_experts(tmp_path):
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    variables: dict[str, Any] = {"tigon": tigon, "AutoModelForCausalLM": AutoModelForCausalLM, "path": tmp_path}
    exec(_snippet("integrations.experts"), variables)
    assert variables["model"].config._experts_implementation == "tigon"


def test_the_snippet_for_trainers_that_build_the_model(monkeypatch):
    patch, reports = tigon.patch, []
    monkeypatch.setattr(tigon, "patch", lambda *args, **options: reports.append(patch(*args, **options)))
    exec(_snippet('tigon.patch("llama", loss=False)'), {})
    try:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    finally:
        reports[0].restore()
    assert "forward" in vars(model.model.norm)
    assert "forward" not in vars(model.lm_head)
