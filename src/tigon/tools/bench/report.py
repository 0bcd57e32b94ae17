"""What a run leaves behind: JSON with everything, Markdown tables, and tables for the terminal.

`bench.json` is one object:

    schema      1
    versions    {package: version}, Python's among them
    machine     type "cpu" or "cuda", name, and what numbers depend on: threads or multiprocessors, memory, L2 cache
    roofline    bytes_per_second, flops_per_second: as measured before the cases
    settings    rounds, quick, interrupted, cases (names), seconds; with --against: ref, commit, title, provider of it
    rows        a list of `runner.Row`, one for each provider of each case, in the order in which they ran

A row has case, op, family, model, shape, dtype, provider; status ("ok", "missing", "unsupported", "wrong", "error" or
"out of memory") and note; kernel_ms, wall_ms and host_ms, medians of the lists samples.kernel, .wall and .host
(kernel_source says whether the profiler or events timed them; a CPU has wall time only); peak_mib above the inputs;
bytes or flops that a perfect kernel moves or does, floor_ms in which the machine could, percent_of_roofline; and of the
check accurate, error and eager_error of the worst tensor, and errors: {"output 0" | "gradient of input" | ...: {error,
eager_error, ratio}}, where eager_error is at least the standard error of a mean over rounded logits. What was not
measured is null.

Where flops are the bound, products_ratio is the time (of kernels; on a CPU, wall time) over that of the provider
"products" in the same run, and peak_above_gradients_mib is peak_mib less the gradients that the call returns.
"""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tigon.tools import environment
from tigon.tools.bench.cases import OPS
from tigon.tools.bench.measure import Roofline
from tigon.tools.bench.runner import Row

__all__ = [
    "describe_machine",
    "legend",
    "markdown",
    "markdown_table",
    "number",
    "summary_table",
    "terminal_table",
    "versions",
    "write_json",
]

PEERS = ("cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")  # the last changes what Liger runs

_LEGEND = (
    "Forward + backward, medians. Kernel ms: GPU kernels summed; host ms: until the call returns; wall ms: until the "
    "device is done; peak MiB: above the inputs; % roofline: floor / time (more than 100 where more is read than "
    "written: a copy does both alike); error: |x - exact| / |exact| of the worst output or gradient, in brackets "
    "eager's of the same."
)
_PRODUCTS_LEGEND = (
    " x products: time over that of the bare products of the valid rows in the same run; peak MiB above gradients: "
    "less the gradients themselves; error x eager: the same error over eager's, of the loss, dX and dW each; no_grad: "
    "forward alone."
)


def legend(products: bool) -> str:
    """What the columns mean; `products`: also where matrix products are the bound."""
    return _LEGEND + _PRODUCTS_LEGEND * products


def versions() -> dict[str, str]:
    """Versions of what can bear on a number."""
    found = environment.versions() | {"torch": torch.__version__}  # torch's own has the build, as in 2.11.0+cu130
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def describe_machine(device: torch.device) -> dict[str, object]:
    """The device that was measured, by name and by the properties that numbers depend on."""
    if device.type != "cuda":
        return {
            "type": "cpu",
            "name": environment.cpu_name(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        "runtime": f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}",
    }


def write_json(path: Path, rows: Iterable[Row], roofline: Roofline, machine: dict, settings: dict) -> None:
    """Everything, every sample included."""
    document = {
        "schema": 1,
        "versions": versions(),
        "machine": machine,
        "roofline": {
            "bytes_per_second": roofline.bytes_per_second,
            "flops_per_second": roofline.flops_per_second,
        },
        "settings": settings,
        "rows": [row.as_dict() for row in rows],
    }
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


