"""The parts that both benchmarks write into their reports: the machine, the versions, JSON and the head of a page.

A JSON report is one object with schema, command, versions, machine (type "cpu" or "cuda", name, runs_kernels, and the
properties that matter), settings, and rows. A value that was not measured is null.
"""

import contextlib
import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from tigon.cli import environment
from tigon.cli.output import write_json
from tigon.runtime.device import runs_kernels

# The last package decides which kernels Liger runs.
PEERS = ("unsloth", "cut-cross-entropy", "fla-core", "quack-kernels", "nvidia-cutlass-dsl")
NO_KERNELS = " (no kernels run here: the rows of Tigon measure its references in torch)"


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a result."""
    # torch's own version has the build, as in 2.11.0+cu130.
    package_versions = environment.versions() | {"torch": torch.__version__}
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package_versions[package] = importlib.metadata.version(package)
    return package_versions


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the name of the device and the properties on which the results depend.

    The name is in the title of each table and picture, so it says if no kernels run on the device.
    """
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
    """Write all numbers of a run as JSON."""
    document = {"schema": 2, "command": command(), "versions": versions(), "machine": machine, "settings": settings}
    write_json(path, document | content)


def page_head(title: str, machine: dict[str, Any]) -> list[str]:
    """Return the first lines of a page in Markdown: the command, the machine and the versions."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [f"<!-- {command()} -->", f"# {title}", "", f"{machine['name']}; {packages}", ""]
