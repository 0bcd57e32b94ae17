"""The report of training and of the demo: tables, JSON, Markdown and the pictures.

The rows of the JSON report are `Measurement`, one for each provider and size; `curves` compares losses with stock's.
Times are medians of the timed steps of all rounds; samples hold each step.

The picture speed_memory.png has bars at one size. Over a sweep it has lines, which end in a cross where memory ran out.
The picture loss.png has the losses of one size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks import figures
from benchmarks.report import page_head, write
from benchmarks.train.measurement import (
    NOISE_FACTOR,
    REFERENCES,
    SLACK,
    STOCK_REVERSED,
    DemoComparison,
    LossComparison,
    Measurement,
    compare_with_stock,
    loss_differences,
)
from tigon.cli.output import console_table, format_number, markdown_table

# --- tables --------------------------------------------------------------------------------------

# The columns that are aligned to the left.
LEFT = ("provider", "note", "within")
# The columns that are left out if no row has a value.
OPTIONAL = ("GPU ms", "x GPU", "kernels", "captures", "reserved GiB")
Value = Callable[[Measurement], float | None]


UNEVEN = (
    "A step at each of several lengths, for the first time and again. ms: the mean, without captures of CUDA graphs."
)


def legend(machine: dict[str, Any]) -> str:
    """Return sentences that explain the columns."""
    start = (
        "One step: forward, backward, optimizer, zero_grad. ms: median of the timed steps, in brackets their quartiles"
    )
    end = "above state: the peak less parameters and optimizer states, in the demo also less gradients."
    if machine["type"] != "cuda":
        return f"{start}; host ms: until the calls return; peak GiB: the state and the growth of the process; {end}"
    return (
        f"{start}; GPU ms and kernels: the sum of the times of a step's kernels, copies and fills in a profile of "
        "three more steps, and their number; x GPU: ms divided by GPU ms; host ms: until the calls return; "
        "tokens/s: of all ranks, or with TRL those of all timed steps, without padding and with the time of "
        "captures; captures: pairs of CUDA graphs, with their seconds in all and those of the longest one; peak "
        "and reserved GiB: peaks of torch's allocator over the timed steps, on the GPU with the highest peak, with "
        "model and optimizer states; "
        f"{end}"
    )


def _format_gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.{1 if count >= 2**30 else 3}f}"


def _as_ms(seconds: float | None) -> str:
    return format_number(None if seconds is None else 1e3 * seconds)


def _ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f}" if value and reference else "-"


def _captures(row: Measurement) -> str:
    seconds = [capture["seconds"] for capture in row.captures]
    return f"{len(seconds)} ({sum(seconds):.1f} s, {max(seconds):.2f} s)" if seconds else "-"


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

    titles = ["provider", "batch", "length", "ms", "GPU ms", "x GPU", "kernels", "host ms", "tokens/s"]
    titles += [f"x {peer}" for peer in peers]
    titles += ["captures", "peak GiB", "above state", "reserved GiB", "note"]
    cells = [
        [row.provider, str(row.batch), f"{row.seq:,}", _milliseconds(row), _as_ms(row.gpu_seconds),
         _ratio(row.step_seconds, row.gpu_seconds), "-" if row.kernels is None else f"{row.kernels:,}",
         _as_ms(row.median_host_seconds),
         "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
         *(ratio(row, peer) for peer in peers), _captures(row), _format_gib(row.allocated),
         _format_gib(row.above_state),
         _format_gib(row.reserved), _note(row)]
        for row in rows
    ]  # fmt: skip
    # A CPU has no kernels of a GPU, and most runs capture nothing.
    used = [i for i, title in enumerate(titles) if title not in OPTIONAL or any(line[i] != "-" for line in cells)]
    return [titles[i] for i in used], [[line[i] for i in used] for line in cells]


def _uneven_cells(rows: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells about the steps at uneven lengths, with ratios to the seconds of stock."""
    rows = [row for row in rows if row.first_seconds]
    means = {row.provider: (fmean(row.first_seconds), fmean(row.again_seconds)) for row in rows}
    stock = means.get("stock", (None, None))
    cells = []
    for row in rows:
        first, again = means[row.provider]
        ratios = _ratio(stock[0], first), _ratio(stock[1], again)
        cells.append([row.provider, str(len(row.first_seconds)), _as_ms(first), ratios[0], _as_ms(again), ratios[1]])
    return ["provider", "lengths", "first ms", "x stock", "again ms", "x stock"], cells


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


def uneven_table(rows: Sequence[Measurement]) -> Table | None:
    """Return the table of the steps at uneven lengths for the terminal, or None if there are none."""
    titles, cells = _uneven_cells(rows)
    return console_table(titles, cells, LEFT, "Uneven lengths") if cells else None


