"""The replacement of a model's loss function: it returns the loss that the head has computed in a fused call.

`tigon.hf.head` describes the placeholder, the marker in it, and the state that the replacements share.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.hf.logits import PLACEHOLDER_SHAPE, as_tensor, is_exact
from tigon.hf.spec import IGNORE_INDEX, loss_arguments
from tigon.hf.transformers_private import loss_slot, loss_type
from tigon.recognition.guards.guard import FunctionGuard
from tigon.runtime.late_checks import check_later

# The allowed relative errors of the marker in the loss function, in fp32 and after a cast. A few operations in fp32
# cause an error of 1e-6, and a cast to bf16 causes 0.004.
FP32_TOLERANCE, CAST_TOLERANCE = 2e-5, 0.01
LOGITS_CHANGED = (
    "tigon: the model or a hook does not change the logits as it did when the model was patched, but the loss was "
    "computed without logits; call report.restore() and tigon.patch again, or use tigon.patch(model, loss=False)"
)


class _WithoutSlot:
    """A view of a model in which nothing was assigned to `slot`. The property of the model's class runs on it."""

    __slots__ = ("_model", "_slot")

    def __init__(self, model: nn.Module, slot: str) -> None:
        self._model = model
        self._slot = slot

    # `super()` checks the type of an object by this property.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        if name == self._slot:
            raise AttributeError(name)
        return getattr(self._model, name)


class LossFunction:
    """The replacement of `model.loss_function`. It returns the loss of the head in a fused call, else the stock loss.
    The stock function is the one that was assigned to the model before the patch. If none was assigned, it is the one
    that the model's class chooses now, by its property, its `loss_type` and transformers' table of losses."""

    def __init__(
        self, fused: Any, model: nn.Module, slot: str, assigned: Callable | None, guard: FunctionGuard | None = None
    ) -> None:
        self.fused, self.model, self.slot, self.assigned = fused, weakref.ref(model), slot, assigned
        self.guard = guard or FunctionGuard(self.choose(model))

    @staticmethod
    def for_model(fused: Any, model: nn.Module) -> "LossFunction":
        """Return the function to assign to a model. `learn_loss` refuses a model whose slot is not found."""
        slot = loss_slot(model)
        assert slot is not None
        return LossFunction(fused, model, slot, vars(model).get(slot))

    def __reduce__(self) -> tuple:
        return LossFunction, (self.fused, self.model(), self.slot, self.assigned, self.guard)

    def choose(self, model: nn.Module) -> Callable:
        """Return the loss function that the model would use without this one."""
        if self.assigned is not None:
            return self.assigned
        static: Any = inspect.getattr_static(type(model), "loss_function")
        if isinstance(static, property):
            return static.__get__(_WithoutSlot(model, self.slot))
        return static.__get__(model, type(model)) if hasattr(static, "__get__") else static

    def stock_function(self) -> Callable:
        """Return the loss function that the model would use without this one; for a deleted model, the last one."""
        model = self.model()
        if model is not None and not torch.compiler.is_compiling():
            return self.choose(model)
        if model is not None:
            # A compiler cannot trace `choose`. `find_change` calls it while the graph is compiled, and the guard stores
            # the function that it returns.
            self.find_change(model)
        return self.guard.function

    def find_change(self, model: nn.Module) -> str | None:
        """Return what has changed, for a warning, if the model's own loss is not the recognised one; None if it is."""
        if torch.compiler.is_compiling():
            # The comparison lets the compiler compile another graph when the loss type changes.
            is_same_type = loss_type(model) == self.fused.spec.loss_type
            is_same = self._is_same_for_graph() and (is_same_type or self.assigned is not None)
        else:
            is_same = self.guard.holds(self.choose(model))
        return None if is_same else "the loss function"

    @torch.compiler.assume_constant_result
    def _is_same_for_graph(self) -> bool:
        """Return whether the loss function is unchanged. A compiler runs this check once for each graph."""
        model = self.model()
        return model is not None and self.guard.holds(self.choose(model))

    def remove(self, model: nn.Module) -> None:
        """Restore the loss function of the model, unless something else has replaced this one."""
        if vars(model).get(self.slot) is self:
            del vars(model)[self.slot]
            vars(model).update({} if self.assigned is None else {self.slot: self.assigned})

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self.fused.call
        if call is None or call.loss is None:
            return self.stock_function()(*args, **kwargs)
        arguments = loss_arguments(args, kwargs)
        logits, labels = arguments["logits"], arguments["labels"]
        tolerance = FP32_TOLERANCE if is_exact(logits) else CAST_TOLERANCE
        logits = logits.full_tensor() if hasattr(logits, "placements") else as_tensor(logits)
        if (
            logits.shape != PLACEHOLDER_SHAPE
            or not (labels is call.labels or labels.device != call.labels.device)
            or not _is_same(arguments.get("num_items_in_batch"), call.num_items)
            or not _is_same(arguments.get("shift_labels"), call.shift_labels)
            or arguments.get("ignore_index", IGNORE_INDEX) != call.ignore_index
            or call.read_versions() != call.versions
        ):
            raise RuntimeError(
                "tigon: the head has computed the loss already, but then the model passed its loss function other "
                "arguments than the model itself received, or wrote into its labels between the head and the loss "
                "function, or called its head twice; use tigon.patch(model, loss=False) for this model"
            )
        marker, expected = logits.reshape(-1)[1], self.fused.spec.marker_at_loss
        is_changed = (marker.detach().float() - expected).abs() > tolerance * abs(expected)
        # If weights are NaN, the marker is NaN. This is no error: the loss is NaN anyway.
        factor = check_later(~is_changed, "RuntimeError", LOGITS_CHANGED)
        # The added term is zero. It keeps the head's output in the graph, because hooks on it gather sharded weights.
        return torch.add(call.loss * factor, marker, alpha=0.0)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two arguments are the same object, or equal values that are no tensors."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
