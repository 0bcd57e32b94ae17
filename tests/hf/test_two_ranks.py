"""Two processes on this machine: each way of a group gives a patched model the loss and every gradient of stock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")
LIBRARIES = {"zero": "deepspeed", "adapters": "peft"}


@pytest.mark.parametrize(("group", "ways"), [("sharded", 16), ("parallel", 10), ("zero", 3), ("adapters", 4)])
def test_two_ranks(group, ways, tmp_path):
    if group in LIBRARIES:
        pytest.importorskip(LIBRARIES[group])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["DS_ACCELERATOR"] = "cpu"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), group, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.count(": same\n") == ways, output