def curve_table(curves: dict[str, LossComparison]) -> Table:
    """Return the table of the comparisons with stock for the terminal."""
    return console_table(*_curve_cells(curves), LEFT, "Losses against stock's")


# --- files ---------------------------------------------------------------------------------------


def write_report(
    path: Path, rows: Sequence[Measurement], settings: dict[str, Any], demo: DemoComparison | None = None
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
    titles, cells = _uneven_cells(rows)
    if cells:
        lines += ["## Uneven lengths", "", UNEVEN, "", *markdown_table(titles, cells, LEFT), ""]
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


def plot(
    rows: Sequence[Measurement], folder: Path, settings: dict[str, Any], demo: DemoComparison | None = None
) -> list[Path]:
    """Write the pictures that `rows` have numbers for; return their files. That of the demo has the tolerances."""
    if not any(row.ok for row in rows):
        return []
    title, sweep = f"{settings['title']}, {settings['machine']['name']}", settings["sweep"]
    limit = None if settings["demo"] else settings["machine"].get("memory_gib")
    providers = [row for row in rows if row.provider not in REFERENCES and row.status in ("ok", "out of memory")]

    def gib(row: Measurement) -> float | None:
        count = row.above_state if settings["demo"] else row.allocated
        return None if count is None else count / 2**30

    def panel(label: str, value: Value, limit: float | None = None) -> figures.Panel:
        if not sweep:
            return figures.Panel(label, _provider_bars(providers, value), limit=limit)
        return figures.Panel(label, (), _sweep_lines(providers, sweep, value), limit, SIZE_LABELS[sweep])

    memory_label = "Peak memory above the state, GiB" if settings["demo"] else "Peak memory, GiB"
    panels = panel("Tokens per second", lambda row: row.tokens_per_second), panel(memory_label, gib, limit)
    speed_memory, loss = folder / "speed_memory.png", folder / "loss.png"
    figures.draw_panels(speed_memory, "Speed and memory", title, [panels])
    if sweep:
        return [speed_memory]
    _plot_losses(loss, [row for row in rows if row.losses], title, demo)
    return [speed_memory, loss]


def _sweep_lines(rows: Sequence[Measurement], sweep: str, value: Value) -> list[figures.SweepLine]:
    """Return a line over the size for each provider that fitted or ran out of memory at any size."""
    return figures.sweep_lines((row.provider, getattr(row, sweep), value(row) if row.ok else None) for row in rows)


def _provider_bars(rows: Sequence[Measurement], value: Value) -> list[figures.Bar]:
    """Return a bar for each provider, with its ratio to stock; the text of a bar without a number is its status."""
    numbers = [value(row) if row.ok else None for row in rows]
    stock = next((n for row, n in zip(rows, numbers, strict=True) if row.provider == "stock"), None)
    highest = max((n for n in numbers if n is not None), default=1.0)
    digits = 0 if highest >= 1000 else 1 if highest >= 10 else 2 if highest >= 0.1 else 4
    bars = []
    for row, n in zip(rows, numbers, strict=True):
        label, colour = row.provider.replace("-", "\n", 1), figures.provider_colour(row.provider)
        if n is None:
            bars.append(figures.Bar(label, colour, n, "not measured" if row.ok else row.status))
        else:
            ratio = f"{n / stock:.2f}x" if stock and row.provider != "stock" else ""
            bars.append(figures.Bar(label, colour, n, f"{n:,.{digits}f}", ratio))
    return bars


def _plot_losses(path: Path, rows: Sequence[Measurement], title: str, demo: DemoComparison | None) -> None:
    """Draw the losses over each other, and below them their differences from stock's."""
    losses, differences = [], []
    stock = next((row.losses for row in rows if row.provider == "stock"), [])
    comparisons = compare_with_stock(rows)
    for row in rows:
        colour, is_noise = figures.provider_colour(row.provider), row.provider == STOCK_REVERSED
        if not is_noise:
            losses.append(figures.Curve(row.provider, colour, row.losses, broad=row.provider == "stock"))
        if row.provider in comparisons and demo is None:
            label = "noise" if is_noise else ""
            differences.append(figures.Curve(label, colour, loss_differences(row.losses, stock), broad=is_noise))
    if demo is None:
        figures.draw_losses(path, "Training loss", title, losses, differences, "difference\nfrom stock")
        return
    relative = [figures.Curve("", figures.INK, demo.differences)]
    label = "relative\ndifference"
    figures.draw_losses(path, "Training loss", title, losses, relative, label, demo.tolerances, 1e-8)
