"""Processes one after the other: each provider at each of its sizes, in rounds, and what a person sees meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.tools.bench.train.plan import Plan, Run
from tigon.tools.bench.train.report import Row
from tigon.tools.bench.train.search import Search
from tigon.tools.training.child import Child, Worker, worker_command, worker_environment
from tigon.tools.training.job import Point

__all__ = ["Outcome", "Runner"]

Tell = Callable[[str], None]  # receives what is being done now


class Outcome:
    """Rows in the order in which they began, and what the processes said of their models."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.applied: dict[str, str] = {}
        self.interrupted = False

    def row(self, run: Run, batch: int, seq: int, gpus: int) -> Row:
        """The row of a run at a size: a new one, or that of an earlier round."""
        for row in self.rows:
            if (row.provider, row.batch, row.seq) == (run.name, batch, seq):
                return row
        self.rows.append(Row(run.name, batch, seq, gpus))
        return self.rows[-1]


class Runner:
    """Runs a plan. `tell` is told what goes on, and `done` gets each row as soon as it is measured."""

    def __init__(self, plan: Plan, folder: Path, tell: Tell, done: Callable[[Row], None]) -> None:
        self._plan, self._folder, self._tell, self._done = plan, folder, tell, done
        self.outcome = Outcome()
        budget = plan.options.budget
        self._deadline = None if budget is None else time.monotonic() + budget

    def run(self) -> Outcome:
        """All rounds; the second and every other after it in reverse order: a chip that warms up is slower later.

        Ctrl-C ends the process and keeps what was measured.
        """
        searches: dict[str, Search] = {}
        try:
            for index in range(self._plan.options.rounds):
                for run in self._plan.runs if index % 2 == 0 else reversed(self._plan.runs):
                    if index == 0:
                        searches[run.name] = self._plan.search()
                        self._run(run, searches[run.name], "")
                    else:
                        again = Search(sorted(searches[run.name].fitted))
                        self._run(run, again, f"round {index + 1}: ")
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            self.outcome.rows = [row for row in self.outcome.rows if row.seconds or row.status != "ok"]
        return self.outcome

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _start(self, run: Run, tell: Tell) -> Child:
        tell("starts")
        ranks, device = self._plan.options.gpus, self._plan.options.device
        log = self._folder / f"{run.name}.log"
        return Child(self._plan.job(run), log, worker_command(ranks), worker_environment(ranks, device))

    def _run(self, run: Run, search: Search, prefix: str) -> None:
        tell = lambda text: self._tell(f"{prefix}{run.name}: {text}")
        worker = Worker(lambda: self._start(run, tell))
        try:
            while (size := search.next()) is not None:
                self._size(run, worker, search, size, tell)
            worker.close(at_rest=self._plan.options.gpus > 1)
        finally:
            worker.close()

    def _size(self, run: Run, worker: Worker, search: Search, size: int, tell: Tell) -> None:
        plan, (batch, seq) = self._plan, self._plan.shape(size)
        row = self.outcome.row(run, batch, seq, plan.options.gpus)
        tell(f"{batch} x {seq:,}")
        left = self._left()
        if left is not None and left <= 0:
            if not row.seconds:
                row.status, row.note = "skipped", "no time left"
            search.stop()
        else:
            point = Point(batch, seq, plan.warmup, plan.steps, left)
            event = worker.train(point.to_json(), lambda event: self._listen(run, point, event, tell))
            self._record(row, search, size, event)
        self._done(row)

    def _listen(self, run: Run, point: Point, event: dict[str, Any], tell: Tell) -> None:
        if event["event"] == "step":
            tell(f"step {event['step'] + 1}/{point.warmup + point.steps}  loss {event['loss']:.3f}")
            return
        tell("first step")
        names = ("parameters", "parameters_of_a_rank", "attention")
        self.outcome.facts = {name: event[name] for name in names}
        if event["applied"]:
            self.outcome.applied[run.name] = event["applied"]

    @staticmethod
    def _record(row: Row, search: Search, size: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "point":
            row.add(event)
            search.record(size, fits=True)
        elif kind == "out of memory":
            # What a first round measured stays.
            if row.seconds:
                row.note = "out of memory in a later round"
            else:
                row.status = kind
            search.record(size, fits=False)
        else:
            search.stop()
            refused = kind == "refused"
            note = event["note"] if refused else f"{event['reason'].splitlines()[0][:300]} {event['log']}"
            row.status, row.note = event["status"] if refused else "error", " ".join(note.split())[:400]
