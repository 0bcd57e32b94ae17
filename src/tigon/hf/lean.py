"""`tigon.patch(model, memory="lean")`: the model's forward runs in `tigon.lean()`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.memory import lean
from tigon.recognition.replacement import find_replacement, foreign_forward, install

__all__ = ["LeanForward", "make_lean", "refusal"]


@dataclass(frozen=True, eq=False)
class LeanForward:
    """Recipe for a model's forward: that of its class, or of another recipe, in a block of `lean`."""

    inner: Callable | None = None

    def __call__(self, model: nn.Module, *args, **kwargs) -> Any:
        with lean():
            return (self.inner or type(model).forward)(model, *args, **kwargs)


def refusal(model: nn.Module) -> str | None:
    """Why a model's forward cannot run in a block of `lean`, or None."""
    try:
        with lean():
            return None if find_replacement(model) else foreign_forward(model)
    except RuntimeError as error:  # this torch, or saved-tensor hooks that are forbidden here
        return str(error)


def make_lean(model: nn.Module) -> Callable[[], None]:
    """Let the model's forward, which may be replaced already, run in `lean`; returns the function that undoes it."""
    replaced = find_replacement(model)
    if replaced is None:
        return install(model, LeanForward())
    before = replaced.recipe
    if isinstance(before, LeanForward):
        return lambda: None
    replaced.recipe = recipe = LeanForward(before)

    def undo() -> None:
        if replaced.recipe is recipe:
            replaced.recipe = before

    return undo
