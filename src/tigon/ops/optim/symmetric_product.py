r"""Products of matrices that are known to be symmetric: half of the multiplications, in one kernel.

    C = alpha s A B^T + beta D,        Q = C + gamma I

C is symmetric if A = B (a Gram matrix), or if A and B are polynomials of one symmetric matrix, which commute. The
kernel computes the tiles that reach to the diagonal or below it, and writes each element below the diagonal to two
places. So C is exactly symmetric, and one product of [M, K] and [K, M] takes M^2 K multiplications and additions
together instead of 2 M^2 K. Tiles on the diagonal compute some elements in vain: 6 % with M = 4096 and tiles of
128 x 256.

Products accumulate in fp32. Each result is rounded once to its dtype.

The kernel is persistent: the chip runs a fixed number of programs, and each of them computes many tiles of all matrices
of a batch. On Hopper and later chips it copies tiles by the tensor memory accelerator (TMA). A table in memory lists
the tiles in an order in which programs that run at the same time share rows of A and B, so that these stay in L2.

Shapes: A, B [batch, M, K], of which M or K is contiguous; C, D, Q [batch, M, M]; s [batch] fp32.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import TensorDescriptor, tl, triton
from tigon.runtime.device import Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.tuning import LaunchConfig


class Epilogue(NamedTuple):
    """The operations on a product before it is stored, and the dtypes of the results."""

    alpha: float = 1.0
    beta: float = 0.0
    addend: Tensor | None = None  # The term D
    scales: Tensor | None = None  # The scales s
    # gamma, if Q is computed too.
    diagonal: float | None = None
    dtype: torch.dtype = torch.float16
    diagonal_dtype: torch.dtype = torch.float16


def symmetric_product_reference(a: Tensor, b: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """Return C, and Q or None."""
    c = (a.float() @ b.float().mT) * epilogue.alpha
    if epilogue.scales is not None:
        c *= epilogue.scales[:, None, None]
    if epilogue.addend is not None:
        c += epilogue.beta * epilogue.addend.float()
    c = c.tril() + c.tril(-1).mT
    if epilogue.diagonal is None:
        return c.to(epilogue.dtype), None
    q = c + epilogue.diagonal * torch.eye(c.shape[-1], device=c.device)
    return c.to(epilogue.dtype), q.to(epilogue.diagonal_dtype)


@dataclass(frozen=True)
class SymmetricConfig(LaunchConfig):
    """Launch parameters: a program computes tiles of `block_m` x `block_n`, and adds `block_k` terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    group: int  # This many rows of tiles are computed together, column by column.
    uses_tma: bool  # True if the tensor memory accelerator copies tiles, where strides and addresses allow it

    @staticmethod
    def heuristic(problem: tuple[int, int, bool], device: Device) -> "SymmetricConfig":
        """Return untuned tiles: those of `grouped_low_rank_product` for Hopper, smaller ones for chips with less
        memory. The problem is M, K, and whether the TMA can copy tiles of both factors."""
        m, k, is_aligned = problem
        if not device.arch:
            return SymmetricConfig(32, 32, 32, 4, 2, 1, 8, False)
        is_even = m % 128 == 0 and k % 64 == 0
        has_tma = device.async_copy and int(device.arch[3:]) >= 90 and device.shared_memory >= 200 * 1024
        if has_tma and TensorDescriptor is not None and is_aligned and m % 16 == 0:
            # A tile of 128 x 256 at an edge would need more registers than there are.
            block_n = 256 if m >= 2048 and m % 256 == 0 else 128
            return SymmetricConfig(128, block_n, 64, 8, 3, 1, 8, True)
        if not is_even:
            # Each element has its own mask, which needs registers.
            return SymmetricConfig(64, 64, 32, 4, 3 if device.async_copy else 2, 2, 8, False)
        if not device.async_copy:
            return SymmetricConfig(128, 128, 32, 8, 2, 2, 8, False)
        return SymmetricConfig(128, 128, 64, 8, 3, 1, 8, False)


