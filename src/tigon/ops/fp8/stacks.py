r"""FP8 copies of a stack of weights W [E, R, C], such as those of experts, with the scales of rowwise products.

    rows          q[e, r, c] = round(W[e, r, c] / s[e, r]),  s[e, r] = max_c |W[e, r, c]| / 448       [E, R, C]
    transposed    q[e, c, r] = round(W[e, r, c] / s[e, c]),  s[e, c] = max_r |W[e, r, c]| / 448       [E, C, R]

A product sums along the last dimension of a copy. A weight that is stored as [E, out, in] needs the copy by rows in
forward and the transposed one for dX, and a weight that is stored as [E, in, out] needs them the other way round.

The copy by rows is that of a matrix [E R, C]: it moves 3 bytes for each bf16 value. A program of the transposed copy
reads a strip of columns of one matrix twice, first for the scales and then for the values. It moves 5 bytes for each
value, less those that the second read finds in the cache: this read starts where the first one ended.

Shapes: E matrices of R rows and C columns.
"""

import torch
from torch import Tensor

from tigon.ops.fp8.formats import E4M3, MULTIPLE, Factor, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Layout, Quantised, quantise, quantise_reference
from tigon.ops.fp8.quantisation_kernels import scaling, store_transposed
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv
from tigon.runtime.launch import launch, launcher
from tigon.runtime.maxima import magnitude_bits


def quantise_stack_reference(x: Tensor, is_transposed: bool) -> Factor:
    """Return the copy of a stack [E, R, C] by rows or the transposed one, in torch."""
    x = x.mT if is_transposed else x
    values, scale, *_ = quantise_reference(x.reshape(-1, x.shape[2]), Layout(True, True, False))
    assert values is not None
    assert scale is not None
    return Factor(values.view(x.shape), scale.view(x.shape[:2]))


# A program reads strips of 64 columns, 128 rows at a time: it reads whole lines of 128 bytes in bf16, and writes whole
# lines in FP8. With 8 warps, a thread has 32 values of a tile in registers.
BLOCK_M, BLOCK_K, NUM_WARPS = 128, 64, 8


@triton.jit(do_not_specialize=["strips"])
def strip_kernel(
    x_ptr, transposed_ptr, scale_ptr,  # [E, R, C], [E, C, R] fp8, [E, C] fp32
    m_over_16, k, strips,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the transposed copy and the scales of a strip of columns of one matrix [16 m_over_16, k]."""
    pid = tl.program_id(0)
    matrix, m = (pid // strips).to(tl.int64), m_over_16 * 16
    x_ptr += matrix * m * k
    transposed_ptr += matrix * m * k
    cols = (pid % strips) * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    for start in range(0, m, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < m)[:, None] & (cols < k)[None, :]
        x = tl.load(x_ptr + rows[:, None] * k + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x))
    factors, scales = scaling(tl.max(bits, 0))
    tl.store(scale_ptr + matrix * k + cols, scales, mask=cols < k)
    blocks = tl.cdiv(m, BLOCK_M)
    for block in range(0, blocks):
        # The last rows that the first loop has read are still in the cache.
        rows = (blocks - 1 - block) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < m)[:, None] & (cols < k)[None, :]
        x = tl.load(x_ptr + rows[:, None] * k + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        store_transposed(transposed_ptr, m, rows, cols, m_over_16, k, x * factors[None, :])


def _empty_transposed(x: Tensor) -> Factor:
    experts, rows, columns = x.shape
    return Factor(
        x.new_empty((experts, columns, rows), dtype=E4M3), x.new_empty((experts, columns), dtype=torch.float32)
    )


@launcher(fake=_empty_transposed)
def quantise_transposed_stack(x: Tensor) -> Factor:
    """Return the transposed copy of a contiguous stack [E, R, C] whose sizes are multiples of 16."""
    experts, rows, columns = x.shape
    copy = _empty_transposed(x)
    strips = cdiv(columns, BLOCK_K)
    launch(
        strip_kernel, experts * strips, x, copy.values, copy.scale, rows // MULTIPLE, columns, strips,
        BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS,
    )  # fmt: skip
    return copy


def quantise_stack(x: Tensor, needs_rows: bool, needs_transposed: bool) -> Quantised:
    """Return the copies of a stack [E, R, C] whose sizes are multiples of 16. A copy that is not needed is None."""
    x = x.detach().contiguous()
    if not runs_fp8_kernels(x):
        copy = lambda needed, is_transposed: quantise_stack_reference(x, is_transposed) if needed else None
        return Quantised(copy(needs_rows, False), copy(needs_transposed, True))
    rows = quantise([x.view(-1, x.shape[2])], Layout(True, needs_rows, False)).rows
    if rows is not None:
        rows = Factor(rows.values.view(x.shape), rows.scale.view(x.shape[:2]))
    return Quantised(rows, quantise_transposed_stack(x) if needs_transposed else None)
