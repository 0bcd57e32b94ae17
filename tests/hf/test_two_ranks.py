"""On two ranks, a patched model has the loss and every gradient of stock in each setup of each group."""

from pathlib import Path

import pytest

from ranks import run_ranks

# The groups, and the number of setups in each.
GROUPS = {
    "sharded": 4, "sharded_more": 8, "parallel": 15, "sequence": 4, "head": 6, "zero": 6, "ulysses": 6, "adapters": 4,
    "lean": 9, "lean_more": 7, "fp8": 9, "adapter_ops": 4,
}  # fmt: skip
# One launch runs several groups, because two processes take longer to start than most setups take.
LAUNCHES = {
    "sharded": ("sharded",),
    "more shards": ("sharded_more", "parallel", "sequence"),
    "more parts": ("head", "adapters", "lean", "lean_more"),
    "zero": ("zero", "ulysses"),
    "fp8": ("fp8",),
    "adapters by ops": ("adapter_ops",),
}
# On the CPU, the kernels of this launch run in Triton's interpreter.
INTERPRETED_LAUNCH = "adapters by ops"
MARKS = {
    "zero": pytest.mark.deepspeed,
    "more shards": pytest.mark.thorough,
    "more parts": pytest.mark.thorough,
    "fp8": pytest.mark.thorough,
    "adapters by ops": pytest.mark.thorough,
}
launches = [pytest.param(name, marks=MARKS.get(name, ())) for name in LAUNCHES]
every_launch = pytest.mark.parametrize("launch", launches)


def assert_same_on_two(device: str, launch: str) -> None:
    groups = LAUNCHES[launch]
    if {"adapters", "adapter_ops"} & {*groups}:
        pytest.importorskip("peft")
    is_interpreted = device == "cpu" and launch == INTERPRETED_LAUNCH
    script = Path(__file__).with_name("two_ranks.py")
    for output in run_ranks(script, *groups, device=device, is_interpreted=is_interpreted):
        counts = {group: sum(line.startswith(f"{group}: ") for line in output.splitlines()) for group in groups}
        assert counts == {group: GROUPS[group] for group in groups}, output


def test_every_group_is_launched_once():
    assert sorted(group for groups in LAUNCHES.values() for group in groups) == sorted(GROUPS)


@every_launch
def test_two_ranks_give_the_results_of_stock(launch):
    assert_same_on_two("cpu", launch)
