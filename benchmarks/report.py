"""The parts that both benchmarks write into their reports: the machine, the versions, JSON, tables and heads of pages.

A JSON report is one object with schema, command, versions, machine (type "cpu" or "cuda", name, runs_kernels, and the
properties that matter), settings, and rows. A value that was not measured is null.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from tigon.cli import environment
from tigon.cli.output import write_json
from tigon.runtime.device import runs_kernels

# The last package decides which kernels Liger runs.
PEERS = ("unsloth", "cut-cross-entropy", "fla-core", "causal-conv1d", "quack-kernels", "nvidia-cutlass-dsl")
NO_KERNELS = " (no kernels run here: the rows of Tigon measure its references in torch)"


def versions() -> dict[str, str]:
    # torch's own version has the build, as in 2.11.0+cu130.
    package_versions = environment.versions() | {"torch": torch.__version__}
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package_versions[package] = importlib.metadata.version(package)
    return package_versions


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the name of the device and the properties on which the results depend. The name is in the title of each
    table and picture, so it says if no kernels run on the device."""
    has_kernels = runs_kernels(torch.empty(1, device=device))
    facts: dict[str, Any] = {"type": device.type, "runs_kernels": has_kernels}
    note = "" if has_kernels else NO_KERNELS
    if device.type != "cuda":
        name, threads = environment.cpu_name(), torch.get_num_threads()
        return facts | {"name": name + note, "threads": threads, "system": platform.system()}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name + note,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        "runtime": f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}",
    }


def command() -> str:
    """Return the command that repeats this run."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def write(path: Path, machine: dict[str, Any], settings: dict[str, Any], **content: Any) -> None:
    document = {"schema": 2, "command": command(), "versions": versions(), "machine": machine, "settings": settings}
    write_json(path, document | content)


def page_head(title: str, machine: dict[str, Any]) -> list[str]:
    """Return the first lines of a page in Markdown: the command, the machine and the versions."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [f"<!-- {command()} -->", f"# {title}", "", f"{machine['name']}; {packages}", ""]


# A column is its title and the function that returns the text of a cell, "-" or "" without a value.
Column = tuple[str, Callable[[Any], str]]
# The columns that are aligned to the left.
LEFT = ("provider", "case", "best peer", "note", "within")
# Titles, cells, and the titles of the columns that are aligned to the left.
Table = tuple[list[str], list[list[str]], tuple[str, ...]]


def make_table(columns: Sequence[Column], rows: Iterable[Any]) -> Table:
    """Return the table of some rows, without the columns in which no row has a value.

    >>> make_table([("provider", str), ("length", len), ("note", lambda row: "")], ["stock", "tigon"])[0]
    ['provider', 'length']
    """
    lines = [[text(row) for _, text in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] not in ("-", "") for line in lines)]
    return [columns[i][0] for i in used], [[line[i] for i in used] for line in lines], LEFT


def markdown_table(titles: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table. The columns in `left` are aligned to the left, the others to the right."""
    rule = "|".join("---" if title in left else "---:" for title in titles)
    rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return [f"| {' | '.join(titles)} |", f"|{rule}|", *(f"| {row} |" for row in rows)]


def make_folder(out: Path | None, prefix: str) -> Path:
    """Create the folder for results, `out` or a new one with the name `runs/<prefix><time>`, and return it."""
    stem = prefix + time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        for number in itertools.count(1):
            folder = out or Path("runs", stem if number == 1 else f"{stem}_{number}")
            if out is not None or not folder.exists():
                break
        folder.mkdir(parents=True, exist_ok=True)
        # Create a file without a name, because os.access allows root everything.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        message = f"must be a folder that can be written, got {str(out or folder)!r} ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--out") from error


def takes_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Let typer read the options of a command from the fields of its only argument, a dataclass."""
    (argument,) = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        command(argument.annotation(**values))

    expanded.__annotations__ = {}
    expanded.__signature__ = inspect.signature(argument.annotation)  # type: ignore[attr-defined]
    return expanded
