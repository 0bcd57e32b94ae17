"""A linear layer and its low-rank adapters as one value, and this value as the arguments of an autograd function.

Shapes: I inputs, O outputs of a layer, r rank of an adapter.
"""

from collections.abc import Callable, Sequence
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
    # No layout of a tensor.
    layout = None

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


def tensors_to_save(ctx: Any, tensors: Sequence[Any], present: Sequence[int]) -> Sequence[Any]:
    """Keep the tensors of a node for backward. Return those that autograd has to save. `present` are the indices of
    those that are neither None nor a `FrozenWeight`. Autograd has to save none if all of these are leaves with
    versions, as parameters are. A block of `lean` saves leaves themselves anyway, because engines exchange their data,
    and each call of its hooks takes the host 10 us."""
    leaves = [tensors[i] for i in present]
    versions = [leaf._version for leaf in leaves if leaf.is_leaf and not leaf.is_inference()]
    if len(versions) == len(leaves):
        ctx.tensors, ctx.leaves, ctx.versions = tensors, leaves, versions
        return ()
    ctx.tensors = [None if isinstance(tensor, Tensor) else tensor for tensor in tensors]
    return [tensor if isinstance(tensor, Tensor) else None for tensor in tensors]


def saved_tensors(ctx: Any, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of a node after `tensors_to_save`. A write in place since the forward raises an error."""
    if tensors:
        return [saved if other is None else other for saved, other in zip(tensors, ctx.tensors, strict=True)]
    for leaf, version in zip(ctx.leaves, ctx.versions, strict=True):
        if leaf._version != version:
            raise modified_in_place(leaf, version)
    return ctx.tensors
