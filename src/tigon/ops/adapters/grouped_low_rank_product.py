r"""The product of each row with the weight of its expert, together with a low-rank term: y[s] = x[s] W[e] + h[s] B[e].

Rows are sorted by expert. `grouped_mm` of torch cannot add the low-rank term, so a second kernel, `grouped_expand`,
would have to read and write y again. The kernel of this file computes the product and the term together. It is
persistent: the chip runs a fixed number of programs, and each of them computes many tiles. It copies tiles of x and W
by the tensor memory accelerator (TMA) of Hopper and later chips. The low-rank term is added to the fp32 accumulators of
a tile, before the tile is rounded and stored.

On an H200, with 65536 rows, 128 experts and rank 16 in bf16, the four products of Qwen3-30B-A3B's experts take 2.16 ms
with their low-rank terms, and those of `grouped_mm` take 2.18 ms without them.

Where the kernel does not run (`adds_in_product`), `grouped_mm` and `grouped_expand` compute the same sum.

Shapes: S rows, E experts, N and M features, R ranks of all adapters of a product together.
"""

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank import count_terms, grouped_expand
from tigon.ops.adapters.grouped_low_rank_kernels import add_expanded, load_factor, load_hidden
from tigon.ops.adapters.low_rank import TERMS, rank_block
from tigon.ops.experts.choice_order import Routing
from tigon.ops.experts.grouped_linear import grouped_product
from tigon.runtime.compat.triton import TensorDescriptor, tl, triton
from tigon.runtime.device import cdiv, device_of, runs_kernels
from tigon.runtime.launch import in_order, launch, on_device

# With a larger rank, the tile of B and the accumulators would not fit in the registers together.
LARGEST_RANK = 32


# A program computes tiles of `BLOCK_T` rows and `BLOCK_M` features, `BLOCK_N` input features at a time. Two groups of
# four warps share a tile of 128 x 256. Two programs of a multiprocessor with tiles of 128 x 128 take 5 % longer, and a
# program for each tile 13 %.
BLOCK_T, BLOCK_M, BLOCK_N = 128, 256, 64