@triton.jit
def _store_both(ptr, value, rows, cols, M, is_below):
    """Store a tile [rows, cols], without what is above the diagonal, and its transpose above the diagonal."""
    if is_below:
        # All elements in a row have the same mask, so that accesses are wide.
        tl.store(ptr + (rows * M + cols), value, rows < M)
        tl.store(ptr + (cols * M + rows), value, rows < M)
    else:
        tl.store(ptr + (rows * M + cols), value, (cols <= rows) & (rows < M))
        tl.store(ptr + (cols * M + rows), value, (cols < rows) & (rows < M))


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of x [ROWS, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _finish(total, c_ptr, q_ptr, d_ptr, first_row, first_col, M, scale, beta, gamma, WIDE: tl.constexpr):
    """Compute and store one part of a tile. The pointers are those of one matrix."""
    rows = first_row + tl.arange(0, total.shape[0])[:, None]
    cols = first_col + tl.arange(0, total.shape[1])[None, :]
    if WIDE:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    is_below = first_row >= first_col + total.shape[1]
    total = total * scale
    if d_ptr is not None:
        # The values above the diagonal are not used.
        d = tl.load(d_ptr + (rows * M + cols), (rows < M) & (cols < M), 0.0)
        total += beta * d.to(tl.float32)
    # Tiles are rounded before the transpose moves them through shared memory.
    _store_both(c_ptr, total.to(c_ptr.dtype.element_ty), rows, cols, M, is_below)
    if q_ptr is not None:
        total = tl.where(rows == cols, total + gamma, total)
        _store_both(q_ptr, total.to(q_ptr.dtype.element_ty), rows, cols, M, is_below)


@triton.jit(do_not_specialize=["TILES", "TOTAL"])
def _symmetric_kernel(
    # C, and Q or None: [batch, M, M]
    c_ptr, q_ptr,
    # [batch, M, K], or descriptors of [batch M, K] or of [batch K, M]
    a_ptr, b_ptr,
    # D [batch, M, M] or None, s [batch] or None, [tiles] int32: row of tiles * 2^16 + column of tiles
    d_ptr, scale_ptr, tile_ptr,
    M, K, TILES, TOTAL, stride_a_b, stride_a_m, stride_a_k, stride_b_b, stride_b_m, stride_b_k,
    alpha, beta, gamma,
    TMA: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr,  # True if K is contiguous
    EVEN: tl.constexpr,  # True if M and K are multiples of the sides of tiles
    WIDE: tl.constexpr,  # True if a matrix has 2^31 elements or more
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the tiles i, i + P, ... of all matrices, for program i of P."""
    for work in range(tl.program_id(0), TOTAL, tl.num_programs(0)):
        matrix = work // TILES
        tile = tl.load(tile_ptr + work % TILES)
        first_row, first_col = (tile >> 16) * BLOCK_M, (tile & 0xFFFF) * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if TMA:
            # Tiles at the end of a matrix may contain rows of the next one. What they contribute is not stored.
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                a = a_ptr.load([matrix * M + first_row, k]) if A_BY_ROWS else a_ptr.load([matrix * K + k, first_row]).T
                b = b_ptr.load([matrix * M + first_col, k]).T if B_BY_ROWS else b_ptr.load([matrix * K + k, first_col])
                total = tl.dot(a, b, total)
        else:
            rows, cols = first_row + tl.arange(0, BLOCK_M)[:, None], first_col + tl.arange(0, BLOCK_N)[None, :]
            if WIDE:
                rows, cols = rows.to(tl.int64), cols.to(tl.int64)
            # A matrix has an int64 address, and its elements have int32 offsets, which take fewer registers.
            a_rows_ptr = a_ptr + matrix.to(tl.int64) * stride_a_b + rows * stride_a_m
            b_cols_ptr = b_ptr + matrix.to(tl.int64) * stride_b_b + cols * stride_b_m
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                inner = k + tl.arange(0, BLOCK_K)
                if WIDE:
                    inner = inner.to(tl.int64)
                a_tile_ptr = a_rows_ptr + inner[None, :] * stride_a_k
                b_tile_ptr = b_cols_ptr + inner[:, None] * stride_b_k
                if EVEN:
                    a, b = tl.load(a_tile_ptr), tl.load(b_tile_ptr)
                else:
                    a = tl.load(a_tile_ptr, (rows < M) & (inner < K)[None, :], 0.0)
                    b = tl.load(b_tile_ptr, (cols < M) & (inner < K)[:, None], 0.0)
                total = tl.dot(a, b, total)
        scale = alpha
        if scale_ptr is not None:
            scale = scale * tl.load(scale_ptr + matrix)
        first = matrix.to(tl.int64) * M * M
        out_ptr = c_ptr + first
        out_q_ptr = None if q_ptr is None else q_ptr + first
        addend_ptr = None if d_ptr is None else d_ptr + first
        # With all addresses of a tile at once, registers would spill.
        left, right = _halves(total, BLOCK_M, BLOCK_N)
        QUARTER: tl.constexpr = BLOCK_N // 4
        for i in tl.static_range(2):
            first_part, second_part = _halves(left if i == 0 else right, BLOCK_M, BLOCK_N // 2)
            col = first_col + 2 * i * QUARTER
            _finish(first_part, out_ptr, out_q_ptr, addend_ptr, first_row, col, M, scale, beta, gamma, WIDE)
            _finish(second_part, out_ptr, out_q_ptr, addend_ptr, first_row, col + QUARTER, M, scale, beta, gamma, WIDE)


@functools.cache
def _tiles(m: int, block_m: int, block_n: int, group: int, device: torch.device) -> Tensor:
    """Return the tiles of one matrix that reach to the diagonal or below it, as the kernel reads them."""
    rows = range(cdiv(m, block_m))
    tiles = [(i, j) for i in rows for j in range(cdiv(m, block_n)) if j * block_n < (i + 1) * block_m]
    tiles.sort(key=lambda tile: (tile[0] // group, tile[1], tile[0]))
    values = torch.tensor([i << 16 | j for i, j in tiles], dtype=torch.int32)
    # The table is made once for each size, so the host may wait for the copy.
    return values.to(device)


def _is_aligned(x: Tensor) -> bool:
    """Return whether the TMA can copy tiles: addresses and strides are multiples of 16 bytes. A tile of a transposed
    matrix must not reach into the next one in the direction in which products are summed."""
    stored = x if _by_rows(x) else x.mT
    if not stored.is_contiguous() or stored.data_ptr() % 16 or stored.shape[2] * x.element_size() % 16:
        return False
    return _by_rows(x) or x.shape[2] % 64 == 0


def _by_rows(x: Tensor) -> bool:
    """Return whether K is contiguous."""
    return x.stride(2) == 1


def _descriptor(x: Tensor, block: int, block_k: int) -> "TensorDescriptor | None":
    """Return a descriptor of tiles of `block` rows and `block_k` columns, or None if the TMA cannot copy them."""
    batch, _, k = x.shape
    if not _by_rows(x) and k % block_k:
        return None
    stored = x if _by_rows(x) else x.mT
    stored = stored.view(batch * stored.shape[1], stored.shape[2])
    tile = [block, block_k] if _by_rows(x) else [block_k, block]
    return TensorDescriptor(stored, stored.shape, stored.stride(), tile)


@on_device
def symmetric_product(a: Tensor, b: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """Return C, and Q or None, for a and b [batch, M, K] in bf16 or fp16 with M, K >= 1. The caller knows that A B^T is
    symmetric, and the D of the epilogue is contiguous."""
    if not runs_kernels(a, b):
        return symmetric_product_reference(a, b, epilogue)
    batch, m, k = a.shape
    is_aligned = _is_aligned(a) and _is_aligned(b)
    config = SymmetricConfig.choose((m, k, is_aligned), device_of(a))
    c = torch.empty(batch, m, m, dtype=epilogue.dtype, device=a.device)
    q = None if epilogue.diagonal is None else torch.empty_like(c, dtype=epilogue.diagonal_dtype)
    tiles = _tiles(m, config.block_m, config.block_n, config.group, a.device)
    a_tiles = b_tiles = None
    if config.uses_tma and is_aligned:
        a_tiles = _descriptor(a, config.block_m, config.block_k)
        b_tiles = _descriptor(b, config.block_n, config.block_k)
    uses_tma = a_tiles is not None and b_tiles is not None
    total = batch * tiles.numel()
    launch(
        _symmetric_kernel,
        min(total, device_of(a).multiprocessors * config.programs_per_multiprocessor),
        *in_order(_symmetric_kernel)(
            c_ptr=c, q_ptr=q, a_ptr=a_tiles if uses_tma else a, b_ptr=b_tiles if uses_tma else b,
            d_ptr=epilogue.addend, scale_ptr=epilogue.scales, tile_ptr=tiles,
            M=m, K=k, TILES=tiles.numel(), TOTAL=total, strides_a=a.stride(), strides_b=b.stride(),
            alpha=float(epilogue.alpha), beta=float(epilogue.beta), gamma=float(epilogue.diagonal or 0.0),
        ),
        TMA=uses_tma, A_BY_ROWS=_by_rows(a), B_BY_ROWS=_by_rows(b),
        EVEN=m % config.block_m == m % config.block_n == k % config.block_k == 0, WIDE=m * max(m, k) >= 2**31,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return c, q
