"""Draw the pictures, which share one look: curves of losses, bars of providers, and lines of a sweep."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

INK, MUTED, FAINT, WARNING = "#22262b", "#6b7280", "#d9dce1", "#c0392b"

STOCK = "#8c8c8c"
# The levels of memory are shades of one colour. The other hues are those of Okabe and Ito for colour-blind people.
COLOURS = {
    "stock": STOCK, "eager": STOCK, "stock-reversed": "#c4c4c4", "stock-fp32": "#000000", "products": "#c9c9c9",
    "liger": "#009e73", "liger-cute": "#7fceb9", "compile": "#0072b2", "unsloth": "#cc79a7", "cce": "#cc79a7",
    "compile-reduce-overhead": "#5b8fc7", "liger-checkpoint": "#66c2a5", "unsloth-checkpoint": "#e3b3ce",
    "torch": "#56b4e9", "quack": "#e69f00", "fla": "#9c6b00", "trl": "#4d3319", "torchao": "#1f4e79",
    "tigon": "#d55e00", "lean": "#f08c3a", "lean+mlp": "#a8480a", "checkpoint": "#5e2a06",
    "checkpoint+attention": "#c8a415", "checkpoint+attention+offload": "#e0cf7d", "checkpoint+offload": "#8a6d5a",
    "fp8": "#7b3fa0", "rowwise": "#b07cc6", "graphs": "#1d6f42", "revision": "#7a3b00",
}  # fmt: skip
MARKERS = "osD^vP*Xp"
DASHES = (0, (4, 3))
# The smallest difference of losses that a picture shows.
RESOLUTION = 1e-7


def provider_colour(provider: str) -> str:
    """Return the colour of a provider, such as liger, tigon, tigon-lean, or the revision tigon@main."""
    if "@" in provider:
        return COLOURS["revision"]
    if provider in COLOURS:
        return COLOURS[provider]
    words = provider.split("-")
    special = [word for word in ("graphs", "rowwise", "fp8") if word in words and words[0] == "tigon"]
    levels = [word.partition(":")[0] for word in words[1:2] if words[0] == "tigon"]
    return next((COLOURS[name] for name in (*special, *levels, words[0]) if name in COLOURS), "#444444")


def new_figure(width: float, height: float) -> Figure:
    """Return a white figure of a size in inches, which needs no display."""
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def headline(figure: Figure, title: str, subtitle: str) -> None:
    """Add a title and a smaller subtitle of one or more lines; the constrained layout leaves room for both."""
    # A character of this size is about 0.063 inches wide.
    lines = textwrap.wrap(subtitle, int(figure.get_figwidth() / 0.068))
    newlines = "\n" * len(lines)
    figure.suptitle(f"{title}{newlines}", x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    text = "\n".join(("", *lines))
    figure.text(0.012, 0.985, text, ha="left", va="top", fontsize=8.5, linespacing=1.9, color=MUTED)


def clean(axes: Axes, title: str = "") -> None:
    """Remove the box and the ticks of axes, and add an optional title at the left."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", fontsize=10, color=INK)


def mark_limit(axes: Axes, height: float, label: str) -> None:
    """Draw a dashed line at a limit of the values, with a label above its left end."""
    axes.axhline(height, color=WARNING, linewidth=1, linestyle=DASHES)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(label, (0, height), xytext=(4, 3), va="bottom", fontsize=8, color=WARNING, **place)


class Curve(NamedTuple):
    """A value for each step. A broad curve is pale, and can be seen below a curve that coincides with it."""

    label: str
    colour: str
    values: Sequence[float]
    broad: bool = False


def _draw_curves(axes: Axes, curves: Iterable[Curve], ylabel: str) -> None:
    for label, colour, values, broad in curves:
        style: dict[str, Any] = {"linewidth": 5.5, "alpha": 0.55} if broad else {"linewidth": 1.5}
        if not broad and len(values) <= 50:
            style |= {"marker": "o", "markersize": 3}
        axes.plot(range(1, len(values) + 1), values, color=colour, label=label or None, **style)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    clean(axes)


def draw_losses(
    path: Path, title: str, subtitle: str, losses: Sequence[Curve], differences: Sequence[Curve] = (),
    differences_label: str = "difference",
) -> None:  # fmt: skip
    """Draw the losses of all runs over each other, and below them their differences. Differences have a logarithmic
    scale above `RESOLUTION` and a linear one below it, which has a place for zero."""
    figure = new_figure(7.2, 4.9 if differences else 3.8)
    headline(figure, title, subtitle)
    if differences:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        _draw_curves(below, differences, differences_label)
        below.set_yscale("symlog", linthresh=RESOLUTION)
        finite = [value for curve in differences for value in curve.values if value < float("inf")]
        top = 20 * max([*finite, RESOLUTION])
        below.set_ylim(-0.2 * RESOLUTION, top)
        below.set_yticks([0, *(tick for power in range(6) if (tick := RESOLUTION * 100**power) <= top)])
        below.minorticks_off()
    else:
        above = below = figure.subplots()
    _draw_curves(above, losses, "loss")
    below.set_xlabel("step", color=INK)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)


