"""The outcome of one check, and the time that the whole run may take."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
# A message of the oracle has about 200 characters, and an error of a compiler may have thousands.
LONGEST_NOTE = 600


class NotChecked(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check.

    `part` is one of the parts of the command, `group` the line of the table (an op, a model type), and `name` the check
    itself. `note` says why the check failed or was skipped.
    """

    part: str
    group: str
    name: str
    status: Status
    note: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


class Clock:
    """Counts the seconds since its construction, and knows when a part of the work should end."""

    def __init__(self, budget: float) -> None:
        self.start, self.budget = time.perf_counter(), budget

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def has_passed(self, share: float) -> bool:
        """Return True if this share of the budget has been used."""
        return self.seconds > share * self.budget


def run_check(part: str, group: str, name: str, check: Callable[[], str | None]) -> CheckOutcome:
    """Run a check, and return its outcome. An error never ends the run.

    `check` raises `NotChecked` if it cannot run here, and any other exception if it fails. It may return a note.
    """
    start = time.perf_counter()
    status: Status = "passed"
    try:
        note = check() or ""
    except NotChecked as reason:
        status, note = "skipped", str(reason)
    except AssertionError as problem:
        status, note = "failed", str(problem)
    # An unknown device can fail in any way: compilers, drivers and torch raise errors of many classes.
    except Exception as problem:
        status, note = "failed", f"{type(problem).__name__}: {problem}"
    note = " ".join(note.split())[:LONGEST_NOTE]
    return CheckOutcome(part, group, name, status, note, round(time.perf_counter() - start, 3))
