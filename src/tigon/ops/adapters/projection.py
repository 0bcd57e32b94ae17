"""A linear layer and its low-rank adapters as one value, and this value as the arguments of an autograd function.

Shapes: I inputs, O outputs of a layer, r rank of an adapter.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime.autograd import modified_in_place


class TensorLike(NamedTuple):
    """The properties of the input of a layer, where there is no tensor yet."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def product_dtype(x: Tensor | TensorLike) -> torch.dtype:
    """Return the dtype of the product of x and a weight of the same dtype: the dtype of autocast if this is active."""
    device_type = x.device.type
    is_cast = device_type != "meta" and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if is_cast else x.dtype


class FrozenWeight:
    """A weight [O, I] that gets no gradient, such as that of a quantised layer. Each product computes it once more."""

    requires_grad = False

    def __init__(
        self, compute: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.compute, self.shape, self.dtype, self.device = compute, shape, dtype, device

    def __len__(self) -> int:
        return self.shape[0]


def dense_weight(weight: Tensor | FrozenWeight) -> Tensor:
    """Return the weight [O, I] as a tensor. The caller should hold it no longer than for one product."""
    return weight.compute() if isinstance(weight, FrozenWeight) else weight


class Adapter(NamedTuple):
    """One adapter, which adds s * (dropout(x) A^T B^T + bias) to the output of a linear layer."""

    a: Any  # Tensor [r, I]
    b: Any  # Tensor [O, r]
    scaling: float = 1.0
    bias: Any = None  # Tensor [O] or None
    dropout: float = 0.0


class Projection(NamedTuple):
    """A linear layer and its adapters. The weight is None if the caller computes its product (`add_adapters`)."""

    weight: Any  # Tensor or FrozenWeight [O, I], or None
    bias: Any = None  # Tensor [O] or None
    adapters: tuple[Adapter, ...] = ()


# --- the tensors of an autograd function -----------------------------------------------------------


def flatten(projections: Sequence[Projection]) -> list[Any]:
    """Return the tensors of the projections in a fixed order, with None in place of a `FrozenWeight`."""
    tensors: list[Any] = []
    for weight, bias, adapters in projections:
        tensors += (None if isinstance(weight, FrozenWeight) else weight, bias)
        for adapter in adapters:
            tensors += (adapter.a, adapter.b, adapter.bias)
    return tensors


def rebuild(tensors: Iterable[Any], projections: Sequence[Projection]) -> list[Projection]:
    """Return the projections with other tensors, in the order of `flatten`, in place of their own."""
    values = iter(tensors)
    result = []
    for projection in projections:
        weight, bias = next(values), next(values)
        weight = projection.weight if isinstance(projection.weight, FrozenWeight) else weight
        adapters = [
            Adapter(next(values), next(values), adapter.scaling, next(values), adapter.dropout)
            for adapter in projection.adapters
        ]
        result.append(Projection(weight, bias, tuple(adapters)))
    return result


def tensors_to_save(ctx: Any, projections: Sequence[Projection], tensors: Sequence[Any]) -> Sequence[Any]:
    """Keep the projections, whose tensors are `tensors`, for backward. Return those that autograd has to save.

    It has to save none of them if all are leaves with versions, as parameters are. A block of `lean` saves leaves
    themselves anyway, because engines exchange their data, and each call of its hooks takes the host 10 us.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.is_leaf and not tensor.is_inference() for tensor in present):
        ctx.projections, ctx.leaves, ctx.versions = projections, present, [tensor._version for tensor in present]
        return ()
    ctx.projections, ctx.leaves, ctx.versions = rebuild([None] * len(tensors), projections), (), ()
    return tensors


def saved_projections(ctx: Any, tensors: Sequence[Any]) -> Sequence[Projection]:
    """Return the projections of a node, whose `tensors_to_save` autograd has saved.

    Raises:
        RuntimeError: A tensor was written in place after forward.
    """
    if tensors:
        return rebuild(tensors, ctx.projections)
    for tensor, version in zip(ctx.leaves, ctx.versions, strict=True):
        if tensor._version != version:
            raise modified_in_place(tensor, version)
    return ctx.projections
