"""One picture for each family of ops: time and memory of each provider.

Three or more cases of an op that differ in one axis only are lines over that axis. Every other case is two panels of
bars. The cases with the tag `linear` get one more picture, of the time divided by that of the bare products.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib

# This backend draws to files and needs no display.
matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from benchmarks.figures import LEVELS, PEER_COLOURS, STOCK
from benchmarks.ops.cases import OPS, has_tag
from benchmarks.ops.runner import BenchRow
from tigon.cli.output import format_number

# A provider has the same colour in every picture, and that of Tigon is the strongest. The hues are those of Okabe and
# Ito, which colour-blind people can distinguish, without their yellow, which is too pale for a line.
COLOURS = {
    **PEER_COLOURS, "tigon": LEVELS["default"], "eager": STOCK, "torch": "#56b4e9", "liger-fp32": "#7fceb9",
    "liger-cute": "#7fceb9", "quack": "#e69f00", "fla": "#9c6b00", "cce": "#cc79a7", "cce-exact": "#e5bcd3",
    "trl": "#4d3319", "products": "#c9c9c9",
}  # fmt: skip
REVISION_COLOUR = "#7a3b00"
# The heights of a bar and of a panel of lines, in inches.
BAR, LINES = 0.27, 3.2
# The smallest number of cases that are drawn as a line.
LINE_CASES = 3
# This follows the name of a peer whose results are wrong.
INACCURATE = " (inaccurate)"


def _colour(provider: str) -> str:
    return COLOURS.get(provider, REVISION_COLOUR if provider.startswith("tigon@") else "#444444")


# --- sweeps --------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """The cases of one op that differ in one axis of their shape, keyed by its size."""

    op: str
    axis: int
    cases: dict[int, list[BenchRow]]

    @property
    def axis_name(self) -> str:
        return OPS[self.op].legend.split(" x ")[self.axis]

    @property
    def title(self) -> str:
        """Return the op and the sizes that the cases share, as in `rms_norm, M = 4096`."""
        row = next(iter(self.cases.values()))[0]
        sizes = zip(OPS[self.op].legend.split(" x "), row.shape, strict=True)
        fixed = [f"{name} = {size}" for i, (name, size) in enumerate(sizes) if i != self.axis]
        return ", ".join([self.op, *fixed, *_extras(row)])


def _extras(row: BenchRow) -> list[str]:
    # The name begins with op, model and shape.
    return row.case.split("/")[3:]


def find_sweeps(cases: dict[str, list[BenchRow]]) -> tuple[list[Sweep], dict[str, list[BenchRow]]]:
    """Return the sweeps among the cases of a family, the longest first, and the other cases with their rows."""
    rest = dict(cases)
    sweeps: list[Sweep] = []
    while True:
        lines: dict[tuple, dict[int, str]] = {}
        for name, rows in rest.items():
            row = rows[0]
            for axis, size in enumerate(row.shape):
                fixed = (*row.shape[:axis], *row.shape[axis + 1 :])
                # Of two cases with one shape the last one counts, because the cases of sweeps follow those of models.
                lines.setdefault((row.op, tuple(_extras(row)), row.dtype, axis, fixed), {})[size] = name
        longest = max(lines, key=lambda key: len(lines[key]), default=None)
        if longest is None or len(lines[longest]) < LINE_CASES:
            return sweeps, rest
        members = dict(sorted(lines[longest].items()))
        sweeps.append(Sweep(longest[0], longest[3], {size: rest.pop(name) for size, name in members.items()}))


# --- drawing -------------------------------------------------------------------------------------


def draw(rows: Iterable[BenchRow], folder: Path, machine: str) -> list[Path]:
    """Write a picture of each family, and one more of the cases with the tag `linear`; return the files."""
    measured_rows = [row for row in rows if row.status == "ok" and row.time_ms is not None]
    measured_rows.sort(key=lambda row: row.family)
    files = []
    for family, family_rows in groupby(measured_rows, key=lambda row: row.family):
        group = list(family_rows)
        files.append(folder / f"{family}.png")
        _draw_family(family, group, files[-1], machine)
        rows_with_ratio = [row for row in group if row.products_ratio and row.provider != "products"]
        linear_rows = [row for row in rows_with_ratio if has_tag(row.case, "linear")]
        if linear_rows:
            files.append(folder / f"{family}_products.png")
            _draw_products(linear_rows, files[-1], machine)
    return files


def _draw_family(family: str, rows: list[BenchRow], file: Path, machine: str) -> None:
    cases: dict[str, list[BenchRow]] = {}
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
        f"left: {kind}{' (lines: share of the roofline)' if sweeps else ''}, dotted: the roofline; "
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
    """Draw lines over the axis that varies: speed as a share of the roofline, and memory."""
    providers = list(dict.fromkeys(row.provider for rows in sweep.cases.values() for row in rows))
    for axes, value in ((left, lambda row: row.percent_of_roofline), (right, lambda row: row.peak_mib)):
        for provider in providers:
            points = [
                (size, value(row)) for size, rows in sweep.cases.items() for row in rows if row.provider == provider
            ]
            points = [(size, y) for size, y in points if y is not None]
            is_tigon = provider.startswith("tigon")
            axes.plot(
                [size for size, _ in points], [y for _, y in points],
                label=_label(provider, sweep), color=_colour(provider), marker="o", markersize=4,
                linewidth=2.2 if is_tigon else 1.3, zorder=3 if is_tigon else 2,
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
    rows = [row for rows in sweep.cases.values() for row in rows if row.provider == provider]
    return provider + INACCURATE * any(row.accurate is False for row in rows)


def _memory_axis(axes: Axes, values: list[float | None]) -> None:
    """Label the axis, and make it logarithmic if the values are far apart."""
    positive_values = [value for value in values if value]
    if positive_values and max(positive_values) > 30 * min(positive_values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB", fontsize=8)


def _draw_case(left: Axes, right: Axes, case: str, rows: list[BenchRow]) -> None:
    _bars(left, rows, [row.time_ms for row in rows], "ms")
    _bars(right, rows, [row.peak_mib for row in rows], "MiB")
    if rows[0].floor_ms and rows[0].floor_ms < left.get_xlim()[1]:
        left.axvline(rows[0].floor_ms, color="black", linewidth=1, linestyle=":")
    left.set_title(case, fontsize=9, loc="left")


def _bars(axes: Axes, rows: list[BenchRow], values: list[float | None], unit: str) -> None:
    names = [row.provider + INACCURATE * (row.accurate is False) for row in rows]
    lengths = [value or 0.0 for value in values]
    bars = axes.barh(names, lengths, color=[_colour(row.provider) for row in rows], height=0.72)
    axes.bar_label(bars, ["" if value is None else f" {format_number(value)} {unit}" for value in values], fontsize=8)
    # The first provider is at the top.
    axes.invert_yaxis()
    axes.set_xlim(0, max([*lengths, 1e-9]) * 1.25)
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.tick_params(axis="x", labelsize=7, colors="#777777")
    axes.spines[["top", "right", "left"]].set_visible(False)


# --- divided by the bare products ----------------------------------------------------------------

TICKS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
# The space between two cases, in bars. The title of a case is written there.
GAP = 1.5


def _draw_products(rows: list[BenchRow], file: Path, machine: str) -> None:
    """Draw bars of each provider on each case: time divided by that of the products, memory above the gradients."""
    positions: list[float] = []
    titles: list[tuple[float, str]] = []
    end = 0.0
    for case, group in groupby(rows, key=lambda row: row.case):
        titles.append((end, case.partition("/")[2]))
        positions += [end + i for i, _ in enumerate(group, 1)]
        end = positions[-1] + GAP
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, layout="constrained", figsize=(11, 1.2 + 0.17 * end), gridspec_kw={"width_ratios": (3, 2)}
    )
    figure.suptitle(
        f"{rows[0].op}, forward + backward on {machine}\n"
        "left: time divided by that of the bare matrix products (1: as fast as the products alone), "
        "right: peak memory above the gradients; both logarithmic",
        fontsize=10,
    )
    _products_bars(left, positions, rows)
    _memory_bars(right, positions, rows)
    left.set_yticks(positions, [row.provider + INACCURATE * (row.accurate is False) for row in rows])
    for label, row in zip(left.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.provider == "tigon" else "normal")
    for position, title in titles:
        left.text(0, position, title, fontsize=8, fontweight="bold", va="center", transform=left.get_yaxis_transform())
    # The first case is at the top.
    left.set_ylim(max(positions) + 0.8, -0.7)
    for axes in (left, right):
        axes.tick_params(axis="y", labelsize=7, length=0)
        axes.tick_params(axis="x", labelsize=7, colors="#555555", labeltop=True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#eeeeee")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _products_bars(axes: Axes, positions: list[float], rows: list[BenchRow]) -> None:
    """Draw a bar from the line of the products to each ratio."""
    ratios = [row.products_ratio or 0.0 for row in rows]
    colours = [_colour(row.provider) for row in rows]
    axes.barh(positions, [ratio - 1 for ratio in ratios], left=1.0, color=colours, height=0.8)
    for height, ratio in zip(positions, ratios, strict=True):
        # The number of a ratio below 1 is at the right of the line, and its bar at the left.
        position = (max(ratio, 1.0), height)
        axes.annotate(f"{ratio:.2f}", position, (3, 0), textcoords="offset points", fontsize=7, va="center")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    low, high = min(*ratios, 1.0) / 1.03, max(*ratios, 1.1) * 1.2
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _memory_bars(axes: Axes, positions: list[float], rows: list[BenchRow]) -> None:
    """Draw a bar from the left edge to each value. A value below the edge has a number and no bar."""
    values = [row.peak_above_gradients_mib for row in rows]
    positive_values = [value for value in values if value is not None and value > 0]
    edge = max(1.0, min(positive_values, default=1.0) / 2)
    lengths = [max(value or 0.0, edge) - edge for value in values]
    bars = axes.barh(positions, lengths, left=edge, color=[_colour(row.provider) for row in rows], height=0.8)
    axes.bar_label(bars, ["" if v is None else f" {round(v):,} MiB" for v in values], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(edge, max([*positive_values, 10 * edge]) * 6)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
