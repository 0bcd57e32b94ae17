"""No name of torch is missing, features that need a missing name refuse to run, and no other file uses these names."""

import ast
import re
from pathlib import Path

import pytest
from torch import nn

import tigon
from tigon.runtime.compat import autograd, graphs, modules, names, operators

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")

PACKAGE = Path(tigon.__file__).parent

# The file or folder that alone may use some private names, and a regular expression for each name.
PRIVATE_NAMES = {
    "runtime/compat": (
        r"torch\._[a-zA-Z]", r"torch\.\w+\._[a-zA-Z]", r"_C\._", r"forward_ad\._current_level", "_engine_run_backward",
        r"aten\._[a-z]", r"\._cdata\b", r"multiprocessing\.reductions", "_resolve_process_group",
        "_global_forward_hooks", "ToCopyBackward0", r"\._python_dispatch\b", "symbolic_shapes", "_call_impl",
        "_post_accumulate_grad_hooks", "_replicate_for_data_parallel", "_is_replica", r"\b_schema\b", "kineto_results",
    ),
    "runtime/compat/triton.py": (
        r"triton\.(runtime|knobs|compiler|backends|experimental)",
        "from triton import (knobs|runtime|compiler|backends|experimental)",
    ),
    "runtime/engines.py": ("_hf_hook", "_old_forward", "ds_shape"),
}  # fmt: skip


def read_code(file: Path) -> str:
    """Return the code of a file without its comments and docstrings, which may mention every name."""
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(...)
    return ast.unparse(tree)


def test_no_name_is_missing():
    assert names.missing == {}


@pytest.mark.parametrize("part", [autograd, graphs, modules, operators], ids=lambda part: part.__name__.split(".")[-1])
def test_every_name_of_a_part_exists(part):
    assert [name for name, value in vars(part).items() if value is None and not name.startswith("_")] == []


@pytest.mark.parametrize("path", names.NAMES_FOR_PLAN)
def test_the_plan_is_refused_by_name_if_a_name_is_missing(monkeypatch, path):
    monkeypatch.setattr(names, "missing", {path: f"torch has no torch.{path}"})
    from tigon.cli.plan.engines import OptimizerCosts, Replicated
    from tigon.cli.plan.step import count_step

    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=f"tigon plan: torch has no torch.{path}"):
        count_step(model, Replicated(model, 1), OptimizerCosts(0, 0, 0), 1, 1)


def test_no_other_file_uses_these_names():
    """Elsewhere, a missing name would fail without its reason and its replacement."""
    texts = {file: file.read_text("utf-8") for file in PACKAGE.rglob("*.py")}
    for owner, patterns in PRIVATE_NAMES.items():
        pattern = re.compile("|".join(patterns))
        others = [f for f, text in texts.items() if pattern.search(text) and not f.is_relative_to(PACKAGE / owner)]
        assert [str(file) for file in others if pattern.search(read_code(file))] == [], owner


def test_a_private_name_would_be_seen():
    assert re.search("|".join(PRIVATE_NAMES["runtime/compat"]), "x = torch._C._len_torch_dispatch_stack()")
