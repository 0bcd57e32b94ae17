"""The snippets of docs/trainers.md run, or name modules, functions and options that exist.

A snippet for a package that is not installed is compiled, and the names of Tigon in it are looked up.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer

import tigon
from tigon.integrations import frameworks

pytestmark = pytest.mark.no_interpreter("The tests show which snippets run.")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text("utf-8")
FOLDER = Path(frameworks.__file__).parent
SNIPPETS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _snippet(text: str) -> str:
    (code,) = (code for _, code in SNIPPETS if text in code)
    return code


def _public_names(module: str) -> list[str]:
    """Return `__all__` of an integration, whose framework may not be installed."""
    path = FOLDER / f"{module}.py"
    tree = ast.parse((path if path.exists() else FOLDER / module / "__init__.py").read_text("utf-8"))
    (names,) = (x.value for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__")
    return ast.literal_eval(names)


def test_the_names_on_the_page_exist():
    for module, names in re.findall(r"from tigon\.integrations\.(\w+) import (.+)", PAGE):
        assert set(names.split(", ")) <= set(_public_names(module))
    used = re.findall(r"tigon\.integrations\.(\w+)(?:\.(\w+))?", PAGE)
    assert {"swift", "verl", "llamafactory", "torchtitan"} <= {module for module, _ in used}
    for module, name in used:
        assert not name or name in _public_names(module), (module, name)
    for name in re.findall(r"megatron\.(\w+)\(", PAGE):
        assert name in _public_names("megatron")
    levels = set(re.findall(r'"(tigon\w*)": ', (FOLDER / "swift" / "__init__.py").read_text("utf-8")))
    assert set(re.findall(r"--callbacks (\w+)", PAGE) + re.findall(r"`(tigon_\w+)`", PAGE)) <= levels
    arguments = (FOLDER / "axolotl.py").read_text("utf-8")
    for key in re.findall(r"\b(tigon_memory|tigon_options):", PAGE):
        assert f"{key}: " in arguments
    assert set(re.findall(r"--tigon_\w+", PAGE)) == {"--tigon_memory"}


def test_each_python_snippet_compiles():
    codes = [code for language, code in SNIPPETS if language == "python"]
    assert len(codes) == 6
    for code in codes:
        compile(code, "trainers.md", "exec")


def test_the_versions_on_the_page_are_those_of_the_plugins():
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 8
    files = {"Megatron-Core": "megatron", "ms-swift": "swift/__init__", "LLaMA-Factory": "llamafactory"}
    for name, version in rows:
        code = (FOLDER / f"{files.get(name, name.lower())}.py").read_text("utf-8")
        assert f'"{version}"' in code, name


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


def test_the_snippet_of_lightning():
    lightning = pytest.importorskip("lightning")
    variables: dict[str, Any] = {"lightning": lightning}
    exec(_snippet("integrations.lightning"), variables)
    assert any(callback.__class__.__name__ == "TigonCallback" for callback in variables["trainer"].callbacks)
