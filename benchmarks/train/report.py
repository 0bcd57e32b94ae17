"""The report of training: tables, JSON, Markdown and the pictures, and the comparison of the demo.

The rows of the JSON report are `Measurement`, one for each provider and size; `curves` compares losses with stock's.
Times are medians of the timed steps of all rounds; samples hold each step.

The first two pictures, throughput.png and memory.png, have bars at one size. Over a sweep they have lines, which end in
a cross where memory ran out. loss.png has the losses of one size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import figures
from benchmarks.report import page_head, write
from benchmarks.train.measurement import (
    NOISE_FACTOR,
    REFERENCES,
    SLACK,
    STOCK_REVERSED,
    TOLERANCE,
    LossComparison,
    Measurement,
    compare_with_stock,
    loss_differences,
)
from tigon.cli.output import console_table, format_number, markdown_table

# --- tables --------------------------------------------------------------------------------------

# The columns that are aligned to the left.
LEFT = ("provider", "note", "within")
Value = Callable[[Measurement], float | None]


def legend(machine: dict[str, Any]) -> str:
    """Return sentences that explain the columns."""
    memory = (
        "peaks of torch's allocator over the timed steps, on the GPU with the highest peak, "
        "with model and optimizer states"
        if machine["type"] == "cuda"
        else "parameters, optimizer states and the growth of the process"
    )
    return (
        "One step: forward, backward, optimizer, zero_grad. ms: median of the timed steps, in brackets their "
        f"quartiles; host ms: until the calls return; tokens/s: of all ranks; peak and reserved GiB: {memory}."
    )


def _format_gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.{1 if count >= 2**30 else 3}f}"


def _milliseconds(row: Measurement) -> str:
    if row.step_seconds is None:
        return "-"
    spread = row.spread
    text = format_number(1e3 * row.step_seconds)
    return text if spread is None else f"{text} ({format_number(1e3 * spread[0])}-{format_number(1e3 * spread[1])})"


def _note(row: Measurement) -> str:
    finite = all(map(math.isfinite, row.losses))
    notes = ("" if row.status == "ok" else row.status, "" if finite else "losses that are not finite", row.note)
    return ": ".join(note for note in notes if note)


def _cells(rows: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Return titles, and the cells of each row by size, with the ratios to stock and to Liger that were measured.

    If a peer ran with and without checkpointing, ratios are to the faster of the two.
    """
    rows = sorted(rows, key=lambda row: (row.batch, row.seq))
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row.ok:
            key = row.provider.removesuffix("-checkpoint"), row.batch, row.seq
            best[key] = max(best.get(key, 0.0), row.tokens_per_second or 0.0)
    peers = [name for name in ("stock", "liger") if any(provider == name for provider, *_ in best)]

    def ratio(row: Measurement, peer: str) -> str:
        speed = best.get((peer, row.batch, row.seq))
        return f"{row.tokens_per_second / speed:.3f}" if row.ok and row.tokens_per_second and speed else "-"

    titles = ["provider", "batch", "length", "ms", "host ms", "tokens/s", *(f"x {peer}" for peer in peers)]
    titles += ["peak GiB", "reserved GiB", "note"]
    cells = [
        [row.provider, str(row.batch), f"{row.seq:,}", _milliseconds(row),
         format_number(row.median_host_seconds and 1e3 * row.median_host_seconds),
         "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
         *(ratio(row, peer) for peer in peers), _format_gib(row.allocated), _format_gib(row.reserved), _note(row)]
        for row in rows
    ]  # fmt: skip
    return titles, cells


def _curve_cells(curves: dict[str, LossComparison]) -> tuple[list[str], list[list[str]]]:
    titles = ["provider", "steps", "first loss", "last loss", "largest difference", "noise", "rms", "noise's rms"]
    has_exact_run = any(curve.error is not None for curve in curves.values())
    titles += ["rms from fp32", "stock's"] if has_exact_run else []
    scientific = lambda value: "-" if value is None else f"{value:.1e}"
    cells = []
    for name, curve in curves.items():
        verdict = {None: "-", True: "yes", False: "no"}[None if name in REFERENCES else curve.agrees]
        errors = (curve.error, curve.stock_error) if has_exact_run else ()
        cells.append([
            name, str(curve.steps), f"{curve.first_loss:.4f}", f"{curve.last_loss:.4f}",
            *map(scientific, (curve.largest, curve.noise, curve.rms, curve.noise_rms, *errors)), verdict,
        ])  # fmt: skip
    return [*titles, "within"], cells


def sentence(row: Measurement) -> str:
    """Return a line about a row, which is printed as soon as the row is complete."""
    start = f"{row.provider:<18} {row.batch} x {row.seq:,}"
    if not row.ok:
        return f"{start}  {_note(row)}"
    peak = "" if row.allocated is None else f"  {_format_gib(row.allocated)} GiB"
    note = f"  {_note(row)}" if _note(row) else ""
    return f"{start}  {_milliseconds(row)} ms  {row.tokens_per_second:,.0f} tokens/s{peak}{note}"


