"""Tensor parallelism cuts the head by rows: two processes, each with half of the vocabulary, compute stock's loss."""

import os
import subprocess
import sys
from pathlib import Path

WAYS = 6


def test_a_head_that_is_cut_over_two_ranks(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("head_two_ranks.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    store = str(tmp_path / "store")
    ranks = [subprocess.Popen([*command, str(rank), store], env=environment, **pipes) for rank in (0, 1)]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.count(": same") == WAYS, output