class Bar(NamedTuple):
    """A bar of height `value`, with `text` above it and `ratio` inside; a value of None has no height."""

    label: str
    colour: str
    value: float | None
    text: str
    ratio: str = ""


class SweepLine(NamedTuple):
    """The (size, value) pairs of a run in ascending order, and the smallest size that did not fit."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    failed_size: float | None


class Panel(NamedTuple):
    """The content of axes: bars, or the lines of a sweep where `xlabel` names the size. A dashed line with the label
    `limit_label` is at `limit`, if there is one."""

    title: str
    bars: Sequence[Bar] = ()
    lines: Sequence[SweepLine] = ()
    limit: float | None = None
    xlabel: str = ""
    limit_label: str = "memory of the GPU"


def draw_panels(path: Path, title: str, subtitle: str, panels: Sequence[Sequence[Panel]]) -> None:
    """Draw rows of two panels. A legend of the lines is at the right of each row."""
    bar_count = max(len(panel.bars) for row in panels for panel in row)
    width = max(7.2, 2.0 * bar_count) if bar_count else 11.0
    figure = new_figure(width, 0.6 + 3.3 * len(panels))
    headline(figure, title, subtitle)
    grid = figure.subplots(len(panels), len(panels[0]), squeeze=False)
    for row, row_axes in zip(panels, grid, strict=True):
        for panel, axes in zip(row, row_axes, strict=True):
            if panel.limit:
                mark_limit(axes, panel.limit, panel.limit_label)
            if panel.xlabel:
                _draw_sweep(axes, panel)
            else:
                _draw_bars(axes, panel)
            axes.grid(axis="y", color=FAINT, linewidth=0.7)
            axes.yaxis.set_major_formatter("{x:,g}")
            clean(axes, panel.title)
        if row[-1].xlabel:
            row_axes[-1].legend(frameon=False, labelcolor=INK, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    """Draw bars below a common height, which is above all values and the limit."""
    bars, heights = panel.bars, [bar.value or 0.0 for bar in panel.bars]
    container = axes.bar([bar.label for bar in bars], heights, color=[bar.colour for bar in bars], width=0.6)
    axes.bar_label(container, [bar.text for bar in bars], padding=3, fontsize=9.5, color=INK)
    # A ratio is inside the bar, where it cannot overlap the text above the bar.
    ratios = [bar.ratio for bar in bars]
    axes.bar_label(container, ratios, label_type="center", fontsize=15, weight="bold", color="white")
    axes.set_ylim(0, 1.14 * max([*heights, panel.limit or 0.0]) or 1.0)


def sweep_lines(results: Iterable[tuple[str, float, float | None]]) -> list[SweepLine]:
    """Return a line for each provider from (provider, size, value); the value is None where memory ran out.

    >>> sweep_lines([("stock", 4, None), ("stock", 2, 7.0)])[0][2:]
    ([(2, 7.0)], 4)
    """
    values: dict[str, dict[float, float | None]] = {}
    for provider, size, value in results:
        values.setdefault(provider, {})[size] = value
    lines = []
    for provider, by_size in values.items():
        points = [(size, value) for size, value in sorted(by_size.items()) if value is not None]
        failed_sizes = [size for size, value in by_size.items() if value is None]
        lines.append(SweepLine(provider, provider_colour(provider), points, min(failed_sizes, default=None)))
    return lines


def _draw_sweep(axes: Axes, panel: Panel) -> None:
    """Draw each run over the size, and a cross where memory ran out, at the last value or the limit that was passed."""
    crosses: Counter[tuple[float, float]] = Counter()
    for (label, colour, points, failed_size), marker in zip(panel.lines, cycle(MARKERS), strict=False):
        sizes, values = [size for size, _ in points], [value for _, value in points]
        axes.plot(sizes, values, color=colour, marker=marker, markersize=5, label=label)
        if failed_size is None:
            continue
        end = failed_size, panel.limit or (values[-1] if values else 0.0)
        axes.plot([*sizes[-1:], end[0]], [*values[-1:], end[1]], color=colour, linestyle=":", linewidth=1)
        # Where several lines end at one place, each cross is larger than the one before, and drawn under it.
        size, order = 9 + 5 * crosses[end], 5 - 0.1 * crosses[end]
        axes.plot(*end, color=colour, marker="x", linestyle="", markersize=size, markeredgewidth=2, zorder=order)
        crosses[end] += 1
    ticks = {size for line in panel.lines for size, _ in line.points}
    ticks |= {line.failed_size for line in panel.lines if line.failed_size}
    axes.set_xscale("log", base=2)
    axes.set_xticks(_select_spaced(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 and x % 256 == 0 else f"{x:g}")
    )
    values = [value for line in panel.lines for _, value in line.points if value > 0]
    if values and max(values) > 30 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.set_xlabel(panel.xlabel + "   (x: out of memory)" * bool(crosses), color=MUTED)


def _select_spaced(sizes: Iterable[float]) -> list[float]:
    """Select sizes, in ascending order, so that their labels do not overlap on a logarithmic axis."""
    ticks: list[float] = []
    for size in sizes:
        if not ticks or size >= 1.4 * ticks[-1]:
            ticks.append(size)
    return ticks