def table(rows: Sequence[Measurement]) -> Table:
    """Return the table of all rows for the terminal."""
    return console_table(*_cells(rows), LEFT, "")


def curve_table(curves: dict[str, LossComparison]) -> Table:
    """Return the table of the comparisons with stock for the terminal."""
    return console_table(*_curve_cells(curves), LEFT, "Losses against stock's")


# --- files ---------------------------------------------------------------------------------------


def write_report(
    path: Path, rows: Sequence[Measurement], settings: dict[str, Any], demo: "DemoComparison | None" = None
) -> None:
    """Write all numbers, with those of every step."""
    curves = {name: {**asdict(curve), "agrees": curve.agrees} for name, curve in compare_with_stock(rows).items()}
    comparison = demo and {**asdict(demo), "agree": demo.agree}
    shown = {name: value for name, value in settings.items() if name != "machine"}
    content = {"rows": [row.as_dict() for row in rows], "curves": curves, "comparison": comparison}
    write(path, settings["machine"], shown, **content)


def markdown(rows: Sequence[Measurement], settings: dict[str, Any]) -> str:
    """Return the report as Markdown: machine, settings, rows, and comparisons of losses."""
    lines = [*page_head("Training steps", settings["machine"]), f"{settings['title']}", ""]
    if settings["interrupted"]:
        lines += ["Interrupted: these are the sizes that were done.", ""]
    lines += [legend(settings["machine"]), "", *markdown_table(*_cells(rows), LEFT), ""]
    curves = compare_with_stock(rows)
    if curves and not settings["sweep"]:
        lines += [
            "## Losses against stock's", "",
            "Noise: stock against itself with the sequences of each batch reversed. Within: the root mean square "
            f"of the differences is at most {NOISE_FACTOR:.0f} times the noise's, plus {SLACK:.0e}, or the losses are "
            "as near to those of the same model in fp32 as stock's are.", "",
            *markdown_table(*_curve_cells(curves), LEFT), "",
        ]  # fmt: skip
    for name, text in settings.get("applied", {}).items():
        lines += [f"## Changes by {name}", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


# --- pictures ------------------------------------------------------------------------------------

SIZE_LABELS = {"seq": "tokens a sequence", "batch": "sequences a GPU"}


def plot(rows: Sequence[Measurement], folder: Path, sweep: str | None, settings: dict[str, Any]) -> list[Path]:
    """Write the pictures that `rows` have numbers for; return their files."""
    if not any(row.ok for row in rows):
        return []
    limit, title = settings["machine"].get("memory_gib"), f"{settings['title']}, {settings['machine']['name']}"
    speed, memory, loss = (folder / f"{name}.png" for name in ("throughput", "memory", "loss"))
    allocated_gib: Value = lambda row: None if row.allocated is None else row.allocated / 2**30
    memory_label = "Peak memory of a GPU, GiB" if limit else "Peak memory, GiB"
    providers = [row for row in rows if row.provider not in REFERENCES]

    def panel(value: Value, limit: float | None = None) -> figures.Panel:
        if not sweep:
            return figures.Panel("", _provider_bars(providers, value), limit=limit)
        return figures.Panel("", (), _sweep_lines(providers, sweep, value), limit, SIZE_LABELS[sweep])

    figures.draw_panels(speed, "Tokens per second", title, [panel(lambda row: row.tokens_per_second)], 7.2, 4.2)
    figures.draw_panels(memory, memory_label, title, [panel(allocated_gib, limit)], 7.2, 4.2)
    if sweep or not any(row.losses for row in rows):
        return [speed, memory]
    _plot_losses(loss, [row for row in rows if row.losses], title)
    return [speed, memory, loss]


def _sweep_lines(rows: Sequence[Measurement], sweep: str, value: Value) -> list[figures.SweepLine]:
    """Return a line over the size for each provider that fitted or ran out of memory at any size."""
    rows = [row for row in rows if row.ok or row.status == "out of memory"]
    return figures.sweep_lines((row.provider, getattr(row, sweep), value(row) if row.ok else None) for row in rows)


def _provider_bars(rows: Sequence[Measurement], value: Value) -> list[figures.Bar]:
    """Return a bar for each provider; the text of a bar without a number is its status."""
    rows = [row for row in rows if row.ok or row.status == "out of memory"]
    numbers = [value(row) if row.ok else None for row in rows]
    highest = max((n for n in numbers if n is not None), default=1.0)
    digits = 0 if highest >= 1000 else 1 if highest >= 10 else 2 if highest >= 0.1 else 4
    return [
        figures.Bar(
            row.provider.replace("-", "\n", 1), figures.provider_colour(row.provider), n,
            row.status if n is None else f"{n:,.{digits}f}",
        )
        for row, n in zip(rows, numbers, strict=True)
    ]  # fmt: skip


def _plot_losses(path: Path, rows: Sequence[Measurement], title: str) -> None:
    """Draw the losses over each other, and below them their differences from stock's."""
    losses, differences = [], []
    stock = next((row.losses for row in rows if row.provider == "stock"), [])
    comparisons = compare_with_stock(rows)
    for row in rows:
        colour, is_noise = figures.provider_colour(row.provider), row.provider == STOCK_REVERSED
        if not is_noise:
            losses.append(figures.Curve(row.provider, colour, row.losses, broad=row.provider == "stock"))
        if row.provider in comparisons:
            label = "noise" if is_noise else ""
            differences.append(figures.Curve(label, colour, loss_differences(row.losses, stock), broad=is_noise))
    figures.draw_losses(path, "Training loss", title, losses, differences, "difference\nfrom stock")


# --- the demo ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoComparison:
    """The second run against the first, over the steps that both have done.

    `differences` are |a - b| / max(|a|, 1) of the losses of each step, infinite where a loss is not finite. `worst` is
    the index of the difference that is largest relative to its tolerance.
    """

    differences: list[float]
    tolerances: list[float]

    @property
    def worst(self) -> int:
        return max(range(len(self.differences)), key=lambda step: self.differences[step] / self.tolerances[step])

    @property
    def agree(self) -> bool:
        return self.differences[self.worst] <= self.tolerances[self.worst]


def compare_demo(rows: Sequence[Measurement], dtype: str) -> DemoComparison | None:
    """Compare the second run with the first; return None if there is no step that both have done."""
    differences = loss_differences(rows[1].losses, rows[0].losses, relative=True) if len(rows) == 2 else []
    return DemoComparison(differences, list(map(TOLERANCE[dtype].at, range(len(differences))))) if differences else None


def memory_sentence(machine: dict[str, Any]) -> str:
    """Return a sentence that says what the memory row of the demo counts."""
    peak = "torch's CUDA allocator" if machine["type"] == "cuda" else "the process's resident memory"
    return f"Peak memory is the peak of {peak} in training, above parameters, gradients and optimizer states."


def _demo_lines(rows: Sequence[Measurement], state_bytes: int) -> list[tuple[str, list[float | None], str]]:
    """Return the name, both values and the format of each line of the demo's table."""
    peaks = [row.allocated and (row.allocated - state_bytes) / 2**20 for row in rows]
    return [
        ("step time (median), ms", [row.step_seconds and 1e3 * row.step_seconds for row in rows], "{:,.0f}"),
        ("tokens per second", [row.tokens_per_second for row in rows], "{:,.0f}"),
        ("peak memory above the model, MiB", peaks, "{:,.0f}"),
        ("last loss", [row.losses[-1] if row.losses else None for row in rows], "{:.4f}"),
    ]


def demo_table(rows: Sequence[Measurement], state_bytes: int, comparison: DemoComparison | None) -> Table:
    """Return the two runs side by side, with the ratio second / first; dashes where nothing was measured."""
    names = [row.provider for row in rows] + ["-"] * (2 - len(rows))
    lines = []
    for name, values, template in _demo_lines(rows, state_bytes):
        a, b = (*values, None, None)[:2]
        cells = ["-" if value is None or math.isnan(value) else template.format(value) for value in (a, b)]
        lines.append([name, *cells, f"{b / a:.2f}x" if a and b and math.isfinite(b / a) else "-"])
    if comparison is not None:
        lines.append(["largest loss difference", "", "", f"{max(comparison.differences):.1e}"])
    return console_table(("", *names, "ratio"), lines, ("",), "")


def plot_demo(
    folder: Path, rows: Sequence[Measurement], state_bytes: int, comparison: DemoComparison | None,
    settings: dict[str, Any],
) -> None:  # fmt: skip
    """Draw loss.png, with the relative difference and its tolerance, and speed_memory.png with the ratios."""
    subtitle = f"{settings['title']}, {settings['machine']['name']}"
    colours = [figures.provider_colour(row.provider.partition("-")[0]) for row in rows]
    curves = [
        figures.Curve(row.provider, colour, row.losses, broad=row.provider == "stock")
        for row, colour in zip(rows, colours, strict=True)
    ]
    differences = [figures.Curve("", figures.INK, comparison.differences)] if comparison else []
    tolerances = comparison.tolerances if comparison else []
    label = "relative\ndifference"
    figures.draw_losses(folder / "loss.png", "Training loss", subtitle, curves, differences, label, tolerances, 1e-8)
    panels = []
    for name, values, template in _demo_lines(rows, state_bytes)[1:3]:
        bars = []
        for row, colour, value in zip(rows, colours, values, strict=True):
            text = "not measured" if value is None else template.format(value)
            ratio = f"{value / values[0]:.2f}x" if value and values[0] and row is not rows[0] else ""
            bars.append(figures.Bar(row.provider, colour, value, text, ratio))
        panels.append(figures.Panel(name[0].upper() + name[1:], bars))
    figures.draw_panels(folder / "speed_memory.png", "Speed and memory", subtitle, panels, 7.2, 3.8)
