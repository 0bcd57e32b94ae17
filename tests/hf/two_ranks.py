"""Take a step of a patched and a stock model in each setup of some groups. test_two_ranks.py runs this on each rank.

python two_ranks.py GROUP... STORE

The group `GROUP_more` has the further setups of a group, which `make test-thorough` runs.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist

from hf.ways import DEVICE
from interpreter import repair_the_interpreter, speed_up_the_interpreter
from ranks import LIMIT, leave
from tigon.runtime.device import INTERPRETED

if __name__ == "__main__":
    *groups, store = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if INTERPRETED:
        repair_the_interpreter()
        speed_up_the_interpreter()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)
    for group in groups:
        module = importlib.import_module(f"hf.ways_{group.removesuffix('_more')}")
        for name, setup in (module.MORE_SETUPS if group.endswith("_more") else module.SETUPS).items():
            setup(rank)
            print(f"{group}: {name} is the same", flush=True)
    dist.destroy_process_group()
    leave()
