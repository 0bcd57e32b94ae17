"""Warn once if a model no longer runs the forward that `tigon.patch` gave it.

A trainer may replace the forward of a causal language model after the patch. TRL's trainer assigns a function that
calls the model's body and computes the loss itself. Norms, MLPs and attention layers then stay patched, but the loss in
the head and the block of `tigon.lean` around the model are not used. The results do not show this. Therefore the body
of a patched model checks at each call that the model still has the forward that `tigon.patch` installed.
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.recognition.replacement import Replacement, exchange, find_replacement, foreign_forward, install
from tigon.runtime.stock import written_in

__all__ = ["watch_forward"]


def _leads_to_replacement(function: Any) -> bool:
    """Return whether a forward is a replacement or wraps one. accelerate wraps and binds forwards."""
    for _ in range(8):
        if isinstance(function, Replacement) or hasattr(function, "is_replacement"):
            return True
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
    return False


class WatchedBody:
    """Recipe for the body of a model: it checks the forward of the model, then runs the body's earlier forward."""

    def __init__(self, model: nn.Module | None, lost_features: str, inner: Callable | None) -> None:
        # A copy of the body does not know its model, so it checks nothing.
        self.model: weakref.ref[nn.Module] | None = None if model is None else weakref.ref(model)
        self.lost_features, self.inner = lost_features, inner

    def __reduce__(self) -> tuple:
        return WatchedBody, (None, self.lost_features, self.inner)

    def __call__(self, body: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.model is not None and not torch.compiler.is_compiling():
            self.check_model(self.model())
        return (self.inner or type(body).forward)(body, *args, **kwargs)

    def check_model(self, model: nn.Module | None) -> None:
        """Warn once if the model has another forward. None stands for a model that was deleted."""
        if model is None:
            self.model = None
            return
        forward = vars(model).get("forward")
        if find_replacement(model) is not None or _leads_to_replacement(forward):
            return
        self.model = None
        name = type(model).__name__
        origin = f"by {written_in(forward)}" if forward is not None else "by the forward of its class"
        warnings.warn(
            f"tigon: the forward of {name} was replaced ({origin}) after tigon.patch, so {self.lost_features} not "
            "used; norms, MLPs and attention layers stay patched",
            stacklevel=4,
        )


def watch_forward(model: nn.Module, lost_features: str) -> Callable[[], None]:
    """Let the body of a patched model check that the model's forward stays installed; return a function to undo this.

    `lost_features` names what only this forward does, as the subject and the verb of a clause: "the loss in its head
    is". The warning continues it with "not used".
    """
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or body is model or find_replacement(model) is None:
        return lambda: None
    replacement = find_replacement(body)
    if replacement is not None:
        return exchange(replacement, WatchedBody(model, lost_features, replacement.recipe))
    return (lambda: None) if foreign_forward(body) else install(body, WatchedBody(model, lost_features, None))
