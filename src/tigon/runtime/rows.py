"""Tensors [..., N] as rows, for ops over the last dimension and for elementwise ops.

A program of an elementwise kernel computes one block of one row. `block_of_row` returns this block, and `plan_blocks`
plans the launch.
"""

from typing import Any

from torch import Tensor

from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import cdiv
from tigon.runtime.launch import Plan


def dense_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor with the rows of x [..., N] and a dense last dimension, and the stride of its rows. The tensor is
    a view of x if its strides allow one. A contiguous x is returned itself, in its shape."""
    n = x.shape[-1]
    if x.is_contiguous():
        return x, n
    x = x.reshape(-1, n)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0)


def in_memory_order(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the inputs and y, all of one shape, with their dimensions in the order of the memory of y. An elementwise
    kernel writes y, which must have no gaps, in any order of its dimensions. In this order it writes long rows."""
    tensors = [*inputs, y]
    if y.is_contiguous():
        return tensors
    # Dimensions of size 1 come first, because their strides have no meaning.
    order = sorted(range(y.dim()), key=lambda i: (y.shape[i] == 1, y.stride(i)), reverse=True)
    return [x.permute(order) for x in tensors]


@triton.jit
def block_of_row(width, blocks, BLOCK: tl.constexpr):
    """Return the row of this program, the columns of its block, and the mask of those below `width`."""
    pid = tl.program_id(0)
    cols = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return (pid // blocks).to(tl.int64), cols, cols < width


def plan_blocks(
    kernel: JITFunction, m: int, width: int, strides: tuple[int, ...], block: int, *numbers: float, **constants: Any
) -> Plan:
    """Return the launch of `kernel(*tensors, *strides, *numbers, width, blocks, ...)` over tensors with m rows.
    `strides` holds the row stride of each tensor. `numbers` are options such as a scale; they are no constexprs, so a
    new value does not compile the kernel again. Rows without gaps form one long row, so that no block ends early."""
    # With an odd width, the length of the long row would be divisible by 16 for some batches only, and Triton would
    # compile the kernel twice.
    if width % 16 == 0 and strides.count(width) == len(strides):
        m, width, strides = 1, m * width, (0,) * len(strides)
    blocks = cdiv(width, block)
    return Plan(kernel, m * blocks, *strides, *numbers, width, blocks, **constants, BLOCK=block)
