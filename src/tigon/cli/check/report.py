"""The outcomes of checks, tables for a terminal of 80 columns, and the document."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.table import Table

from tigon.cli.output import console_table, format_number

SCHEMA = 2
Status = Literal["passed", "failed", "skipped"]
# A message of the oracle has about 200 characters, and an error of a compiler may have thousands.
LONGEST_NOTE = 600
NO_TIME = "no time left: see --seconds"


class NotChecked(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check: its part of the command, its line of the table (`group`), its name, and the reason."""

    part: str
    group: str
    name: str
    status: Status
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class OpSpeed:
    """The milliseconds of forward and backward of an op and of eager code, and the bytes of its tensors."""

    op: str
    sizes: tuple[int, ...]
    ms: float
    eager_ms: float
    bytes: int


# A check has a part, a group, a name, and a function, which returns a note, or a speed.
Check = tuple[str, str, str, Callable[[], "str | OpSpeed | None"]]


@dataclass
class CheckReport:
    """Everything that a run has found. `running` names the current check, so that after a crash the file shows it."""

    device: str
    device_type: str
    outcomes: list[CheckOutcome] = field(default_factory=list)
    speeds: list[OpSpeed] = field(default_factory=list)
    roofline: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    running: str = ""
    interrupted: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, check: Check) -> None:
        """Run a check, and add its outcome. An error never ends the run. The function of the check raises `NotChecked`
        if it cannot run here, and any other exception if it fails."""
        part, group, name, function = check
        start, status, note = time.perf_counter(), "passed", ""
        try:
            result = function()
            if isinstance(result, OpSpeed):
                self.speeds.append(result)
            note = result if isinstance(result, str) else ""
        except NotChecked as reason:
            status, note = "skipped", str(reason)
        except AssertionError as problem:
            status, note = "failed", str(problem)
        # An unknown device can fail in any way: compilers, drivers and torch raise errors of many classes.
        except Exception as problem:
            status, note = "failed", f"{type(problem).__name__}: {problem}"
        note, seconds = " ".join(note.split())[:LONGEST_NOTE], round(time.perf_counter() - start, 3)
        self.outcomes.append(CheckOutcome(part, group, name, status, note, seconds))  # type: ignore[arg-type]

    def skip(self, check: Check) -> None:
        """Add the outcome of a check for which there is no time."""
        self.outcomes.append(CheckOutcome(*check[:3], "skipped", NO_TIME))

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        counts = {status: self.count(status) for status in ("passed", "failed", "skipped")}
        return {"schema": SCHEMA, **counts, **asdict(self), "seconds": round(self.seconds, 1)}


def outcome_table(part: str, outcomes: Iterable[CheckOutcome]) -> Table:
    """Return one line for each group of a part: how many checks passed, failed and were skipped, and why."""
    groups: dict[str, list[CheckOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.group, []).append(outcome)
    lines = []
    for group, members in groups.items():
        counts = Counter(outcome.status for outcome in members)
        # A failure has its whole note below the tables. A note of a group is that of its first check that has one.
        notes = [outcome.note for outcome in members if outcome.note and outcome.status != "failed"]
        cells = [str(counts[status] or "-") for status in ("passed", "failed", "skipped")]
        lines.append([group, *cells, notes[0] if notes and not counts["failed"] else ""])
    return console_table((part, "passed", "failed", "skipped", "note"), lines, (part, "note"), "")


def speed_table(speeds: Iterable[OpSpeed]) -> Table:
    """Return the time of each op and of eager code, and the bytes of its tensors per second."""
    lines = [
        [
            speed.op, "x".join(map(str, speed.sizes)), format_number(speed.ms), format_number(speed.eager_ms),
            f"{speed.eager_ms / speed.ms:.2f}x", f"{speed.bytes / speed.ms / 1e6:,.0f}",
        ]
        for speed in speeds
    ]  # fmt: skip
    return console_table(("op", "size", "Tigon ms", "eager ms", "speed-up", "GB/s"), lines, ("op", "size"), "")


def last_line(report: CheckReport) -> str:
    """Return the line that ends the run."""
    passed, failed, skipped = map(report.count, ("passed", "failed", "skipped"))
    if report.interrupted:
        verdict = "Interrupted"
    elif failed:
        verdict = "Something is wrong"
    elif not passed:
        verdict = "Nothing was checked"
    else:
        verdict = "All that ran holds" if skipped else "Everything holds"
    counts = f"{passed} passed, {failed} failed, {skipped} skipped"
    return f"{verdict} on {report.device}: {counts} in {report.seconds:.0f} s"
