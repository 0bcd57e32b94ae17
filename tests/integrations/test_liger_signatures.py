"""The parameters and defaults of the alias are those of Liger Kernel 0.8.5, and its published snippets run."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tigon
from integrations import liger_signatures
from tigon.integrations.liger import names
from tigon.integrations.liger.apply import PARAMETERS

pytestmark = pytest.mark.no_interpreter("These tests compare signatures and run modules of tests/ops.")
EMPTY = inspect.Parameter.empty


# The modules whose classes the tests compare. `rope` stands for all modules below `liger_kernel.transformers`.
CLASS_MODULES = ("transformers", "chunked_loss", "megatron", "transformers.rope")


def resolve(module: str, name: str) -> Any:
    source, _, member = names.MODULES[f"liger_kernel.{module}"][name].partition(":")
    return getattr(importlib.import_module(source), member)


def expected_parameters(row: str) -> list[tuple[str, object]]:
    """Return the names and defaults of a row. Parameters with one or two stars are left out."""
    pairs = [word.partition("=") for word in row.split() if not word.startswith("*")]
    return [(name, eval(default) if equals else EMPTY) for name, equals, default in pairs]


def assert_same_parameters(function: Any, row: str, with_names: bool = True) -> None:
    """Check that Liger's parameters come first and in order. Further ones must have a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in kinds
    ]
    ours, expected = [(p.name, p.default) for p in parameters], expected_parameters(row)
    if not with_names:
        # A default where Liger has none does no harm to a call by position.
        ours = [(None, value) for _, value in ours]
        expected = [(None, b if b is not EMPTY else a) for (_, a), (_, b) in zip(ours, expected, strict=False)]
    assert len(ours) >= len(expected_parameters(row))
    assert ours[: len(expected)] == expected
    assert all(default is not EMPTY for _, default in ours[len(expected) :])


def test_apply_functions_have_the_parameters_of_liger():
    rows = {name: row for row, types in liger_signatures.APPLY.items() for name in types.split()}
    served = [name for name in names.MODULES["liger_kernel.transformers"] if name.startswith("apply_")]
    assert sorted(served) == sorted(f"apply_liger_kernel_to_{name}" for name in rows)
    assert len(rows) == 45
    for name, row in rows.items():
        signature = inspect.signature(resolve("transformers", f"apply_liger_kernel_to_{name}"))
        words = row.removesuffix(" **").split()
        expected = [(word.removeprefix("-"), None if word == "model" else word[0] != "-") for word in words]
        has_kwargs = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        named = [(p.name, p.default) for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert (named, has_kwargs) == (expected, row.endswith("**")), name


@pytest.mark.parametrize("name", liger_signatures.CLASSES)
def test_classes_have_the_parameters_of_liger(name):
    module = next(module for module in CLASS_MODULES if name in names.MODULES[f"liger_kernel.{module}"])
    served, (constructor, forward) = resolve(module, name), liger_signatures.CLASSES[name]
    assert_same_parameters(served.__init__, constructor)
    assert_same_parameters(served.forward, forward)


@pytest.mark.parametrize("path", liger_signatures.FUNCTIONS)
def test_functions_have_the_parameters_of_liger(path):
    module, _, name = path.rpartition(".")
    assert_same_parameters(resolve(module, name), liger_signatures.FUNCTIONS[path])


@pytest.mark.parametrize("name", liger_signatures.OPS)
def test_autograd_functions_have_the_arguments_of_liger(name):
    # `torch.autograd.Function.apply` takes no keyword arguments, so only positions and defaults matter.
    assert_same_parameters(resolve("ops", name).apply, liger_signatures.OPS[name], with_names=False)


def test_every_class_and_function_is_compared():
    classes = {
        name
        for module in CLASS_MODULES
        for name in names.MODULES[f"liger_kernel.{module}"]
        if inspect.isclass(resolve(module, name)) and name not in names.MODULES["liger_kernel.ops"]
    }
    classes -= {"AutoLigerKernelForCausalLM", "CrossEntropyOutput", "LigerEmbedding"}
    assert set(liger_signatures.CLASSES) == classes
    assert set(liger_signatures.OPS) == set(names.MODULES["liger_kernel.ops"])
    paths = {
        f"{module}.{name}"
        for module in ("functional", "transformers.functional", "utils")
        for name in names.MODULES[f"liger_kernel.{module}"]
        if name != "CrossEntropyOutput"
    }
    assert paths <= set(liger_signatures.FUNCTIONS)


def test_the_page_names_everything_that_is_served_and_what_is_not():
    text = (Path(__file__).parents[2] / "docs" / "liger.md").read_text("utf-8")
    served = {name for table in names.MODULES.values() for name in table if not name.startswith("apply_liger_kernel_")}
    absent = {*names.NOT_SERVED, *(f"liger_kernel.{name}" for name in names.NOT_SERVED_MODULES)}
    assert [name for name in sorted(served | absent) if f"`{name}`" not in text] == []
    (types,) = re.findall(r"for \d+ types: ([^.]*)\.", text)
    assert " ".join(types.split()).split(", ") == list(PARAMETERS)


# --- published snippets ----------------------------------------------------------------------------


def test_snippet_of_the_automatic_class(alias, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    model = AutoLigerKernelForCausalLM.from_pretrained(str(tmp_path))
    assert "already" in str(tigon.patch(model))
    tokens = torch.arange(8)[None]
    assert model(tokens, labels=tokens).loss.requires_grad


def test_snippet_of_the_fused_loss(alias):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    model, loss_fn = nn.Linear(128, 256), LigerFusedLinearCrossEntropyLoss()
    input, target = torch.randn(4, 128, requires_grad=True), torch.randint(256, (4,))
    loss = loss_fn(model.weight, input, target)
    loss.backward()
    expected = nn.functional.cross_entropy(input @ model.weight.T, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(input.grad, torch.autograd.grad(expected, input)[0])


def test_snippet_of_the_chunked_loss(alias):
    from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

    head, orpo_loss = nn.Linear(16, 32, bias=False), LigerFusedLinearORPOLoss()
    x, target = torch.randn(4, 6, 16, requires_grad=True), torch.randint(32, (4, 6))
    loss, _ = orpo_loss(head.weight, x, target)
    loss.backward()
    assert x.grad.isfinite().all()
