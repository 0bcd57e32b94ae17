"""One launch for many tensors: a table of their addresses in device memory, and the block that a program computes."""

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, runs_kernels

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}  # fmt: skip

# Each of 128 threads accesses 16 bytes of the widest tensor at once.
NUM_WARPS = 4
BLOCK_BYTES = NUM_WARPS * 32 * 16


def block_size(itemsize: int) -> int:
    """Return the number of elements of a block, given the bytes of an element of the tensor with the widest ones."""
    return BLOCK_BYTES // max(itemsize, 2)


def are_addressable(param: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels can access all tensors by their addresses. The first of the others is a gradient."""
    if not runs_kernels(param, others[0]):
        return False
    device = param.get_device()
    # A loop is faster than generators, and small models wait for the host.
    for x in (param, *others):
        if x is not None and not (x.is_contiguous() and x.get_device() == device and x.dtype in TYPES):
            return False
    return True


class TableKey(NamedTuple):
    """Everything that a table depends on."""

    # For each tensor its addresses, and N in the last place.
    tensors: list[tuple[int, ...]]
    device: torch.device
    # Elements of a span of blocks.
    span_size: int
    stream: int


@dataclass(frozen=True)
class TensorTable:
    """The tensors of one launch, in the memory of their device."""

    key: TableKey
    # [tensors, columns] int64, as the kernel reads them: the addresses, N, the first span and the number of spans.
    rows: Tensor
    tensor_of_span: Tensor  # [spans] int32: the index of the tensor of each span


def update_table(
    previous: TensorTable | None, tensors: list[tuple[int, ...]], device: torch.device, span_size: int
) -> TensorTable:
    """Return the table of these tensors for spans of `span_size` elements. It is `previous` if nothing has changed."""
    # A copy on another stream may not have ended, so the table depends on the stream.
    key = TableKey(tensors, device, span_size, current_raw_stream(device.index) if device.type == "cuda" else 0)
    if previous is not None and previous.key == key:
        return previous
    values, first_span = array("q"), 0
    lengths = [n for *_, n in tensors]
    for addresses, n in zip(tensors, lengths, strict=True):
        spans = cdiv(n, span_size)
        values.extend((*addresses, first_span, spans))
        first_span += spans
    host_rows = torch.frombuffer(values, dtype=torch.int64).view(len(tensors), -1)
    # The host memory is pinned, so that the copy does not wait for the device. Torch keeps this memory until the copy
    # has ended.
    rows = (host_rows.pin_memory() if device.type == "cuda" else host_rows).to(device, non_blocking=True)
    if previous is not None and previous.key[1:] == key[1:] and [n for *_, n in previous.key.tensors] == lengths:
        return TensorTable(key, rows, previous.tensor_of_span)
    return TensorTable(key, rows, torch.repeat_interleave(rows[:, -1].int(), output_size=first_span))


@triton.jit
def tensor_at(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to the tensor whose address is stored at `address_ptr`."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The compiler cannot know the alignment of an address that is loaded. Without it there are no accesses of 16
        # bytes.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def find_span(rows_ptr, tensor_of_span_ptr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the index of the tensor of this program's span, a pointer to its row, the span's start and N."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_span_ptr + program)
    row_ptr = rows_ptr + tensor * COLUMNS
    start = (program - tl.load(row_ptr + COLUMNS - 2)) * SIZE  # int64
    n = tl.load(row_ptr + COLUMNS - 3)
    if ALIGNED:
        # Then a mask has one value for 16 elements, and accesses are wide.
        n = tl.multiple_of(n, 16)
    return tensor, row_ptr, start, n
