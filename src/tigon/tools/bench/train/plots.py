"""Three pictures: throughput.png, memory.png and loss.png.

At one size the first two are bars, over a sweep they are lines that end in a cross where memory ran out.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tigon.tools.bench.plots import COLOURS
from tigon.tools.bench.train.report import Row, compare_curves
from tigon.tools.training.figures import (
    FAINT,
    INK,
    LEVELS,
    MUTED,
    STOCK,
    SweepLine,
    clean,
    draw_sweep,
    headline,
    mark_limit,
    new_figure,
)  # fmt: skip

__all__ = ["draw"]

_PEERS = {
    "stock": STOCK,
    "stock-reversed": "#c4c4c4",
    "liger": COLOURS["liger"],
    "compile": COLOURS["compile"],
    "stock-checkpoint": STOCK,
    "liger-checkpoint": "#5b8fc7",
}
_NAMES = {"seq": "tokens a sequence", "batch": "sequences a GPU"}


def _colour(provider: str) -> str:
    level = provider.removeprefix("tigon").removeprefix("-") or "default"
    return _PEERS.get(provider) or LEVELS.get(level, "#444444")


def _gib(row: Row) -> float | None:
    return None if row.allocated is None else row.allocated / 2**30


def draw(rows: Sequence[Row], folder: Path, sweep: str | None, title: str, machine: dict[str, Any]) -> list[Path]:
    """Write the pictures that `rows` have numbers for; -> their files."""
    if not any(row.ok for row in rows):
        return []
    limit = machine.get("memory_gib")
    speed, memory, loss = (folder / f"{name}.png" for name in ("throughput", "memory", "loss"))
    compared = [row for row in rows if row.provider != "stock-reversed"]
    panel = (lambda *given: _lines(sweep, *given)) if sweep else _bars
    _one(speed, panel, compared, "Tokens per second", title, lambda row: row.tokens_per_second, None)
    _one(memory, panel, compared, "Peak memory of a GPU, GiB" if limit else "Peak memory, GiB", title, _gib, limit)
    written = [speed, memory]
    if sweep is None and _loss(loss, rows, title):
        written.append(loss)
    return written


def _one(
    path: Path, panel: Callable, rows: Sequence[Row], what: str, title: str,
    value: Callable[[Row], float | None], limit: float | None,
) -> None:  # fmt: skip
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    headline(figure, what, title)
    if limit:
        mark_limit(axes, limit, "memory of the GPU")
    panel(axes, rows, value, limit)
    axes.yaxis.set_major_formatter("{x:,g}")
    clean(axes)
    figure.savefig(path)


def _bars(axes: Axes, rows: Sequence[Row], value: Callable[[Row], float | None], limit: float | None) -> None:
    """A bar a provider; one without a number says why."""
    rows = [row for row in rows if row.ok or row.status == "out of memory"]
    numbers = [value(row) if row.ok else None for row in rows]
    names = [row.provider.replace("-", "\n", 1) for row in rows]
    bars = axes.bar(names, [n or 0.0 for n in numbers], color=[_colour(row.provider) for row in rows], width=0.62)
    highest = max([n for n in numbers if n is not None], default=1.0)
    digits = 0 if highest >= 1000 else 1 if highest >= 10 else 2 if highest >= 0.1 else 4
    texts = [f"{n:,.{digits}f}" if n is not None else row.status for row, n in zip(rows, numbers, strict=True)]
    axes.bar_label(bars, texts, padding=3, fontsize=9, color=INK)
    axes.set_ylim(0, 1.12 * max([n for n in numbers if n is not None] + ([limit] if limit else [])))
    axes.grid(axis="y", color=FAINT, linewidth=0.7)


def _lines(
    sweep: str, axes: Axes, rows: Sequence[Row], value: Callable[[Row], float | None], limit: float | None
) -> None:
    """A line a provider over the size; a cross at the smallest size that did not fit."""
    size = lambda row: getattr(row, sweep)
    ticks: set[int] = set()
    lines = []
    for provider in dict.fromkeys(row.provider for row in rows):
        of_provider = sorted((row for row in rows if row.provider == provider), key=size)
        points = [(size(row), value(row)) for row in of_provider if row.ok and value(row) is not None]
        failed = next((size(row) for row in of_provider if row.status == "out of memory"), None)
        if points or failed:
            ticks |= {x for x, _ in points} | ({failed} if failed else set())
            lines.append(SweepLine(provider, _colour(provider), points, failed))
    draw_sweep(axes, lines, limit)
    axes.set_xticks(_spaced(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 and x % 256 == 0 else f"{x:g}")
    )
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.set_xlabel(f"{_NAMES[sweep]}   (x: out of memory)", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _spaced(sizes: Iterable[int]) -> list[int]:
    """Of ascending sizes those that are far enough apart for their names on a logarithmic axis."""
    kept: list[int] = []
    for x in sizes:
        if not kept or x >= 1.4 * kept[-1]:
            kept.append(x)
    return kept


def _loss(path: Path, rows: Sequence[Row], title: str) -> bool:
    """The curves over each other, and below them how far each is from stock's, if that is there; -> whether drawn."""
    runs = [row for row in rows if row.losses]
    if not runs:
        return False
    curves = compare_curves(rows)
    figure = new_figure(7.2, 5.0 if curves else 3.8)
    parts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4)) if curves else [figure.subplots()]
    headline(figure, "Training loss", title)
    for row in runs:
        if row.provider != "stock-reversed":
            # Stock broad and pale, so that it is seen below those that agree with it.
            style = {"linewidth": 5.5, "alpha": 0.5} if row.provider == "stock" else {"linewidth": 1.4}
            steps = range(1, len(row.losses) + 1)
            parts[0].plot(steps, row.losses, color=_colour(row.provider), label=row.provider, **style)
    parts[0].set_ylabel("loss", color=INK)
    parts[0].legend(frameon=False, labelcolor=INK, fontsize=9)
    if curves:
        stock = next(row for row in runs if row.provider == "stock")
        for row in runs:
            if row.provider in curves:
                noise = row.provider == "stock-reversed"
                gaps = [abs(a - b) for a, b in zip(row.losses, stock.losses, strict=False)]
                label = "noise" if noise else None
                style = {"linewidth": 4, "alpha": 0.7} if noise else {"linewidth": 1.2}
                parts[1].plot(range(1, len(gaps) + 1), gaps, color=_colour(row.provider), label=label, **style)
        parts[1].set_yscale("symlog", linthresh=1e-6)
        parts[1].set_ylim(bottom=0)
        parts[1].set_ylabel("difference\nfrom stock", color=INK)
        if "stock-reversed" in curves:
            parts[1].legend(frameon=False, labelcolor=INK, fontsize=9)
    for axes in parts:
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        clean(axes)
    parts[-1].set_xlabel("step", color=INK)
    figure.savefig(path)
    return True
