"""The report of a run: JSON with all results, and Markdown tables, which the terminal shows too.

`bench.json` also has the roofline, as measured before the cases, and a row is a `runner.BenchRow`, one for each
provider of each case. With --against, the settings have its ref, commit, title and provider.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.table import Table

from benchmarks.ops.cases import OPS
from benchmarks.ops.measure import Roofline
from benchmarks.ops.runner import BenchRow
from benchmarks.report import page_head, write
from tigon.cli.output import console_table, format_number, markdown_table

# The columns that are aligned to the left.
LEFT, SUMMARY_LEFT = ("provider", "note"), ("case", "best peer")

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


def legend(products: bool) -> str:
    """Return the meaning of the columns; with `products` also of those for ops whose bound is matrix products."""
    return _LEGEND + _PRODUCTS_LEGEND * products


def write_json(path: Path, rows: Iterable[BenchRow], roofline: Roofline, machine: dict, settings: dict) -> None:
    """Write all results as JSON, with every sample."""
    write(path, machine, settings, roofline=asdict(roofline), rows=[row.as_dict() for row in rows])


# --- tables --------------------------------------------------------------------------------------


def _percent(row: BenchRow) -> str:
    return "-" if row.percent_of_roofline is None else f"{row.percent_of_roofline:.0f}"


def _error(row: BenchRow) -> str:
    return "-" if row.error is None or row.eager_error is None else f"{row.error:.1e} ({row.eager_error:.1e})"


def _products_ratio(row: BenchRow) -> str:
    return "" if row.products_ratio is None else f"{row.products_ratio:.3f}"


def _above_gradients(row: BenchRow) -> str:
    return "" if row.peak_above_gradients_mib is None else format_number(row.peak_above_gradients_mib)


def _error_ratios(row: BenchRow) -> str:
    names = ("output 0", "gradient of input", "gradient of linear_weight")
    ratios = [row.errors.get(name, {}).get("ratio") for name in names]
    return ", ".join("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios) if row.errors else ""


def _note(row: BenchRow) -> str:
    parts = [] if row.status == "ok" else [row.status]
    parts += [row.note] if row.note else []
    return ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


# A column is its title and the function that returns the text of a cell.
Column = tuple[str, Callable[[BenchRow], str]]
_TIMES: tuple[Column, ...] = (
    ("kernel ms", lambda row: format_number(row.kernel_ms)),
    ("wall ms", lambda row: format_number(row.wall_ms)),
    ("host ms", lambda row: format_number(row.host_ms)),
)
_MEMORY: Column = ("peak MiB", lambda row: format_number(row.peak_mib))
_ROOFLINE: Column = ("% roofline", _percent)
_ERROR: Column = ("error (eager's)", _error)
_NOTE: Column = ("note", _note)
# These columns appear where matrix products are the bound.
_PRODUCTS_RATIO: Column = ("x products", _products_ratio)
_ABOVE_GRADIENTS: Column = ("peak MiB above gradients", _above_gradients)
_ERROR_RATIOS: Column = ("error x eager: loss, dX, dW", _error_ratios)


def _columns(rows: list[BenchRow]) -> tuple[Column, ...]:
    """Return the columns of the table of one case."""
    times = _TIMES if any(row.kernel_ms is not None for row in rows) else _TIMES[1:2]
    if not rows[0].flops:
        return (*times, _MEMORY, _ROOFLINE, _ERROR, _NOTE)
    return (*times, _PRODUCTS_RATIO, _MEMORY, _ABOVE_GRADIENTS, _ROOFLINE, _ERROR, _ERROR_RATIOS, _NOTE)


def _title(row: BenchRow) -> str:
    bound = "memory" if row.bytes else "products"
    work = f"{row.bytes / 1e9:.3g} GB" if row.bytes else f"{(row.flops or 0) / 1e12:.3g} TFLOP"
    return f"{row.case} ({OPS[row.op].legend}, {row.dtype}): floor {format_number(row.floor_ms)} ms by {bound}, {work}"


def _by_case(rows: Iterable[BenchRow]) -> Iterable[tuple[str, list[BenchRow]]]:
    return ((case, list(group)) for case, group in groupby(rows, key=lambda row: row.case))


# --- summary -------------------------------------------------------------------------------------


def _speed_up(other: BenchRow | None, tigon: BenchRow) -> str:
    return f"{other.time_ms / tigon.time_ms:.2f}x" if other and other.time_ms and tigon.time_ms else "-"


def _time(row: BenchRow | None) -> str:
    return format_number(row.time_ms if row else None)


def _row_of(name: str, group: list[BenchRow]) -> BenchRow | None:
    return next((row for row in group if row.provider == name and row.status == "ok"), None)


def _summary(rows: list[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells: each case is a line about Tigon, and empty columns are left out."""
    revision = next((row.provider for row in rows if row.provider.startswith("tigon@")), "")
    titles = ["case", "tigon ms", "% roofline", "best peer", "its ms", "speed-up", "liger ms", "speed-up over liger"]
    titles += ["host ms (liger's)", f"{revision} ms", f"speed-up over {revision}"]
    titles += [title for title, _ in (_PRODUCTS_RATIO, _ABOVE_GRADIENTS, _ERROR_RATIOS)]
    lines = []
    for case, group in _by_case(rows):
        tigon = next((row for row in group if row.provider == "tigon"), None)
        if tigon is None:
            continue
        peers = [row for row in group if row.is_peer and row.status == "ok" and row.time_ms]
        best = min(peers, key=lambda row: row.time_ms or 0.0, default=None)
        liger, other = _row_of("liger", group), _row_of(revision, group)
        liger_host = format_number(liger.host_ms if liger else None)
        lines.append([
            case, _time(tigon) if tigon.status == "ok" else tigon.status, _percent(tigon),
            "-" if best is None else best.provider + (" (inaccurate)" if best.accurate is False else ""),
            _time(best), _speed_up(best, tigon), _time(liger), _speed_up(liger, tigon),
            "-" if tigon.host_ms is None else f"{format_number(tigon.host_ms)} ({liger_host})",
            _time(other), _speed_up(other, tigon),
            *(cell(tigon) or "-" for _, cell in (_PRODUCTS_RATIO, _ABOVE_GRADIENTS, _ERROR_RATIOS)),
        ])  # fmt: skip
    columns = [i for i in range(len(titles)) if any(line[i] != "-" for line in lines)]
    return [titles[i] for i in columns], [[line[i] for i in columns] for line in lines]


