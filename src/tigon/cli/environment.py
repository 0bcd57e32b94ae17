"""Versions and devices of this machine, for bug reports and for the results of measurements."""

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import tigon
from tigon.runtime import cublaslt
from tigon.runtime.launch import launch_method

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "accelerate", "peft", "trl", "liger-kernel")


def versions() -> dict[str, str]:
    """Return the versions of Python, of Tigon, and of those packages in `_PACKAGES` that are installed."""
    numbers = {"python": platform.python_version(), "tigon": tigon.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if it has no name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerators() -> dict[str, str]:
    """Return the CUDA or HIP version of torch and the GPUs."""
    toolkit = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return {"gpu": f"none (torch is built for {'the CPU' if toolkit.endswith('None') else toolkit})"}
    facts = {"toolkit": toolkit}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = (
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.multi_processor_count} multiprocessors, "
            f"capability {device.major}.{device.minor}"
        )
    return facts


def environment() -> dict[str, str]:
    """Return versions, devices and settings, in the order of a bug report."""
    facts = {**versions(), "platform": platform.platform(), "cpu": f"{cpu_name()}, {cpu_count()} cores"}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    facts.update(_accelerators())
    facts |= {"launches": launch_method(runs_self_checks=True), "cuBLASLt": cublaslt.state()}
    for name in ("TIGON_CUBLASLT", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        if name in os.environ:
            facts[name] = os.environ[name]
    return facts
