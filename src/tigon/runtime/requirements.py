"""The oldest version of each package that Tigon works with, and the refusal of older ones.

`pyproject.toml` states the same versions (`tests/runtime/test_requirements.py` compares the two), but pip can be told
to ignore them, and another package can install an older version later. The errors then appear far from their cause: an
optimizer step raises `TypeError`, a kernel does not compile, or experts of a mixture stay stock without a message.
"""

import importlib
import importlib.util
import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

FLOORS = {
    # 2.7 has no `_top_saved_tensors_default_hooks`, which `tigon.lean` reads. In 2.6 `AdamW._init_group` takes other
    # arguments.
    "torch": "2.8",
    # torch 2.8 requires 3.4. Triton 3.3 has no `triton.knobs`, and its interpreter and compiler fail on the kernels.
    "triton": "3.4",
    # Up to 5.2 the experts of Mixtral stay stock, up to 5.12 those of GraniteMoe, and the report of `tigon.patch` does
    # not say so.
    "transformers": "5.13",
    # Since 1.14, FSDP2 shards the embedding as one unit and the last norm with the head as another one. `tigon plan`
    # counts these units.
    "accelerate": "1.14",
    # 0.45.0 cannot be imported together with triton 3.4.
    "bitsandbytes": "0.45.5",
    "matplotlib": "3.8.4",
    "numpy": "1.26",
    "peft": "0.19.1",
    # 5.9.3 has no wheel for Python 3.11.
    "psutil": "5.9.4",
    "rich": "13",
    # tokenizers 0.22.0 and transformers 5.13 exclude each other's huggingface_hub.
    "tokenizers": "0.22.1",
    # `tigon.integrations.trl` replaces functions of this release.
    "trl": "1.16",
    # 0.15 raises TypeError with click 8.2.
    "typer": "0.19.2",
}


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. A nightly build counts as its release: "2.8.0a0+git1234" gives (2, 8, 0).

    >>> _release("3.8.4.post1")
    (3, 8, 4)
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def _installed_version(package: str) -> str | None:
    """Return the version of a package that can be imported, "" if it does not state one, or None if there is none."""
    module = sys.modules.get(package)
    if module is None and importlib.util.find_spec(package) is None:
        return None
    # An imported module states its version itself, and several distributions hold triton under other names.
    if version := getattr(module, "__version__", None):
        return version
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(importlib.import_module(package), "__version__", "")


def install_command(extra: str) -> str:
    """Return the command that installs Tigon with an extra from a checkout, because Tigon is not on a package index.

    >>> install_command("trl")
    "pip install '.[trl]' in a checkout of Tigon"
    """
    return f"pip install '.[{extra}]' in a checkout of Tigon"


def unmet(*packages: str, extra: str | None = None) -> str:
    """Return which packages of `FLOORS` are missing or too old and how to install them, or "" if none is.

    The text follows a subject: "needs typer 0.19.2 or later (0.12.5 is installed): pip install '.[cli]' in a checkout
    of Tigon". Without an extra of Tigon, it names the packages.
    """
    phrases, targets = [], []
    for package in packages:
        version, floor = _installed_version(package), FLOORS[package]
        if version is None:
            phrases.append(package)
        elif version and _release(version) < _release(floor):
            phrases.append(f"{package} {floor} or later ({version} is installed)")
        else:
            continue
        targets.append(f"'{package}>={floor}'")
    if not phrases:
        return ""
    command = install_command(extra) if extra else f"pip install {' '.join(targets)}"
    return f"needs {', '.join(phrases)}: {command}"


def needs_triton() -> bool:
    """Return True on Linux, and wherever Triton is installed. Elsewhere every op runs its reference in torch."""
    return sys.platform == "linux" or _installed_version("triton") is not None


def require(user: str, *packages: str, extra: str | None = None) -> None:
    """Check that packages are installed in versions that Tigon works with."""
    if message := unmet(*packages, extra=extra):
        raise ImportError(f"{user} {message}")


def require_for(modules: "Collection[nn.Module]") -> None:
    """Check the version of transformers, importing nothing, if a class of these modules comes from there."""
    if any(cls.__module__.partition(".")[0] == "transformers" for m in modules for cls in type(m).__mro__):
        require(f"tigon.patch({type(next(iter(modules))).__name__})", "transformers", extra="hf")
