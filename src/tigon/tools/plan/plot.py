"""Plot the memory of a step against the length of its sequences, with a line for each level."""

from itertools import cycle
from pathlib import Path

from tigon.tools.plan.planner import GIB, STOCK, Row, Settings

__all__ = ["draw", "lengths"]

SHORTEST = 128


def lengths(seq: int) -> tuple[int, ...]:
    """Return lengths up to four times `seq`, each twice the one before."""
    return tuple(seq * 2**k // 8 for k in range(6) if seq * 2**k // 8 >= SHORTEST) or (seq,)


def draw(path: Path, name: str, rows: list[Row], settings: Settings) -> None:
    """Write the plot of rows `by_length`; the suffix of the path is its format. Needs matplotlib."""
    from tigon.tools.training import figures

    drawn = sorted((row for row in rows if row.by_length), key=lambda row: row.level != STOCK)
    ticks = [step.seq for step in drawn[0].by_length]
    figure = figures.new_figure(7, 4.4)
    axes = figure.add_subplot()
    for row, marker in zip(drawn, cycle(figures.MARKERS), strict=False):
        peaks = [step.peak / GIB for step in row.by_length]
        colour = figures.LEVELS.get(row.level, figures.STOCK)
        axes.plot(ticks, peaks, marker=marker, markersize=4, label=row.level, color=colour)
    figures.mark_limit(axes, settings.budget / GIB, "what tensors get")
    axes.set_xlabel("tokens a sequence", color=figures.INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    axes.set_ylim(0, 1.5 * settings.budget / GIB)
    where = f"each of {settings.gpus} GPUs" if settings.gpus > 1 else "one GPU"
    figures.headline(figure, "Peak memory of a GPU, GiB", f"{name}, batch {settings.batch} on {where}")
    figures.clean(axes)
    axes.grid(color=figures.FAINT, linewidth=0.7)
    axes.legend(fontsize=8, loc="upper left", ncols=2, frameon=False, labelcolor=figures.INK)
    figure.savefig(path)
