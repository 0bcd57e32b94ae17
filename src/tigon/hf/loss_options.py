"""Options of the loss in the head that `tigon.patch` or a call of the model sets.

`model(..., return_token_accuracy=True)` sets an option for one call, and `tigon.patch(model, token_scaling=True)` for
all calls. Their meaning is that of `tigon.linear_cross_entropy`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime import checks


@dataclass(frozen=True)
class LossOptions:
    """Options of `linear_cross_entropy` that a user of a patched model chooses."""

    # It is True if the loss of each token is scaled by the detached probability of its target.
    token_scaling: bool = False
    # The dtype in which the gradient of the head's weight is summed, or None.
    acc_dtype: torch.dtype | None = None
    # Add the share of valid tokens whose largest logit is the target's to the output of the model.
    return_token_accuracy: bool = False
    # Add the argmax of the logits [B, S] to the output of the model, with -1 for ignored targets.
    return_predicted_tokens: bool = False

    def check(self, op: str) -> None:
        """Raise TypeError or ValueError for a wrong value. The message begins with `op`."""
        checks.flag(
            op, token_scaling=self.token_scaling, return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )  # fmt: skip
        checks.choice(op, "acc_dtype", self.acc_dtype, (None, torch.float32))

    def for_call(self, kwargs: dict[str, Any]) -> "LossOptions":
        """Return the options of one call of the model, and remove them from its keyword arguments."""
        options = {name: kwargs.pop(name) for name in LOSS_OPTIONS if name in kwargs}
        if not options:
            return self
        call_options = dataclasses.replace(self, **options)
        call_options.check("model")
        return call_options

    def check_unfused(self, call_options: "LossOptions") -> None:
        """Raise ValueError if a call that computes logits requests a loss that only the loss in the head computes."""
        if call_options.token_scaling and not self.token_scaling:
            raise ValueError(
                "model: token_scaling=True needs the loss in the head, but this call computes logits; call the model "
                "in training mode with labels, or with labels and skip_logits=True"
            )


# The options of each language model that `tigon.patch` was called for. If a trainer replaces the forward that reads
# them, its integration reads them here.
_recorded: "weakref.WeakKeyDictionary[nn.Module, LossOptions]" = weakref.WeakKeyDictionary()


def record_options(modules: Iterable[nn.Module], options: LossOptions) -> Callable[[], None]:
    """Record the options of all language models among modules, and return the function that restores earlier records.
    The defaults replace no earlier record, because `tigon.patch` may be called again for another reason."""
    models = [module for module in modules if hasattr(module, "get_output_embeddings")]
    earlier = [(weakref.ref(module), _recorded.get(module)) for module in models]
    for module in models:
        if options != LossOptions() or module not in _recorded:
            _recorded[module] = options

    def restore() -> None:
        for reference, record in earlier:
            module = reference()
            if module is None:
                continue
            if record is None:
                _recorded.pop(module, None)
            else:
                _recorded[module] = record

    return restore


def recorded_options(model: nn.Module) -> LossOptions:
    """Return the options that `tigon.patch` was called with for a language model, or the defaults."""
    return _recorded.get(model, LossOptions())


LOSS_OPTIONS = tuple(field.name for field in dataclasses.fields(LossOptions))


# The attribute that marks the classes that `_class_with_predictions` creates.
_MARK = "_is_made_by_tigon"


def _class_with_predictions(cls: type) -> type:
    """Return the subclass of an output class of transformers that has `token_accuracy` and `predicted_tokens`. Engines
    take outputs apart and build them again from their fields, so a plain attribute would be lost. transformers
    registers each class of outputs in `torch.utils._pytree` and never removes it, so all models share one subclass."""
    subclasses: list[type] = cls.__subclasses__()
    if (known := next((each for each in subclasses if _MARK in vars(each)), None)) is not None:
        return known
    fields = [(name, Tensor | None, None) for name in ("token_accuracy", "predicted_tokens")]
    return dataclasses.make_dataclass(
        cls.__name__, fields, bases=(cls,), namespace={"__module__": cls.__module__, _MARK: True}
    )


def with_predictions(outputs: Any, predictions: dict[str, Tensor]) -> Any:
    """Add `token_accuracy` and `predicted_tokens` to an output, in place, and return it. A tuple stays as it is,
    because its length has a meaning for callers."""
    if isinstance(outputs, tuple) or not predictions:
        return outputs
    if dataclasses.is_dataclass(type(outputs)) and isinstance(outputs, dict):
        outputs.__class__ = _class_with_predictions(type(outputs))
    for name, value in predictions.items():
        # The class of an output of transformers has the field now, so an item is an attribute too.
        if isinstance(outputs, dict):
            outputs[name] = value
        else:
            setattr(outputs, name, value)
    return outputs
