"""One picture an op family: time and memory of each provider.

Three or more cases of an op that differ in one axis only are lines over that axis; every other case is two panels of
bars. The cases of the tag `linear` get one more picture: time over that of the bare products.
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

from tigon.tools.bench.cases import OPS, tagged
from tigon.tools.bench.report import number
from tigon.tools.bench.runner import Row
from tigon.tools.training.figures import LEVELS, STOCK

__all__ = ["Sweep", "draw", "find_sweeps"]

# Ours stands out; a provider has one colour in every picture. The hues are those of Okabe and Ito, which colour-blind
# people tell apart; their yellow, too pale for a line, is left out.
COLOURS = {
    "tigon": LEVELS["default"], "eager": STOCK, "compile": "#0072b2", "torch": "#56b4e9", "liger": "#009e73",
    "liger-fp32": "#7fceb9", "liger-cute": "#7fceb9", "quack": "#e69f00", "cce": "#cc79a7", "cce-exact": "#e5bcd3",
    "trl": "#4d3319", "products": "#c9c9c9",
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
    """Write `<family>.png` for each family with something measured, `<family>_products.png` for `linear`; -> files."""
    measured = [row for row in rows if row.status == "ok" and row.time_ms is not None]
    measured.sort(key=lambda row: row.family)
    files = []
    for family, group in groupby(measured, key=lambda row: row.family):
        group = list(group)
        files.append(folder / f"{family}.png")
        _draw_family(family, group, files[-1], machine)
        compared = [row for row in group if row.products_ratio and row.provider != "products"]
        compared = [row for row in compared if tagged(row.case, "linear")]
        if compared:
            files.append(folder / f"{family}_products.png")
            _draw_products(compared, files[-1], machine)
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


# --- over the bare products ----------------------------------------------------------------------

TICKS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
GAP = 1.5  # bars between two cases: room for the title


def _draw_products(rows: list[Row], file: Path, machine: str) -> None:
    """Bars of each provider on each case, ours first: time over the products, and memory above the gradients."""
    places, titles, at = [], [], 0.0
    for case, group in groupby(rows, key=lambda row: row.case):
        titles.append((at, case.partition("/")[2]))
        places += [at + i for i, _ in enumerate(group, 1)]
        at = places[-1] + GAP
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, layout="constrained", figsize=(11, 1.2 + 0.17 * at), gridspec_kw={"width_ratios": (3, 2)}
    )
    figure.suptitle(
        f"{rows[0].op}, forward + backward on {machine}\n"
        "left: time over that of the bare matrix products (1: nothing but products), "
        "right: peak memory above the gradients; both logarithmic",
        fontsize=10,
    )
    _products_bars(left, places, rows)
    _memory_bars(right, places, rows)
    left.set_yticks(places, [row.provider + INACCURATE * (row.accurate is False) for row in rows])
    for label, row in zip(left.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.provider == "tigon" else "normal")
    for at, title in titles:
        left.text(0, at, title, fontsize=8, fontweight="bold", va="center", transform=left.get_yaxis_transform())
    left.set_ylim(max(places) + 0.8, -0.7)  # the first case on top
    for axes in (left, right):
        axes.tick_params(axis="y", labelsize=7, length=0)
        axes.tick_params(axis="x", labelsize=7, colors="#555555", labeltop=True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#eeeeee")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _products_bars(axes: Axes, places: list[float], rows: list[Row]) -> None:
    """From the line of the products to each ratio."""
    ratios = [row.products_ratio for row in rows]
    colours = [_colour(row.provider) for row in rows]
    axes.barh(places, [ratio - 1 for ratio in ratios], left=1.0, color=colours, height=0.8)
    for place, ratio in zip(places, ratios, strict=True):
        beside = (max(ratio, 1.0), place)  # a bar to the left has its number on the right of the line
        axes.annotate(f"{ratio:.2f}", beside, (3, 0), textcoords="offset points", fontsize=7, va="center")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    low, high = min(*ratios, 1.0) / 1.03, max(*ratios, 1.1) * 1.2
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _memory_bars(axes: Axes, places: list[float], rows: list[Row]) -> None:
    """From the left edge; what lies below it, or was not measured, is its number alone."""
    values = [row.peak_above_gradients_mib for row in rows]
    known = [value for value in values if value is not None and value > 0]
    edge = max(1.0, min(known, default=1.0) / 2)
    lengths = [max(value or 0.0, edge) - edge for value in values]
    bars = axes.barh(places, lengths, left=edge, color=[_colour(row.provider) for row in rows], height=0.8)
    axes.bar_label(bars, ["" if v is None else f" {round(v):,} MiB" for v in values], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(edge, max([*known, 10 * edge]) * 6)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
