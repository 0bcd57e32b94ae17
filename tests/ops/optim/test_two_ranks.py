"""The optimizers update the shards of two ranks. One launch runs all checks, because its start takes seconds."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from interpreter import repair_the_interpreter, speed_up_the_interpreter
from op_cases import INTERPRETED
from ranks import LIMIT, leave, run_ranks

CHECKS = {
    "AdamW": ("test_adamw_optimizer", "check_shards"),
    "compact AdamW": ("test_compact_optimizer", "check_compact_shards"),
    "Muon": ("test_muon", "check_muon_shards"),
}
# In the interpreter, the kernel of compact states would update the local tensors that the reference updates here.
NAMES = [(name,) for name in ("AdamW", "Muon")] if INTERPRETED else [(*CHECKS,)]


@pytest.mark.thorough_in_interpreter
@pytest.mark.parametrize("names", NAMES, ids=" and ".join)
def test_optimizers_update_the_shards_of_two_ranks(names):
    for output in run_ranks(__file__, *names, device="cpu"):
        assert output.splitlines()[-len(names) :] == [f"{name}: as one rank" for name in names]


if __name__ == "__main__":
    import importlib

    *names, store = sys.argv[1:]
    if INTERPRETED:
        repair_the_interpreter()
        speed_up_the_interpreter()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=LIMIT)
    for name in names:
        module, function = CHECKS[name]
        getattr(importlib.import_module(module), function)(rank)
        print(f"{name}: as one rank", flush=True)
    dist.destroy_process_group()
    leave()
