"""Plot the memory of a step against the length of its sequences, with a line for each level."""

from pathlib import Path

from tigon.cli.plan.planner import GIB, STOCK, LevelPlan, PlanSettings

SHORTEST_SEQUENCE = 128
STOCK_COLOUR, LIMIT_COLOUR = "#8c8c8c", "#c0392b"


def lengths(seq: int) -> tuple[int, ...]:
    """Return lengths up to four times `seq`, each twice the one before."""
    return tuple(seq * 2**k // 8 for k in range(6) if seq * 2**k // 8 >= SHORTEST_SEQUENCE) or (seq,)


def draw(path: Path, name: str, plans: list[LevelPlan], settings: PlanSettings) -> None:
    """Plot the steps `by_length` of all levels to a file, whose suffix names its format. This needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    level_plans = sorted((row for row in plans if row.by_length), key=lambda row: row.level != STOCK)
    ticks = [step.seq for step in level_plans[0].by_length]
    figure = Figure(figsize=(7, 4.8), dpi=160, layout="constrained")
    # This canvas draws to a file and needs no display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, plan in enumerate(level_plans):
        colour = STOCK_COLOUR if plan.level == STOCK else f"C{index}"
        peaks = [step.peak / GIB for step in plan.by_length]
        axes.plot(ticks, peaks, marker="osD^vP*Xp"[index % 9], markersize=4, label=plan.level, color=colour)
    axes.axhline(settings.budget / GIB, color=LIMIT_COLOUR, linewidth=1, linestyle="--", label="memory for tensors")
    axes.set_xlabel("tokens a sequence")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    axes.set_ylim(0, 1.5 * settings.budget / GIB)
    devices = f"each of {settings.gpus} GPUs" if settings.gpus > 1 else "one GPU"
    axes.set_title(f"Peak memory of a GPU, GiB: {name}, batch {settings.batch} on {devices}", fontsize=10)
    axes.grid(color="#d9dce1", linewidth=0.7)
    # Lines of long sequences leave the axes at the top, so the legend stands below them.
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
