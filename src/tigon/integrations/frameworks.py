"""The code that integrations share: checks of versions, the patch of a model and its report, replaced functions."""

import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import Tensor, nn

from tigon.hf.patch import OPTIONS, patch
from tigon.hf.report import Report
from tigon.memory.levels import check_memory
from tigon.ops.logits.cross_entropy import cross_entropy
from tigon.runtime.requirements import require_for

__all__ = ["check_options", "is_known_version", "patch_model", "replace_function", "token_losses"]

LOGGER = logging.getLogger("tigon")

# Other packages that replace the forwards of models. Their names begin the module that contains such a forward.
KERNEL_LIBRARIES = {"liger_kernel": "Liger Kernel", "unsloth": "Unsloth", "kernels": "kernels", "axolotl": "axolotl"}

# The warnings of `_warn_once` that were given in this process.
_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def is_known_version(package: str, tested: str, feature: str) -> bool:
    """Return whether the installed release of a package has the minor version that an integration was written for.

    If it has another one, warn once that the feature is off, and name both versions.

    Args:
        package: The name of the distribution, such as "deepspeed".
        tested: The version whose code was read, such as "0.19.8".
        feature: What is off with another version, as a subject: "the loss of DeepSpeed".
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    if version.split(".")[:2] == tested.split(".")[:2]:
        return True
    installed = f"{package} {version} is installed" if version else f"{package} is not installed"
    _warn_once(f"tigon: {feature} is off: it was written for {package} {tested}, but {installed}")
    return False


def check_options(op: str, memory: Any, options: dict[str, Any]) -> None:
    """Refuse an unknown memory level and unknown or wrong options of `tigon.patch`.

    Raises:
        TypeError: An option is unknown, or its value is not a bool.
        ValueError: `memory` is no level.
    """
    check_memory(op, memory)
    parts = [name for name in OPTIONS if name != "memory"]
    for name, value in options.items():
        if name not in parts:
            raise TypeError(f"{op}: unknown option {name!r}; choose from {', '.join([*parts, 'memory'])}")
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def patch_model(model: nn.Module, memory: Any, options: dict[str, Any]) -> Report | None:
    """Patch a model, log the report, and warn if another kernel library has replaced some of its forwards.

    Returns:
        The report, or None if transformers is older than what `tigon.patch` needs. A warning then names both versions,
        and the model is trained as it is.
    """
    try:
        require_for(model)
    except ImportError as error:
        _warn_once(f"tigon: the model is trained without Tigon: {error}")
        return None
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


def replace_function(name: str, owners: tuple[str, ...], wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function of a framework in the modules that hold it under its name.

    A second call changes nothing. Modules that are not imported yet import the function from the first one.

    Args:
        name: The name of the function.
        owners: The modules. The first one is imported, the others are skipped if they are not imported yet.
        wrap: Takes the function and returns its replacement.

    Returns:
        A function that puts the framework's function back.
    """
    original = getattr(importlib.import_module(owners[0]), name)
    if hasattr(original, "is_tigon"):
        return lambda: None
    replacement = wrap(original)
    vars(replacement)["is_tigon"] = True

    def exchange(old: Any, new: Any) -> None:
        for owner in owners:
            module = sys.modules.get(owner)
            if module is not None and getattr(module, name, None) is old:
                setattr(module, name, new)

    exchange(original, replacement)
    return lambda: exchange(replacement, original)


def token_losses(logits: Tensor, target: Tensor, ignore_index: int, group: Any) -> Tensor:
    """Return the losses [...] in fp32 of logits [..., V_p] and targets [...].

    Args:
        logits: V_p columns of this rank. Every rank of the group has equally many.
        target: Class indices of the whole vocabulary.
        ignore_index: Targets of this value have loss zero.
        group: The ranks that share the vocabulary, or None if this rank has all columns.
    """
    ranks = 1 if group is None else group.size()
    sharding: dict[str, Any] = {"process_group": group, "vocab_size": ranks * logits.shape[-1]} if ranks > 1 else {}
    losses = cross_entropy(logits, target, ignore_index=ignore_index, reduction="none", **sharding)
    assert isinstance(losses, Tensor)
    return losses
