"""Memory of a step by the length of its sequences, a line for each level."""

from pathlib import Path

from tigon.plan.planner import GIB, STOCK, Row, Settings

__all__ = ["draw", "lengths"]

COLOURS = {
    "stock": "#888888", "default": "#1f77b4", "lean": "#2ca02c", "lean+mlp": "#ff7f0e", "checkpoint": "#9467bd",
    "offload": "#17becf",
}  # fmt: skip
LIMIT = "#cc3333"
SHORTEST = 128


def lengths(seq: int) -> tuple[int, ...]:
    """Up to four times `seq`, each twice the one before."""
    return tuple(seq * 2**k // 8 for k in range(6) if seq * 2**k // 8 >= SHORTEST) or (seq,)


def draw(path: Path, name: str, rows: list[Row], settings: Settings) -> None:
    """Write the plot of rows `by_length`; the suffix of the path is its format. Needs matplotlib."""
    from matplotlib.figure import Figure

    drawn = sorted((row for row in rows if row.by_length), key=lambda row: row.level != STOCK)
    ticks = [step.seq for step in drawn[0].by_length]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for row in drawn:
        peaks = [step.peak / GIB for step in row.by_length]
        axes.plot(ticks, peaks, marker="o", markersize=3, label=row.level, color=COLOURS.get(row.level))
    axes.axhline(settings.budget / GIB, color=LIMIT, linewidth=1, linestyle="--")
    place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 3), "textcoords": "offset points"}
    axes.annotate("what tensors get", (0, settings.budget / GIB), color=LIMIT, fontsize=8, **place)
    axes.set(xlabel="tokens a sequence", ylabel="peak memory of a GPU, GiB")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{seq:,}" for seq in ticks])
    axes.set_ylim(0, 1.5 * settings.budget / GIB)
    where = f"each of {settings.gpus} GPUs" if settings.gpus > 1 else "one GPU"
    axes.set_title(f"{name}, batch {settings.batch} on {where}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", ncols=2)
    figure.savefig(path, dpi=150)
