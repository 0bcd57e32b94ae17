"""Every training program runs this loop: each run has a process, and the processes train their points in turn.

`benchmarks.train` and the Medusa example subclass `TrainingRun`; the subclass chooses the points and stores the
answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.train.child import Event, Worker
from benchmarks.train.job import RankJob
from benchmarks.train.search import Search


class AllRunsEnd(Exception):
    """A run failed in such a way that no other run should continue."""


class TrainingRun(ABC):
    """A job, and the sizes of a step at which it is trained.

    `search` chooses the sizes. The worker writes its standard error to `log`, and `facts` is its event "ready". A
    subclass for another program than `benchmarks.train.worker` overrides `make_worker`.
    """

    size: int

    def __init__(self, name: str, job: RankJob, search: Search, log: Path | None = None) -> None:
        self.name, self.job, self.search, self.log = name, job, search, log
        self.facts: Event = {}

    @abstractmethod
    def point(self) -> str | None:
        """Return the line to send to the worker for a point of `size`, or None to end the run."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Store the worker's answer: "point", "out of memory", "failed" or "refused".

        The last two can also answer the start of the worker, before there is a size.
        """

    def make_worker(self) -> Worker:
        return Worker(self.job, self.log, self.listen)

    def listen(self, event: Event) -> None:
        """Store the facts of the worker. A subclass also shows its progress: "starts", "ready" and "step"."""
        if event["event"] == "ready":
            self.facts = event

    def train_next_point(self, worker: Worker) -> bool:
        """Train the point of the next size; return False at the end of the run."""
        size = self.search.next()
        if size is None:
            return False
        self.size = size
        point = self.point()
        if point is None:
            return False
        event = worker.train(point)
        self.search.record(size, fits=event["event"] == "point")
        self.record(event)
        # After any other failure, a further point would fail in the same way.
        return event["event"] in ("point", "out of memory")


def train_in_turns(runs: Sequence[TrainingRun]) -> None:
    """Train all points of `runs`, one point of each run in turn, until no run has another point.

    Where there are several runs, all processes start at once, and none trains before all are ready.
    """
    with ExitStack() as stack:
        active = [(run, stack.enter_context(run.make_worker())) for run in runs]
        if len(active) > 1:
            for _, worker in active:
                worker.start()
            active = [(run, worker) for run, worker in active if _is_ready(run, worker)]
        while active:
            active = [(run, worker) for run, worker in active if run.train_next_point(worker)]


def _is_ready(run: TrainingRun, worker: Worker) -> bool:
    event = worker.wait_until_ready()
    if event["event"] == "ready":
        return True
    run.record(event)
    return False


def train_groups(groups: Iterable[Sequence[TrainingRun]]) -> bool:
    """Train one group of runs after the other, the runs of a group in turns; return False after Ctrl-C.

    Ctrl-C and `AllRunsEnd` end the processes; the runs keep their measurements.
    """
    try:
        with suppress(AllRunsEnd):
            for group in groups:
                train_in_turns(group)
    except KeyboardInterrupt:
        return False
    return True
