"""Two training runs, each in its own process, and what a person sees while they go on."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tigon.tools.demo.report import Run
from tigon.tools.training.child import Child, ChildFailed, worker_command
from tigon.tools.training.job import Point

__all__ = ["run_jobs"]

_LINES_WITHOUT_TERMINAL = 6  # progress lines a run, where no bar can be drawn


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


def _facts(event: dict[str, Any]) -> dict[str, Any]:
    """Return what report.json says of the model."""
    if event["event"] == "refused":
        raise ChildFailed(event["note"])
    names = ("event", "parameters", "state_bytes", "attention", "threads")
    return {**{name: event[name] for name in names}, "patch": event["applied"] or None}


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
            going[run.name] = stack.enter_context(Child(run.job, folder / f"{run.name}.log", worker_command()))

        def attempt(run: Run, action: str) -> None:
            child = going[run.name]
            try:
                if action == "start":
                    run.facts = _facts(child.next_event())
                    display.note(run, "ready")
                else:
                    _record(run, child.ask(Point(run.preset.batch, run.preset.seq).to_json()))
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
    together = runs[0].preset.take_turns
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
