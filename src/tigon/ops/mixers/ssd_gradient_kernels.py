r"""The backward kernels of the state space dual. `ssd_chunks` and `ssd_kernels` have the formulas.

`ssd_scan_kernel` recomputes the states before all chunks, and computes their gradients after all chunks. Three kernels
then compute the other gradients, for all chunks in parallel: `ssd_group_gradients_kernel` dB and dC,
`ssd_value_gradients_kernel` dx and dD, and `ssd_step_gradients_kernel` ddt, dA and ddt_bias.

dg of token t is the sum of these parts, which the decay of the token multiplies:

- the pairs (i, j) of tokens of the chunk with j < t <= i,
- what token t and later ones read from the state before the chunk: C . (exp(G) dy S),
- what earlier tokens write to the state after the chunk: B . (exp(G_n - G) v dS'),
- the product of the states before and after the chunk, exp(G_n) <S, dS'>.

No part is the difference of two sums, so a strong decay costs no digits.

Shapes: H heads of P features, K groups of B and C with N features, C = 64 tokens of a chunk, M chunks in total.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    CHUNK,
    MIN_LOG_DECAY,
    load_tile,
    pair_decays,
    rows_of_chunk,
    square_offsets,
    store_tile,
)
from tigon.ops.mixers.ssd_kernels import LOG_DECAY, STEP, TOTAL, VECTORS, WRITE, load_state, unlimited_steps
from tigon.runtime.compat.triton import tl, triton

# The numbers [C] of a chunk of a head and a block of N in `parts` [M, H, blocks, 3, C], fp32:
#   READ    the dot products C . (exp(G) dy S)
#   WRITTEN the dot products B . (exp(G_n - G) v dS')
#   DOTS    the dot product of the block of S and that of dS', in the first element
READ, WRITTEN, DOTS = (tl.constexpr(i) for i in range(3))
PARTS = tl.constexpr(3)
# The numbers [C] of a chunk of a head and a block of P in `value_parts` [M, H, blocks, 2, C], fp32:
#   PAIR    the part of dg that comes from pairs of tokens of the chunk
#   VALUE   the dot products x . dv
PAIR, VALUE = tl.constexpr(0), tl.constexpr(1)


@triton.jit(do_not_specialize=["T", "chunks", "rows"])
def ssd_group_gradients_kernel(
    x_ptr, b_ptr, c_ptr, dy_ptr, vectors_ptr, states_ptr, dstates_ptr, chunks_ptr,  # the last is [M, 3] or None
    parts_ptr, db_ptr, dc_ptr,  # [M, H, blocks, 3, C] fp32, [SPLITS, rows, K, N], [SPLITS, rows, K, N]
    T, chunks, rows, stride_x, stride_b, stride_c, stride_dy,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dB and dC of one chunk, summed over the heads of a part of a group.

    The sum over these heads stays in registers, so its order is fixed. `parts` gets what these columns add to dg.
    """
    blocks: tl.constexpr = (STATE_SIZE + BLOCK_N - 1) // BLOCK_N
    groups: tl.constexpr = HEADS // GROUPS
    heads_of_split: tl.constexpr = GROUPS // SPLITS
    pid = tl.program_id(0)
    block, split, group = pid % blocks, pid // blocks % SPLITS, pid // (blocks * SPLITS) % groups
    chunk = pid // (blocks * SPLITS * groups)
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    index, value_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    b_ptr, c_ptr = b_ptr + group * STATE_SIZE, c_ptr + group * STATE_SIZE
    db, dc = tl.zeros([CHUNK, BLOCK_N], tl.float32), tl.zeros([CHUNK, BLOCK_N], tl.float32)
    for i in tl.range(0, heads_of_split, num_stages=STAGES, disable_licm=True):
        head = group * GROUPS + split * heads_of_split + i
        place = chunk.to(tl.int64) * HEADS + head
        x = load_tile(x_ptr + head * SIZE, first, end, stride_x, SIZE, value_cols)
        dy = load_tile(dy_ptr + head * SIZE, first, end, stride_dy, SIZE, value_cols)
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total, step = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + STEP * CHUNK)
        dpairs = tl.dot(dy, tl.trans(x), input_precision="ieee") * pair_decays(total) * step[None, :]
        dpairs = dpairs.to(dtype)
        b = load_tile(b_ptr, first, end, stride_b, STATE_SIZE, cols)
        dc = tl.dot(dpairs, b, dc, input_precision="ieee")
        c = load_tile(c_ptr, first, end, stride_c, STATE_SIZE, cols)
        db = tl.dot(tl.trans(dpairs), c, db, input_precision="ieee")
        parts = parts_ptr + (place * blocks + block) * (PARTS * CHUNK)
        state = load_state(states_ptr + place * (SIZE * STATE_SIZE), SIZE, STATE_SIZE, value_cols, cols)
        read = tl.exp(total)[:, None] * tl.dot(dy, state, input_precision="ieee")
        tl.store(parts + READ * CHUNK + index, tl.sum(c * read, 1))
        dc += read
        dstate = load_state(dstates_ptr + place * (SIZE * STATE_SIZE), SIZE, STATE_SIZE, value_cols, cols)
        tl.store(parts + DOTS * CHUNK, tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0))
        written = tl.load(vectors + WRITE * CHUNK)[:, None] * tl.dot(x, dstate, input_precision="ieee")
        tl.store(parts + WRITTEN * CHUNK + index, tl.sum(b * written, 1))
        db += written
    place = split.to(tl.int64) * rows * (groups * STATE_SIZE) + group * STATE_SIZE
    store_tile(db_ptr + place, db, first, end, groups * STATE_SIZE, STATE_SIZE, cols)
    store_tile(dc_ptr + place, dc, first, end, groups * STATE_SIZE, STATE_SIZE, cols)


