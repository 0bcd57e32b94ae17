"""Kernels that find the largest absolute values of a matrix and write its FP8 copies.

    amax       the largest |x| of the tensor, or of each row and of each column
    copies     q = round(x * (largest / amax)), scale = amax / largest; stored by rows, transposed, or both

The matrix is x itself, or act(gate) * up, which is computed from its two inputs and never stored in another format.
An amax is stored as the bits of an fp32 number without its sign. Integers compare as such numbers do, and NaN is larger
than infinity, so an atomic maximum of integers keeps NaN. If the amax is NaN or infinite, every result of a product is
NaN: an infinite scale times the zeros that it divides is NaN.

The first pass over the matrix begins with the last tiles, because those that the producer of the matrix wrote last are
still in the cache. This is the amax pass, which leaves the first tiles in the cache for the second pass. If the
maxima are known, it is the pass that writes the copies. Shapes: M rows, K columns.
"""

from dataclasses import dataclass

from tigon.ops.mlps.activation_kernels import activation_and_slope
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device
from tigon.runtime.maxima import magnitude_bits, raise_to, raise_to_largest
from tigon.runtime.tuning import LaunchConfig

# The largest value of e4m3.
_LARGEST = tl.constexpr(448.0)
# The bits of `SMALLEST_AMAX`, 2^-100.
_SMALLEST_BITS = tl.constexpr((127 - 100) << 23)


@dataclass(frozen=True)
class Fp8TileConfig(LaunchConfig):
    """Launch parameters. A program reads a tile of `block_m` rows and `block_k` columns."""

    block_m: int
    block_k: int
    num_warps: int

    @staticmethod
    def heuristic(problem: tuple[int, bool], device: Device) -> "Fp8TileConfig":
        """Return tiles whose rows fill lines of 128 bytes. On an H200, both passes over x [8192, 4096] take 0.114 ms by
        tiles of 64 x 128, and 0.138 by 128 x 64. Those over three inputs [8192, 14336] with rowwise scales take 0.89 ms
        by 64 x 64 with 4 warps, and 1.23 with 8. The problem is the number of inputs (1, 2 for act(gate) * up, 3 for
        its backward), and whether the pass writes FP8 copies."""
        inputs, writes = problem
        if inputs < 3:
            return Fp8TileConfig(block_m=64, block_k=128, num_warps=8)
        if device.arch == "sm_90":
            return Fp8TileConfig(64, 64, 4)
        # Larger tiles spill when they are compiled for a B200.
        return Fp8TileConfig(128, 32, 8) if writes else Fp8TileConfig(16, 64, 4)


