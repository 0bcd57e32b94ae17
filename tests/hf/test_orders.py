"""The table of orders in docs/patching.md is right in every cell."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf import orders

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patching.md"
# A process group, or a compiler, takes seconds.
SLOW = ("FSDP2", "compile")


def read_table() -> list[tuple[str, str, str]]:
    """Return the cells of the table: the first step, the second step, and the outcome."""
    lines = PAGE.read_text("utf-8").partition("## The order of the calls")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, _, *rows = rows
    return [(row[0], second, cell) for row in rows for second, cell in zip(header[1:], row[1:], strict=True)]


TABLE = read_table()
CASES = [
    pytest.param(*cell, marks=pytest.mark.thorough if {*SLOW} & {*cell} else (), id=f"{cell[0]}, {cell[1]}")
    for cell in TABLE
    if cell[0] != cell[1]
]


def test_the_table_has_every_order_of_two_steps():
    seconds = [*orders.STEPS, "patch", "restore", "patch again"]
    assert [cell[:2] for cell in TABLE] == [(a, b) for a in ["patch", *orders.STEPS] for b in seconds]
    assert all((outcome == "") == (first == second) for first, second, outcome in TABLE)


@pytest.fixture
def one_rank(tmp_path):
    """Start a process group of one rank, in which FSDP2 has the same hooks and DTensors as on many ranks."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("first", "second", "expected"), CASES)
@pytest.mark.sampled(3)
def test_each_order_does_what_the_page_says(request, fresh_accelerate, first, second, expected):
    pytest.importorskip("peft")
    if "FSDP2" in (first, second):
        request.getfixturevalue("one_rank")
    if "compile" in (first, second):
        torch._dynamo.reset()
    assert orders.outcome(first, second) == expected
