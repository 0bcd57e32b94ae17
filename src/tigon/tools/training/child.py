"""A process that trains: started with a job, spoken to by lines, ended in time.

It is given the file of its job as last argument. Its standard output is one line of JSON an event, of which one may say
that it failed:

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
from typing import Any, Protocol

from tigon.tools.environment import cpu_count

__all__ = ["Child", "ChildFailed", "Worker", "worker_command", "worker_environment"]

WORKER = ("-m", "tigon.tools.training.worker")


def worker_command(ranks: int = 1, program: Sequence[str] = WORKER) -> list[str]:
    """Return the command line of one process of `program`, or of a group of them, which finds a free port by itself."""
    if ranks == 1:
        return [sys.executable, *program]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    return [*launcher, "--nproc-per-node", str(ranks), *program]


def worker_environment(ranks: int, device: str) -> dict[str, str]:
    """Return the environment variables that the ranks of a group need besides."""
    if ranks == 1:
        return {}
    threads = {"OMP_NUM_THREADS": str(max(1, cpu_count() // ranks))}
    # Gloo looks up the host's own name, which need not lead anywhere.
    return threads if device != "cpu" else {**threads, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


class _Job(Protocol):
    def to_json(self) -> str: ...


class ChildFailed(Exception):
    """A training process ended before its time. `out_of_memory`: the other run may still succeed.

    `log`: the last lines that the process wrote to standard error, if it ended without giving a reason.
    """

    def __init__(self, reason: str, out_of_memory: bool = False, log: str = "") -> None:
        super().__init__(f"{reason}\n{log}" if log else reason)
        self.reason, self.out_of_memory, self.log = reason, out_of_memory, log


class Child:
    """The process of `command`, with `extra` in its environment.

    `log` takes what it writes to standard error; it is removed if empty. Without a log the process shares this one's
    standard error.
    """

    def __init__(
        self,
        job: _Job,
        log: Path | None,
        command: Sequence[str],
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
            file.write(job.to_json())
        self._job_file = Path(file.name)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= extra or {}
        with log.open("w", encoding="utf-8") if log else nullcontext() as stderr:
            self._process = subprocess.Popen(
                [*command, str(self._job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=environment,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )

    def next_event(self) -> dict[str, Any]:
        """Wait for the process's next line. Raises ChildFailed if it reports a failure or ends without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            log = self._log.read_text(encoding="utf-8", errors="replace") if self._log else ""
            lines = log.strip().splitlines()
            # Signal 9 is how the kernel ends a process when memory runs out.
            hint = " (killed: out of memory?)" if code == -9 else ""
            raise ChildFailed(f"the process ended with code {code}{hint}", code == -9, "\n".join(lines[-8:]))
        event = json.loads(line)
        if event["event"] == "failed":
            with suppress(subprocess.TimeoutExpired):  # its log is to be whole
                self._process.wait(timeout=10)
            raise ChildFailed(event["reason"], event["out_of_memory"])
        return event

    def send(self, line: str) -> None:
        """Write a line to the process's standard input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # next_event says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def ask(self, line: str) -> dict[str, Any]:
        """Write a line to the process's standard input and wait for its answer."""
        self.send(line)
        return self.next_event()

    def finish(self, seconds: float = 60.0) -> None:
        """Close the process's standard input and wait for it to end by itself; end it if it does not."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.close()

    def close(self) -> None:
        """End the process, at once if it is inside a step."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self._job_file.unlink(missing_ok=True)
        if self._log and self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Worker:
    """The child that `start` makes: started when it is first needed, and again if it ended."""

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._child: Child | None = None

    def train(self, point: str, listen: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Send a point and return the event that answers it; `listen` gets the events "ready" and "step" before it.

        A child that fails is closed, and the answer is {"event": "out of memory" | "failed", "reason": .., "log": ..}.
        """
        try:
            if self._child is None:
                self._child = self._start()
            self._child.send(point)
            while (event := self._child.next_event())["event"] in ("ready", "step"):
                listen(event)
            return event
        except ChildFailed as failure:
            self.close()
            kind = "out of memory" if failure.out_of_memory else "failed"
            return {"event": kind, "reason": failure.reason, "log": failure.log}

    def close(self, at_rest: bool = False) -> None:
        """End the child. One that is `at_rest` ends by itself, which leaves no complaints of a group in its log."""
        if self._child is not None:
            (self._child.finish if at_rest else self._child.close)()
            self._child = None
