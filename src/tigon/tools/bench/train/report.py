"""What a run leaves behind: rows, the comparison of the curves, train.json, train.md, a table for the terminal.

`train.json` is one object:

    schema      1
    versions    {package: version}, Python's among them
    machine     type "cpu" or "cuda", name, and what numbers depend on
    settings    the options, dtype, steps, warm-up, parameters, text, and whether it was interrupted
    rows        a list of `Row`, one for each provider and size
    curves      {provider: `Curve`} against stock, where stock and it have losses at the same size

Times are medians of the timed steps of all rounds; samples hold each step. What was not measured is null.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tigon.tools.bench.report import markdown_table, number, versions
from tigon.tools.training.records import without_nan

__all__ = ["Curve", "Row", "compare_curves", "curve_table", "legend", "markdown", "sentence", "table", "write_json"]

# One run's noise is a matter of chance, and a patched model rounds every layer otherwise, where reversed rows leave
# each forward pass as it was: hence three times. The rest is for losses that agree to their last digits.
TIMES_NOISE, SLACK = 3.0, 1e-4


@dataclass
class Row:
    """One provider at one size.

    `status` is "ok", "out of memory", "missing" (not installed, no GPU), "unsupported" (refuses the model), "error" or
    "skipped" (no time left); `note` says more. `tokens` are those of a step over all ranks.
    """

    provider: str
    batch: int
    seq: int
    gpus: int
    status: str = "ok"
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocated: int | None = None
    reserved: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.seconds)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq * self.gpus

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def host(self) -> float | None:
        return statistics.median(self.host_seconds) if self.host_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The first and the third quartile of a step's seconds."""
        if len(self.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def failed(self) -> bool:
        """Whether it must end the command with exit code 1."""
        return self.status == "error" and self.provider.startswith("tigon")

    def add(self, event: dict[str, Any]) -> None:
        """Take in what a process measured; a second round's steps join the first's, whose losses stay."""
        self.seconds += event["seconds"]
        self.host_seconds += event["host_seconds"]
        self.losses = self.losses or event["losses"]
        for name in ("allocated", "reserved"):
            values = [value for value in (getattr(self, name), event[name]) if value is not None]
            setattr(self, name, max(values, default=None))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = asdict(self)
        samples = {name: own.pop(name) for name in ("seconds", "host_seconds")}
        derived = {
            "tokens_per_step": self.tokens, "step_seconds": self.step_seconds, "quartiles": self.spread,
            "median_host_seconds": self.host, "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip
        return {**own, **derived, "samples": samples}


# --- curves --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Losses against stock's, step by step: the largest and the root-mean-square difference, over so many steps.

    `noise` and `noise_rms` are those of stock with the sequences of each batch reversed; None if that was not run, and
    then there is no verdict.
    """

    steps: int
    largest: float
    rms: float
    first_loss: float
    last_loss: float
    noise: float | None = None
    noise_rms: float | None = None

    @property
    def agrees(self) -> bool | None:
        return None if self.noise_rms is None else self.rms <= TIMES_NOISE * self.noise_rms + SLACK


def _apart(losses: Sequence[float], stock: Sequence[float]) -> tuple[float, float]:
    """The largest and the root-mean-square difference; infinite where a loss is not finite."""
    gaps = [
        abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in zip(losses, stock, strict=False)
    ]
    return max(gaps), math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))


def compare_curves(rows: Iterable[Row]) -> dict[str, Curve]:
    """Every run that has losses against stock at the first size of both; {} without stock."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.losses:
            first.setdefault(row.provider, row)
    stock = first.get("stock")
    if stock is None:
        return {}
    others = {
        name: row for name, row in first.items() if name != "stock" and (row.batch, row.seq) == (stock.batch, stock.seq)
    }
    mirror = others.get("stock-reversed")
    noise = _apart(mirror.losses, stock.losses) if mirror else (None, None)
    return {
        name: Curve(min(len(row.losses), len(stock.losses)), *_apart(row.losses, stock.losses),
                    row.losses[0], row.losses[-1], *noise)
        for name, row in others.items()
    }  # fmt: skip


# --- tables --------------------------------------------------------------------------------------

_LEFT = ("provider", "note", "within")


def legend(machine: dict[str, Any]) -> str:
    """What the columns mean."""
    memory = (
        "peaks of torch's allocator over the timed steps, the highest of the GPUs: model, gradients, optimizer and all"
        if machine["type"] == "cuda"
        else "parameters, optimizer states and what the process grew by"
    )
    return (
        "One step: forward, backward, AdamW, zero_grad. ms: median of the timed steps, in brackets their quartiles; "
        f"host ms: until the calls return; tokens/s: of all ranks; peak and reserved GiB: {memory}."
    )


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.{1 if count >= 2**30 else 3}f}"


def _milliseconds(row: Row) -> str:
    if row.step_seconds is None:
        return "-"
    spread = row.spread
    text = number(1e3 * row.step_seconds)
    return text if spread is None else f"{text} ({number(1e3 * spread[0])}-{number(1e3 * spread[1])})"


def _note(row: Row) -> str:
    finite = all(map(math.isfinite, row.losses))
    notes = ("" if row.status == "ok" else row.status, "" if finite else "losses that are not finite", row.note)
    return ": ".join(note for note in notes if note)


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles, and the cells of each row, by size; ratios to stock and to Liger where they were measured.

    A peer that ran with and without checkpointing counts as the faster of the two.
    """
    rows = sorted(rows, key=lambda row: (row.batch, row.seq))
    at = {(row.provider, row.batch, row.seq): row for row in rows if row.ok}
    best: dict[tuple[str, int, int], float] = {}
    for (provider, *size), row in at.items():
        key = provider.removesuffix("-checkpoint"), *size
        best[key] = max(best.get(key, 0.0), row.tokens_per_second or 0.0)
    peers = [name for name in ("stock", "liger") if any(provider == name for provider, *_ in best)]

    def ratio(row: Row, peer: str) -> str:
        other = best.get((peer, row.batch, row.seq))
        return f"{row.tokens_per_second / other:.3f}" if row.ok and row.tokens_per_second and other else "-"

    titles = ["provider", "batch", "length", "ms", "host ms", "tokens/s", *(f"x {peer}" for peer in peers)]
    titles += ["peak GiB", "reserved GiB", "note"]
    cells = [
        [row.provider, str(row.batch), f"{row.seq:,}", _milliseconds(row), number(row.host and 1e3 * row.host),
         "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
         *(ratio(row, peer) for peer in peers), _gib(row.allocated), _gib(row.reserved), _note(row)]
        for row in rows
    ]  # fmt: skip
    return titles, cells


def _curve_cells(curves: dict[str, Curve]) -> tuple[list[str], list[list[str]]]:
    titles = ["provider", "steps", "first loss", "last loss", "largest difference", "noise", "rms", "noise's rms"]
    scientific = lambda value: "-" if value is None else f"{value:.1e}"
    cells = []
    for name, curve in curves.items():
        verdict = {None: "-", True: "yes", False: "no"}[None if name == "stock-reversed" else curve.agrees]
        cells.append([
            name, str(curve.steps), f"{curve.first_loss:.4f}", f"{curve.last_loss:.4f}",
            *map(scientific, (curve.largest, curve.noise, curve.rms, curve.noise_rms)), verdict,
        ])  # fmt: skip
    return [*titles, "within"], cells


def sentence(row: Row) -> str:
    """A row in a line, for those who wait."""
    start = f"{row.provider:<18} {row.batch} x {row.seq:,}"
    if not row.ok:
        return f"{start}  {_note(row)}"
    peak = "" if row.allocated is None else f"  {_gib(row.allocated)} GiB"
    note = f"  {_note(row)}" if _note(row) else ""
    return f"{start}  {_milliseconds(row)} ms  {row.tokens_per_second:,.0f} tokens/s{peak}{note}"


def table(rows: Sequence[Row], title: str = "") -> Table:
    """For the terminal."""
    titles, cells = _cells(rows)
    return _rich(titles, cells, title)


def curve_table(curves: dict[str, Curve]) -> Table:
    """The curves for the terminal."""
    return _rich(*_curve_cells(curves), "Losses against stock's")


def _rich(titles: Sequence[str], cells: Iterable[Sequence[str]], title: str) -> Table:
    found = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for name in titles:
        found.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    for line in cells:
        found.add_row(*map(Text, line))
    return found


def largest(rows: Iterable[Row], sweep: str) -> dict[str, tuple[int | None, int | None]]:
    """Of each provider the largest size that fitted and the smallest that did not."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for row in rows:
        fits, fails = found.setdefault(row.provider, (None, None))
        size = getattr(row, sweep)
        if row.ok:
            found[row.provider] = (max(size, fits or 0), fails)
        elif row.status == "out of memory":
            found[row.provider] = (fits, min(size, fails or size))
    return found


# --- files ---------------------------------------------------------------------------------------


def write_json(path: Path, rows: Sequence[Row], machine: dict[str, Any], settings: dict[str, Any]) -> None:
    """Everything, every sample included."""
    curves = {name: {**asdict(curve), "agrees": curve.agrees} for name, curve in compare_curves(rows).items()}
    document = {
        "schema": 1, "versions": versions(), "machine": machine, "settings": settings,
        "rows": [row.as_dict() for row in rows], "curves": curves,
    }  # fmt: skip
    path.write_text(json.dumps(without_nan(document), indent=1, default=str) + "\n", encoding="utf-8")


def markdown(rows: Sequence[Row], machine: dict[str, Any], settings: dict[str, Any]) -> str:
    """The report as Markdown: the machine, the settings, the rows, the largest sizes of a sweep, the curves."""
    lines = [
        "# tigon bench train", "",
        f"{settings['title']}", "",
        f"{machine['name']}; " + ", ".join(f"{name} {version}" for name, version in versions().items()), "",
    ]  # fmt: skip
    if settings["interrupted"]:
        lines += ["Interrupted: these are the sizes that were done.", ""]
    titles, cells = _cells(rows)
    lines += [legend(machine), "", *markdown_table(titles, cells, _LEFT), ""]
    if settings["sweep"]:
        sizes = [
            [name, *("-" if size is None else f"{size:,}" for size in pair)]
            for name, pair in largest(rows, settings["sweep"]).items()
        ]
        names = {"seq": "length", "batch": "batch"}[settings["sweep"]]
        lines += [f"## The largest {names}", ""]
        lines += [*markdown_table(["provider", "fits", "out of memory"], sizes, _LEFT), ""]
    curves = compare_curves(rows)
    if curves and not settings["sweep"]:
        lines += ["## Losses against stock's", ""]
        lines += [
            "Noise: stock against itself with the sequences of each batch reversed. Within: the root mean square "
            f"of the differences is at most {TIMES_NOISE:.0f} times the noise's, plus {SLACK:.0e}.",
            "",
        ]
        lines += [*markdown_table(*_curve_cells(curves), _LEFT), ""]
    patched = settings.get("applied", {})
    if patched:
        lines += ["## What was applied", ""]
        for name, text in patched.items():
            lines += [f"{name}:", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip() + "\n"
