"""The look of a picture: a white figure, a headline, axes without a box."""

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
    "clean",
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