@dataclass(frozen=True)
class Fp8RowConfig(LaunchConfig):
    """Launch parameters. A program computes a row, in blocks of `block` columns."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: tuple[int], device: Device) -> "Fp8RowConfig":
        """Return a block that holds rows of up to 16384 columns in registers."""
        block = min(triton.next_power_of_2(problem[0]), 16384)
        return Fp8RowConfig(block=block, num_warps=max(1, min(16, block // 512)))


@triton.jit
def scaling(bits):
    """Return the factor that maps the amax to the largest FP8 value, and the scale, for the bits of an amax."""
    amax = tl.maximum(bits, _SMALLEST_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(_LARGEST, amax), tl.div_rn(amax, _LARGEST)


@triton.jit
def tensorwise_factor(amax_ptr, scale_ptr, is_first):
    """Return the factor that maps the amax [1] of a matrix to the largest value. If `is_first`, store the scale [1]."""
    factor, scale = scaling(tl.load(amax_ptr))
    tl.store(scale_ptr, scale, mask=is_first)
    return factor


@triton.jit
def _load(x_ptr, up_ptr, x_offsets, up_offsets, mask, KIND: tl.constexpr):
    """Return the values of the matrix in fp32: x, or act(x) * up."""
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is not None:
        act, _ = activation_and_slope(x, KIND)
        x = act * tl.load(up_ptr + up_offsets, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["m", "column_blocks"])
def amax_kernel(
    x_ptr, up_ptr,  # [M, K]
    tensor_ptr, rows_ptr, columns_ptr,  # [1], [M] and [K] int32, or None
    stride_x, stride_up, m, k, column_blocks,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Raise the amax of the tensor, or those of rows and columns, to the values of a tile."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % column_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, col_mask = rows < m, cols < k
    mask = row_mask[:, None] & col_mask[None, :]
    x_offsets = rows[:, None] * stride_x + cols[None, :]
    bits = magnitude_bits(_load(x_ptr, up_ptr, x_offsets, rows[:, None] * stride_up + cols[None, :], mask, KIND))
    if tensor_ptr is not None:
        raise_to_largest(tensor_ptr, bits)
    if rows_ptr is not None:
        raise_to(rows_ptr + rows, tl.max(bits, 1), row_mask)
    if columns_ptr is not None:
        raise_to(columns_ptr + cols, tl.max(bits, 0), col_mask)


@triton.jit(do_not_specialize=["m", "padded_groups", "column_blocks"])
def write_kernel(
    x_ptr, up_ptr,  # [M, K]
    row_amax_ptr, column_amax_ptr,  # [M] and [K] int32, or with TENSORWISE [1]
    row_ptr, row_scale_ptr,  # [M, K] fp8 and [M] (TENSORWISE: [1]) fp32, or None
    transposed_ptr, column_scale_ptr,  # [K, padded M] fp8 and [K] (TENSORWISE: [1]) fp32, or None
    stride_x, stride_up, stride_row, stride_transposed, m, padded_groups, k, column_blocks,
    KIND: tl.constexpr, TENSORWISE: tl.constexpr, REVERSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the FP8 copies of a tile, and the scales. If REVERSED, the first programs compute the last tiles."""
    pid = tl.program_id(0)
    if REVERSED:
        pid = tl.num_programs(0) - 1 - pid
    row_block, column_block = pid // column_blocks, pid % column_blocks
    rows = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = column_block * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, col_mask = rows < m, cols < k
    mask = row_mask[:, None] & col_mask[None, :]
    x_offsets = rows[:, None] * stride_x + cols[None, :]
    x = _load(x_ptr, up_ptr, x_offsets, rows[:, None] * stride_up + cols[None, :], mask, KIND)
    if row_ptr is not None:
        if TENSORWISE:
            q = x * tensorwise_factor(row_amax_ptr, row_scale_ptr, pid == 0)
        else:
            factors, scales = scaling(tl.load(row_amax_ptr + rows, mask=row_mask, other=0))
            tl.store(row_scale_ptr + rows, scales, mask=row_mask & (column_block == 0))
            q = x * factors[:, None]
        q = q.to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + rows[:, None] * stride_row + cols[None, :], q, mask=mask)
    if transposed_ptr is not None:
        if TENSORWISE:
            q = x * tensorwise_factor(column_amax_ptr, column_scale_ptr, pid == 0)
        else:
            factors, scales = scaling(tl.load(column_amax_ptr + cols, mask=col_mask, other=0))
            tl.store(column_scale_ptr + cols, scales, mask=col_mask & (row_block == 0))
            q = x * factors[None, :]
        # Values of rows from m on are zero.
        store_transposed(transposed_ptr, stride_transposed, rows, cols, padded_groups, k, q)


@triton.jit
def store_transposed(ptr, stride, rows, cols, padded_groups, k, q):
    """Store a tile [rows, cols] of fp32 values as FP8 in the transposed matrix [K, padded M]. Padded M is
    `padded_groups` groups of 16. From this product the compiler sees that 16 neighbours have one mask, so that a thread
    may store 16 bytes at once."""
    q = tl.trans(q.to(ptr.dtype.element_ty))
    offsets = cols[:, None].to(tl.int64) * stride + rows[None, :]
    tl.store(ptr + offsets, q, mask=(cols < k)[:, None] & (rows < padded_groups * 16)[None, :])


@triton.jit
def row_kernel(
    x_ptr, up_ptr, row_ptr, scale_ptr,  # [M, K] each; scales [M]
    stride_x, stride_up, stride_row, k,
    KIND: tl.constexpr, FITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the FP8 copy of a row and its scale. A row that FITS in a block is read once."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    x_ptr, row_ptr = x_ptr + row * stride_x, row_ptr + row * stride_row
    if up_ptr is not None:
        up_ptr += row * stride_up
    cols = tl.arange(0, BLOCK)
    if FITS:
        x = _load(x_ptr, up_ptr, cols, cols, cols < k, KIND)
        bits = tl.max(magnitude_bits(x), 0)
    else:
        block_bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, k, BLOCK):
            block_cols = start + cols
            x = _load(x_ptr, up_ptr, block_cols, block_cols, block_cols < k, KIND)
            block_bits = tl.maximum(block_bits, magnitude_bits(x))
        bits = tl.max(block_bits, 0)
    factor, scale = scaling(bits)
    tl.store(scale_ptr + row, scale)
    if FITS:
        tl.store(row_ptr + cols, (x * factor).to(row_ptr.dtype.element_ty), mask=cols < k)
    else:
        for start in range(0, k, BLOCK):
            block_cols = start + cols
            x = _load(x_ptr, up_ptr, block_cols, block_cols, block_cols < k, KIND)
            tl.store(row_ptr + block_cols, (x * factor).to(row_ptr.dtype.element_ty), mask=block_cols < k)
