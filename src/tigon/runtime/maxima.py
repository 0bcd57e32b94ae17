"""The largest absolute values of a matrix, which its FP8 scales depend on, as the bits of fp32 numbers in int32.

Integers compare as such numbers do, and NaN is larger than infinity. A quantisation reads a tensor twice, first for its
maximum. The backward of an RMS norm finds the maximum of the gradient that it writes, if an FP8 layer may read it, so
one of the two reads disappears: 1 to 1.5 % of a step of Llama-3-8B on an H100.

    norm     maximum = zero_number(z);  dz = kernel(z, maximum);  attach_maximum(dz, maximum)
    layer    maximum = find_maximum(dy)                           None: the quantisation finds it itself

A maximum belongs to one tensor object as long as its memory and its version are the same. Views, copies and casts have
none. A write through `tensor.data`, or by a kernel of another library, changes no version and is not noticed.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.counters import zero_number
from tigon.runtime.device import PLAIN, is_capturing

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


class _Record(NamedTuple):
    """The maximum of a tensor, and the state of the tensor to which it belongs."""

    maximum: Tensor
    version: int
    address: int
    # A replay of a CUDA graph changes tensors without a new version, so a graph and the code around it share no maxima.
    is_captured: bool


_records = WeakTensorKeyDictionary()


def records_maxima() -> bool:
    """Return whether maxima are recorded: not in compiled code, and not in a job of several ranks, because a collective
    writes in place without a new version."""
    if torch.compiler.is_compiling():
        return False
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def attach_maximum(x: Tensor, maximum: Tensor) -> None:
    """Record the maximum [1] of x, which a kernel has just written, if maxima are recorded now."""
    # Inference tensors have no version.
    if type(x) in PLAIN and not x.is_inference() and records_maxima():
        _records[x] = _Record(maximum, x._version, x.data_ptr(), is_capturing(x))


def find_maximum(x: Tensor) -> Tensor | None:
    """Return the bits [1] of the largest absolute value of x if the kernel that wrote x has found it, or None."""
    record = None if torch.compiler.is_compiling() else _records.get(x)
    if record is None or record[1:] != (x._version, x.data_ptr(), is_capturing(x)):
        return None
    return record.maximum
