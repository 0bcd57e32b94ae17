"""The two runs of the demo, and the progress that a person sees."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.demo.demo_presets import DemoPreset, warmup_steps
from benchmarks.training.child import Event
from benchmarks.training.job import Job, Point
from benchmarks.training.measurement import Measurement
from benchmarks.training.search import Search
from benchmarks.training.turns import AllRunsEnd, TrainingRun, train_groups

# The number of progress lines of a run where there is no terminal.
PROGRESS_LINES = 6


class DemoMeasurement(Measurement):
    """A measurement that times all steps and leaves the first ones out of the median."""

    @property
    def step_seconds(self) -> float | None:
        seconds = self.seconds[warmup_steps(len(self.seconds)) :]
        return statistics.median(seconds) if seconds else None


class DemoRun(TrainingRun):
    """One training run of the demo: a point for each step. `name` is for files, `title` for people.

    `failure` is the reason why the run is not complete.
    """

    job: Job
    display: "ProgressDisplay"

    def __init__(self, name: str, title: str, model_type: str, preset: DemoPreset, job: Job) -> None:
        super().__init__(name, job, Search([preset.seq] * preset.steps))
        self.title, self.model_type, self.preset = title, model_type, preset
        self.measurement: Measurement = DemoMeasurement(name, preset.batch, preset.seq)
        self.failure = ""

    @property
    def losses(self) -> list[float]:
        return self.measurement.losses

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory above parameters, gradients and optimizer states; 0 before the first step."""
        peak = self.measurement.allocated
        return 0 if peak is None else peak - self.facts["state_bytes"]

    def point(self) -> str:
        return Point(self.preset.batch, self.size).to_json()

    def listen(self, event: Event) -> None:
        super().listen(event)
        if event["event"] != "step":
            self.display.show_state(self, event["event"])

    def record(self, event: Event) -> None:
        if event["event"] == "point":
            self.measurement.add(event)
            self.display.show_step(self)
            return
        is_refused = event["event"] == "refused"
        self.failure = event["note"] if is_refused else "\n".join(filter(None, (event["reason"], event.get("log"))))
        self.display.show_state(self, self.failure.splitlines()[0])
        if event["event"] != "out of memory":
            raise AllRunsEnd


class ProgressDisplay:
    """A progress bar for each run, or a few lines of each where there is no terminal."""

    def __init__(self, console: Console, runs: Sequence[DemoRun]) -> None:
        self._console, self._steps = console, runs[0].preset.steps
        self.bars = Progress(
            TextColumn("[bold]{task.description:<8}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"), TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks = {
            run: self.bars.add_task(run.title, total=self._steps, state="waits", start=False) for run in runs
        }

    def show_state(self, run: DemoRun, state: str) -> None:
        self.bars.start_task(self._tasks[run])
        self.bars.update(self._tasks[run], state=state)
        if self.bars.disable:
            self._console.print(f"{run.title}: {state}")

    def show_step(self, run: DemoRun) -> None:
        """Show the loss, speed and memory of the last step."""
        step, speed = len(run.losses), run.measurement.tokens / run.measurement.seconds[-1]
        state = f"loss {run.losses[-1]:.3f}  {speed:,.0f} tokens/s  {run.peak_bytes / 2**20:,.0f} MiB"
        self.bars.update(self._tasks[run], completed=step, state=state)
        is_shown = step in (1, self._steps) or step % max(1, self._steps // PROGRESS_LINES) == 0
        if self.bars.disable and is_shown:
            self._console.print(f"{run.title:<8} step {step}/{self._steps}  {state}")


def train_runs(runs: Sequence[DemoRun], folder: Path, console: Console) -> bool:
    """Train all runs, in turns step by step or one after the other; return False after Ctrl-C.

    A run that is out of memory does not end the others; any other failure does.
    """
    display = ProgressDisplay(console, runs)
    for run in runs:
        run.display, run.log = display, folder / f"{run.name}.log"
    with display.bars:
        return train_groups([runs] if runs[0].preset.take_turns else [[run] for run in runs])
