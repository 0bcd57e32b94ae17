"""The largest absolute values of a matrix, which its FP8 scales depend on, as the bits of fp32 numbers in int32.

Integers compare as such numbers do, and NaN is larger than infinity. Kernels call each maximum an amax.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.counters import zero_number

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


class MaximaNeeds(NamedTuple):
    """The maxima of a matrix that are needed: of all values, of each row, and of each column."""

    tensor: bool = False
    rows: bool = False
    columns: bool = False


class Maxima(NamedTuple):
    """The bits of the largest absolute values of a matrix [M, K], int32. Maxima that are not needed are None."""

    tensor: Tensor | None  # [1]
    rows: Tensor | None  # [M]
    columns: Tensor | None  # [K]


def zero_maxima(like: Tensor, m: int, k: int, needs: MaximaNeeds) -> Maxima:
    """Allocate the maxima of a matrix [M, K] in one tensor of zeros on the device of `like`."""
    if not any(needs):
        return Maxima(None, None, None)
    if needs == MaximaNeeds(tensor=True):
        return Maxima(zero_number(like), None, None)
    # The rows come last. Behind them, the alignment would depend on the number of rows, and Triton would compile the
    # kernels several times. The same holds for the columns behind one number, which takes 4 places.
    sizes = [4 * needs.tensor, k * needs.columns, m * needs.rows]
    tensor, columns, rows = like.new_zeros(sum(sizes), dtype=torch.int32).split(sizes)
    return Maxima(
        tensor[:1] if needs.tensor else None, rows if needs.rows else None, columns if needs.columns else None
    )


@triton.jit
def magnitude_bits(x):
    """Return |x| for x in fp32, as an integer."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def raise_to(ptr, bits, mask):
    """Raise the stored maxima to `bits`. Only the next kernel reads them, so the order of the writes is free."""
    tl.atomic_max(ptr, bits, mask=mask, sem="relaxed")


@triton.jit
def raise_to_largest(ptr, bits):
    """Raise one stored maximum to the largest of a tile of bits."""
    raise_to(ptr, tl.max(tl.max(bits, 1), 0), None)
