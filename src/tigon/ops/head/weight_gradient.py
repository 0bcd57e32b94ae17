"""dW [V, H] = sum over chunks of dlogits^T x. The first chunk writes the sum, the other chunks add to it.

With a half-precision dW, every chunk reads dW, adds to it, and rounds once more. An fp32 sum avoids these roundings,
but as a whole it would need a buffer of twice the size of dW in addition to the result. `WeightGradient` needs a buffer
of the size of dW only: the fp32 sum of the upper rows is in the memory of the half-precision result, and that of the
lower rows is in the buffer. At the end both are rounded into the result:

    result  |  rows [0, V/2) in fp32   |  ->  |  rows [0, V/2)  |  rows [V/2, V)  |
    buffer  |  rows [V/2, V) in fp32   |  ->                     rounded from here ^

Shapes: V vocabulary, H hidden, C tokens of a chunk.
"""

import torch
from torch import Tensor

from tigon.runtime.device import cdiv
from tigon.runtime.products import accumulates_in_fp32, product

# Bytes of one slab of a product, and of one slab of its factor, if the product is added to a sum of another dtype.
SLAB_BYTES = 64 * 2**20
# The index of the first lower row is a multiple of this number, so that the columns of the logits are aligned.
ROW_ALIGNMENT = 64
# The number of rows that are rounded first, through a copy.
FIRST_ROWS = 256


def product_in_fp32(a: Tensor, b: Tensor, total: Tensor, accumulate: bool = False) -> None:
    """Compute total = a b or total += a b in fp32 (or fp64), for total [M, N], a [M, K] and b [K, N] of any dtype. Two
    half-precision factors, whose products are exact in fp32, are not copied where cuBLAS returns fp32 sums. Others are
    copied to fp32, one slab of N at a time."""
    if a.dtype == b.dtype and (a.dtype == total.dtype or accumulates_in_fp32(a)):
        product(a, b, out=total, accumulate=accumulate)
        return
    columns = max(1, SLAB_BYTES // (4 * max(1, b.shape[0])))
    a = a.float()
    for start in range(0, b.shape[1], columns):
        part = total[:, start : start + columns]
        slab = b[:, start : start + columns].float()
        if accumulate:
            part.addmm_(a, slab)
        else:
            torch.mm(a, slab, out=part)


class WeightGradient:
    """The gradient of a weight [V, H], summed over chunks, in addition to `buffer` [V, H] if there is one. With
    `in_fp32`, the gradient of a half-precision weight is summed in fp32. Other dtypes are at least as precise. The
    weight may be more precise than the products (fp32 under autocast)."""

    def __init__(self, weight: Tensor, in_fp32: bool, buffer: Tensor | None = None) -> None:
        self.result = torch.empty_like(weight, memory_format=torch.contiguous_format) if buffer is None else buffer
        self.has_sum = buffer is not None
        self.is_split = in_fp32 and self.result.element_size() == 2
        v, h = weight.shape
        self.middle = v // 2 // ROW_ALIGNMENT * ROW_ALIGNMENT if self.is_split else 0
        self.lower = self.result
        if self.is_split:
            self.upper = self.result.flatten()[: 2 * self.middle * h].view(torch.float32).view(self.middle, h)
            self.lower = weight.new_empty(v - self.middle, h, dtype=torch.float32)

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Add the product of a chunk's dlogits [C, V] and x [C, H]."""
        self.add_rows(0, dlogits, x)
        self.has_sum = True

    def add_rows(self, start: int, dlogits: Tensor, x: Tensor) -> None:
        """Add dlogits^T x, for the columns [C, v] of dlogits from `start` on and x [C, H]. The caller sets `has_sum`
        after all rows."""
        columns = dlogits.shape[1]
        in_upper = max(0, min(self.middle - start, columns))
        first = start + in_upper - self.middle
        totals = [(self.lower[first : first + columns - in_upper], slice(in_upper, columns))]
        if in_upper:
            totals.insert(0, (self.upper[start : start + in_upper], slice(0, in_upper)))
        if dlogits.dtype == x.dtype:
            for total, part in totals:
                self._add(total, dlogits[:, part], x)
            return
        # The product of fp32 logits is summed in fp32, and rounded into a half-precision dW.
        product_of_part = x.new_empty(columns, x.shape[1], dtype=torch.float32)
        product_in_fp32(dlogits.t(), x, product_of_part)
        for total, part in totals:
            self._write(total, product_of_part[part])

    def _write(self, total: Tensor, values: Tensor) -> None:
        if self.has_sum:
            total.add_(values)
        else:
            total.copy_(values)

    def _add(self, total: Tensor, dlogits: Tensor, x: Tensor) -> None:
        if not len(total):
            return
        if total.dtype == x.dtype or (total.dtype == torch.float32 and accumulates_in_fp32(x)):
            product(dlogits.t(), x, out=total, accumulate=self.has_sum)
            return
        # On a CPU, fp32 products are as fast as half-precision ones, and their results are not rounded.
        if x.device.type == "cpu":
            x = x.float()
        rows = max(1, SLAB_BYTES // (max(x.shape) * x.element_size()))
        slab = x.new_empty(min(rows, len(total)), x.shape[1])
        for start in range(0, len(total), rows):
            part = total[start : start + rows]
            # With `out`, autocast does not round the result.
            torch.mm(dlogits[:, start : start + rows].t().to(x.dtype), x, out=slab[: len(part)])
            self._write(part, slab[: len(part)])

    def finish(self) -> Tensor:
        """Return the sum [V, H], which is zero if no product was added."""
        if not self.has_sum:
            return self.result.zero_()
        if self.is_split:
            # Row r occupies bytes 4rH.. in fp32 and 2rH.. once rounded. Rounding rows [a, 2a) therefore overwrites the
            # fp32 rows [a/2, a), which have been rounded already.
            self.result[: min(FIRST_ROWS, self.middle)] = self.upper[:FIRST_ROWS].clone()
            for k in range(cdiv(self.middle, FIRST_ROWS).bit_length()):
                part = slice(FIRST_ROWS << k, min(FIRST_ROWS << (k + 1), self.middle))
                self.result[part] = self.upper[part]
            self.result[self.middle :] = self.lower
        return self.result