@triton.jit(do_not_specialize=["T", "chunks", "state_width"])
def ssd_value_gradients_kernel(
    x_ptr, b_ptr, products_ptr, weights_ptr, dy_ptr,  # rows, rows, [M, K, C, C], [H, P] fp32 or None, rows
    vectors_ptr, dstates_ptr, chunks_ptr,  # [M, H, 4, C], [M, H, P, N], [M, 3] or None
    dx_ptr, value_parts_ptr, dweights_ptr,  # rows, [M, H, blocks, 2, C] fp32, [M, H, P] fp32 or None
    T, chunks, state_width, stride_x, stride_b, stride_dy,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dx of one chunk of one head, what they add to `value_parts`, and their part of dD.

    A chunk that does not exist has a part of 0.
    """
    blocks: tl.constexpr = (SIZE + BLOCK_P - 1) // BLOCK_P
    block, pid = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    chunk, head = pid // HEADS, pid % HEADS
    place = chunk.to(tl.int64) * HEADS + head
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    index, cols = tl.arange(0, CHUNK), block * BLOCK_P + tl.arange(0, BLOCK_P)
    if sample < 0:
        if dweights_ptr is not None:
            tl.store(dweights_ptr + place * SIZE + cols, tl.zeros([BLOCK_P], tl.float32), cols < SIZE)
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    dvalues = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for start in tl.range(0, state_width, BLOCK_N, num_stages=STAGES):
        state_cols = start + tl.arange(0, BLOCK_N)
        b = load_tile(b_ptr + head // GROUPS * STATE_SIZE, first, end, stride_b, STATE_SIZE, state_cols)
        dstate = load_state(dstates_ptr + place * (SIZE * STATE_SIZE), SIZE, STATE_SIZE, cols, state_cols)
        dvalues = tl.dot(b, tl.trans(dstate), dvalues, input_precision="ieee")
    vectors = vectors_ptr + place * (VECTORS * CHUNK)
    total, step = tl.load(vectors + TOTAL * CHUNK + index), tl.load(vectors + STEP * CHUNK + index)
    dvalues *= tl.exp(tl.load(vectors + (TOTAL * CHUNK + CHUNK - 1)) - total)[:, None]
    products = chunk.to(tl.int64) * (HEADS // GROUPS) + head // GROUPS
    scores = tl.load(products_ptr + products * (CHUNK * CHUNK) + square_offsets()) * pair_decays(total)
    dy = load_tile(dy_ptr + head * SIZE, first, end, stride_dy, SIZE, cols)
    dvalues = tl.dot(tl.trans(scores.to(dtype)), dy, dvalues, input_precision="ieee")
    x = load_tile(x_ptr + head * SIZE, first, end, stride_x, SIZE, cols)
    parts = value_parts_ptr + (place * blocks + block) * (2 * CHUNK) + index
    tl.store(parts + VALUE * CHUNK, tl.sum(x * dvalues, 1))
    dx = step[:, None] * dvalues
    if weights_ptr is not None:
        dx += tl.load(weights_ptr + head * SIZE + cols, cols < SIZE, 0.0)[None, :] * dy
        # The second term is NaN if the bounds of the samples are malformed.
        dweights = tl.sum(x.to(tl.float32) * dy.to(tl.float32), 0) + 0.0 * tl.sum(dvalues, 0)
        tl.store(dweights_ptr + place * SIZE + cols, dweights, cols < SIZE)
    store_tile(dx_ptr + head * SIZE, dx, first, end, HEADS * SIZE, SIZE, cols)
    is_later = index[:, None] > index[None, :]
    pairs = scores * tl.dot(dy, tl.trans(x), input_precision="ieee") * step[None, :]
    # Row t of this product has the sums over i >= t. It takes less time than a cumulative sum.
    from_token = (index[:, None] <= index[None, :]).to(tl.float32)
    pairs = tl.dot(from_token, tl.where(is_later, pairs, 0.0), input_precision=PRECISION)
    tl.store(parts + PAIR * CHUNK, tl.sum(tl.where(is_later, pairs, 0.0), 1))


@triton.jit
def _sum_parts(parts, stride, index, mask, BLOCKS: tl.constexpr):
    """Return the sum over blocks of the numbers at `parts + index`, which have this stride between the blocks."""
    total = tl.load(parts + index, mask, 0.0)
    for block in tl.static_range(1, BLOCKS):
        total += tl.load(parts + block * stride + index, mask, 0.0)
    return total


@triton.jit(do_not_specialize=["T", "chunks"])
def ssd_step_gradients_kernel(
    dt_ptr, rates_ptr, bias_ptr, vectors_ptr, chunks_ptr,  # rows, [H], [H] or None, [M, H, 4, C], [M, 3] or None
    parts_ptr, value_parts_ptr, ddt_ptr, drates_ptr,  # [M, H, N_BLOCKS, 3, C], [M, H, P_BLOCKS, 2, C], rows, [M, 2, H]
    T, chunks, stride_dt, smallest, largest,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, N_BLOCKS: tl.constexpr, P_BLOCKS: tl.constexpr,
    APPLIES_SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Compute ddt of one chunk for a block of heads, and their parts of dA and of ddt_bias.

    A chunk that does not exist has parts of 0.
    """
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    block, chunk = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    index, heads = tl.arange(0, CHUNK)[None, :], block * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    drates = drates_ptr + chunk.to(tl.int64) * (2 * HEADS) + heads
    if sample < 0:
        tl.store(drates, tl.zeros([BLOCK_H], tl.float32), is_head)
        tl.store(drates + HEADS, tl.zeros([BLOCK_H], tl.float32), is_head)
        return
    places = (chunk.to(tl.int64) * HEADS + heads)[:, None]
    mask = is_head[:, None] & (index >= 0)
    vectors = vectors_ptr + places * (VECTORS * CHUNK)
    parts, value_parts = (
        parts_ptr + places * (N_BLOCKS * PARTS * CHUNK),
        value_parts_ptr + places * (P_BLOCKS * 2 * CHUNK),
    )
    last_total = tl.load(vectors + (TOTAL * CHUNK + CHUNK - 1), is_head[:, None], 0.0)
    dots = _sum_parts(parts + DOTS * CHUNK, PARTS * CHUNK, 0, is_head[:, None], N_BLOCKS)
    dlog_decay = _sum_parts(value_parts + PAIR * CHUNK, 2 * CHUNK, index, mask, P_BLOCKS) + tl.exp(last_total) * dots
    reads = _sum_parts(parts + READ * CHUNK, PARTS * CHUNK, index, mask, N_BLOCKS)
    dlog_decay += tl.cumsum(reads, 1, reverse=True)
    # The sum of the writes before token t must not contain the write of token t, which may be so much larger that the
    # sum would lose their digits.
    written = _sum_parts(parts + WRITTEN * CHUNK, PARTS * CHUNK, index - 1, mask & (index > 0), N_BLOCKS)
    dlog_decay += tl.cumsum(written, 1)
    # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
    log_decay = tl.load(vectors + LOG_DECAY * CHUNK + index, mask, 0.0)
    dlog_decay = tl.where(log_decay >= MIN_LOG_DECAY, dlog_decay, 0.0 * dlog_decay)
    rates = tl.load(rates_ptr + heads, is_head, 0.0).to(tl.float32)
    bias = tl.zeros([BLOCK_H], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + heads, is_head, 0.0).to(tl.float32)
    is_token = mask & (index < end - first)
    rows = first + index
    dt = tl.load(dt_ptr + rows * stride_dt + heads[:, None], is_token, 0.0)
    unlimited = unlimited_steps(dt, bias[:, None], APPLIES_SOFTPLUS)
    slope = tl.full([BLOCK_H, CHUNK], 1.0, tl.float32)
    if APPLIES_SOFTPLUS:
        # The derivative of the softplus.
        slope = tl.sigmoid(dt.to(tl.float32) + bias[:, None])
    is_limited = (unlimited < smallest) | (unlimited > largest)
    values = _sum_parts(value_parts + VALUE * CHUNK, 2 * CHUNK, index, mask, P_BLOCKS)
    ddt = tl.where(is_limited, 0.0, slope) * (rates[:, None] * dlog_decay + values)
    ddt = tl.where(is_token, ddt, 0.0)
    tl.store(ddt_ptr + rows * HEADS + heads[:, None], ddt, is_token)
    steps = tl.load(vectors + STEP * CHUNK + index, mask, 0.0)
    tl.store(drates, tl.sum(steps * dlog_decay, 1), is_head)
    tl.store(drates + HEADS, tl.sum(ddt, 1), is_head)
