"""Tables of the outcomes for a terminal of 80 columns, and the document that the file holds."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ops.measure import Roofline
from tigon.cli.check.outcome import CheckOutcome
from tigon.cli.check.speed import OpSpeed
from tigon.cli.environment import environment
from tigon.cli.output import console_table, format_number

SCHEMA = 1


@dataclass
class CheckReport:
    """Everything that a run has found. `running` names the current check, so that after a crash the file shows it."""

    device: str
    device_type: str
    outcomes: list[CheckOutcome] = field(default_factory=list)
    speeds: list[OpSpeed] = field(default_factory=list)
    roofline: Roofline | None = None
    seconds: float = 0.0
    running: str = ""
    interrupted: bool = False
    environment: dict[str, str] = field(default_factory=environment)

    def count(self, status: str) -> int:
        """Return the number of checks with this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Return the document for the file."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "device": self.device,
            "device_type": self.device_type,
            "seconds": round(self.seconds, 1),
            "running": self.running,
            "interrupted": self.interrupted,
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "environment": self.environment,
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
        }
        if self.roofline is not None:
            document["roofline"] = {
                "bytes_per_second": self.roofline.bytes_per_second,
                "flops_per_second": self.roofline.flops_per_second,
            }
            document["speed"] = [row.as_dict() for speed in self.speeds for row in (speed.row, speed.eager)]
        return document


def outcome_table(part: str, outcomes: Iterable[CheckOutcome]) -> Table:
    """Return one line for each group of a part: how many checks passed, failed and were skipped, and why."""
    groups: dict[str, list[CheckOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.group, []).append(outcome)
    lines = []
    for group, members in groups.items():
        counts = Counter(outcome.status for outcome in members)
        # A failure has its whole note below the table. A note of a group is that of its first skipped or passed check.
        notes = [outcome.note for outcome in members if outcome.note and outcome.status != "failed"]
        cells = [str(counts[status] or "-") for status in ("passed", "failed", "skipped")]
        lines.append([group, *cells, notes[0] if notes and not counts["failed"] else ""])
    return console_table((part, "passed", "failed", "skipped", "note"), lines, (part, "note"), "")


def speed_table(speeds: Iterable[OpSpeed]) -> Table:
    """Return the time of each op, its share of the floor, and the time of eager code."""
    lines = []
    for speed in speeds:
        row, eager = speed.row, speed.eager
        ratio = f"{eager.time_ms / row.time_ms:.2f}x" if eager.time_ms and row.time_ms else "-"
        percent = "-" if row.percent_of_roofline is None else f"{row.percent_of_roofline:.0f}"
        times = [format_number(value) for value in (row.floor_ms, row.time_ms, eager.time_ms)]
        lines.append([row.op, "x".join(map(str, row.shape)), *times, percent, ratio])
    titles = ("op", "size", "floor ms", "Tigon", "eager", "% floor", "speed-up")
    return console_table(titles, lines, ("op", "size"), "")


def print_failures(console: Console, outcomes: Iterable[CheckOutcome]) -> None:
    """Print each failure with its whole note, in one line."""
    for outcome in outcomes:
        if outcome.status == "failed":
            text = f"FAILED {outcome.part}: {outcome.group}: {outcome.name}: {outcome.note}"
            console.print(text, style="bold red", markup=False, soft_wrap=True)


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
