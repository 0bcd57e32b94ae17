"""Tensors [..., N] as rows: what ops over the last dimension, and of single values, have in common.

A kernel of single values takes a block of one row a program; `block_of_row` says which, `launch_blocks` starts it.
"""

import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime.device import cdiv
from tigon.runtime.launch import launch
from tigon.runtime.triton_private import JITFunction

__all__ = ["block_of_row", "dense_rows", "launch_blocks"]


def dense_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [..., N] of any strides -> a tensor of the same rows, dense in the last dimension, and the stride of the rows.

    A view where that exists. A contiguous tensor keeps its shape: no view is made of it.
    """
    n = x.shape[-1]
    if x.is_contiguous():
        return x, n
    x = x.reshape(-1, n)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0)


@triton.jit
def block_of_row(width, blocks, BLOCK: tl.constexpr):
    """This program's row, its columns and which of them are inside."""
    pid = tl.program_id(0)
    cols = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return (pid // blocks).to(tl.int64), cols, cols < width


def launch_blocks(
    kernel: JITFunction, width: int, tensors: tuple[Tensor, ...], strides: tuple[int, ...], block: int, **constants
) -> None:
    """Run `kernel(*tensors, *strides, width, blocks, ...)` over tensors of the first one's rows, which lie `strides`
    apart; as one long row where no tensor has gaps, so that no block is cut at a row's end.
    """
    m = tensors[0].numel() // width
    # An odd width would make the long row's length divisible by 16 or not from batch to batch, and compile twice.
    if width % 16 == 0 and all(stride == width for stride in strides):
        m, width, strides = 1, m * width, (0,) * len(strides)
    blocks = cdiv(width, block)
    launch(kernel, m * blocks, *tensors, *strides, width, blocks, **constants, BLOCK=block)
