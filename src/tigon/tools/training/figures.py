"""The look of a picture: a white figure, a headline, axes without a box, and the lines of a sweep."""

from collections import Counter
from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = [
    "FAINT",
    "INK",
    "LEVELS",
    "MARKERS",
    "MUTED",
    "STOCK",
    "WARNING",
    "SweepLine",
    "clean",
    "draw_sweep",
    "headline",
    "mark_limit",
    "new_figure",
]

INK, MUTED, FAINT, WARNING = "#22262b", "#6b7280", "#d9dce1", "#c0392b"

# The levels of memory are shades of one colour.
STOCK = "#8c8c8c"
LEVELS = {
    "default": "#d55e00",
    "lean": "#f08c3a",
    "lean+mlp": "#a8480a",
    "checkpoint": "#5e2a06",
    "offload": "#f5b98a",
}
MARKERS = "osD^vP*X"


def new_figure(width: float, height: float) -> Figure:
    """A white figure of that size in inches, which needs no display."""
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def headline(figure: Figure, title: str, subtitle: str) -> None:
    """A title and, smaller, what was measured; the constrained layout leaves room for both."""
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.text(0.012, 0.985, f"\n{subtitle}", ha="left", va="top", fontsize=8.5, linespacing=1.9, color=MUTED)


def clean(axes: Axes, title: str = "") -> None:
    """Axes without a box and ticks, with an optional title at the left."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", fontsize=10, color=INK)


def mark_limit(axes: Axes, height: float, what: str) -> None:
    """A line that no value passes, and over its left end what it is."""
    axes.axhline(height, color=WARNING, linewidth=1, linestyle=(0, (4, 3)))
    place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 3), "textcoords": "offset points", "va": "bottom"}
    axes.annotate(what, (0, height), fontsize=8, color=WARNING, **place)


class SweepLine(NamedTuple):
    """The (size, value) pairs of a run in ascending order, and the smallest size that did not fit."""

    label: str
    colour: str
    points: list[tuple[float, float]]
    failed: int | None


def draw_sweep(axes: Axes, lines: Iterable[SweepLine], limit: float | None) -> None:
    """Draw each run over the size, on a logarithmic axis, with a cross at the size that did not fit.

    The cross is at the height of the last value, or at the limit that was passed.
    """
    crosses: Counter[tuple[float, float]] = Counter()
    for (label, colour, points, failed), marker in zip(lines, cycle(MARKERS), strict=False):
        axes.plot(
            *zip(*points, strict=True) if points else ([], []), color=colour, marker=marker, markersize=5, label=label
        )
        if failed is None:
            continue
        end = failed, limit or (points[-1][1] if points else 0.0)
        axes.plot(*zip(*points[-1:], end, strict=True), color=colour, linestyle=":", linewidth=1)
        # Where several lines end at one place, each cross is larger than the one before, and below it.
        style = {"markersize": 9 + 5 * crosses[end], "markeredgewidth": 2, "zorder": 5 - 0.1 * crosses[end]}
        axes.plot(*end, color=colour, marker="x", linestyle="", **style)
        crosses[end] += 1
    axes.set_xscale("log", base=2)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
