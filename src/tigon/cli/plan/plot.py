"""Plot the memory of a step against the length of its sequences, with a line for each level."""

from itertools import cycle
from pathlib import Path

from tigon.cli.plan.planner import GIB, STOCK, LevelPlan, PlanSettings

SHORTEST_SEQUENCE = 128


def lengths(seq: int) -> tuple[int, ...]:
    """Return lengths up to four times `seq`, each twice the one before."""
    return tuple(seq * 2**k // 8 for k in range(6) if seq * 2**k // 8 >= SHORTEST_SEQUENCE) or (seq,)


def draw(path: Path, name: str, plans: list[LevelPlan], settings: PlanSettings) -> None:
    """Plot the steps `by_length` of all levels to a file, whose suffix names its format. This needs matplotlib."""
    from benchmarks.training import figures

    level_plans = sorted((row for row in plans if row.by_length), key=lambda row: row.level != STOCK)
    ticks = [step.seq for step in level_plans[0].by_length]
    figure = figures.new_figure(7, 4.8)
    axes = figure.add_subplot()
    for level_plan, marker in zip(level_plans, cycle(figures.MARKERS), strict=False):
        peaks = [step.peak / GIB for step in level_plan.by_length]
        colour = figures.LEVELS.get(level_plan.level, figures.STOCK)
        axes.plot(ticks, peaks, marker=marker, markersize=4, label=level_plan.level, color=colour)
    figures.mark_limit(axes, settings.budget / GIB, "memory for tensors")
    axes.set_xlabel("tokens a sequence", color=figures.INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    axes.set_ylim(0, 1.5 * settings.budget / GIB)
    devices = f"each of {settings.gpus} GPUs" if settings.gpus > 1 else "one GPU"
    figures.headline(figure, "Peak memory of a GPU, GiB", f"{name}, batch {settings.batch} on {devices}")
    figures.clean(axes)
    axes.grid(color=figures.FAINT, linewidth=0.7)
    # Lines of long sequences leave the axes at the top, so the legend stands below them.
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False, labelcolor=figures.INK)
    figure.savefig(path)
