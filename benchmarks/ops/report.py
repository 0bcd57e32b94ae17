"""The report of a run: JSON with all results, Markdown tables, which the terminal shows too, and pictures of sweeps.

A row is a `runner.BenchRow`. A picture for each family of ops has lines of speed and memory over the axis in which the
cases of a sweep differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import table as rich_table

from benchmarks.figures import Panel, SweepLine, draw_panels, sweep_lines
from benchmarks.ops.cases import OPS
from benchmarks.ops.measure import Roofline
from benchmarks.ops.runner import BenchRow
from benchmarks.report import Column, Table, make_table, markdown_table, page_head, write
from tigon.cli.output import console_table, format_number

_LEGEND = (
    "Forward + backward, medians. Kernel ms: on the GPU, queued ahead; host ms: until the call returns; wall ms: "
    "until the device is done; peak MiB: above the inputs; % roofline: floor / time (it exceeds 100 where an op reads "
    "more than it writes, because a copy, the roofline, reads and writes as much); error: |x - exact| / |exact| of "
    "the worst output or gradient, in brackets that of eager code."
)
_PRODUCTS_LEGEND = (
    " x products: time divided by that of the bare products of the valid rows in the same run; peak MiB above "
    "gradients: the peak less the gradients themselves; error x eager: the error divided by that of eager code, for "
    "the loss, dX and dW; no_grad: forward alone."
)


def describe_roofline(roofline: Roofline) -> str:
    copied, products = roofline.bytes_per_second / 1e9, roofline.flops_per_second / 1e12
    return f"{copied:,.0f} GB/s (copy, read + written), {products:.3g} TFLOP/s (bf16 product)"


def legend(products: bool) -> str:
    """Return the meaning of the columns; with `products` also of those for ops whose bound is matrix products."""
    return _LEGEND + _PRODUCTS_LEGEND * products


def write_json(path: Path, rows: Iterable[BenchRow], roofline: Roofline, machine: dict, settings: dict) -> None:
    write(path, machine, settings, roofline=asdict(roofline), rows=[asdict(row) for row in rows])


def _error(row: BenchRow) -> str:
    return "-" if row.error is None or row.eager_error is None else f"{row.error:.1e} ({row.eager_error:.1e})"


def _error_ratios(row: BenchRow) -> str:
    names = ("output 0", "gradient of input", "gradient of linear_weight")
    ratios = [row.errors.get(name, {}).get("ratio") for name in names]
    return ", ".join("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios) if row.errors and row.flops else "-"


def _note(row: BenchRow) -> str:
    return ": ".join(part for part in ("" if row.status == "ok" else row.status, row.note) if part)


_ROOFLINE: Column = (
    "% roofline",
    lambda row: "-" if row.percent_of_roofline is None else f"{row.percent_of_roofline:.0f}",
)
# These columns have values where matrix products are the bound.
_PRODUCTS: tuple[Column, ...] = (
    ("x products", lambda row: "-" if row.products_ratio is None else f"{row.products_ratio:.3f}"),
    ("peak MiB above gradients", lambda row: format_number(row.peak_above_gradients_mib)),
    ("error x eager: loss, dX, dW", _error_ratios),
)
_COLUMNS: tuple[Column, ...] = (
    ("provider", lambda row: row.provider), ("kernel ms", lambda row: format_number(row.kernel_ms)),
    ("wall ms", lambda row: format_number(row.wall_ms)), ("host ms", lambda row: format_number(row.host_ms)),
    _PRODUCTS[0], ("peak MiB", lambda row: format_number(row.peak_mib)), _PRODUCTS[1], _ROOFLINE,
    ("error (eager's)", _error), _PRODUCTS[2], ("note", _note),
)  # fmt: skip


def _title(row: BenchRow) -> str:
    bound = "memory" if row.bytes else "products"
    work = f"{row.bytes / 1e9:.3g} GB" if row.bytes else f"{(row.flops or 0) / 1e12:.3g} TFLOP"
    return f"{row.case} ({OPS[row.op].legend}, {row.dtype}): floor {format_number(row.floor_ms)} ms by {bound}, {work}"


def _by_case(rows: Iterable[BenchRow]) -> list[list[BenchRow]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: row.case)]


def _summary(rows: list[BenchRow]) -> Table:
    """Return a table in which each case is a line about Tigon."""
    revision = next((row.provider for row in rows if row.provider.startswith("tigon@")), "")
    lines = []
    for group in _by_case(rows):
        done = {row.provider: row for row in group if row.status == "ok"}
        peers = [row for row in done.values() if row.is_peer and row.time_ms]
        best, liger = min(peers, key=lambda row: row.time_ms or 0.0, default=None), done.get("liger")
        lines += [(row, best, liger, done.get(revision)) for row in group if row.provider == "tigon"]

    def time(row: BenchRow | None) -> str:
        return format_number(row.time_ms if row else None)

    def times(title: str, speed_up_title: str, index: int) -> list[Column]:
        """Return the columns of the time of another provider, and of its ratio to that of Tigon."""
        ratio = lambda other, own: f"{other.time_ms / own.time_ms:.2f}x" if other and own.time_ms else "-"
        return [(title, lambda line: time(line[index])), (speed_up_title, lambda line: ratio(line[index], line[0]))]

    best_name = lambda best: best.provider + " (inaccurate)" * (best.accurate is False) if best else "-"
    host = lambda row, liger: f"{format_number(row.host_ms)} ({format_number(liger and liger.host_ms)})"
    columns: list[Column] = [
        ("case", lambda line: line[0].case),
        ("tigon ms", lambda line: time(line[0]) if line[0].status == "ok" else line[0].status),
        (_ROOFLINE[0], lambda line: _ROOFLINE[1](line[0])), ("best peer", lambda line: best_name(line[1])),
        *times("its ms", "speed-up", 1), *times("liger ms", "speed-up over liger", 2),
        ("host ms (liger's)", lambda line: "-" if line[0].host_ms is None else host(line[0], line[2])),
        *times(f"{revision} ms", f"speed-up over {revision}", 3),
        *((title, lambda line, cell=cell: cell(line[0])) for title, cell in _PRODUCTS),
    ]  # fmt: skip
    return make_table(columns, lines)


def summary_table(rows: list[BenchRow]) -> rich_table.Table:
    return console_table(*_summary(rows), "Summary")


def case_table(rows: list[BenchRow]) -> rich_table.Table:
    return console_table(*make_table(_COLUMNS, rows), _title(rows[0]))


def markdown(rows: list[BenchRow], roofline: Roofline, machine: dict, settings: dict) -> str:
    """Return the report as Markdown: the machine, a summary, and one table for each case."""
    against = settings.get("against")
    lines = [*page_head("Ops", machine), f"Roofline measured first: {describe_roofline(roofline)}.", ""]
    if against:
        lines += [f"{against['provider']} is {against['commit'][:12]} ({against['title']}).", ""]
    summary = _summary(rows)
    if summary[1]:
        lines += ["## Summary", "", *markdown_table(*summary), ""]
    lines += ["## Cases", "", legend(any(row.flops for row in rows))]
    for group in _by_case(rows):
        lines += ["", f"### {_title(group[0])}", "", *markdown_table(*make_table(_COLUMNS, group))]
    return "\n".join(lines) + "\n"


def plot(rows: Iterable[BenchRow], folder: Path, machine: str) -> list[Path]:
    """Write a picture of each family that has a sweep of at least two sizes; return the files."""
    # The rows of each sweep, by family, and by op and options.
    families: dict[str, dict[tuple[str, ...], list[BenchRow]]] = {}
    files = []
    for row in rows:
        if row.model == "sweep" and row.status == "ok" and row.time_ms is not None:
            families.setdefault(row.family, {}).setdefault((row.op, *_options(row)), []).append(row)
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
