"""The demo's two pictures: loss.png and speed_memory.png."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tigon.tools.demo.report import Comparison, Run
from tigon.tools.training.figures import FAINT, INK, WARNING, clean, headline, new_figure

__all__ = ["plot_loss", "plot_speed_memory"]

_COLOURS = ("#8a8f98", "#e8731c")  # stock grey, tigon orange


def plot_loss(path: Path, first: Run, second: Run, comparison: Comparison | None, subtitle: str) -> None:
    """Both curves over each other, and below them their relative difference with the tolerance."""
    figure = new_figure(7.2, 4.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    # The first run broad and pale, the second thin on top: both are seen where they agree.
    styles = ({"linewidth": 5.5, "alpha": 0.55}, {"linewidth": 1.6, "marker": "o", "markersize": 3})
    for run, colour, style in zip((first, second), _COLOURS, styles, strict=True):
        above.plot(range(1, len(run.losses) + 1), run.losses, color=colour, label=run.title, **style)
    above.set_ylabel("loss", color=INK)
    above.grid(axis="y", color=FAINT, linewidth=0.7)
    above.legend(frameon=False, labelcolor=INK)
    clean(above)
    headline(figure, f"Training loss: {first.title} and {second.title}", subtitle)

    if comparison is not None:
        steps = range(1, len(comparison.differences) + 1)
        below.plot(steps, comparison.differences, color=INK, linewidth=1.2, marker="o", markersize=3)
        below.plot(steps, comparison.tolerances, color=WARNING, linewidth=1, linestyle=(0, (4, 3)))
        below.annotate(
            "tolerance",
            (1, comparison.tolerances[-1]),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color=WARNING,
        )
        # Logarithmic, with a place for zero.
        below.set_yscale("symlog", linthresh=1e-8)
        finite = [value for value in comparison.differences + comparison.tolerances if value < float("inf")]
        below.set_ylim(-2e-9, 20 * max(finite))
        below.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
        below.minorticks_off()
    below.set_ylabel("relative\ndifference", color=INK)
    below.set_xlabel("step", color=INK)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.grid(axis="y", color=FAINT, linewidth=0.7)
    clean(below)
    figure.savefig(path)


def plot_speed_memory(path: Path, first: Run, second: Run, subtitle: str) -> None:
    """Bars of tokens/s and of peak memory above the model, with the second run's gain."""
    figure = new_figure(7.2, 3.8)
    left, right = figure.subplots(1, 2)
    headline(figure, "Speed and memory", subtitle)
    memory = [run.peak_bytes / 2**20 for run in (first, second)]
    gibibytes = max(memory) >= 10_000
    unit, memory = ("GiB", [value / 1024 for value in memory]) if gibibytes else ("MiB", memory)
    speed = [run.tokens_per_second for run in (first, second)]
    _bars(left, "Tokens per second", (first, second), speed, lambda value: f"{value:,.0f}")
    number = (lambda value: f"{value:,.1f} {unit}") if gibibytes else (lambda value: f"{value:,.0f} {unit}")
    _bars(right, "Peak memory above the model", (first, second), memory, number)
    figure.savefig(path)


def _bars(axes: Axes, title: str, runs: Sequence[Run], values: list[float], number: Callable[[float], str]) -> None:
    heights = [value if value == value else 0.0 for value in values]
    bars = axes.bar([run.title for run in runs], heights, color=_COLOURS, width=0.58)
    labels = [number(value) if value == value else "not measured" for value in values]
    axes.bar_label(bars, labels, padding=3, fontsize=10, color=INK)
    if values[0] and values[0] == values[0] and values[1] == values[1]:
        # Inside the bar, so that it cannot meet the label above.
        axes.annotate(
            f"{values[1] / values[0]:.2f}x",
            (1, heights[1] / 2),
            ha="center",
            va="center",
            fontsize=15,
            fontweight="bold",
            color="white",
        )
    axes.set_ylim(0, max(heights) * 1.15 or 1)
    axes.set_yticks([])
    clean(axes, title)
    axes.spines["left"].set_visible(False)