def summary_table(rows: list[BenchRow]) -> Table:
    """Return the summary for the terminal."""
    return console_table(*_summary(rows), SUMMARY_LEFT, "Summary")


# --- the report ----------------------------------------------------------------------------------


def _cells(rows: list[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of the table of one case."""
    columns = _columns(rows)
    cells = [[row.provider, *(cell(row) for _, cell in columns)] for row in rows]
    return ["provider", *(title for title, _ in columns)], cells


def case_table(rows: list[BenchRow]) -> Table:
    """Return the table of one case for the terminal."""
    return console_table(*_cells(rows), LEFT, _title(rows[0]))


def markdown(rows: list[BenchRow], roofline: Roofline, machine: dict, settings: dict) -> str:
    """Return the report as Markdown: the machine, a summary, and one table for each case."""
    against = settings.get("against")
    lines = [
        *page_head("Ops", machine),
        f"Roofline measured first: {roofline.bytes_per_second / 1e9:,.0f} GB/s (copy, read + written), "
        f"{roofline.flops_per_second / 1e12:.3g} TFLOP/s (bf16 product).",
        "",
    ]
    if against:
        lines += [f"{against['provider']} is {against['commit'][:12]} ({against['title']}).", ""]
    titles, cells = _summary(rows)
    if cells:
        lines += ["## Summary", "", *markdown_table(titles, cells, SUMMARY_LEFT), ""]
    lines += ["## Cases", "", legend(any(row.flops for row in rows))]
    for _, group in _by_case(rows):
        lines += ["", f"### {_title(group[0])}", "", *markdown_table(*_cells(group), LEFT)]
    return "\n".join(lines) + "\n"
