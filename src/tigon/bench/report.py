"""What a run leaves behind: JSON with everything, a Markdown table, and a table for the terminal."""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tigon import environment
from tigon.bench.cases import OPS
from tigon.bench.measure import Roofline
from tigon.bench.runner import Row

__all__ = ["LEGEND", "describe_machine", "markdown", "number", "terminal_table", "versions", "write_json"]

PEERS = ("cut-cross-entropy", "nvidia-cutlass-dsl")  # the second changes what Liger runs


LEGEND = (
    "Forward + backward, medians. Kernel ms: GPU kernels summed; host ms: until the call returns; wall ms: until the "
    "device is done; peak MiB: above the inputs; % roofline: floor / time (more than 100 where more is read than "
    "written: a copy does both alike); error: |x - exact| / |exact| of the worst output or gradient, in brackets "
    "eager's of the same."
)


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


def _error(row: Row) -> str:
    return "-" if row.error is None or row.eager_error is None else f"{row.error:.1e} ({row.eager_error:.1e})"


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
_REST: tuple[Column, ...] = (
    ("peak MiB", lambda row: number(row.peak_mib)),
    ("% roofline", lambda row: "-" if row.percent_of_roofline is None else f"{row.percent_of_roofline:.0f}"),
    ("error (eager's)", _error),
    ("note", _note),
)


def _columns(rows: list[Row]) -> tuple[Column, ...]:
    on_gpu = any(row.kernel_ms is not None for row in rows)
    return (*(_TIMES if on_gpu else _TIMES[1:2]), *_REST)


def _title(row: Row) -> str:
    bound = "memory" if row.bytes else "products"
    work = f"{row.bytes / 1e9:.3g} GB" if row.bytes else f"{row.flops / 1e12:.3g} TFLOP"
    return f"{row.case} ({OPS[row.op].legend}, {row.dtype}): floor {number(row.floor_ms)} ms by {bound}, {work}"


def _by_case(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    return ((case, list(group)) for case, group in groupby(rows, key=lambda row: row.case))


def markdown(rows: list[Row], roofline: Roofline, machine: dict) -> str:
    """The report as Markdown: the machine, then one table a case."""
    columns = _columns(rows)
    lines = [
        "# tigon bench",
        "",
        f"{machine['name']}; " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        f"Roofline measured first: {roofline.bytes_per_second / 1e9:,.0f} GB/s (copy, read + written), "
        f"{roofline.flops_per_second / 1e12:.3g} TFLOP/s (bf16 product).",
        "",
        LEGEND,
    ]
    for _, group in _by_case(rows):
        lines += ["", f"## {_title(group[0])}", ""]
        lines += ["| provider | " + " | ".join(title for title, _ in columns) + " |"]
        lines += ["|---|" + "---:|" * (len(columns) - 1) + "---|"]
        for row in group:
            cells = [cell(row).replace("|", "\\|") for _, cell in columns]
            lines.append(f"| {row.provider} | " + " | ".join(cells) + " |")
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
