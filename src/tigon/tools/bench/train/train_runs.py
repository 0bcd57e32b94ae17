"""The runs of `tigon bench train`: each provider at each of its sizes, in rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tigon.tools.bench.train.plan import ProviderRun, TrainPlan
from tigon.tools.training.child import Event
from tigon.tools.training.job import Job, Point
from tigon.tools.training.measurement import Measurement
from tigon.tools.training.runner import TrainingRun, train_in_turns
from tigon.tools.training.search import Search

__all__ = ["BenchSession", "train_rounds"]


@dataclass
class BenchSession:
    """All measurements in the order in which they began, and the facts that the processes report of their models.

    `show_state` gets a line about the current work; `show_row` gets each measurement as soon as it is complete.
    """

    plan: TrainPlan
    folder: Path
    show_state: Callable[[str], None]
    show_row: Callable[[Measurement], None]
    rows: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    applied: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
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

    job: Job

    def __init__(self, session: BenchSession, run: ProviderRun, search: Search, prefix: str) -> None:
        super().__init__(run.name, session.plan.job(run), session.folder / f"{run.name}.log")
        self._session, self._search, self._prefix = session, search, prefix

    def _show_state(self, state: str) -> None:
        self._session.show_state(f"{self._prefix}{self.name}: {state}")

    def next_point(self) -> str | None:
        size = self._search.next()
        if size is None:
            return None
        plan, session = self._session.plan, self._session
        batch, seq = plan.shape(size)
        self._size, self._row = size, session.row(self.name, batch, seq)
        self._show_state(f"{batch} x {seq:,}")
        seconds_left = session.seconds_left()
        if seconds_left is not None and seconds_left <= 0:
            if not self._row.seconds:
                self._row.status, self._row.note = "skipped", "no time left"
            session.show_row(self._row)
            return None
        self._point = Point(batch, seq, plan.warmup, plan.steps, seconds_left)
        return self._point.to_json()

    def listen(self, event: Event) -> None:
        match event["event"]:
            case "starts":
                self._show_state("starts")
            case "step":
                steps = self._point.warmup + self._point.steps
                self._show_state(f"step {event['step'] + 1}/{steps}  loss {event['loss']:.3f}")
            case "ready":
                self._show_state("first step")
                names = ("parameters", "parameters_of_a_rank", "attention")
                self._session.facts = {name: event[name] for name in names}
                if event["applied"]:
                    self._session.applied[self.name] = event["applied"]

    def record(self, event: Event) -> bool:
        row, kind = self._row, event["event"]
        if kind == "point":
            # A later round trains the same steps again, so its losses add nothing.
            row.add({**event, "losses": []} if row.losses else event)
            self._search.record(self._size, fits=True)
        elif kind == "out of memory":
            # The measurements of an earlier round remain valid.
            if row.seconds:
                row.note = "out of memory in a later round"
            else:
                row.status = kind
            self._search.record(self._size, fits=False)
        else:
            self._search.stop()
            if kind == "refused":
                row.status, note = event["status"], event["note"]
            else:
                row.status, note = "error", f"{event['reason'].splitlines()[0][:300]} {event['log']}"
            row.note = " ".join(note.split())[:400]
        self._session.show_row(row)
        return True


def train_rounds(session: BenchSession) -> None:
    """Train all providers in each round, in reverse order in every second one, because a warm chip is slower.

    Ctrl-C ends the process and keeps the measurements that are complete.
    """
    searches: dict[str, Search] = {}
    plan = session.plan
    try:
        for index in range(plan.options.rounds):
            for run in plan.runs if index % 2 == 0 else reversed(plan.runs):
                if index == 0:
                    search, prefix = searches.setdefault(run.name, plan.search()), ""
                else:
                    # A later round repeats the sizes that fitted.
                    search, prefix = Search(sorted(searches[run.name].fitting_sizes)), f"round {index + 1}: "
                train_in_turns([_BenchRun(session, run, search, prefix)])
    except KeyboardInterrupt:
        session.interrupted = True
        session.rows = [row for row in session.rows if row.seconds or row.status != "ok"]
