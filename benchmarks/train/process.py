"""Both sides of a training process: the parent starts it with a job and reads its events, the child writes them.

The job is a JSON object, the last argument of the process. An event is a line of JSON on standard output. The last
event of a process is one of these:

    {"event": "point", ..}                                     the measurements
    {"event": "refused", "status": .., "note": ..}             the job cannot be done here
    {"event": "failed", "out_of_memory": .., "reason": ..}
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[2]
Event = dict[str, Any]
WORKER = ("-m", "benchmarks.train.worker")
FINAL_EVENTS = ("point", "refused", "failed")
MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class WriteEvent(Protocol):
    """A function that writes an event with its fields to the parent."""

    def __call__(self, event: str, **fields: Any) -> None: ...


# --- the parent ----------------------------------------------------------------------------------


def worker_command(ranks: int, program: Sequence[str] = WORKER) -> list[str]:
    """Return the command line of one process of `program`, or of torchrun, which starts a group on a free port."""
    if ranks == 1:
        return [sys.executable, *program]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    return [*launcher, "--nproc-per-node", str(ranks), *program]


def _environment(ranks: int, device: str, source: str) -> dict[str, str]:
    """Return the environment of a process, or of the ranks of a group."""
    # The process imports `benchmarks` from the repository, whatever its working directory.
    path = os.pathsep.join(filter(None, (source, str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    values = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        values["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        if device == "cpu":
            # By default gloo looks up the host's own name, which not every network resolves.
            values |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return values


def run_process(
    job: Mapping[str, Any],
    log: Path,
    listen: Callable[[Event], None],
    program: Sequence[str] = WORKER,
    source: str = "",
) -> Event:
    """Run a job in a process of `program`, or in a group of `job["ranks"]` processes, and return its last event.

    `listen` gets the other events. The standard error goes to the file `log`, which is removed if it stays empty. The
    process imports Tigon from the folder `source`, or the Tigon of this process if that is "".
    """
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [*worker_command(job["ranks"], program), json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            env=_environment(job["ranks"], job["device"], source),
            # Ctrl-C reaches the parent alone, which then ends the process.
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] in FINAL_EVENTS:
                # The log is complete once the process has ended. A launcher that is terminated would write into it.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
                return event
            listen(event)
        code = process.wait()
        # Linux ends a process with signal 9 when memory runs out.
        hint = " (killed: out of memory?)" if code == -9 else ""
        last_lines = " ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:])
        reason = f"the process ended with code {code}{hint} {last_lines}"
        return {"event": "failed", "out_of_memory": code == -9, "reason": reason}
    finally:
        _end_process(process)
        if not log.stat().st_size:
            log.unlink()


def _end_process(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


# --- the child -----------------------------------------------------------------------------------


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
    merged: dict[str, Any] = {}
    for name, field in fields.items():
        values = [rank[name] for rank in of_ranks]
        if name == "losses":
            merged[name] = [sum(losses) / ranks for losses in zip(*values, strict=True)]
        elif isinstance(field, list):
            merged[name] = [max(items) for items in zip(*values, strict=True)]
        else:
            merged[name] = None if field is None else max(values)
    return merged


def _end(code: int) -> NoReturn:
    """End the process at once, without the exit handlers of libraries, which could wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def answer(work: Callable[[dict[str, Any], int, WriteEvent], None]) -> int:
    """Call `work(job, rank, write_event)` with the job of the command line, and return the exit code.

    Rank 0 writes the events of a group. An error goes to the parent as an event "failed", from any rank.
    """
    job = json.loads(sys.argv[1])
    ranks = job["ranks"]
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    # Events go to a copy of standard output. Everything that libraries print goes to standard error.
    events = os.dup(1)
    os.dup2(2, 1)

    def write_event(event: str, **fields: Any) -> None:
        # Each line is a single write, because ranks share the pipe.
        os.write(events, (json.dumps({"event": event, **fields}) + "\n").encode())

    try:
        work(job, rank, write_event if rank == 0 else lambda *_, **__: None)
    except BrokenPipeError:
        # The parent has ended.
        return 1
    except Exception as error:
        out_of_memory = is_out_of_memory(error)
        kind = "out of memory" if out_of_memory else type(error).__name__
        write_event("failed", out_of_memory=out_of_memory, reason=f"{kind}: {str(error).strip()}")
        if not out_of_memory:
            traceback.print_exc()
        if ranks > 1:
            _end(1)
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()
        # A thread of gloo can abort a process while Python ends (pytorch's issue 190489).
        _end(0)
    return 0
