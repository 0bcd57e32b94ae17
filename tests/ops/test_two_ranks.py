"""Heads, optimizers and hooks of engines on two ranks. One launch runs all checks, because its start takes seconds."""

import importlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from interpreter import repair_the_interpreter, speed_up_the_interpreter
from op_cases import INTERPRETED
from ranks import LIMIT, leave, run_ranks

CHECKS = {
    "hooks of FSDP": ("ops.test_two_ranks", "check_hooks"), "heads": ("ops.head.sharded_head", "check_heads"),
    "AdamW": ("ops.optim.test_adamw_optimizer", "check_shards"),
    "compact AdamW": ("ops.optim.test_compact_optimizer", "check_compact_shards"),
    "Muon": ("ops.optim.test_muon", "check_muon_shards"),
}  # fmt: skip
# In the interpreter, the kernel of compact states would update the local tensors that the reference updates here.
RUNS = [(2, "heads"), (2, "AdamW"), (2, "Muon")] if INTERPRETED else [(2, *CHECKS)]
MARKS = dict.fromkeys([*RUNS[1:], (3, "heads")], pytest.mark.thorough)


@pytest.mark.parametrize("run", [pytest.param(run, marks=MARKS.get(run, ())) for run in [*RUNS, (3, "heads")]], ids=str)
def test_heads_and_optimizers_on_two_ranks(run):
    ranks, *names = run
    for output in run_ranks(__file__, *names, ranks=ranks, device="cpu"):
        assert [line for line in output.splitlines() if line.endswith("checked")] == [f"{x} checked" for x in names]


def check_hooks(rank: int) -> None:
    """FSDP2 leaves a class of sharded modules in its process, for which `keeps_versions` answers False from then on."""
    from torch.distributed.fsdp import fully_shard

    from tigon.runtime.engines import keeps_values, keeps_versions, may_run_twice

    assert keeps_versions(nn.Linear(4, 4).weight)
    layer = fully_shard(nn.Linear(4, 4))
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    assert hooks
    assert all(keeps_values(hook) and may_run_twice(hook) for hook in hooks)
    assert not keeps_versions(nn.Linear(4, 4).weight)


if __name__ == "__main__":
    *names, store = sys.argv[1:]
    if INTERPRETED:
        repair_the_interpreter()
        speed_up_the_interpreter()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)
    for name in names:
        module, function = CHECKS[name]
        getattr(importlib.import_module(module), function)(rank)
        print(f"{name} checked", flush=True)
    dist.destroy_process_group()
    leave()
