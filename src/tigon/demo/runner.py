"""Two training runs, each in its own process, and what a person sees while they go on."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tigon.demo.report import Run

__all__ = ["Child", "ChildFailed", "run_jobs"]

_LINES_WITHOUT_TERMINAL = 6  # progress lines a run, where no bar can be drawn


class _Job(Protocol):
    def to_json(self) -> str: ...


class ChildFailed(Exception):
    """A training process ended before its time. `out_of_memory`: the other run may still succeed."""

    def __init__(self, reason: str, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class Child:
    """One `tigon.demo.train` process; see there for the protocol.

    `log` takes what the process writes to standard error; it is removed if empty. Another `command` that follows the
    protocol is given the file of its job as last argument, and may have more in its environment.
    """

    def __init__(
        self,
        job: _Job,
        log: Path,
        command: Sequence[str] = (sys.executable, "-m", "tigon.demo.train"),
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
            file.write(job.to_json())
        self._job_file = Path(file.name)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= extra or {}
        with log.open("w", encoding="utf-8") as stderr:
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
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            # Signal 9 is how the kernel ends a process when memory runs out.
            hint = " (killed: out of memory?)" if code == -9 else ""
            raise ChildFailed(f"the process ended with code {code}{hint}\n" + "\n".join(lines[-8:]), code == -9)
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

    def step(self) -> dict[str, Any]:
        """Let the process train one step and wait for its result."""
        self.send("")
        return self.next_event()

    def finish(self, seconds: float = 20.0) -> None:
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
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# --- progress ------------------------------------------------------------------------------------


class _Display(Protocol):
    def __enter__(self) -> "_Display": ...
    def __exit__(self, *error: Any) -> None: ...
    def note(self, run: Run, text: str) -> None: ...
    def step(self, run: Run) -> None: ...


def _state(run: Run) -> tuple[str, str, str]:
    """Loss, speed and memory of a run so far, for people."""
    speed = f"{run.tokens_per_step / run.seconds[-1]:,.0f} tokens/s"
    return f"loss {run.losses[-1]:.3f}", speed, f"{run.peak_bytes / 2**20:,.0f} MiB"


class _Bars:
    """A progress bar for each run."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description:<8}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {
            run.name: self._progress.add_task(run.title, total=run.steps, state="waits", start=False) for run in runs
        }

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def note(self, run: Run, text: str) -> None:
        self._progress.start_task(self._tasks[run.name])
        self._progress.update(self._tasks[run.name], state=text)

    def step(self, run: Run) -> None:
        self._progress.update(self._tasks[run.name], completed=len(run.losses), state="  ".join(_state(run)))


class _Lines:
    """A line now and then for each run, where there is no terminal."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._console = console
        self._every = max(1, max(run.steps for run in runs) // _LINES_WITHOUT_TERMINAL)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def note(self, run: Run, text: str) -> None:
        self._console.print(f"{run.title}: {text}")

    def step(self, run: Run) -> None:
        done = len(run.losses)
        if done == 1 or done == run.steps or done % self._every == 0:
            self._console.print(f"{run.title:<8} step {done}/{run.steps}  {'  '.join(_state(run))}")


# --- running -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How it ended. `failures`: a message for each run that did not finish, by the run's name."""

    interrupted: bool = False
    failures: dict[str, str] = field(default_factory=dict)


def _record(run: Run, event: dict[str, Any]) -> None:
    run.losses.append(event["loss"])
    run.seconds.append(event["seconds"])
    run.peak_bytes = event["peak_bytes"]


def _run_together(runs: Sequence[Run], folder: Path, display: _Display, outcome: Outcome) -> None:
    """Run `runs` at once, taking turns step by step."""
    with ExitStack() as stack:
        going: dict[str, Child] = {}
        for run in runs:
            display.note(run, "starts")
            going[run.name] = stack.enter_context(Child(run.job, folder / f"{run.name}.log"))

        def attempt(run: Run, action: str) -> None:
            child = going[run.name]
            try:
                if action == "start":
                    run.facts = child.next_event()
                    display.note(run, "ready")
                else:
                    _record(run, child.step())
                    display.step(run)
            except ChildFailed as error:
                outcome.failures[run.name] = str(error)
                display.note(run, str(error).splitlines()[0])
                del going[run.name]
                if not error.out_of_memory:
                    raise

        for turn in range(1 + max(run.steps for run in runs)):
            for run in runs:
                if run.name in going:
                    attempt(run, "step" if turn else "start")


def run_jobs(runs: Sequence[Run], folder: Path, console: Console) -> Outcome:
    """Train all `runs` and fill in what they measure: in turns, step by step, or one after the other.

    Ctrl-C and a failure end the processes and keep what was measured. A run that is out of memory does not end the
    others.
    """
    outcome = Outcome()
    together = runs[0].job.preset.take_turns
    groups = [runs] if together else [[run] for run in runs]
    display: _Display = (_Bars if console.is_terminal else _Lines)(console, runs)
    try:
        with display:
            for group in groups:
                _run_together(group, folder, display, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = True
    except ChildFailed:
        pass  # in outcome.failures
    return outcome
