"""The runs of a plan: each provider at each of its sizes, in rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.train.child import Event
from benchmarks.train.job import Point
from benchmarks.train.measurement import Measurement
from benchmarks.train.plan import ProviderRun, TrainPlan
from benchmarks.train.search import Search
from benchmarks.train.turns import AllRunsEnd, TrainingRun, train_groups


@dataclass
class TrainSession:
    """All measurements in the order in which they began, and the facts that the processes report about their models.

    `show_state` gets a line about the current work; `show_row` gets each measurement as soon as it is complete.
    `patch_reports` has for each run what its provider changed in its model.
    """

    plan: TrainPlan
    folder: Path
    show_state: Callable[[str], None]
    show_row: Callable[[Measurement], None]
    rows: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    patch_reports: dict[str, str] = field(default_factory=dict)

    def row(self, name: str, batch: int, seq: int) -> Measurement:
        """Return the measurement of a run at a size: a new one, or that of an earlier round."""
        for row in self.rows:
            if (row.provider, row.batch, row.seq) == (name, batch, seq):
                return row
        unsteady = self.plan.warmup if self.plan.continues else 0
        self.rows.append(Measurement(name, batch, seq, self.plan.options.gpus, unsteady=unsteady))
        return self.rows[-1]


class _ProviderRun(TrainingRun):
    """One provider in one round."""

    def __init__(self, session: TrainSession, run: ProviderRun, search: Search, prefix: str, source: str) -> None:
        super().__init__(run.name, session.plan.job(run, source), search, session.folder / f"{run.name}.log")
        self._session, self._prefix = session, prefix
        self._row = session.row(run.name, *session.plan.shape(search.sizes[0])) if search.sizes else None

    def _show_state(self, state: str) -> None:
        self._session.show_state(f"{self._prefix}{self.name}: {state}")

    def point(self) -> str | None:
        plan = self._session.plan
        batch, seq = plan.shape(self.size)
        self._row = self._session.row(self.name, batch, seq)
        if plan.continues:
            return Point(batch, seq).to_json()
        self._show_state(f"{batch} x {seq:,}")
        return Point(batch, seq, plan.warmup, plan.steps).to_json()

    def listen(self, event: Event) -> None:
        plan, session = self._session.plan, self._session
        match event["event"]:
            case "starts":
                self._show_state("starts")
            case "step":
                done = len(self._row.losses) if plan.continues and self._row else event["step"]
                total = plan.steps + (0 if plan.continues else plan.warmup)
                self._show_state(f"step {done + 1}/{total}  loss {event['loss']:.3f}")
            case "ready":
                self._show_state("first step")
                names = ("parameters", "parameters_of_a_rank", "attention", "state_bytes", "threads")
                session.facts = {name: event[name] for name in names if name in event}
                if event["applied"]:
                    session.patch_reports[self.name] = event["applied"]

    def record(self, event: Event) -> None:
        row, kind, plan = self._row, event["event"], self._session.plan
        assert row is not None
        if kind == "point":
            # A later round trains the same steps again, so its losses add nothing.
            repeats = bool(row.losses) and not plan.continues
            row.add({**event, "losses": []} if repeats else event)
        elif kind == "out of memory" and row.seconds and not plan.continues:
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
        if not plan.continues or kind != "point" or len(row.losses) == plan.steps:
            self._session.show_row(row)
        if plan.continues and kind not in ("point", "out of memory"):
            raise AllRunsEnd


def _order_runs(session: TrainSession, sources: dict[str, str]) -> Iterator[Sequence[_ProviderRun]]:
    """Yield the runs of all rounds. Every second round is in reverse order, because a warm chip is slower."""
    plan = session.plan
    searches = {run.name: plan.search() for run in plan.runs}
    if plan.takes_turns:
        yield [_ProviderRun(session, run, searches[run.name], "", "") for run in plan.runs]
        return
    for index in range(plan.options.rounds):
        for run in plan.runs if index % 2 == 0 else reversed(plan.runs):
            search, prefix = searches[run.name], ""
            if index > 0:
                # A later round repeats the sizes that fitted.
                search, prefix = Search(sorted(search.fitting_sizes)), f"round {index + 1}: "
            yield [_ProviderRun(session, run, search, prefix, sources.get(run.name, ""))]


def train_rounds(session: TrainSession) -> bool:
    """Train all runs; return False after Ctrl-C, which leaves the measurements that are complete."""
    with ExitStack() as stack:
        folders: dict[str, Path] = {}
        for revision in (run.revision for run in session.plan.runs if run.revision):
            if revision.commit not in folders:
                folders[revision.commit] = stack.enter_context(revision.files())
        sources = {run.name: str(folders[run.revision.commit].parent) for run in session.plan.runs if run.revision}
        is_complete = train_groups(_order_runs(session, sources))
    if not is_complete:
        session.rows = [row for row in session.rows if row.seconds or row.status != "ok"]
    return is_complete
