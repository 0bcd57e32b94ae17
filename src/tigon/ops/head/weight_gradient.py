"""dW [V, H] = sum over chunks of dlogits^T x: written by the first chunk, added to by the others.

In half precision every chunk reads dW, adds, and rounds once more. Summed in fp32 it would need a buffer of twice its
size beside the result. Here the result itself is half of it: the upper rows are summed, in fp32, in the memory of the
half-precision result, the lower rows in a buffer of the same size, and at the end both are rounded into place:

    result  |  rows [0, V/2) in fp32   |  ->  |  rows [0, V/2)  |  rows [V/2, V)  |
    buffer  |  rows [V/2, V) in fp32   |  ->                     rounded from here ^

Shapes: V vocabulary, H hidden, C tokens of a chunk.
"""

import torch
from torch import Tensor

from tigon.runtime.device import cdiv
from tigon.runtime.products import accumulates_in_fp32, product

__all__ = ["WeightGradient"]

SLAB_BYTES = 64 * 2**20  # of a product, and of its factor in fp32, that is added to a sum of another dtype


class WeightGradient:
    """The sum, for a weight [V, H] that may be of higher precision than the products (fp32 under autocast)."""

    def __init__(self, weight: Tensor, in_fp32: bool, into: Tensor | None = None) -> None:
        """`in_fp32` sums the gradient of a half-precision weight in fp32; sums in fp32 and fp64 are as fine or finer.

        `into` is a gradient to add to, instead of a new one.
        """
        self.result = torch.empty_like(weight, memory_format=torch.contiguous_format) if into is None else into
        self.started = into is not None
        self.split = in_fp32 and self.result.element_size() == 2
        v, h = weight.shape
        # Rows of the halves start at aligned columns of the logits.
        self.middle = v // 2 // 64 * 64 if self.split else 0
        if self.split:
            self.upper = self.result.flatten()[: 2 * self.middle * h].view(torch.float32).view(self.middle, h)
        self.lower = weight.new_empty(v - self.middle, h, dtype=torch.float32) if self.split else self.result

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """dlogits [C, V], x [C, H]."""
        if self.middle:
            self._add(self.upper, dlogits[:, : self.middle], x)
        self._add(self.lower, dlogits[:, self.middle :], x)
        self.started = True

    def _add(self, total: Tensor, dlogits: Tensor, x: Tensor) -> None:
        if total.dtype == x.dtype or (total.dtype == torch.float32 and accumulates_in_fp32(x)):
            product(dlogits.t(), x, out=total, accumulate=self.started)
            return
        if x.device.type == "cpu":  # as quick there as half-precision products, and not rounded
            x = x.float()
        rows = max(1, SLAB_BYTES // (max(x.shape) * x.element_size()))
        made = x.new_empty(min(rows, len(total)), x.shape[1])
        for start in range(0, len(total), rows):
            part = total[start : start + rows]
            # Into `made`, because autocast would round the result.
            torch.mm(dlogits[:, start : start + rows].t().to(x.dtype), x, out=made[: len(part)])
            if self.started:
                part.add_(made[: len(part)])
            else:
                part.copy_(made[: len(part)])

    def finish(self) -> Tensor:
        """The result [V, H]; zeros if nothing was added."""
        if not self.started:
            return self.result.zero_()
        if self.split:
            # A row's fp32 values stand at twice its rounded place: what [a, 2a) is rounded into, [a/2, a) has left.
            first = 256
            self.result[: min(first, self.middle)] = self.upper[:first].clone()
            for k in range(cdiv(self.middle, first).bit_length()):
                part = slice(first << k, min(first << (k + 1), self.middle))
                self.result[part] = self.upper[part]
            self.result[self.middle :] = self.lower
        return self.result
