"""A picture for each family of ops: lines of speed and memory over the axis in which the cases of a sweep differ."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.figures import Panel, SweepLine, draw_panels, sweep_lines
from benchmarks.ops.cases import OPS
from benchmarks.ops.runner import BenchRow


def draw(rows: Iterable[BenchRow], folder: Path, machine: str) -> list[Path]:
    """Write a picture of each family that has a sweep of at least two sizes; return the files."""
    # The rows of each sweep, by family, and by op and options.
    families: dict[str, dict[tuple[str, ...], list[BenchRow]]] = {}
    for row in rows:
        if row.model == "sweep" and row.status == "ok" and row.time_ms is not None:
            families.setdefault(row.family, {}).setdefault((row.op, *_options(row)), []).append(row)
    files = []
    for family, sweeps in families.items():
        if panels := [_panels(rows) for rows in sweeps.values() if len({row.shape for row in rows}) > 1]:
            files.append(folder / f"{family}.png")
            draw_panels(files[-1], f"{family}: forward + backward", machine, panels)
    return files


def _options(row: BenchRow) -> list[str]:
    # The name begins with op, model and shape.
    return row.case.split("/")[3:]


def _panels(rows: list[BenchRow]) -> tuple[Panel, Panel]:
    """Return lines over the axis that varies: speed as a share of the roofline, and memory."""
    first, names = rows[0], OPS[rows[0].op].legend.split(" x ")
    axis = next(i for i, sizes in enumerate(zip(*(row.shape for row in rows), strict=True)) if len(set(sizes)) > 1)
    fixed = [f"{name} = {size}" for i, (name, size) in enumerate(zip(names, first.shape, strict=True)) if i != axis]
    title = ", ".join([first.op, *fixed, *_options(first)])
    inaccurate = {row.provider for row in rows if row.accurate is False}

    def lines(value: Callable[[BenchRow], float | None]) -> list[SweepLine]:
        values = [(row.provider, row.shape[axis], value(row)) for row in rows]
        return [
            line._replace(label=line.label + " (inaccurate)" * (line.label in inaccurate))
            for line in sweep_lines(point for point in values if point[2] is not None)
        ]

    speed, memory = lines(lambda row: row.percent_of_roofline), lines(lambda row: row.peak_mib)
    return (
        Panel(f"{title}: % of the roofline", (), speed, 100.0, names[axis], "roofline"),
        Panel("Peak memory above the inputs, MiB", (), memory, None, names[axis]),
    )
