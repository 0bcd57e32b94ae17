"""Run a script in several processes on this machine, one for each rank."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).parent

# The timeout of a process group. If a rank fails, the other ranks wait for it. The time counts from the moment when the
# first rank has imported everything.
LIMIT = datetime.timedelta(seconds=120)


def leave() -> NoReturn:
    """End a successful rank at once: a thread of gloo can abort it while Python exits (pytorch issue 190489)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(
    script: Path | str, *args: str, ranks: int = 2, device: str = "cpu", timeout: int = 200,
    is_interpreted: bool = False,
) -> list[str]:  # fmt: skip
    """Run `python script *args STORE` once for each rank, and return the output of each. All ranks must succeed.

    The script reads its rank from RANK and WORLD_SIZE, as with a launcher, and joins the other ranks by the file STORE.
    It may import from tests, and reads its device from TIGON_TEST_DEVICE. Ranks on "cpu" see no GPU. After `timeout`
    seconds all ranks are ended, and the call fails. With `is_interpreted`, kernels run in Triton's interpreter.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TIGON_TEST_DEVICE": device}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    # `benchmarks` is the folder at the root, and not the folder of its tests.
    folders = str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *args, str(Path(folder) / "store")]
        environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        # The ranks write to files, because a pipe that is not read would become full.
        files = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes, end = [], time.monotonic() + timeout
        try:
            for file, env in zip(files, environments, strict=True):
                with file.open("w", encoding="utf-8") as output:
                    processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
            while (codes := [process.poll() for process in processes]).count(None) and time.monotonic() < end:
                # If a rank has failed, the other ranks would wait for it.
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
