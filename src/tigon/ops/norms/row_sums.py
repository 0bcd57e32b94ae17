"""Sum the partial gradients that the programs of a backward have computed: dw = sum_programs(partial).

Shapes: P = programs of the backward, N = columns.
"""

import functools

from torch import Tensor

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv
from tigon.runtime.launch import Plan

# A program sums this many columns, and loads this many rows of them at a time.
COLUMNS, ROWS = 32, 256


@triton.jit
def _sum_rows(partial_ptr, sum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum a block of columns of [P, N] fp32 over P."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(partial_ptr + rows * N + cols, mask=(rows < P) & (cols < N), other=0.0)
    tl.store(sum_ptr + cols, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


@triton.jit(do_not_specialize=["P"])
def _sum_kernel(
    first_ptr, second_ptr, first_sum_ptr, second_sum_ptr,  # [P, N] fp32, [P, N] fp32 or None, [N], [N]
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum a block of columns of one or two tensors over their rows."""
    _sum_rows(first_ptr, first_sum_ptr, P, N, BLOCK_P, BLOCK_N)
    if second_ptr is not None:
        _sum_rows(second_ptr, second_sum_ptr, P, N, BLOCK_P, BLOCK_N)


@functools.lru_cache(4096)
def _plan_sum(p: int, n: int) -> Plan:
    return Plan(_sum_kernel, cdiv(n, COLUMNS), p, n, BLOCK_P=ROWS, BLOCK_N=COLUMNS, num_warps=8)


def sum_rows(partial: Tensor, out: Tensor, second: Tensor | None = None, second_out: Tensor | None = None) -> None:
    """Write the sum of `partial` [P, N] fp32 over P into `out` [N], and that of `second` into `second_out`."""
    _plan_sum(*partial.shape).launch(partial, second, out, second_out)
