"""Processes on this machine, one a rank, that compute together."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).parent

# For the group of a rank: one that fails leaves the others waiting. They count from when the first has imported all.
LIMIT = datetime.timedelta(seconds=120)


def leave() -> NoReturn:
    """End a rank that went well, at once: while Python ends, a thread of gloo can abort it (pytorch's issue 190489)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(script: Path | str, *args: str, ranks: int = 2, device: str = "cpu", timeout: int = 200) -> list[str]:
    """Run `python script *args STORE` once a rank, and return what each wrote; every one must succeed.

    The script finds its rank as launchers give it, in RANK and WORLD_SIZE, and joins the others by the file STORE; it
    may import from tests, and finds in TIGON_TEST_DEVICE where to compute. Ranks on "cpu" see no GPU. After `timeout`
    seconds they are ended, and fail.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TIGON_TEST_DEVICE": device}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *args, str(Path(folder) / "store")]
        own = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        files = [Path(folder) / f"rank{rank}" for rank in range(ranks)]  # a pipe that nobody reads would fill
        processes, end = [], time.monotonic() + timeout
        try:
            for file, env in zip(files, own, strict=True):
                with file.open("w", encoding="utf-8") as output:
                    processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
            while (codes := [process.poll() for process in processes]).count(None) and time.monotonic() < end:
                if any(codes):  # the others would wait for it
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
