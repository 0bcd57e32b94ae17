"""The measured properties of a causal language model by which Tigon computes the loss in the model's head.

`tigon.hf.learn` measures a `Spec`, and `tigon.hf.head` computes losses by it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

# The options that the standard loss reads. It ignores all others, and so does the fused loss.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
IGNORE_INDEX = -100
NUMBERS = (int, float)
# Paths of attributes, which start at the model, and the values of these attributes.
Settings = tuple[tuple[tuple[str, ...], Any], ...]


def loss_arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the standard loss, by name."""
    return {**dict(zip(("logits", "labels", "vocab_size", *LOSS_ARGUMENTS), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class Spec:
    """The measured properties of a model that are needed to compute its loss from the inputs of its head."""

    # The name, among the model's children, of the head or of an adapter's wrapper around it.
    head: str
    softcap: float | None
    logit_scale: float
    # The arguments of the model's forward that a caller may pass by position.
    positional_arguments: tuple[str, ...]
    # The options in `LOSS_ARGUMENTS` that the model passes to its loss.
    forwarded_options: frozenset[str]
    # The loss type of the model. torch.compile compiles another graph when it changes.
    loss_type: str | None
    settings: Settings
    # The paths of the settings that hold the size of the vocabulary. They must equal the size of the head in each call.
    vocabulary_settings: tuple[tuple[str, ...], ...]
    # Arguments of the model's loss that the standard loss does not have. A call with one of them runs the stock code.
    unknown_arguments: frozenset[str]
    # The names of the functions in the model's forward that compute `load_balancing_loss`.
    router_losses: tuple[tuple[str, str], ...] = ()

    @property
    def marker(self) -> float:
        """The known value that the head writes into a placeholder, and that the model scales and caps like a logit."""
        return (self.softcap or 100.0) / self.logit_scale

    @property
    def marker_at_loss(self) -> float:
        """The value of the marker when it reaches the loss, if the model has the measured scale and soft cap."""
        return 100.0 if self.softcap is None else self.softcap * math.tanh(1.0)

    def __str__(self) -> str:
        steps = [f"scale {self.logit_scale:g}"] if self.logit_scale != 1.0 else []
        steps += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        steps += ["load_balancing_loss"] if self.router_losses else []
        return ", ".join(["linear_cross_entropy in the head", *steps])


def read_setting(model: nn.Module, path: tuple[str, ...]) -> Any:
    """Return the attribute of a model at a path such as ("config", "vocab_size")."""
    return functools.reduce(getattr, path, model)


def changed_setting(model: nn.Module, settings: Settings) -> str | None:
    """Return the first setting of a model whose value has changed, as the forward spells it; None if none has."""
    for path, value in settings:
        try:
            current = read_setting(model, path)
        except AttributeError:
            return ".".join(path)
        if current is not value and not (type(current) in NUMBERS and current == value):
            return ".".join(path)
    return None
