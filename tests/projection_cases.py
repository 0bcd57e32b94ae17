"""The tensors of linear layers with adapters as one list."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tigon.ops.adapters.projection import Adapter, Projection


def flatten(projections: Sequence[Projection]) -> list[Tensor]:
    """Return the tensors of the projections, without those that are None."""
    tensors: list[Any] = []
    for projection in projections:
        tensors += (projection.weight, projection.bias)
        for adapter in projection.adapters:
            tensors += (adapter.a, adapter.b, adapter.bias)
    return [tensor for tensor in tensors if tensor is not None]


def rebuild(tensors: Iterable[Any], projections: Sequence[Projection]) -> list[Projection]:
    """Return the projections with other tensors, in the order of `flatten`, in place of their own."""
    values = iter(tensors)
    replace = lambda tensor: None if tensor is None else next(values)
    return [
        Projection(
            replace(weight), replace(bias),
            tuple(Adapter(replace(a), replace(b), scale, replace(c), dropout) for a, b, scale, c, dropout in adapters),
        )
        for weight, bias, adapters in projections
    ]  # fmt: skip
