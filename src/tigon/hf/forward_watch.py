"""Warn once if a patched model trains without the loss that `tigon.patch` has put into its head.

A trainer may replace the forward of a causal language model after the patch. The trainers of TRL assign a function that
calls the body of the model and computes the loss itself. Norms, MLPs and attention layers then stay patched, and the
body keeps its memory level, but the loss in the head is not used. The results do not show this. Therefore the body of a
patched model checks at each call in training that the patched forward of its model is running, or is still assigned to
the model.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from tigon.hf.positions import NumberingForward
from tigon.recognition.replacement import (
    Replacement,
    exchange,
    find_replacement,
    foreign_forward,
    install,
    wrapped_functions,
)
from tigon.runtime.stock import written_in


class ForwardState(Protocol):
    """The part of `FusedLoss` that shows whether the patched forward of the model is running in this thread."""

    is_running: bool


def describe_bypass(what: str, model: nn.Module, origin: str) -> str:
    """Return the sentence that says what replaced a part of a patched model, what is off, and what to call.

    Args:
        what: The part that was replaced, such as "the forward".
        model: The model.
        origin: The Python module that contains the new code; "" if the part is the one of the model's class again.
    """
    if origin.partition(".")[0] == "trl":
        advice = "call tigon.integrations.trl.enable() before the trainer is built"
    else:
        advice = "let the new code call the one that it replaces, or compute its loss by tigon.linear_cross_entropy"
    code = f"by {origin}" if origin else f"by {what} of its class"
    return (
        f"{what} of {type(model).__name__} was replaced ({code}) after tigon.patch, so the loss in its head is not "
        f"used; norms, MLPs, attention layers and the memory level stay as patched; {advice}"
    )


class WatchedBody:
    """Recipe for the body of a model: it checks the forward of the model, then runs the body's earlier forward."""

    def __init__(
        self, model: nn.Module | None, state: ForwardState | None, notes: list[str], inner: Callable | None
    ) -> None:
        # A copy of the body does not know its model, so it checks nothing.
        self.model: weakref.ref[nn.Module] | None = None if model is None else weakref.ref(model)
        # The notes of the report, to which the warning is added.
        self.state, self.notes, self.inner = state, notes, inner
        # The forward of the body's class. The first call sets it.
        self.numbering: NumberingForward | None = None

    def __reduce__(self) -> tuple:
        return WatchedBody, (None, None, [], self.inner)

    def __call__(self, body: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.model is not None and not torch.compiler.is_compiling() and body.training and torch.is_grad_enabled():
            self.check_model(self.model())
        return (self.inner or self.find_forward(body, args, kwargs))(body, *args, **kwargs)

    def find_forward(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Callable:
        """Return the forward of the body's class, or a variant that computes the same for these arguments."""
        stock = type(body).forward
        if torch.compiler.is_compiling():
            return stock
        if self.numbering is None or self.numbering.stock is not stock:
            self.numbering = NumberingForward(stock)
        return self.numbering.for_call(body, args, kwargs)

    def check_model(self, model: nn.Module | None) -> None:
        """Warn once if the model has another forward. None stands for a model that was deleted."""
        if model is None:
            self.model = None
            return
        forward = vars(model).get("forward")
        is_running = self.state is not None and self.state.is_running
        if isinstance(forward, Replacement) or is_running:
            return
        # Tigon's integration of TRL sets this attribute on its forward, and wrappers of accelerate copy it.
        if find_replacement(model) is not None or any(hasattr(f, "is_replacement") for f in wrapped_functions(forward)):
            return
        self.model = None
        message = describe_bypass("the forward", model, "" if forward is None else written_in(forward))
        self.notes.append(message)
        warnings.warn(f"tigon: {message}", stacklevel=4)


def watch_forward(model: nn.Module, state: ForwardState, notes: list[str]) -> Callable[[], None]:
    """Let the body of a patched model check that the model's forward stays in use; return a function to undo this.

    Args:
        model: A model whose loss is computed in its head.
        state: The state of this loss.
        notes: The notes of the report. The warning is added to them.
    """
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or body is model or find_replacement(model) is None:
        return lambda: None
    replacement = find_replacement(body)
    if replacement is not None:
        return exchange(replacement, WatchedBody(model, state, notes, replacement.recipe))
    return (lambda: None) if foreign_forward(body) else install(body, WatchedBody(model, state, notes, None))
