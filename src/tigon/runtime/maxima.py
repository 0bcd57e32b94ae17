"""The largest absolute values of a tensor, which the kernel that writes the tensor finds for an op that quantises it.

The maxima of a matrix are that of all values, those of its rows, and those of its columns. Kernels call each an amax.

An op that quantises a tensor with scales of its values needs their maxima before it writes anything, so it reads the
tensor twice. If the kernel that writes the tensor also finds the maxima, one of the two reads disappears:

    producer    needs = request.next_needs();  y, maxima = kernel(x, needs);  attach(y, maxima, request)
    reader      maxima = find(y, needs)        None: the reader has to find the maxima itself

A producer does not know who reads its results. So each producer has a `MaximaRequest`, which learns the needs of the
readers: `find` records what a reader looked for, and the producer finds it from the next call on. It stops if nobody
looks for it any more.

Maxima belong to one tensor object, not to its memory. A cast and a copy of the tensor have none, and of its views only
those have them that are the same matrix, such as [B, S, H] as [B S, H]. Maxima are used only if the tensor has the
version that it had when they were found, so a write in place removes them. (A write through
`tensor.data`, a collective and a kernel of another library change no version, which also holds for the tensors that
autograd saves.) Autograd hands a gradient on as the same object, and
adds gradients in place or in another tensor, so the same rule holds for them.
While a CUDA graph is captured, only maxima of captured kernels are used: those that were found before it would be out
of date at its replay.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.counters import zero_number
from tigon.runtime.device import is_capturing

# A producer stops to find maxima after this number of results whose maxima nobody has looked for.
PATIENCE = 8

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

    def covers(self, needs: MaximaNeeds) -> bool:
        """Return whether all maxima that are needed exist."""
        return not any(need and maxima is None for need, maxima in zip(needs, self, strict=True))


NO_NEEDS = MaximaNeeds()
NO_MAXIMA = Maxima(None, None, None)


def zero_maxima(like: Tensor, m: int, k: int, needs: MaximaNeeds) -> Maxima:
    """Allocate the maxima of a matrix [M, K] in one tensor of zeros on the device of `like`."""
    if not any(needs):
        return NO_MAXIMA
    if needs == MaximaNeeds(tensor=True):
        return Maxima(zero_number(like), None, None)
    # The rows come last. Behind them, the alignment would depend on the number of rows, and Triton would compile the
    # kernels several times. The same holds for the columns behind one number, which takes 4 places.
    sizes = [4 * needs.tensor, k * needs.columns, m * needs.rows]
    tensor, columns, rows = like.new_zeros(sum(sizes), dtype=torch.int32).split(sizes)
    return Maxima(
        tensor[:1] if needs.tensor else None, rows if needs.rows else None, columns if needs.columns else None
    )


# --- parts of kernels ------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """Return |x| for x in fp32, as an integer. Integers compare as such numbers do, and NaN is larger than infinity."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def raise_to(ptr, bits, mask):
    """Raise the stored maxima to `bits`. Only the next kernel reads them, so the order of the writes is free."""
    tl.atomic_max(ptr, bits, mask=mask, sem="relaxed")


@triton.jit
def raise_to_largest(ptr, bits):
    """Raise one stored maximum to the largest of a tile of bits."""
    raise_to(ptr, tl.max(tl.max(bits, 1), 0), None)


# --- producers and readers -------------------------------------------------------------------------


class MaximaRequest:
    """The maxima that the readers of a producer's results need. They are learnt from the readers of earlier results."""

    def __init__(self) -> None:
        self.needs = NO_NEEDS
        # The number of results since the last reader.
        self.unread = 0

    def __reduce__(self) -> tuple:
        # A copy of a model learns the needs of its readers itself.
        return MaximaRequest, ()

    def next_needs(self) -> MaximaNeeds:
        """Return the maxima that the next result should have."""
        if self.needs is not NO_NEEDS:
            self.unread += 1
            if self.unread > PATIENCE:
                self.needs = NO_NEEDS
        return self.needs

    def note(self, needs: MaximaNeeds) -> None:
        """Record that a reader needs these maxima. Several readers of a result may need different ones."""
        self.unread = 0
        if needs != self.needs:
            self.needs = MaximaNeeds(*map(max, needs, self.needs))


class MaximaRequests:
    """The requests for the result of a norm and for the gradient of its input."""

    def __init__(self) -> None:
        self.result = MaximaRequest()
        self.gradient = MaximaRequest()

    def __reduce__(self) -> tuple:
        return MaximaRequests, ()


class _Record(NamedTuple):
    """The maxima of a tensor, and the state in which they are valid."""

    ref: weakref.ref
    version: int
    address: int
    maxima: Maxima
    request: MaximaRequest
    is_captured: bool


# The records by the id of the tensor.
_records: dict[int, _Record] = {}


def attach(x: Tensor, maxima: Maxima, request: MaximaRequest) -> None:
    """Record the maxima of x, which has just been written. Without maxima, only record whom its readers should ask."""
    # Inference tensors have no version.
    if torch.compiler.is_compiling() or x.is_inference():
        return
    key = id(x)

    def forget(ref: weakref.ref) -> None:
        record = _records.get(key)
        if record is not None and record.ref is ref:
            _records.pop(key, None)

    _records[key] = _Record(weakref.ref(x, forget), x._version, x.data_ptr(), maxima, request, is_capturing(x))


def _is_same_matrix(x: Tensor, base: Tensor) -> bool:
    """Return whether a view of `base` has the same rows and columns, in the same memory."""
    is_same = x.dtype == base.dtype and x.shape[-1:] == base.shape[-1:] and x.numel() == base.numel()
    return is_same and x.data_ptr() == base.data_ptr() and x.is_contiguous() and base.is_contiguous()


def find(x: Tensor, needs: MaximaNeeds) -> Maxima | None:
    """Return the maxima of x if they are known and x is unchanged, or None. Its producer learns what is needed."""
    if not _records or not any(needs) or torch.compiler.is_compiling():
        return None
    if (base := x._base) is not None and _is_same_matrix(x, base):
        x = base
    record = _records.get(id(x))
    if record is None or record.ref() is not x:
        return None
    record.request.note(needs)
    is_unchanged = x._version == record.version and x.data_ptr() == record.address
    is_valid = is_unchanged and record.is_captured == is_capturing(x)
    return record.maxima if is_valid and record.maxima.covers(needs) else None
