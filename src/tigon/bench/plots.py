"""One picture an op family: time and memory of each provider, a row of panels a case."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files: needs no display
from matplotlib import pyplot
from matplotlib.axes import Axes

from tigon.bench.report import number
from tigon.bench.runner import Row

__all__ = ["draw"]

# Ours stands out; a provider has one colour in every picture.
COLOURS = {
    "tigon": "#d9730d", "eager": "#8c8c8c", "compile": "#5b8ff9", "torch": "#9d7fe0", "liger": "#3fa796",
    "liger-fp32": "#7cc4b8", "cce": "#c25b7c", "cce-exact": "#dba0b3", "products": "#c9c9c9",
}  # fmt: skip


def draw(rows: Iterable[Row], folder: Path, machine: str) -> list[Path]:
    """Write `<family>.png` for each family with something measured; -> the files."""
    measured = [row for row in rows if row.status == "ok" and row.time_ms is not None]
    measured.sort(key=lambda row: row.family)
    files = []
    for family, group in groupby(measured, key=lambda row: row.family):
        files.append(folder / f"{family}.png")
        _draw_family(family, list(group), files[-1], machine)
    return files


def _draw_family(family: str, rows: list[Row], file: Path, machine: str) -> None:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    heights = [len(group) + 1.6 for group in cases.values()]
    figure, axes = pyplot.subplots(
        len(cases), 2, squeeze=False, layout="constrained",
        figsize=(11, 1.1 + 0.27 * sum(heights)), gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    kind = "GPU kernel time" if any(row.kernel_ms is not None for row in rows) else "wall time"
    figure.suptitle(
        f"{family}: forward + backward on {machine}\n"
        f"left: {kind}, dotted the roofline; right: peak memory above the inputs",
        fontsize=10,
    )
    for (left, right), (case, group) in zip(axes, cases.items(), strict=True):
        _bars(left, group, [row.time_ms for row in group], "ms")
        _bars(right, group, [row.peak_mib for row in group], "MiB")
        if group[0].floor_ms and group[0].floor_ms < left.get_xlim()[1]:
            left.axvline(group[0].floor_ms, color="black", linewidth=1, linestyle=":")
        left.set_title(case, fontsize=9, loc="left")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _bars(axis: Axes, rows: list[Row], values: list[float | None], unit: str) -> None:
    names = [row.provider for row in rows]
    lengths = [value or 0.0 for value in values]
    bars = axis.barh(names, lengths, color=[COLOURS.get(name, "#444444") for name in names], height=0.72)
    axis.bar_label(bars, ["" if value is None else f" {number(value)} {unit}" for value in values], fontsize=8)
    axis.invert_yaxis()  # the first provider on top
    axis.set_xlim(0, max([*lengths, 1e-9]) * 1.25)
    axis.tick_params(axis="y", labelsize=8, length=0)
    axis.tick_params(axis="x", labelsize=7, colors="#777777")
    axis.spines[["top", "right", "left"]].set_visible(False)
