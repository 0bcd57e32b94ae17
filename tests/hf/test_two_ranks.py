"""Two processes on this machine: each way of a group gives a patched model the loss and every gradient of stock."""

from pathlib import Path

import pytest

from ranks import run_ranks

GROUPS = {"sharded": 16, "parallel": 10, "head": 6, "zero": 5, "adapters": 4, "lean": 25}  # and how many ways
LIBRARIES = {"zero": "deepspeed", "adapters": "peft"}


def assert_same_on_two(device: str, group: str) -> None:
    if group in LIBRARIES:
        pytest.importorskip(LIBRARIES[group])
    for output in run_ranks(Path(__file__).with_name("two_ranks.py"), group, device=device):
        assert output.count(": same\n") == GROUPS[group], output


@pytest.mark.parametrize("group", GROUPS)
def test_two_ranks(group):
    assert_same_on_two("cpu", group)
