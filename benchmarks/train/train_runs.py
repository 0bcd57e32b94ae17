"""The runs of `benchmarks.train`: each provider at each of its sizes, in rounds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.train.train_plan import ProviderRun, TrainPlan
from benchmarks.training.child import Event
from benchmarks.training.job import Point
from benchmarks.training.measurement import Measurement
from benchmarks.training.search import Search
from benchmarks.training.turns import TrainingRun, train_groups


@dataclass
class BenchSession:
    """All measurements in the order in which they began, and the facts that the processes report about their models.

    `show_state` gets a line about the current work; `show_row` gets each measurement as soon as it is complete.
    `patch_reports` has for each provider what it changed in its model.
    """

    plan: TrainPlan
    folder: Path
    show_state: Callable[[str], None]
    show_row: Callable[[Measurement], None]
    rows: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    patch_reports: dict[str, str] = field(default_factory=dict)
    start_time: float = field(default_factory=time.monotonic)

    def row(self, name: str, batch: int, seq: int) -> Measurement:
        """Return the measurement of a run at a size: a new one, or that of an earlier round."""
        for row in self.rows:
            if (row.provider, row.batch, row.seq) == (name, batch, seq):
                return row
        self.rows.append(Measurement(name, batch, seq, self.plan.options.gpus))
        return self.rows[-1]

    def seconds_left(self) -> float | None:
        budget = self.plan.options.budget
        return None if budget is None else self.start_time + budget - time.monotonic()


class _BenchRun(TrainingRun):
    """One provider in one round."""

    def __init__(self, session: BenchSession, run: ProviderRun, search: Search, prefix: str) -> None:
        super().__init__(run.name, session.plan.job(run), search, session.folder / f"{run.name}.log")
        self._session, self._prefix = session, prefix

    def _show_state(self, state: str) -> None:
        self._session.show_state(f"{self._prefix}{self.name}: {state}")

    def point(self) -> str | None:
        plan, session = self._session.plan, self._session
        batch, seq = plan.shape(self.size)
        self._row = session.row(self.name, batch, seq)
        self._show_state(f"{batch} x {seq:,}")
        seconds_left = session.seconds_left()
        if seconds_left is not None and seconds_left <= 0:
            if not self._row.seconds:
                self._row.status, self._row.note = "skipped", "no time left"
            session.show_row(self._row)
            return None
        return Point(batch, seq, plan.warmup, plan.steps, seconds_left).to_json()

    def listen(self, event: Event) -> None:
        plan, session = self._session.plan, self._session
        match event["event"]:
            case "starts":
                self._show_state("starts")
            case "step":
                self._show_state(f"step {event['step'] + 1}/{plan.warmup + plan.steps}  loss {event['loss']:.3f}")
            case "ready":
                self._show_state("first step")
                session.facts = {name: event[name] for name in ("parameters", "parameters_of_a_rank", "attention")}
                if event["applied"]:
                    session.patch_reports[self.name] = event["applied"]

    def record(self, event: Event) -> None:
        row, kind = self._row, event["event"]
        if kind == "point":
            # A later round trains the same steps again, so its losses add nothing.
            row.add({**event, "losses": []} if row.losses else event)
        elif kind == "out of memory" and row.seconds:
            # The measurements of an earlier round remain valid.
            row.note = "out of memory in a later round"
        elif kind == "out of memory":
            row.status = kind
        else:
            if kind == "refused":
                row.status, note = event["status"], event["note"]
            else:
                row.status, note = "error", f"{event['reason'].splitlines()[0][:300]} {event['log']}"
            row.note = " ".join(note.split())[:400]
        self._session.show_row(row)


def _order_runs(session: BenchSession) -> Iterator[list[_BenchRun]]:
    """Yield the runs of all rounds. Every second round is in reverse order, because a warm chip is slower."""
    searches = {run.name: session.plan.search() for run in session.plan.runs}
    for index in range(session.plan.options.rounds):
        for run in session.plan.runs if index % 2 == 0 else reversed(session.plan.runs):
            search, prefix = searches[run.name], ""
            if index > 0:
                # A later round repeats the sizes that fitted.
                search, prefix = Search(sorted(search.fitting_sizes)), f"round {index + 1}: "
            yield [_BenchRun(session, run, search, prefix)]


def train_rounds(session: BenchSession) -> bool:
    """Train all runs; return False after Ctrl-C, which leaves the measurements that are complete."""
    is_complete = train_groups(_order_runs(session))
    if not is_complete:
        session.rows = [row for row in session.rows if row.seconds or row.status != "ok"]
    return is_complete
