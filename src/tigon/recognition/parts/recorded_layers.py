"""Read a linear layer with adapters from the expression that the forward of a layer has computed."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.adapters.projection import Adapter, Projection
from tigon.recognition.probing.deferred import (
    Call,
    Cast,
    Computed,
    Dropout,
    Expression,
    Input,
    Product,
    Scaled,
    Sum,
    TensorLike,
)


class RecordedLayer(NamedTuple):
    """A linear layer with adapters, as a forward has computed it."""

    # The weight is None if the forward has called the base layer as a module.
    projection: Projection
    # The base layer that was called as a module; None if the product of its weight was recorded.
    base: nn.Module | None
    # The dtype of the output.
    dtype: torch.dtype


def _dtype_after_casts(expression: Expression, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of an expression that only casts the input, and keeps its values; None for any other expression.

    `dtype` is the dtype of the input.
    """
    if isinstance(expression, Input):
        return dtype
    if not isinstance(expression, Cast):
        return None
    source, target = _dtype_after_casts(expression.operand, dtype), expression.dtype
    return target if source is not None and torch.promote_types(source, target) == target else None


def _read_adapter(expression: Expression, dtype: torch.dtype) -> Adapter | None:
    """Return the adapter if an expression computes scaling * (dropout(x) A^T B^T + bias), and None otherwise.

    `dtype` is the dtype of the input x.
    """
    scaling = 1.0
    if isinstance(expression, Scaled):
        scaling, expression = expression.factor, expression.operand
    # The last product is the one with B. Its operand is the product of dropout(x) with A.
    inner = expression.operand if isinstance(expression, Product) else None
    if not isinstance(expression, Product) or not isinstance(inner, Product) or inner.bias is not None:
        return None
    operand = inner.operand
    dropout, x = (operand.probability, operand.operand) if isinstance(operand, Dropout) else (0.0, operand)
    if _dtype_after_casts(x, dtype) is None:
        return None
    return Adapter(inner.weight, expression.weight, scaling, expression.bias, dropout)


def read_layer(computed: Computed, x: Tensor | TensorLike) -> RecordedLayer | None:
    """Return the linear layer with adapters that a forward applied to x; None if it computed something else."""
    expression, output = computed
    # If the layer is in bf16 and the adapter in fp32, the adapter or the sum is cast to the dtype of the layer.
    without_cast = lambda term: term.operand if isinstance(term, Cast) and term.dtype == output.dtype else term
    expression = without_cast(expression)
    adapters: list[Adapter] = []
    # The forward adds one adapter after the other, so the last adapter is the second operand of the outermost sum.
    while isinstance(expression, Sum):
        adapter = _read_adapter(without_cast(expression.second), x.dtype)
        if adapter is None:
            return None
        adapters.insert(0, adapter)
        expression = expression.first
    if isinstance(expression, Call) and isinstance(expression.operand, Input) and adapters:
        return RecordedLayer(Projection(None, None, tuple(adapters)), expression.module, output.dtype)
    if isinstance(expression, Product) and isinstance(expression.operand, Input):
        return RecordedLayer(Projection(expression.weight, expression.bias, tuple(adapters)), None, output.dtype)
    return None
