"""One picture an op family: time and memory of each provider.

Three or more cases of an op that differ in one axis only are lines over that axis; every other case is two panels of
bars.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files: needs no display
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from tigon.bench.cases import OPS
from tigon.bench.report import number
from tigon.bench.runner import Row

__all__ = ["Sweep", "draw", "find_sweeps"]

# Ours stands out; a provider has one colour in every picture.
COLOURS = {
    "tigon": "#d9730d", "eager": "#8c8c8c", "compile": "#5b8ff9", "torch": "#9d7fe0", "liger": "#3fa796",
    "liger-fp32": "#7cc4b8", "liger-cute": "#7cc4b8", "quack": "#c2a300", "cce": "#c25b7c", "cce-exact": "#dba0b3",
    "trl": "#8a5a44", "products": "#c9c9c9",
}  # fmt: skip
ANOTHER_REVISION = "#7a3b00"
BAR, LINES = 0.27, 3.2  # inches
ENOUGH = 3  # cases make a line
INACCURATE = " (inaccurate)"  # behind the name of a peer whose results are not those of the others


def _colour(provider: str) -> str:
    return COLOURS.get(provider, ANOTHER_REVISION if provider.startswith("tigon@") else "#444444")


# --- sweeps --------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """Cases of one op that differ in one axis of their shape, by its size."""

    op: str
    axis: int
    cases: dict[int, list[Row]]

    @property
    def axis_name(self) -> str:
        return OPS[self.op].legend.split(" x ")[self.axis]

    @property
    def title(self) -> str:
        """What stays: `rms_norm, M = 4096`."""
        row = next(iter(self.cases.values()))[0]
        sizes = zip(OPS[self.op].legend.split(" x "), row.shape, strict=True)
        fixed = [f"{name} = {size}" for i, (name, size) in enumerate(sizes) if i != self.axis]
        return ", ".join([self.op, *fixed, *_extras(row)])


def _extras(row: Row) -> list[str]:
    return row.case.split("/")[3:]  # behind op, model and shape


def find_sweeps(cases: dict[str, list[Row]]) -> tuple[list[Sweep], dict[str, list[Row]]]:
    """Sort the cases of a family, rows by name, into sweeps and what is left; the longest sweeps first."""
    rest, sweeps = dict(cases), []
    while True:
        lines: dict[tuple, dict[int, str]] = {}
        for name, rows in rest.items():
            row = rows[0]
            for axis, size in enumerate(row.shape):
                fixed = (*row.shape[:axis], *row.shape[axis + 1 :])
                # Of two cases with one shape the last: those made for a sweep stand behind those of models.
                lines.setdefault((row.op, tuple(_extras(row)), row.dtype, axis, fixed), {})[size] = name
        longest = max(lines, key=lambda key: len(lines[key]), default=None)
        if longest is None or len(lines[longest]) < ENOUGH:
            return sweeps, rest
        members = dict(sorted(lines[longest].items()))
        sweeps.append(Sweep(longest[0], longest[3], {size: rest.pop(name) for size, name in members.items()}))


# --- drawing -------------------------------------------------------------------------------------


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
    sweeps, single = find_sweeps(cases)
    heights = [LINES] * len(sweeps) + [BAR * (len(group) + 1.6) for group in single.values()]
    figure, axes = pyplot.subplots(
        len(heights), 2, squeeze=False, layout="constrained",
        figsize=(11, 1.1 + sum(heights)), gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    kind = "GPU kernel time" if any(row.kernel_ms is not None for row in rows) else "wall time"
    figure.suptitle(
        f"{family}: forward + backward on {machine}\n"
        f"left: {kind}{' (lines: the roofline over it)' if sweeps else ''}, dotted the roofline; "
        "right: peak memory above the inputs",
        fontsize=10,
    )
    for (left, right), sweep in zip(axes, sweeps, strict=False):
        _draw_sweep(left, right, sweep)
    for (left, right), (case, group) in zip(axes[len(sweeps) :], single.items(), strict=True):
        _draw_case(left, right, case, group)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _draw_sweep(left: Axes, right: Axes, sweep: Sweep) -> None:
    """Lines over the axis that varies: speed as a share of the roofline, and memory."""
    providers = list(dict.fromkeys(row.provider for rows in sweep.cases.values() for row in rows))
    for axes, value in ((left, lambda row: row.percent_of_roofline), (right, lambda row: row.peak_mib)):
        for provider in providers:
            points = [
                (size, value(row)) for size, rows in sweep.cases.items() for row in rows if row.provider == provider
            ]
            points = [(size, y) for size, y in points if y is not None]
            ours = provider.startswith("tigon")
            axes.plot(
                [size for size, _ in points], [y for _, y in points],
                label=_label(provider, sweep), color=_colour(provider), marker="o", markersize=4,
                linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2,
                linestyle="--" if provider == "products" else "-",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sweep.cases), [f"{size:,}" for size in sweep.cases], rotation=30, ha="right")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(sweep.axis_name, fontsize=8)
        axes.tick_params(labelsize=7, colors="#555555")
        axes.grid(axis="y", color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    left.axhline(100, color="black", linewidth=1, linestyle=":")
    left.set_ylim(bottom=0)
    left.set_ylabel("% of the roofline", fontsize=8)
    _memory_axis(right, [row.peak_mib for rows in sweep.cases.values() for row in rows])
    left.set_title(sweep.title, fontsize=9, loc="left")
    right.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _label(provider: str, sweep: Sweep) -> str:
    wrong = any(row.accurate is False for rows in sweep.cases.values() for row in rows if row.provider == provider)
    return provider + INACCURATE * wrong


def _memory_axis(axes: Axes, values: list[float | None]) -> None:
    """Logarithmic where providers lie far apart."""
    values = [value for value in values if value]
    if values and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB", fontsize=8)


def _draw_case(left: Axes, right: Axes, case: str, rows: list[Row]) -> None:
    _bars(left, rows, [row.time_ms for row in rows], "ms")
    _bars(right, rows, [row.peak_mib for row in rows], "MiB")
    if rows[0].floor_ms and rows[0].floor_ms < left.get_xlim()[1]:
        left.axvline(rows[0].floor_ms, color="black", linewidth=1, linestyle=":")
    left.set_title(case, fontsize=9, loc="left")


def _bars(axis: Axes, rows: list[Row], values: list[float | None], unit: str) -> None:
    names = [row.provider + INACCURATE * (row.accurate is False) for row in rows]
    lengths = [value or 0.0 for value in values]
    bars = axis.barh(names, lengths, color=[_colour(row.provider) for row in rows], height=0.72)
    axis.bar_label(bars, ["" if value is None else f" {number(value)} {unit}" for value in values], fontsize=8)
    axis.invert_yaxis()  # the first provider on top
    axis.set_xlim(0, max([*lengths, 1e-9]) * 1.25)
    axis.tick_params(axis="y", labelsize=8, length=0)
    axis.tick_params(axis="x", labelsize=7, colors="#777777")
    axis.spines[["top", "right", "left"]].set_visible(False)
