"""The parent's side of a training process: start it with a job, send it points, read its events, end it.

The process gets the path of its job as last argument. It writes its events to standard output, as lines of JSON. Every
process can report a failure:

    {"event": "failed", "out_of_memory": .., "reason": ..}
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.train.job import RankJob

REPOSITORY = Path(__file__).resolve().parents[2]
Event = dict[str, Any]
WORKER = ("-m", "benchmarks.train.worker")
# These events do not answer a point.
PROGRESS = ("ready", "step")


def worker_command(ranks: int = 1, program: Sequence[str] = WORKER) -> list[str]:
    """Return the command line of one process of `program`, or of torchrun, which starts a group on a free port."""
    if ranks == 1:
        return [sys.executable, *program]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    return [*launcher, "--nproc-per-node", str(ranks), *program]


def _group_settings(ranks: int, device: str) -> dict[str, str]:
    """Return the environment variables that the ranks of a group need."""
    if ranks == 1:
        return {}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    # By default gloo looks up the host's own name, which not every network resolves.
    return threads if device != "cpu" else {**threads, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


class ChildFailed(Exception):
    """A training process failed. If `out_of_memory`, memory ran out, so another run may still succeed.

    `log` holds the last lines of its standard error if the process ended without a reason.
    """

    def __init__(self, reason: str, out_of_memory: bool = False, log: str = "") -> None:
        super().__init__(reason)
        self.reason, self.out_of_memory, self.log = reason, out_of_memory, log


class Child:
    """A process of `command`, with `settings` added to its environment.

    The process writes its standard error to the file `log`, which is removed if it stays empty. Without `log`, it
    shares the standard error of this process.
    """

    def __init__(self, job: RankJob, log: Path | None, command: Sequence[str], settings: Mapping[str, str]) -> None:
        self._log = log
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
            file.write(job.to_json())
        self._job_file = Path(file.name)
        # The process imports `benchmarks` from the repository, whatever its working directory.
        folders = getattr(job, "source", ""), str(REPOSITORY), os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, folders))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= settings
        with log.open("w", encoding="utf-8") if log else nullcontext() as stderr:
            self._process = subprocess.Popen(
                [*command, str(self._job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=environment,
                # Ctrl-C reaches the parent alone, which then ends the process.
                start_new_session=True,
            )

    def next_event(self) -> Event:
        """Wait for the next event of the process.

        Raises:
            ChildFailed: the process reports a failure, or ends.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            log = self._log.read_text(encoding="utf-8", errors="replace") if self._log else ""
            lines = log.strip().splitlines()
            # Linux ends a process with signal 9 when memory runs out.
            hint = " (killed: out of memory?)" if code == -9 else ""
            raise ChildFailed(f"the process ended with code {code}{hint}", code == -9, "\n".join(lines[-8:]))
        event = json.loads(line)
        if event["event"] == "failed":
            # Wait, so that the log is complete.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            raise ChildFailed(event["reason"], event["out_of_memory"])
        return event

    def send(self, line: str) -> None:
        """Write a line to the standard input of the process."""
        assert self._process.stdin is not None
        # If the process has ended, `next_event` raises and gives the reason.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def finish(self, seconds: float = 60.0) -> None:
        """Close the standard input of the process and wait until it ends; end it after `seconds`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.close()

    def close(self) -> None:
        """End the process at once, even inside a step."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._job_file.unlink(missing_ok=True)
        if self._log and self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()


class Worker:
    """The training process of a job, or the group of its ranks.

    It starts at the first point, and again after a failure. `listen` gets the events of its progress: "starts", "ready"
    and "step". As a context manager the worker ends its process.
    """

    def __init__(
        self,
        job: RankJob,
        log: Path | None,
        listen: Callable[[Event], None],
        program: Sequence[str] = WORKER,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._job, self._log, self._listen = job, log, listen
        self._command = worker_command(job.ranks, program)
        self._settings = {**(settings or {}), **_group_settings(job.ranks, job.device)}
        self._child: Child | None = None

    def start(self) -> None:
        """Start the process if none runs."""
        if self._child is None:
            self._listen({"event": "starts"})
            self._child = Child(self._job, self._log, self._command, self._settings)

    def wait_until_ready(self) -> Event:
        """Return the event "ready", or the event that says why the process cannot train."""
        return self._next_event(("step",))

    def train(self, point: str) -> Event:
        """Send a point and return the event that answers it.

        If the process fails, close it and return {"event": "out of memory" | "failed", "reason": .., "log": ..}.
        """
        return self._next_event(PROGRESS, point)

    def _next_event(self, progress: Sequence[str], point: str | None = None) -> Event:
        """Return the next event that is not in `progress`; `listen` gets all events of the process's progress."""
        try:
            self.start()
            assert self._child is not None
            if point is not None:
                self._child.send(point)
            while True:
                event = self._child.next_event()
                if event["event"] in PROGRESS:
                    self._listen(event)
                if event["event"] not in progress:
                    return event
        except ChildFailed as failure:
            self._close()
            kind = "out of memory" if failure.out_of_memory else "failed"
            return {"event": kind, "reason": failure.reason, "log": failure.log}

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Let a group end by itself if it can, because a launcher that is terminated writes errors into the log.
        if self._child is not None and kind is None and self._job.ranks > 1:
            self._child.finish()
            self._child = None
        self._close()
