"""Use Tigon inside other frameworks. There is one file for each framework, which is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tigon.integrations import deepspeed, experts, liger, trainer, trl

__all__ = ["deepspeed", "experts", "liger", "trainer", "trl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"tigon.integrations.{name}")
    raise AttributeError(f"module 'tigon.integrations' has no attribute {name!r}")
