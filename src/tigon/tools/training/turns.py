"""The loop of every training program: each run has a process, and the processes train their points in turn.

`tigon demo`, `tigon bench train` and the Medusa example subclass `TrainingRun`; the subclass chooses the points and
keeps the answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tigon.tools.training.child import Event, RankJob, Worker

__all__ = ["TrainingRun", "train_in_turns"]


class TrainingRun(ABC):
    """A job and the points at which it is trained. The worker writes its standard error to `log`.

    A subclass for another program than `tigon.tools.training.worker` overrides `make_worker`.
    """

    def __init__(self, name: str, job: RankJob, log: Path | None = None) -> None:
        self.name, self.job, self.log = name, job, log

    @abstractmethod
    def next_point(self) -> str | None:
        """Return the line to send to the worker, or None at the end of the run."""

    @abstractmethod
    def record(self, event: Event) -> bool:
        """Keep the worker's answer to the point; return False to end the run.

        The answer is "point", "out of memory", "failed" or "refused".
        """

    @abstractmethod
    def listen(self, event: Event) -> None:
        """Show the worker's progress: events "starts", "ready" and "step"."""

    def make_worker(self) -> Worker:
        return Worker(self.job, self.log, self.listen)


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
            active = [(run, worker) for run, worker in active if _train_next_point(run, worker)]


def _is_ready(run: TrainingRun, worker: Worker) -> bool:
    event = worker.wait_until_ready()
    return event["event"] == "ready" or run.record(event)


def _train_next_point(run: TrainingRun, worker: Worker) -> bool:
    """Return whether the run goes on."""
    point = run.next_point()
    return point is not None and run.record(worker.train(point))