@triton.jit(do_not_specialize=["E"])
def grouped_low_rank_product_kernel(
    # [S, M], [S, 2, R] bf16, [E, R, M], [E], and descriptors of [S, N] and of [E M, N] or [E N, M]
    y_ptr, h_ptr, b_ptr, ends_ptr, x_tiles, weight_tiles, E, N, M, stride_term,
    R: tl.constexpr, ORDER: tl.constexpr, B_TERMS: tl.constexpr, IS_SPLIT: tl.constexpr, BY_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute tiles of y. All rows of a tile belong to one expert. Program i of P computes the tiles i, i + P, ... If
    BY_ROWS, the weight of an expert is stored as [N, M], otherwise as [M, N]. ORDER is the number of terms of h and of
    B that the precision of y needs. The tile of x may contain rows of the next expert: the rows of y that are computed
    from them are not stored."""
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + index, index < E, 0)
    starts = tl.load(ends_ptr + index - 1, (index > 0) & (index < E), 0)
    blocks = tl.cdiv(M, BLOCK_M)
    tiles = (ends - starts + BLOCK_T - 1) // BLOCK_T * blocks
    tile_ends = tl.cumsum(tiles)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        expert = tl.sum((tile_ends <= tile).to(tl.int32))
        is_expert = index == expert
        start, end = tl.sum(tl.where(is_expert, starts, 0)), tl.sum(tl.where(is_expert, ends, 0))
        # The tiles of an expert follow one another, so its weight stays in the L2 cache.
        tile_of_expert = tile - tl.sum(tl.where(is_expert, tile_ends - tiles, 0))
        first_row = start + tile_of_expert // blocks * BLOCK_T
        first_col = tile_of_expert % blocks * BLOCK_M
        total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for inner in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            x = x_tiles.load([first_row, inner])
            if BY_ROWS:
                weight = weight_tiles.load([expert * N + inner, first_col])
            else:
                weight = weight_tiles.load([expert * M + first_col, inner]).T
            total = tl.dot(x, weight, total)
        rows = (first_row + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        cols = (first_col + tl.arange(0, BLOCK_M))[None, :]
        if h_ptr is not None:
            for first_rank in tl.static_range(0, R, BLOCK_R):
                ranks = first_rank + tl.arange(0, BLOCK_R)
                h, h2 = load_hidden(h_ptr, rows, end, ranks[None, :], R, ORDER)
                offsets = (expert.to(tl.int64) * R + ranks[:, None]) * M + cols
                b, b2 = load_factor(
                    b_ptr, offsets, stride_term, (ranks[:, None] < R) & (cols < M), B_TERMS, IS_SPLIT
                )  # fmt: skip
                total = add_expanded(total, h, h2, b, b2, ORDER, B_TERMS)
        tl.store(y_ptr + rows * M + cols, total, (rows < end) & (cols < M))


def adds_in_product(x: Tensor, weight: Tensor, b: Tensor) -> bool:
    """Return whether the kernel computes y for x [S, N], weight [E, N, M] and the factor B."""
    if TensorDescriptor is None or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    if b.shape[-2] > LARGEST_RANK or x.numel() == 0 or weight.numel() == 0:
        return False
    if not _copies_by_tma(x):
        return False
    by_rows = weight.is_contiguous()
    if not by_rows and not weight.mT.is_contiguous():
        return False
    # The TMA needs addresses and strides that are multiples of 16 bytes. A tile of a weight that is stored as [N, M]
    # must not reach into the rows of the next expert, which the TMA would read instead of zeros.
    is_aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    return is_aligned and weight.shape[1] % (BLOCK_N if by_rows else 8) == 0 and weight.shape[2] % 8 == 0


def _copies_by_tma(x: Tensor) -> bool:
    """Return whether the device of x has a tensor memory accelerator, and enough shared memory for the tiles. The
    interpreter emulates it. A meta tensor has no address, which a descriptor needs, so a simulation counts the cost of
    `grouped_mm`."""
    chip = device_of(x)
    if x.is_meta or not chip.arch:
        return not x.is_meta and runs_kernels(x)
    return chip.arch.startswith("sm_") and int(chip.arch[3:]) >= 90 and chip.shared_memory >= 200 * 1024


def grouped_low_rank_product(x: Tensor, weight: Tensor, h: Tensor | None, b: Tensor | None, routing: Routing) -> Tensor:
    """Return x W + h B [S, M], or x W without h and B. Rows that belong to no expert are undefined. x is [S, N], weight
    [E, N, M], h [S, 2, R] in terms and B [E, R, M]."""
    if h is None or b is None:
        return grouped_product(x, weight, routing.ends)
    if adds_in_product(x, weight, b):
        return _product(x, weight, h, b, routing)
    y = grouped_product(x, weight, routing.ends)
    grouped_expand(h, b, y, routing)
    return y


@on_device
def _product(x: Tensor, weight: Tensor, h: Tensor, b: Tensor, routing: Routing) -> Tensor:
    """Return x W + h B by the kernel."""
    (experts, n, m), by_rows = weight.shape, weight.is_contiguous()
    y, r, order = x.new_empty(x.shape[0], m), b.shape[-2], TERMS[x.dtype]
    if by_rows:
        stored, block = weight.view(experts * n, m), [BLOCK_N, BLOCK_M]
    else:
        stored, block = weight.mT.view(experts * m, n), [BLOCK_M, BLOCK_N]
    tiles = (cdiv(len(x), BLOCK_T) + experts) * cdiv(m, BLOCK_M)
    launch(
        grouped_low_rank_product_kernel,
        min(tiles, device_of(x).multiprocessors),
        *in_order(grouped_low_rank_product_kernel)(
            y_ptr=y, h_ptr=h, b_ptr=b, ends_ptr=routing.ends,
            x_tiles=TensorDescriptor(x, x.shape, x.stride(), [BLOCK_T, BLOCK_N]),
            weight_tiles=TensorDescriptor(stored, stored.shape, stored.stride(), block),
            E=experts, N=n, M=m, stride_term=b.stride(0),
        ),
        R=r, ORDER=order, B_TERMS=min(order, count_terms(b)), IS_SPLIT=b.dim() == 4, BY_ROWS=by_rows,
        BLOCK_T=BLOCK_T, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=rank_block(r),
        BLOCK_E=triton.next_power_of_2(experts), STAGES=3, num_warps=8,
    )  # fmt: skip
    return y
