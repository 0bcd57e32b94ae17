"""A linear layer and its low-rank adapters as one value, and this value as the arguments of an autograd function.

Shapes: I inputs, O outputs of a layer, r rank of an adapter.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


# --- the arguments of an autograd function ---------------------------------------------------------


class Constants(NamedTuple):
    """The values of a projection that are not tensors."""

    # The weight if it is a `FrozenWeight`, and None if it is a tensor.
    frozen_weight: FrozenWeight | None
    # (scaling, dropout) of each adapter.
    numbers: tuple[tuple[float, float], ...]


def flatten(projections: Sequence[Projection]) -> tuple[list[Any], tuple[Constants, ...]]:
    """Return the tensors of the projections in a fixed order, and the other values of each projection."""
    tensors: list[Any] = []
    constants: list[Constants] = []
    for projection in projections:
        weight = projection.weight
        frozen_weight = weight if isinstance(weight, FrozenWeight) else None
        tensors += [weight if frozen_weight is None else None, projection.bias]
        for adapter in projection.adapters:
            tensors += [adapter.a, adapter.b, adapter.bias]
        constants.append(Constants(frozen_weight, tuple((x.scaling, x.dropout) for x in projection.adapters)))
    return tensors, tuple(constants)


def rebuild(tensors: Iterable[Any], constants: tuple[Constants, ...]) -> list[Projection]:
    """Return the projections from the results of `flatten`. Other values, such as flags, may replace the tensors."""
    values = iter(tensors)
    projections = []
    for frozen_weight, numbers in constants:
        weight, bias = next(values), next(values)
        # If flags replace the tensors, that of this weight is False.
        weight = frozen_weight if weight is None else weight
        adapters = []
        for scaling, dropout in numbers:
            a, b, adapter_bias = next(values), next(values), next(values)
            adapters.append(Adapter(a, b, scaling, adapter_bias, dropout))
        projections.append(Projection(weight, bias, tuple(adapters)))
    return projections
