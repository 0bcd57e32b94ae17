"""The kernels of the low-rank products of experts, which the docstring of `grouped_low_rank` describes.

A factor [E, R, N] is in memory either as its values, or as its bf16 terms [terms, E, R, N]. Kernels split values into
terms when they read them. The low-rank product h is in memory as two bf16 terms for each row, [S, 2, R].

Shapes: S rows, E experts, N features, R ranks of all adapters of a product together.
"""

from tigon.ops.adapters.low_rank_kernels import term
from tigon.runtime.compat.triton import tl, triton


@triton.jit(do_not_specialize=["E", "first"])
def split_experts_kernel(
    a_ptr, out_ptr, E, N, first, stride_ae, stride_ar, stride_an, stride_oe, stride_or, stride_on, stride_term, factor,
    TERMS_: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the terms of factor * a [E, r, N] to the ranks `first`, `first` + 1, ... of out [terms, E, R, N]. If TERMS_
    is 0, write the values of `a` to out [E, R, N]. Both tensors have any strides. A program writes one rank of a block
    of experts, because the experts of PEFT's B are adjacent in memory."""
    e_blocks = tl.cdiv(E, BLOCK_E)
    n_blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rank = (pid // n_blocks // e_blocks).to(tl.int64)
    experts = ((pid // n_blocks % e_blocks) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)[:, None]
    cols = ((pid % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (experts < E) & (cols < N)
    a_offsets = experts * stride_ae + rank * stride_ar + cols.to(tl.int64) * stride_an
    a = tl.load(a_ptr + a_offsets, mask, 0.0)
    out = out_ptr + experts * stride_oe + (first + rank) * stride_or + cols.to(tl.int64) * stride_on
    if TERMS_ == 0:
        tl.store(out, a, mask)
    else:
        a = a.to(tl.float32) * factor
        for i in tl.static_range(TERMS_):
            tl.store(out + i * stride_term, term(a, i), mask)


@triton.jit
def find_rows(ends_ptr, tile, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the expert of a tile (BLOCK_E if there is no such tile), its first row, and the end of the expert's
    rows."""
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + index, index < E, 0)
    starts = tl.load(ends_ptr + index - 1, (index > 0) & (index < E), 0)
    tiles = (ends - starts + BLOCK_T - 1) // BLOCK_T
    tile_ends = tl.cumsum(tiles)
    expert = tl.sum((tile_ends <= tile).to(tl.int32))
    is_expert = index == expert
    start = tl.sum(tl.where(is_expert, starts, 0))
    end = tl.sum(tl.where(is_expert, ends, 0))
    earlier_tiles = tl.sum(tl.where(is_expert, tile_ends - tiles, 0))
    return expert, (start + (tile - earlier_tiles) * BLOCK_T).to(tl.int64), end


@triton.jit
def load_factor(a_ptr, offsets, stride_term, mask, TERMS_: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Return the first and the second bf16 term of a tile of a factor. If IS_SPLIT, `a_ptr` points to the terms. If
    TERMS_ is 1, the first term replaces the second, which is unused."""
    a = tl.load(a_ptr + offsets, mask, 0.0)
    first = a.to(tl.bfloat16)
    second = first
    if TERMS_ == 2:
        if IS_SPLIT:
            second = tl.load(a_ptr + stride_term + offsets, mask, 0.0)
        else:
            second = (a.to(tl.float32) - first.to(tl.float32)).to(tl.bfloat16)
    return first, second


@triton.jit
def load_hidden(h_ptr, rows, end, ranks, R: tl.constexpr, ORDER: tl.constexpr):
    """Return the first and the second term of h [T, r]. If ORDER is 1, the first replaces the second, as above."""
    mask = (rows < end) & (ranks < R)
    first = tl.load(h_ptr + rows * (2 * R) + ranks, mask, 0.0)
    second = first
    if ORDER == 2:
        second = tl.load(h_ptr + rows * (2 * R) + R + ranks, mask, 0.0)
    return first, second


@triton.jit
def store_hidden(h, h_ptr, rows, end, ranks, R: tl.constexpr):
    """Write the two terms of h [T, r]."""
    mask = (rows < end) & (ranks < R)
    tl.store(h_ptr + rows * (2 * R) + ranks, term(h, 0), mask)
    tl.store(h_ptr + rows * (2 * R) + R + ranks, term(h, 1), mask)


@triton.jit
def add_projected(total, z, a, a_second, Z_TERMS: tl.constexpr, A_TERMS: tl.constexpr):
    """Return total [T, r] + z [T, N] a [r, N]^T in fp32. Tensor cores do not round the sums that they carry, so the
    products start from zero."""
    first = z.to(tl.bfloat16)
    sums = tl.zeros(total.shape, tl.float32)
    if A_TERMS == 2:
        sums = tl.dot(first, tl.trans(a_second), sums)
    if Z_TERMS == 2:
        sums = tl.dot(term(z, 1), tl.trans(a), sums)
    sums = tl.dot(first, tl.trans(a), sums)
    return total + sums


@triton.jit
def add_expanded(base, h, h_second, b, b_second, ORDER: tl.constexpr, B_TERMS: tl.constexpr):
    """Return base [T, N] + h [T, r] b [r, N] in fp32. ORDER is the number of terms that the dtype of `base` needs."""
    total = tl.dot(h, b, base.to(tl.float32))
    if ORDER == 2:
        total = tl.dot(h_second, b, total)
        if B_TERMS == 2:
            total = tl.dot(h, b_second, total)
    return total


@triton.jit(do_not_specialize=["E"])
def grouped_project_kernel(
    # [S, N] or [T, N], [E, R, N], [S, 2, R] bf16, [S, 2, R] bf16 or None, [S, N] or None, [S], [T, K] or None, [E]
    z_ptr, a_ptr, out_ptr, weighted_ptr, copy_ptr, order_ptr, weights_ptr, ends_ptr,
    E, N, stride_z, stride_term,
    R: tl.constexpr, CHOICES: tl.constexpr, GATHERS: tl.constexpr,
    Z_TERMS: tl.constexpr, A_TERMS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute z A^T for a tile of the rows of one expert and a block of the columns of h, and w z A^T if it is needed.
    If `copy` is passed, the rows of z are written to it. Rows without an expert are not written."""
    r_blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    expert, first, end = find_rows(ends_ptr, pid // r_blocks, E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    sources = rows
    if GATHERS:
        sources = tl.load(order_ptr + rows, rows < end, 0) // CHOICES
    z_rows = z_ptr + sources * stride_z
    ranks = (pid % r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    a_rows = (expert.to(tl.int64) * R + ranks[:, None]) * N
    steps = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + steps
        is_inside = (rows < end) & (cols < N)
        z = tl.load(z_rows + cols, is_inside, 0.0)
        if copy_ptr is not None:
            tl.store(copy_ptr + rows * N + cols, z, is_inside & (pid % r_blocks == 0))
        a, a2 = load_factor(
            a_ptr, a_rows + cols, stride_term, (ranks[:, None] < R) & (cols < N), A_TERMS, IS_SPLIT
        )  # fmt: skip
        total = add_projected(total, z, a, a2, Z_TERMS, A_TERMS)
    store_hidden(total, out_ptr, rows, end, ranks[None, :], R)
    if weighted_ptr is not None:
        choices = tl.load(order_ptr + rows, rows < end, 0)
        weights = tl.load(weights_ptr + choices, rows < end, 0.0).to(tl.float32)
        store_hidden(total * weights, weighted_ptr, rows, end, ranks[None, :], R)


@triton.jit(do_not_specialize=["E", "parts"])
def grouped_expand_kernel(
    h_ptr, b_ptr, out_ptr, ends_ptr,  # [S, 2, R] bf16, [E, R, N], [S, N], [E]
    E, N, part_length, parts, stride_out, stride_term,
    R: tl.constexpr, ORDER: tl.constexpr, B_TERMS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add h B to a tile of the rows of one expert and a part of the features. The precision of `out` needs ORDER terms
    of h and of B."""
    pid = tl.program_id(0)
    expert, first, end = find_rows(ends_ptr, pid // parts, E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    steps = tl.arange(0, BLOCK_N)[None, :]
    out_rows = out_ptr + rows * stride_out
    # A single block of ranks is loaded once for all features.
    if R <= BLOCK_R:
        all_ranks = tl.arange(0, BLOCK_R)
        h, h2 = load_hidden(h_ptr, rows, end, all_ranks[None, :], R, ORDER)
    # The length of a part is a multiple of `BLOCK_N`. Triton vectorises the loads only if it knows that.
    start_of_part = tl.multiple_of((pid % parts) * part_length, BLOCK_N)
    for start in tl.range(start_of_part, tl.minimum(start_of_part + part_length, N), BLOCK_N, num_stages=STAGES):
        cols = start + steps
        inside = (rows < end) & (cols < N)
        total = tl.load(out_rows + cols, inside, 0.0).to(tl.float32)
        for first_rank in tl.static_range(0, R, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            if R > BLOCK_R:
                h, h2 = load_hidden(h_ptr, rows, end, ranks[None, :], R, ORDER)
            offsets = (expert.to(tl.int64) * R + ranks[:, None]) * N + cols
            b, b2 = load_factor(
                b_ptr, offsets, stride_term, (ranks[:, None] < R) & (cols < N), B_TERMS, IS_SPLIT
            )  # fmt: skip
            total = add_expanded(total, h, h2, b, b2, ORDER, B_TERMS)
        tl.store(out_rows + cols, total, inside)


@triton.jit
def grouped_sum_kernel(
    z_ptr, h_ptr, out_ptr, order_ptr, ends_ptr,  # [S, N] or [T, N], [S, 2, R] bf16, [E, RANK, N] by strides, [S], [E]
    N, stride_z, stride_oe, stride_or, stride_on, factor,
    R: tl.constexpr, COLUMN: tl.constexpr, RANK: tl.constexpr, CHOICES: tl.constexpr, GATHERS: tl.constexpr,
    Z_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute factor * z^T h over the rows of one expert, for a block of features and a block of the columns of h. The
    columns of h are COLUMN, ..., COLUMN + RANK - 1. One product takes both terms of a block of columns."""
    n_blocks = tl.cdiv(N, BLOCK_N)
    r_blocks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    expert = (pid // r_blocks // n_blocks).to(tl.int64)
    features = (pid // r_blocks % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = features[None, :]
    first_rank = (pid % r_blocks) * BLOCK_R
    lanes = tl.arange(0, 2 * BLOCK_R)
    lane_ranks = (first_rank + lanes % BLOCK_R)[None, :]
    h_cols = (lanes // BLOCK_R)[None, :] * R + (COLUMN + lane_ranks)
    first = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    end = tl.load(ends_ptr + expert)
    steps = tl.arange(0, BLOCK_T).to(tl.int64)[:, None]
    total = tl.zeros([BLOCK_N, 2 * BLOCK_R], tl.float32)
    for start in tl.range(first, end, BLOCK_T, num_stages=STAGES):
        rows = start + steps
        is_row = rows < end
        sources = rows
        if GATHERS:
            sources = tl.load(order_ptr + rows, is_row, 0) // CHOICES
        z = tl.load(z_ptr + sources * stride_z + cols, is_row & (cols < N), 0.0)
        h = tl.load(h_ptr + rows * (2 * R) + h_cols, is_row & (lane_ranks < RANK), 0.0)
        # The products of each step start from zero, as in `add_projected`. The multiplication keeps the compiler from
        # adding them to the total inside of the tensor cores.
        sums = tl.dot(tl.trans(z.to(tl.bfloat16)), h)
        if Z_TERMS == 2:
            sums = tl.dot(tl.trans(term(z, 1)), h, sums)
        total += sums * factor
    both = tl.sum(tl.reshape(total, [BLOCK_N, 2, BLOCK_R]), 1)
    ranks = (first_rank + tl.arange(0, BLOCK_R))[None, :]
    rows_of_out = features[:, None].to(tl.int64)
    out = out_ptr + expert * stride_oe + ranks.to(tl.int64) * stride_or + rows_of_out * stride_on
    tl.store(out, both, (rows_of_out < N) & (ranks < RANK))
