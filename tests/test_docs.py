"""The pages of the documentation list every public name and every page, and the code of some pages runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_reference_has_each_public_name_once():
    pages = "\n".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    names = re.findall(r"^::: tigon\.(\w+)$", pages, re.MULTILINE)
    assert sorted(names) == sorted(tigon.__all__)


def test_the_navigation_has_each_page_once():
    yaml = pytest.importorskip("yaml")

    def pages_of(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages_of(child)]

    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))["nav"]
    # These pages are made from files outside of `docs/`.
    expected = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")] + ["contributing.md", "examples.md"]
    assert sorted(pages_of(nav)) == sorted(expected)


def test_each_combination_that_is_called_tested_names_its_test():
    engines, _, tests = (DOCS / "compatibility.md").read_text("utf-8").partition("## The tests of each combination")
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    features, _, *rows = [cells(line) for line in engines.splitlines() if line.startswith("|")]
    claimed = [
        f"{engine}, {feature}"
        for engine, *values in rows
        for feature, value in zip(features[1:], values, strict=True)
        if value == "yes"
    ]
    named = [cells(line) for line in tests.splitlines() if line.startswith("|")][2:]
    assert [name.removesuffix(" (on a GPU)") for name, _, _ in named] == claimed
    for name, path, setup in named:
        assert setup.strip("`") in (DOCS.parent / path.strip("`")).read_text("utf-8"), name


@pytest.mark.parametrize("page", ["quickstart.md", "losses.md", "experts.md", "lora.md"])
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    variables: dict[str, Any] = {}
    # A quantised model is loaded from files that a script writes.
    for block in (block for block in blocks if "from_pretrained" not in block):
        exec(block, variables)
        assert variables.get("loss", torch.zeros(())).isfinite()
    assert "loss" in variables or page in ("experts.md", "lora.md")
