"""The report of the training benchmark: tables, JSON, Markdown and the pictures.

The rows of the JSON report are `Measurement`, one for each provider and size; `curves` compares losses with stock's.
The picture speed_memory.png has bars at one size, or lines over a sweep, and loss.png the losses of one size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import table as rich_table

from benchmarks import figures
from benchmarks.report import Column, Table, make_table, markdown_table, page_head, write
from benchmarks.train.measurement import (
    NOISE_FACTOR,
    REFERENCES,
    SLACK,
    STOCK_REVERSED,
    LossComparison,
    Measurement,
    compare_with_stock,
    loss_differences,
)
from tigon.cli.output import console_table, format_number

Value = Callable[[Measurement], float | None]
UNEVEN = (
    "A step at each of several lengths, for the first time and again. ms: the mean, without captures of CUDA graphs."
)
CURVES = (
    "Noise: stock against itself with the sequences of each batch reversed. Within: the root mean square of the "
    f"differences is at most {NOISE_FACTOR:.0f} times the noise's, plus {SLACK:.0e}, or the losses are as near to "
    "those of the same model in fp32 as stock's are."
)


def legend(machine: dict[str, Any]) -> str:
    """Return sentences that explain the columns."""
    start = (
        "One step: forward, backward, optimizer, zero_grad. ms: median of the timed steps, in brackets their quartiles"
    )
    end = "above state: the peak less parameters and optimizer states."
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


def _ratio(value: float | None, reference: float | None, digits: int = 2) -> str:
    return f"{value / reference:.{digits}f}" if value and reference else "-"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _captures(row: Measurement) -> str:
    seconds = [capture["seconds"] for capture in row.captures]
    return f"{len(seconds)} ({sum(seconds):.1f} s, {max(seconds):.2f} s)" if seconds else "-"


def _milliseconds(row: Measurement) -> str:
    return _as_ms(row.step_seconds) + (f" ({'-'.join(map(_as_ms, row.spread))})" if row.spread else "")


def _note(row: Measurement) -> str:
    finite = all(map(math.isfinite, row.losses))
    notes = ("" if row.status == "ok" else row.status, "" if finite else "losses that are not finite", row.note)
    return ": ".join(note for note in notes if note)


def _main_table(rows: Sequence[Measurement]) -> Table:
    """Return a line for each row by size, with the ratios to the stock and to the Liger that were measured. If a peer
    ran with and without checkpointing, ratios are to the faster of the two."""
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row.ok:
            key = row.provider.removesuffix("-checkpoint"), row.batch, row.seq
            best[key] = max(best.get(key, 0.0), row.tokens_per_second or 0.0)

    def against(peer: str) -> Column:
        speed = lambda row: row.tokens_per_second if row.ok else None
        return f"x {peer}", lambda row: _ratio(speed(row), best.get((peer, row.batch, row.seq)), 3)

    columns: list[Column] = [
        ("provider", lambda row: row.provider), ("batch", lambda row: str(row.batch)),
        ("length", lambda row: f"{row.seq:,}"), ("ms", _milliseconds), ("GPU ms", lambda row: _as_ms(row.gpu_seconds)),
        ("x GPU", lambda row: _ratio(row.step_seconds, row.gpu_seconds)), ("kernels", lambda row: _count(row.kernels)),
        ("host ms", lambda row: _as_ms(row.median_host_seconds)),
        ("tokens/s", lambda row: _count(row.tokens_per_second)), against("stock"), against("liger"),
        ("captures", _captures), ("peak GiB", lambda row: _format_gib(row.allocated)),
        ("above state", lambda row: _format_gib(row.above_state)),
        ("reserved GiB", lambda row: _format_gib(row.reserved)), ("note", _note),
    ]  # fmt: skip
    return make_table(columns, sorted(rows, key=lambda row: (row.batch, row.seq)))


def _uneven_table(rows: Sequence[Measurement]) -> Table:
    """Return the means of the steps at uneven lengths, with ratios to those of stock."""
    first, again = (lambda row: fmean(row.first_seconds)), (lambda row: fmean(row.again_seconds))
    rows = [row for row in rows if row.first_seconds]
    stock = next((row for row in rows if row.provider == "stock"), None)
    against = lambda mean: lambda row: _ratio(mean(stock) if stock else None, mean(row))
    columns: list[Column] = [
        ("provider", lambda row: row.provider), ("lengths", lambda row: str(len(row.first_seconds))),
        ("first ms", lambda row: _as_ms(first(row))), ("x stock", against(first)),
        ("again ms", lambda row: _as_ms(again(row))), ("x stock", against(again)),
    ]  # fmt: skip
    return make_table(columns, rows)


def _curve_table(curves: dict[str, LossComparison]) -> Table:
    scientific = lambda name: lambda item: "-" if (value := getattr(item[1], name)) is None else f"{value:.1e}"
    verdicts = {None: "-", True: "yes", False: "no"}
    columns: list[Column] = [
        ("provider", lambda item: item[0]), ("steps", lambda item: str(item[1].steps)),
        ("first loss", lambda item: f"{item[1].first_loss:.4f}"),
        ("last loss", lambda item: f"{item[1].last_loss:.4f}"),
        ("largest difference", scientific("largest")), ("noise", scientific("noise")), ("rms", scientific("rms")),
        ("noise's rms", scientific("noise_rms")), ("rms from fp32", scientific("error")),
        ("stock's", scientific("stock_error")),
        ("within", lambda item: "-" if item[0] in REFERENCES else verdicts[item[1].agrees]),
    ]  # fmt: skip
    return make_table(columns, curves.items())


def _tables(rows: Sequence[Measurement], settings: dict[str, Any]) -> Iterator[tuple[str, str, Table]]:
    """Yield the title, the legend and the table of each part of the report that has lines."""
    yield "", legend(settings["machine"]), _main_table(rows)
    if any(row.first_seconds for row in rows):
        yield "Uneven lengths", UNEVEN, _uneven_table(rows)
    curves = compare_with_stock(rows)
    if curves and not settings["sweep"]:
        yield "Losses against stock's", CURVES, _curve_table(curves)


def sentence(row: Measurement) -> str:
    """Return a line about a row, which is printed as soon as the row is complete."""
    start, note = f"{row.provider:<18} {row.batch} x {row.seq:,}", _note(row)
    if not row.ok:
        return f"{start}  {note}"
    peak = "" if row.allocated is None else f"  {_format_gib(row.allocated)} GiB"
    return f"{start}  {_milliseconds(row)} ms  {row.tokens_per_second:,.0f} tokens/s{peak}  {note}".rstrip()


def console_tables(rows: Sequence[Measurement], settings: dict[str, Any]) -> list[rich_table.Table]:
    return [console_table(*table, title) for title, _, table in _tables(rows, settings)]


def write_json(folder: Path, rows: Sequence[Measurement], settings: dict[str, Any]) -> None:
    curves = {name: {**asdict(curve), "agrees": curve.agrees} for name, curve in compare_with_stock(rows).items()}
    shown = {name: value for name, value in settings.items() if name != "machine"}
    content = {"rows": [row.as_dict() for row in rows], "curves": curves}
    write(folder / "train.json", settings["machine"], shown, **content)


def write_files(folder: Path, rows: Sequence[Measurement], settings: dict[str, Any]) -> list[str]:
    """Write the numbers, the page and the pictures, and return the names of the files."""
    write_json(folder, rows, settings)
    (folder / "train.md").write_text(markdown(rows, settings), encoding="utf-8")
    return ["train.json", "train.md", *(picture.name for picture in plot(rows, folder, settings))]


def markdown(rows: Sequence[Measurement], settings: dict[str, Any]) -> str:
    """Return the report as Markdown: machine, settings, rows, and comparisons of losses."""
    lines = [*page_head("Training steps", settings["machine"]), f"{settings['title']}", ""]
    if settings["interrupted"]:
        lines += ["Interrupted: these are the sizes that were done.", ""]
    for title, text, table in _tables(rows, settings):
        lines += [*([f"## {title}", ""] if title else []), text, "", *markdown_table(*table), ""]
    for name, text in settings["applied"].items():
        lines += [f"## Changes by {name}", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


SIZE_LABELS = {"seq": "tokens a sequence", "batch": "sequences a GPU"}


def plot(rows: Sequence[Measurement], folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Write the pictures that `rows` have numbers for; return their files."""
    if not any(row.ok for row in rows):
        return []
    title, sweep = f"{settings['title']}, {settings['machine']['name']}", settings["sweep"]
    providers = [row for row in rows if row.provider not in REFERENCES and row.status in ("ok", "out of memory")]

    def panel(label: str, value: Value, limit: float | None = None) -> figures.Panel:
        if not sweep:
            return figures.Panel(label, _provider_bars(providers, value), limit=limit)
        values = ((row.provider, getattr(row, sweep), value(row) if row.ok else None) for row in providers)
        return figures.Panel(label, (), figures.sweep_lines(values), limit, SIZE_LABELS[sweep])

    gib: Value = lambda row: None if row.allocated is None else row.allocated / 2**30
    memory = panel("Peak memory, GiB", gib, settings["machine"].get("memory_gib"))
    speed_memory, loss = folder / "speed_memory.png", folder / "loss.png"
    panels = [panel("Tokens per second", lambda row: row.tokens_per_second), memory]
    figures.draw_panels(speed_memory, "Speed and memory", title, [panels])
    if sweep:
        return [speed_memory]
    _plot_losses(loss, [row for row in rows if row.losses], title)
    return [speed_memory, loss]


def _provider_bars(rows: Sequence[Measurement], value: Value) -> list[figures.Bar]:
    """Return a bar for each provider, with its ratio to stock; the text of a bar without a number is its status."""
    numbers = [value(row) if row.ok else None for row in rows]
    stock = next((n for row, n in zip(rows, numbers, strict=True) if row.provider == "stock"), None)
    highest = max((n for n in numbers if n is not None), default=1.0)
    digits = 0 if highest >= 1000 else 1 if highest >= 10 else 2 if highest >= 0.1 else 4
    bars = []
    for row, n in zip(rows, numbers, strict=True):
        text = f"{n:,.{digits}f}" if n is not None else "not measured" if row.ok else row.status
        ratio = f"{n / stock:.2f}x" if n is not None and stock and row.provider != "stock" else ""
        label = row.provider.replace("-", "\n", 1)
        bars.append(figures.Bar(label, figures.provider_colour(row.provider), n, text, ratio))
    return bars


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
