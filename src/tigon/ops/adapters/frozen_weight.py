"""A weight that exists only while a product needs it, such as the dequantised weight of a quantised layer."""

from collections.abc import Callable

import torch
from torch import Tensor


class FrozenWeight:
    """A weight [O, I] that gets no gradient. Forward computes it for one product, and backward computes it again."""

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
