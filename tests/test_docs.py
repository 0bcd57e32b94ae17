"""The pages list every public name and every page, their links and numbers are right, and the code of some runs."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENTRIES = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
]
# A link to a file, or to a heading of the same page or of another one.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
LINKED_PAGES = [
    *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((DOCS.parent / "examples").rglob("*.md")), *sorted(DOCS.rglob("*.md")),
]  # fmt: skip


def test_the_reference_has_each_public_name_once():
    pages = "\n".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    names = re.findall(r"^::: tigon\.(\w+)$", pages, re.MULTILINE)
    assert sorted(names) == sorted(tigon.__all__)


@pytest.fixture(scope="module")
def package():
    """Return the package as the builder of the reference reads it, without importing it."""
    griffe = pytest.importorskip("griffe")
    modules = griffe.GriffeLoader(search_paths=[DOCS.parent / "src"])
    root = modules.load("tigon")
    modules.resolve_aliases()
    return root


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_the_reference_describes_what_its_name_is(name, package):
    """A module and a function in it may have one name. The reference must describe what a user imports."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    entry = package[name.removeprefix("tigon.")]
    assert (entry.is_class, entry.is_function) == (inspect.isclass(value), inspect.isroutine(value))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page. GitHub and the site make them in the same way."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain if "  " not in heading}


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_the_links_of_a_page_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for path, anchor in LINK.findall(text):
        # The site makes these two pages from files outside of `docs/`.
        outside = {"examples.md": "examples/README.md", "contributing.md": "CONTRIBUTING.md"}
        target = (DOCS.parent / outside[path]) if path in outside else (page.parent / path if path else page)
        assert target.exists(), f"{page.name}: there is no {path}"
        assert not anchor or anchor in _anchors(target), f"{page.name}: {path or page.name} has no heading #{anchor}"


def test_pages_that_count_the_levels_of_memory_count_those_of_the_code():
    from tigon.memory.levels import MEMORY

    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    texts = [page.read_text("utf-8") for page in LINKED_PAGES]
    pattern = rf"\b({'|'.join(words)}) \[?(?:levels of memory|memory levels)"
    counts = [count for text in texts for count in re.findall(pattern, re.sub(r"\s+", " ", text))]
    assert len(counts) >= 2
    assert set(counts) == {words[len(MEMORY)]}


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
    table = (DOCS / "compatibility.md").read_text("utf-8").partition("\n## ")[0]
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    features, _, *rows = [cells(line) for line in table.splitlines() if line.startswith("|")]
    claimed = [
        f"{engine}, {feature}"
        for engine, *values in rows
        for feature, value in zip(features[1:], values, strict=True)
        if value == "yes"
    ]
    lines = (DOCS.parent / "tests" / "combinations.txt").read_text("utf-8").splitlines()[1:]
    named = [line.split(" | ") for line in lines]
    assert [name for name, _, _ in named] == claimed
    for name, path, setup in named:
        assert setup in (DOCS.parent / path).read_text("utf-8"), name


@pytest.mark.parametrize("page", ["index.md", "losses.md", "experts.md", "lora.md", "optimizer.md"])
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    variables: dict[str, Any] = {}
    # A quantised model is loaded from files that a script writes.
    for block in (block for block in blocks if "from_pretrained" not in block):
        exec(block, variables)
        assert variables.get("loss", torch.zeros(())).isfinite()
    assert "loss" in variables or page in ("experts.md", "lora.md")
