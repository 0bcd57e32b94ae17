"""A picture for each family of ops: lines of speed and memory over the axis in which three or more cases differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from benchmarks.figures import LEVELS, PEER_COLOURS, STOCK, new_figure
from benchmarks.ops.cases import OPS
from benchmarks.ops.runner import BenchRow

# A provider has the same colour in every picture, and that of Tigon is the strongest. The hues are those of Okabe and
# Ito, which colour-blind people can distinguish, without their yellow, which is too pale for a line.
COLOURS = {
    **PEER_COLOURS, "tigon": LEVELS["default"], "eager": STOCK, "torch": "#56b4e9", "liger-cute": "#7fceb9",
    "quack": "#e69f00", "fla": "#9c6b00", "cce": "#cc79a7", "trl": "#4d3319", "products": "#c9c9c9",
}  # fmt: skip
REVISION_COLOUR = "#7a3b00"
# The smallest number of cases that are drawn as a line.
LINE_CASES = 3


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


def find_sweeps(cases: dict[str, list[BenchRow]]) -> list[Sweep]:
    """Return the sweeps among the cases of a family, the longest first."""
    rest = dict(cases)
    sweeps: list[Sweep] = []
    while True:
        lines: dict[tuple, dict[int, str]] = {}
        for name, rows in rest.items():
            row = rows[0]
            for axis, size in enumerate(row.shape):
                fixed = (*row.shape[:axis], *row.shape[axis + 1 :])
                # If two cases have one shape, the last one counts: the cases of sweeps follow those of models.
                lines.setdefault((row.op, tuple(_extras(row)), row.dtype, axis, fixed), {})[size] = name
        longest = max(lines, key=lambda key: len(lines[key]), default=None)
        if longest is None or len(lines[longest]) < LINE_CASES:
            return sweeps
        members = dict(sorted(lines[longest].items()))
        sweeps.append(Sweep(longest[0], longest[3], {size: rest.pop(name) for size, name in members.items()}))


def draw(rows: Iterable[BenchRow], folder: Path, machine: str) -> list[Path]:
    """Write a picture of each family that has a sweep; return the files."""
    measured_rows = [row for row in rows if row.status == "ok" and row.time_ms is not None]
    measured_rows.sort(key=lambda row: row.family)
    files = []
    for family, family_rows in groupby(measured_rows, key=lambda row: row.family):
        cases: dict[str, list[BenchRow]] = {}
        for row in family_rows:
            cases.setdefault(row.case, []).append(row)
        if not (sweeps := find_sweeps(cases)):
            continue
        figure = new_figure(11, 1.1 + 3.2 * len(sweeps))
        figure.suptitle(
            f"{family}: forward + backward on {machine}\nleft: share of the roofline; right: peak memory above the "
            "inputs",
            fontsize=10,
        )
        for (left, right), sweep in zip(figure.subplots(len(sweeps), 2, squeeze=False), sweeps, strict=True):
            _draw_sweep(left, right, sweep)
        files.append(folder / f"{family}.png")
        figure.savefig(files[-1])
    return files


def _draw_sweep(left: Axes, right: Axes, sweep: Sweep) -> None:
    """Draw lines over the axis that varies: speed as a share of the roofline, and memory."""
    rows = [row for rows in sweep.cases.values() for row in rows]
    for axes, value in ((left, lambda row: row.percent_of_roofline), (right, lambda row: row.peak_mib)):
        for provider in dict.fromkeys(row.provider for row in rows):
            own_rows = [row for row in rows if row.provider == provider]
            points = [(row.shape[sweep.axis], y) for row in own_rows if (y := value(row)) is not None]
            is_tigon = provider.startswith("tigon")
            axes.plot(
                [size for size, _ in points], [y for _, y in points],
                label=provider + " (inaccurate)" * any(row.accurate is False for row in own_rows),
                color=COLOURS.get(provider, REVISION_COLOUR if is_tigon else "#444444"), marker="o", markersize=4,
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
    left.set_title(sweep.title, fontsize=9, loc="left")
    _memory_axis(right, [row.peak_mib for row in rows])
    right.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
