"""The runs of a plan: each provider at each of its sizes, in rounds."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.train.measurement import Measurement
from benchmarks.train.plan import ProviderRun, TrainPlan, search_sizes
from benchmarks.train.process import Event, run_process

# These facts of the processes are settings in the report.
FACTS = ("parameters", "parameters_of_a_rank", "attention", "state_bytes", "threads")


class RunFailed(Exception):
    """A process failed for another reason than memory, so further sizes would fail in the same way."""


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

    def _row(self, name: str, size: int) -> Measurement:
        """Return the measurement of a run at a size: a new one, or that of an earlier round."""
        batch, seq = self.plan.shape(size)
        for row in self.rows:
            if (row.provider, row.batch, row.seq) == (name, batch, seq):
                return row
        self.rows.append(Measurement(name, batch, seq, self.plan.options.gpus))
        return self.rows[-1]

    def attempt(self, run: ProviderRun, size: int, source: str) -> bool:
        """Train a run at a size, and return whether it fits.

        Raises:
            RunFailed: the provider refuses the model, or an error occurred. The row says which.
        """
        plan, row = self.plan, self._row(run.name, size)
        label = f"{run.name}, {row.batch} x {row.seq:,}"

        def listen(event: Event) -> None:
            if event["event"] == "step":
                self.show_state(
                    f"{label}: step {event['step'] + 1}/{plan.warmup + plan.steps}  loss {event['loss']:.3f}"
                )
                return
            self.show_state(f"{label}: first step")
            row.state_bytes = event["state_bytes"]
            self.facts = {name: event[name] for name in FACTS if name in event}

        self.show_state(f"{label}: starts")
        log = self.folder / f"{run.name}.log"
        event = run_process(asdict(plan.job(run, size)), log, listen, source=source)
        out_of_memory = event["event"] == "failed" and event["out_of_memory"]
        if event["event"] == "point":
            row.add(event)
            if event["applied"]:
                self.patch_reports[run.name] = event["applied"]
        elif out_of_memory and row.seconds:
            # The measurements of an earlier round remain valid.
            row.note = "out of memory in a later round"
        elif out_of_memory:
            row.status = "out of memory"
        elif event["event"] == "refused":
            row.status, row.note = event["status"], event["note"]
        else:
            row.status, row.note = "error", " ".join(event["reason"].split())[:400]
        self.show_row(row)
        if event["event"] != "point" and not out_of_memory:
            raise RunFailed
        return not out_of_memory


def train_rounds(session: TrainSession) -> bool:
    """Train all runs; return False after Ctrl-C, which leaves the measurements that are complete.

    Every second round is in reverse order, because a warm chip is slower. A later round repeats the sizes that fitted.
    """
    plan = session.plan
    fitting_sizes: dict[str, list[int]] = {run.name: [] for run in plan.runs}
    with ExitStack() as stack:
        sources = {
            run.name: str(stack.enter_context(run.revision.files()).parent) if run.revision else "" for run in plan.runs
        }
        try:
            for index in range(plan.options.rounds):
                for run in plan.runs if index % 2 == 0 else reversed(plan.runs):

                    def attempt(size: int, run: ProviderRun = run) -> bool:
                        return session.attempt(run, size, sources[run.name])

                    with suppress(RunFailed):
                        if index == 0:
                            fitting_sizes[run.name] = plan.search(attempt)
                        else:
                            search_sizes(attempt, sorted(fitting_sizes[run.name]))
        except KeyboardInterrupt:
            session.rows = [row for row in session.rows if row.seconds or row.status != "ok"]
            return False
    return True
