"""Processes one after the other: each provider at each of its sizes, in rounds, and what a person sees meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.tools.bench.train.plan import Plan, Run
from tigon.tools.bench.train.report import Row
from tigon.tools.bench.train.search import Search
from tigon.tools.training.child import Child, ChildFailed, worker_command, worker_environment
from tigon.tools.training.job import Point

__all__ = ["Outcome", "Runner"]

Tell = Callable[[str], None]  # receives what is being done now


class _Provider:
    """The process of one run: started when it is first needed, and again if it ended."""

    def __init__(self, plan: Plan, run: Run, folder: Path, tell: Tell) -> None:
        self._plan, self._run, self._folder, self._tell = plan, run, folder, tell
        self._child: Child | None = None

    def _started(self) -> Child:
        if self._child is None:
            self._tell("starts")
            ranks, device = self._plan.options.gpus, self._plan.options.device
            job = self._plan.job(self._run)
            self._child = Child(
                job, self._folder / f"{self._run.name}.log", worker_command(ranks), worker_environment(ranks, device)
            )
        return self._child

    def close(self, at_rest: bool = False) -> None:
        """End the process. A group that is `at_rest` ends by itself, which leaves no complaints in its log."""
        if self._child is not None:
            (self._child.finish if at_rest and self._plan.options.gpus > 1 else self._child.close)()
            self._child = None

    def train(self, point: Point, ready: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train a point; -> its event: "point", "refused", "out of memory" or "failed". The last ends the process."""
        total = point.warmup + point.steps
        try:
            child = self._started()
            child.send(point.to_json())
            while True:
                event = child.next_event()
                if event["event"] == "ready":
                    ready(event)
                    self._tell("first step")
                elif event["event"] == "step":
                    self._tell(f"step {event['step'] + 1}/{total}  loss {event['loss']:.3f}")
                else:
                    return event
        except ChildFailed as failure:
            self.close()
            kind = "out of memory" if failure.out_of_memory else "failed"
            return {"event": kind, "reason": f"{failure.reason.splitlines()[0][:300]}\n{failure.log}"}


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

    def _run(self, run: Run, search: Search, prefix: str) -> None:
        provider = _Provider(self._plan, run, self._folder, lambda text: self._tell(f"{prefix}{run.name}: {text}"))
        try:
            while (size := search.next()) is not None:
                self._size(run, provider, search, size, prefix)
            provider.close(at_rest=True)
        finally:
            provider.close()

    def _size(self, run: Run, provider: _Provider, search: Search, size: int, prefix: str) -> None:
        plan, (batch, seq) = self._plan, self._plan.shape(size)
        row = self.outcome.row(run, batch, seq, plan.options.gpus)
        self._tell(f"{prefix}{run.name}: {batch} x {seq:,}")
        left = self._left()
        if left is not None and left <= 0:
            if not row.seconds:
                row.status, row.note = "skipped", "no time left"
            search.stop()
        else:
            event = provider.train(Point(batch, seq, plan.warmup, plan.steps, left), lambda e: self._ready(run, e))
            self._record(row, search, size, event)
        self._done(row)

    def _ready(self, run: Run, event: dict[str, Any]) -> None:
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
            status = event["status"] if kind == "refused" else "error"
            row.status, row.note = status, " ".join(event.get("note", event.get("reason", "")).split())[:400]
