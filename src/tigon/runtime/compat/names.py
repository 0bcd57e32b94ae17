"""Names that this torch may lack, and the features that refuse to run without them."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

missing: dict[str, str] = {}


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises a RuntimeError about the missing name."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(missing[name])

    return refuse


def find(path: str, default: Any = None) -> Any:
    """Return `torch.<path>`. If this torch has none, record its name for `require_names` and return the default.
    Without a default, the result is a function that raises a RuntimeError which names the missing function."""
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    if value is not None:
        return value
    missing[path] = (
        f"torch {torch.__version__} has no torch.{path}, which Tigon needs here; "
        "docs/compatibility.md lists the versions that work"
    )
    return _refusal(path) if default is None else default


# The names without which a feature refuses to run; see `require_names`.
NAMES_FOR_LEAN = "_C._autograd._top_saved_tensors_default_hooks", "UntypedStorage._cdata"
NAMES_FOR_OFFLOAD = ("_C._current_graph_task_id",)
NAMES_FOR_LOSS = (
    "_C._are_functorch_transforms_active",
    "autograd.forward_ad._current_level",
    "_C.DisableTorchFunctionSubclass",
)
NAMES_FOR_PLAN = "_C.DisableTorchFunction", "autograd.graph._engine_run_backward", "UntypedStorage._cdata"


def require_names(user: str, *paths: str) -> None:
    """Refuse a feature, before it computes anything, if this torch lacks one of the names that the feature needs."""
    for path in paths:
        if path in missing:
            raise RuntimeError(f"{user}: {missing[path]}")
