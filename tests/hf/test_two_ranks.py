"""Two processes on this machine: under DDP and FSDP2, loss and every gradient of a patched model are stock's."""

import os
import subprocess
import sys
from pathlib import Path

WAYS = 5


def test_two_ranks(tmp_path):
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
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
        assert output.count(": same") == WAYS, output
