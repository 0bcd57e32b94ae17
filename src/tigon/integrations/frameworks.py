"""What the integrations share: the check of a framework's version, and the patch of its model with the report."""

import logging
import warnings
from importlib import metadata
from typing import Any

from torch import nn

from tigon.hf.patch import MEMORY, OPTIONS, patch
from tigon.hf.report import Report

__all__ = ["check_options", "is_known_version", "patch_model"]

LOGGER = logging.getLogger("tigon")

# Other packages that replace the forwards of models. Their names begin the module that contains such a forward.
KERNEL_LIBRARIES = {"liger_kernel": "Liger Kernel", "unsloth": "Unsloth", "kernels": "kernels"}

# The warnings of `is_known_version` that were given in this process.
_warned: set[str] = set()


def is_known_version(package: str, tested: str, feature: str) -> bool:
    """Return whether the installed release of a package has the minor version that an integration was written for.

    If it has another one, warn once that the feature is off, and name both versions.

    Args:
        package: The name of the distribution, such as "ms-swift".
        tested: The version whose code was read, such as "4.6.0".
        feature: What is off with another version, as a subject: "the callback 'tigon'".
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    if version.split(".")[:2] == tested.split(".")[:2]:
        return True
    installed = f"{package} {version} is installed" if version else f"{package} is not installed"
    message = f"tigon: {feature} is off: it was written for {package} {tested}, but {installed}"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
    return False


def check_options(op: str, memory: Any, options: dict[str, Any]) -> None:
    """Refuse an unknown memory level and unknown or wrong options of `tigon.patch`.

    Raises:
        TypeError: An option is unknown, or its value is not a bool.
        ValueError: `memory` is no level.
    """
    if not isinstance(memory, str) or memory not in MEMORY:
        raise ValueError(f"{op}: memory must be one of {', '.join(map(repr, MEMORY))}, got {memory!r}")
    parts = [name for name in OPTIONS if name != "memory"]
    for name, value in options.items():
        if name not in parts:
            raise TypeError(f"{op}: unknown option {name!r}; choose from {', '.join([*parts, 'memory'])}")
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def patch_model(model: nn.Module, memory: Any, options: dict[str, Any]) -> Report:
    """Patch a model, log the report, and warn if another kernel library has replaced some of its forwards."""
    report = patch(model, memory=memory, **options)
    LOGGER.info("%s", report)
    for package, name in KERNEL_LIBRARIES.items():
        entries = [entry for entry in report.left_alone if f"already replaced (by {package}" in entry.detail]
        if entries:
            classes = ", ".join(sorted({entry.module for entry in entries}))
            warnings.warn(
                f"tigon: {name} has replaced the forward of {classes} before tigon.patch, so these modules run on "
                f"{name}; switch {name} off in the trainer's configuration to run them on Tigon",
                stacklevel=3,
            )
    return report
