"""Processes on this machine, one a rank, that compute together."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent


def run_ranks(script: Path | str, *args: str, ranks: int = 2, device: str = "cpu", timeout: int = 200) -> list[str]:
    """Run `python script *args STORE` once a rank, and return what each wrote; every one must succeed.

    The script finds its rank as launchers give it, in RANK and WORLD_SIZE, and joins the others by the file STORE; it
    may import from tests, and finds in TIGON_TEST_DEVICE where to compute. Ranks on "cpu" see no GPU.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TIGON_TEST_DEVICE": device}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *args, str(Path(folder) / "store")]
        own = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=env, **pipes) for env in own]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
