"""Both sides of a training process: the parent starts it with a job and reads its result, which the child writes.

The job is a JSON object, the last argument of the process. The result is another one, a line on standard output:

    {"status": "ok", ..}                      the measurements
    {"status": .., "note": ..}                "out of memory", "error", or the status of a provider that refuses the job
"""

import json
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[2]
# A process that has written its result ends within this time.
EXIT_SECONDS = 60.0
WORKER = ("-m", "benchmarks.train.worker")
# The function of a child: it gets the job and its rank, and returns the fields of the result.
Work = Callable[[dict[str, Any], int], dict[str, Any]]
MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def worker_command(ranks: int, program: Sequence[str] = WORKER) -> list[str]:
    """Return the command line of one process of `program`, or of torchrun, which starts a group on a free port."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node"]
    return [sys.executable, *([*launcher, str(ranks)] if ranks > 1 else []), *program]


def _environment(ranks: int, device: str, source: str) -> dict[str, str]:
    # The process imports `benchmarks` from the repository, whatever its working directory.
    path = os.pathsep.join(filter(None, (source, str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    values = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        values["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        if device == "cpu":
            # By default gloo looks up the host's own name, which not every network resolves.
            values |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return values


def run_process(job: Mapping[str, Any], log: Path, program: Sequence[str] = WORKER, source: str = "") -> dict[str, Any]:
    """Run a job in a process of `program`, or in a group of `job["ranks"]` processes, and return its result. The
    standard error goes to the file `log`, which is removed if it stays empty. The process imports Tigon from the folder
    `source`, or the Tigon of this process if that is ""."""
    command, environment = worker_command(job["ranks"], program), _environment(job["ranks"], job["device"], source)
    with log.open("w", encoding="utf-8") as stderr:
        # In a session of its own: Ctrl-C reaches the parent alone, which then ends the process.
        options: Any = {"stderr": stderr, "encoding": "utf-8", "env": environment, "start_new_session": True}
        process = subprocess.Popen([*command, json.dumps(job)], stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        # The log is complete once the process has ended. A launcher that is terminated would write into it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=EXIT_SECONDS)
        if line:
            return json.loads(line)
        # Linux ends a process with signal 9 when memory runs out.
        code = process.returncode
        last_lines = " ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:])
        note = f"the process ended with code {code} {last_lines}"
        return {"status": "out of memory" if code == -9 else "error", "note": note}
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if not log.stat().st_size:
            log.unlink()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` of torch, a library or the host says that memory ran out."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(message in str(error) for message in MEMORY_MESSAGES)


def select_device(device: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank, and make a GPU the current one."""
    selected = torch.device(device)
    if selected.type == "cuda":
        selected = torch.device("cuda", rank if ranks > 1 else selected.index or 0)
        torch.cuda.set_device(selected)
    return selected


def merge_ranks(fields: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the mean of "losses" and the maximum of each other field over all ranks; lists item by item."""
    if ranks == 1:
        return fields
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, fields)

    def merge(name: str) -> Any:
        values, summary = [rank[name] for rank in of_ranks], statistics.fmean if name == "losses" else max
        if isinstance(values[0], list):
            return [summary(items) for items in zip(*values, strict=True)]
        return None if values[0] is None else summary(values)

    return {name: merge(name) for name in fields}


def run_job(work: Work, job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the result of `work(job, rank)`. An error becomes its status: that of the error's class, if it has one."""
    try:
        return {"status": "ok", **work(job, rank)}
    except Exception as error:
        status = getattr(error, "status", "out of memory" if is_out_of_memory(error) else "error")
        if status == "error":
            traceback.print_exc()
            return {"status": status, "note": f"{type(error).__name__}: {str(error).strip()}"}
        return {"status": status, "note": str(error)}


def answer(work: Work) -> int:
    """Call `work(job, rank)` with the job of the command line, write its result, and return the exit code. Rank 0
    writes the result of a group, and any rank an error."""
    job = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"]) if job["ranks"] > 1 else 0
    # The result goes to a copy of standard output. Everything that libraries print goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    result = run_job(work, job, rank)
    failed = result["status"] in ("error", "out of memory")
    if rank == 0 or failed:
        # The line is a single write, because ranks share the pipe. The parent may have ended.
        with suppress(BrokenPipeError):
            os.write(output, (json.dumps(result) + "\n").encode())
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
    if job["ranks"] > 1:
        # End at once: exit handlers of libraries could wait for other ranks, and a thread of gloo can abort a process
        # while Python ends (pytorch's issue 190489).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(failed))
    return int(failed)