# --- tables --------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three or more significant digits, without an exponent where one can read it."""
    if value is None:
        return "-"
    for limit, digits in ((1, 4), (10, 3), (100, 2), (1000, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def _percent(row: Row) -> str:
    return "-" if row.percent_of_roofline is None else f"{row.percent_of_roofline:.0f}"


def _error(row: Row) -> str:
    return "-" if row.error is None or row.eager_error is None else f"{row.error:.1e} ({row.eager_error:.1e})"


def _times_products(row: Row) -> str:
    return "" if row.products_ratio is None else f"{row.products_ratio:.3f}"


def _above_gradients(row: Row) -> str:
    return "" if row.peak_above_gradients_mib is None else number(row.peak_above_gradients_mib)


def _error_ratios(row: Row) -> str:
    names = ("output 0", "gradient of input", "gradient of linear_weight")
    ratios = [row.errors.get(name, {}).get("ratio") for name in names]
    return ", ".join("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios) if row.errors else ""


def _note(row: Row) -> str:
    parts = [] if row.status == "ok" else [row.status]
    parts += [row.note] if row.note else []
    parts += ["kernel time from events"] if row.kernel_source == "events" else []
    return ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


# Title, and the text of a cell.
Column = tuple[str, Callable[[Row], str]]
_TIMES: tuple[Column, ...] = (
    ("kernel ms", lambda row: number(row.kernel_ms)),
    ("wall ms", lambda row: number(row.wall_ms)),
    ("host ms", lambda row: number(row.host_ms)),
)
_MEMORY: Column = ("peak MiB", lambda row: number(row.peak_mib))
_ROOFLINE: Column = ("% roofline", _percent)
_ERROR: Column = ("error (eager's)", _error)
_NOTE: Column = ("note", _note)
# Where matrix products are the bound.
_TIMES_PRODUCTS: Column = ("x products", _times_products)
_ABOVE_GRADIENTS: Column = ("peak MiB above gradients", _above_gradients)
_ERROR_RATIOS: Column = ("error x eager: loss, dX, dW", _error_ratios)


def _columns(rows: list[Row]) -> tuple[Column, ...]:
    """Of a table of one case."""
    times = _TIMES if any(row.kernel_ms is not None for row in rows) else _TIMES[1:2]
    if not rows[0].flops:
        return (*times, _MEMORY, _ROOFLINE, _ERROR, _NOTE)
    return (*times, _TIMES_PRODUCTS, _MEMORY, _ABOVE_GRADIENTS, _ROOFLINE, _ERROR, _ERROR_RATIOS, _NOTE)


def _title(row: Row) -> str:
    bound = "memory" if row.bytes else "products"
    work = f"{row.bytes / 1e9:.3g} GB" if row.bytes else f"{row.flops / 1e12:.3g} TFLOP"
    return f"{row.case} ({OPS[row.op].legend}, {row.dtype}): floor {number(row.floor_ms)} ms by {bound}, {work}"


def _by_case(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    return ((case, list(group)) for case, group in groupby(rows, key=lambda row: row.case))


# --- summary -------------------------------------------------------------------------------------


def _faster(than: Row | None, ours: Row) -> str:
    return f"{than.time_ms / ours.time_ms:.2f}x" if than and than.time_ms and ours.time_ms else "-"


def _best(group: list[Row]) -> Row | None:
    peers = [row for row in group if row.is_peer and row.status == "ok" and row.time_ms]
    return min(peers, key=lambda row: row.time_ms, default=None)


def _named(group: list[Row], name: str) -> Row | None:
    return next((row for row in group if row.provider == name and row.status == "ok"), None)


def _summary(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells: Tigon in a line a case; columns with nothing in them are left out."""
    other = next((row.provider for row in rows if row.provider.startswith("tigon@")), "")
    titles = ["case", "tigon ms", "% roofline", "best peer", "its ms", "speed-up", "liger ms", "speed-up over liger"]
    titles += ["host ms (liger's)", f"{other} ms", f"speed-up over {other}"]
    titles += [title for title, _ in (_TIMES_PRODUCTS, _ABOVE_GRADIENTS, _ERROR_RATIOS)]
    lines = []
    for case, group in _by_case(rows):
        ours = next((row for row in group if row.provider == "tigon"), None)
        if ours is None:
            continue
        best, liger, before = _best(group), _named(group, "liger"), _named(group, other)
        time = lambda row: number(row.time_ms if row else None)
        lines.append([
            case, time(ours) if ours.status == "ok" else ours.status, _percent(ours),
            "-" if best is None else best.provider + (" (inaccurate)" if best.accurate is False else ""),
            time(best), _faster(best, ours), time(liger), _faster(liger, ours),
            "-" if ours.host_ms is None else f"{number(ours.host_ms)} ({number(liger.host_ms if liger else None)})",
            time(before), _faster(before, ours),
            *(cell(ours) or "-" for _, cell in (_TIMES_PRODUCTS, _ABOVE_GRADIENTS, _ERROR_RATIOS)),
        ])  # fmt: skip
    used = [i for i in range(len(titles)) if any(line[i] != "-" for line in lines)]
    return [titles[i] for i in used], [[line[i] for i in used] for line in lines]


def summary_table(rows: list[Row]) -> Table:
    """The summary for the terminal, which is not as wide as a page."""
    titles, lines = _summary(rows)
    if _ERROR_RATIOS[0] in titles:
        titles, lines = titles[:-1], [line[:-1] for line in lines]
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, title="Summary", title_justify="left")
    for title in titles:
        table.add_column(title, justify="left" if title in ("case", "best peer") else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def markdown_table(titles: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[str]) -> list[str]:
    """Lines of a Markdown table; the columns titled `left` are aligned so, the others to the right."""
    rule = "|".join("---" if title in left else "---:" for title in titles)
    rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return [f"| {' | '.join(titles)} |", f"|{rule}|", *(f"| {row} |" for row in rows)]


# --- the report ----------------------------------------------------------------------------------


def markdown(rows: list[Row], roofline: Roofline, machine: dict, settings: dict) -> str:
    """The report as Markdown: the machine, a summary, then one table a case."""
    against = settings.get("against")
    lines = [
        "# tigon bench",
        "",
        f"{machine['name']}; " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        f"Roofline measured first: {roofline.bytes_per_second / 1e9:,.0f} GB/s (copy, read + written), "
        f"{roofline.flops_per_second / 1e12:.3g} TFLOP/s (bf16 product).",
        "",
    ]
    if against:
        lines += [f"{against['provider']} is {against['commit'][:12]} ({against['title']}).", ""]
    titles, cells = _summary(rows)
    if cells:
        lines += ["## Summary", "", *markdown_table(titles, cells, ("case", "best peer")), ""]
    lines += ["## Cases", "", legend(any(row.flops for row in rows))]
    for _, group in _by_case(rows):
        columns = _columns(group)
        titles = ["provider", *(title for title, _ in columns)]
        cells = [[row.provider, *(cell(row) for _, cell in columns)] for row in group]
        lines += ["", f"### {_title(group[0])}", "", *markdown_table(titles, cells, ("provider", "note"))]
    return "\n".join(lines) + "\n"


def terminal_table(rows: list[Row]) -> Group:
    """One case's rows for the terminal, and under them what is to be said of each."""
    columns = _columns(rows)[:-1]  # notes are long: they stand below
    measured = [row for row in rows if row.status == "ok"]
    best = min((row.time_ms for row in measured if row.time_ms and row.provider != "products"), default=None)
    table = Table("provider", box=box.SIMPLE, show_edge=False, pad_edge=False)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in measured:
        style = "bold green" if row.time_ms == best and row.provider != "products" else ""
        table.add_row(row.provider, *(cell(row) for _, cell in columns), style=style)
    notes = [(row, f"{row.provider}: {_note(row)}") for row in rows if _note(row)]
    return Group(
        Text(_title(rows[0]), style="bold"),
        table,
        *(Text(note, style="bold red" if row.failed else "dim") for row, note in notes),
        "",
    )
