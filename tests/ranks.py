"""Processes on this machine that compute together, one for each rank."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).parent

# The timeout of a process group, because the other ranks wait for one that fails. It counts from the moment when the
# first rank has imported everything.
LIMIT = datetime.timedelta(seconds=120)


def leave() -> NoReturn:
    """End a successful rank at once. A thread of gloo can abort Python while it ends (issue 190489 of pytorch)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(script: Path | str, *args: str, ranks: int = 2, device: str = "cpu", timeout: int = 200) -> list[str]:
    """Run `python script *args STORE` once for each rank, and return the output of each; every rank must succeed.

    The script reads its rank from RANK and WORLD_SIZE, as from a launcher, and joins the other ranks by the file STORE.
    It may import from tests, and reads its device from TIGON_TEST_DEVICE. Ranks on "cpu" see no GPU. After `timeout`
    seconds the ranks are ended and fail.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TIGON_TEST_DEVICE": device}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *args, str(Path(folder) / "store")]
        environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        # The output goes to files, because a pipe that nobody reads would fill.
        files = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes, end = [], time.monotonic() + timeout
        try:
            for file, env in zip(files, environments, strict=True):
                with file.open("w", encoding="utf-8") as output:
                    processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
            while (codes := [process.poll() for process in processes]).count(None) and time.monotonic() < end:
                # The other ranks would wait for a rank that failed.
                if any(codes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
