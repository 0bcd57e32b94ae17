"""dW [V, H] = sum over chunks of dlogits^T x. The first chunk writes the sum, the other chunks add to it.

With a half-precision dW, every chunk reads dW, adds to it, and rounds once more. An fp32 sum avoids these roundings,
but as a whole it would need a buffer of twice the size of dW in addition to the result. `WeightGradient` needs a buffer
of the size of dW only: the fp32 sum of the upper rows is in the memory of the half-precision result, and that of the
lower rows is in the buffer. At the end both are rounded into the result:

    result  |  rows [0, V/2) in fp32   |  ->  |  rows [0, V/2)  |  rows [V/2, V)  |
    buffer  |  rows [V/2, V) in fp32   |  ->                     rounded from here ^

Shapes: V vocabulary, H hidden, C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.products import accumulates_in_fp32, product
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------


class WeightGradientProblem(NamedTuple):
    """The properties that the parameters of a sum over chunks depend on."""

    # bytes of an element of the weight
    itemsize: int


@dataclass(frozen=True)
class WeightGradientConfig(LaunchConfig):
    """Parameters of a sum over chunks."""

    # bytes of one slab of a product, and of one slab of its factor, if the product is added to a sum of another dtype
    slab_bytes: int
    # The index of the first lower row is a multiple of this number, so that the columns of the logits are aligned.
    row_alignment: int
    # the number of rows that are rounded first, through a copy
    first_rows: int

    @staticmethod
    def heuristic(problem: WeightGradientProblem, device: Device) -> "WeightGradientConfig":
        return WeightGradientConfig(slab_bytes=64 * 2**20, row_alignment=64, first_rows=256)


# --- products in fp32 ----------------------------------------------------------------------------


def product_in_fp32(a: Tensor, b: Tensor, total: Tensor, accumulate: bool = False) -> None:
    """Compute total = a b or total += a b in fp32, for total [M, N] fp32, a [M, K] and b [K, N] of any dtype.

    Products of half-precision numbers are exact in fp32, so two half-precision factors are not copied where cuBLAS
    returns fp32 sums. Other factors are copied to fp32, one slab of N at a time.
    """
    if a.dtype == b.dtype and (a.dtype == torch.float32 or accumulates_in_fp32(a)):
        product(a, b, out=total, accumulate=accumulate)
        return
    config = WeightGradientConfig.choose(WeightGradientProblem(b.element_size()), device_of(b))
    columns = max(1, config.slab_bytes // (4 * max(1, b.shape[0])))
    a = a.float()
    for start in range(0, b.shape[1], columns):
        part = total[:, start : start + columns]
        slab = b[:, start : start + columns].float()
        if accumulate:
            part.addmm_(a, slab)
        else:
            torch.mm(a, slab, out=part)


# --- the sum -------------------------------------------------------------------------------------


class WeightGradient:
    """The gradient of a weight [V, H], summed over chunks.

    The dtype of the weight may be more precise than that of the products (fp32 under autocast).

    Args:
        weight: [V, H].
        in_fp32: Sum the gradient of a half-precision weight in fp32. The option has no effect on other dtypes, which
            are at least as precise as fp32.
        buffer: An existing gradient [V, H] that the sum is added to; None allocates a new one.
    """

    def __init__(self, weight: Tensor, in_fp32: bool, buffer: Tensor | None = None) -> None:
        self.config = WeightGradientConfig.choose(WeightGradientProblem(weight.element_size()), device_of(weight))
        self.result = torch.empty_like(weight, memory_format=torch.contiguous_format) if buffer is None else buffer
        self.has_sum = buffer is not None
        self.is_split = in_fp32 and self.result.element_size() == 2
        v, h = weight.shape
        alignment = self.config.row_alignment
        self.middle = v // 2 // alignment * alignment if self.is_split else 0
        self.lower = self.result
        if self.is_split:
            self.upper = self.result.flatten()[: 2 * self.middle * h].view(torch.float32).view(self.middle, h)
            self.lower = weight.new_empty(v - self.middle, h, dtype=torch.float32)

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Add the product of a chunk's dlogits [C, V] and x [C, H]."""
        self.add_rows(0, dlogits, x)
        self.has_sum = True

    def add_rows(self, start: int, dlogits: Tensor, x: Tensor) -> None:
        """Add the product of dlogits [C, v], the columns from `start` on, and x [C, H] to rows [start, start + v).

        Set `has_sum` once the products of the first tokens have been added to all rows.
        """
        upper_columns = max(0, min(self.middle - start, dlogits.shape[1]))
        if upper_columns:
            self._add(self.upper[start : start + upper_columns], dlogits[:, :upper_columns], x)
        if upper_columns < dlogits.shape[1]:
            first = start + upper_columns - self.middle
            lower_columns = dlogits[:, upper_columns:]
            self._add(self.lower[first : first + lower_columns.shape[1]], lower_columns, x)

    def add_to_rows(self, start: int, part: Tensor) -> None:
        """Add `part` [v, H], a product in fp32, to rows [start, start + v). Set `has_sum` as for `add_rows`."""
        in_upper = max(0, min(self.middle - start, len(part)))
        first = start + in_upper - self.middle
        totals = [self.lower[first : first + len(part) - in_upper]]
        if in_upper:
            totals.insert(0, self.upper[start : start + in_upper])
        for total, values in zip(totals, part.split([len(total) for total in totals]), strict=True):
            if self.has_sum:
                total.add_(values)
            else:
                total.copy_(values)

    def _add(self, total: Tensor, dlogits: Tensor, x: Tensor) -> None:
        if total.dtype == x.dtype or (total.dtype == torch.float32 and accumulates_in_fp32(x)):
            product(dlogits.t(), x, out=total, accumulate=self.has_sum)
            return
        # On a CPU, fp32 products are as fast as half-precision ones, and their results are not rounded.
        if x.device.type == "cpu":
            x = x.float()
        rows = max(1, self.config.slab_bytes // (max(x.shape) * x.element_size()))
        slab = x.new_empty(min(rows, len(total)), x.shape[1])
        for start in range(0, len(total), rows):
            part = total[start : start + rows]
            # With `out`, autocast does not round the result.
            torch.mm(dlogits[:, start : start + rows].t().to(x.dtype), x, out=slab[: len(part)])
            if self.has_sum:
                part.add_(slab[: len(part)])
            else:
                part.copy_(slab[: len(part)])

    def finish(self) -> Tensor:
        """Return the sum [V, H], which is zero if no product was added."""
        if not self.has_sum:
            return self.result.zero_()
        if self.is_split:
            # Row r occupies bytes 4rH.. in fp32 and 2rH.. once rounded. Rounding rows [a, 2a) therefore overwrites the
            # fp32 rows [a/2, a), which have been rounded already.
            first = self.config.first_rows
            self.result[: min(first, self.middle)] = self.upper[:first].clone()
            for k in range(cdiv(self.middle, first).bit_length()):
                part = slice(first << k, min(first << (k + 1), self.middle))
                self.result[part] = self.upper[part]
            self.result[self.middle :] = self.lower
        return self.result
