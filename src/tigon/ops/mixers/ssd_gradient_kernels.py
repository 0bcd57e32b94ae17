r"""The backward kernels of the state space dual. `ssd_chunks` and `ssd_kernels` have the formulas.

`ssd_scan_kernel` recomputes the states before all chunks, and computes their gradients after all chunks. Two kernels
then compute the other gradients, for all chunks in parallel: `ssd_group_gradients_kernel` dB and dC, and
`ssd_head_gradients_kernel` dx, ddt and the parts of dA, dD and ddt_bias.

dg of token t is the sum of these parts, which the decay of the token multiplies:

- the pairs (i, j) of tokens of the chunk with j < t <= i,
- what token t and later ones read from the state before the chunk: C . (exp(G) dy S),
- what earlier tokens write to the state after the chunk: B . (exp(G_L - G) v dS'),
- the product of the states before and after the chunk, exp(G_L) <S, dS'>.

No part is the difference of two sums, so a strong decay costs no digits.

Shapes: H heads of P features, K groups of B and C with N features, C = 64 tokens of a chunk, M chunks in total.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    CHUNK,
    MIN_LOG_DECAY,
    load_tile,
    pair_decays,
    rows_of_chunk,
    saturate,
    square_offsets,
    store_tile,
)
from tigon.ops.mixers.ssd_kernels import LOG_DECAY, STEP, TOTAL, VECTORS, WRITE, load_state, unlimited_steps
from tigon.runtime.compat.triton import tl, triton

# The numbers [C] of a chunk of a head and a block of N in `parts` [M, H, blocks, 3, C], fp32:
#   READ    the dot products C . (exp(G) dy S)
#   WRITTEN the dot products B . (exp(G_L - G) v dS')
#   DOTS    the dot product of the block of S and that of dS', in the first element
READ, WRITTEN, DOTS = (tl.constexpr(i) for i in range(3))
PARTS = tl.constexpr(3)


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
        dpairs = saturate(dpairs, x_ptr).to(dtype)
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


@triton.jit
def _sum_parts(parts_ptr, place, BLOCKS: tl.constexpr, PART: tl.constexpr):
    """Return the sum [C] over blocks of N of one of the numbers of `ssd_group_gradients_kernel`."""
    total = tl.zeros([CHUNK], tl.float32)
    for block in range(BLOCKS):
        total += tl.load(parts_ptr + ((place * BLOCKS + block) * PARTS + PART) * CHUNK + tl.arange(0, CHUNK))
    return total


@triton.jit(do_not_specialize=["T", "chunks", "state_width"])
def ssd_head_gradients_kernel(
    x_ptr, dt_ptr, rates_ptr, b_ptr, products_ptr, weights_ptr, bias_ptr, dy_ptr,  # `weights` [H, P] fp32 or None
    vectors_ptr, dstates_ptr, parts_ptr, chunks_ptr,  # [M, H, 4, C], [M, H, P, N], [M, H, PART_BLOCKS, 3, C], [M, 3]
    dx_ptr, ddt_ptr, drates_ptr, dweights_ptr,  # rows, rows, [M, H, 2] fp32, [M, H, P] fp32 or None
    T, chunks, state_width, stride_x, stride_dt, stride_b, stride_dy, smallest, largest,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr, PART_BLOCKS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, APPLIES_SOFTPLUS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx and ddt of one chunk of one head, and its parts of dA, ddt_bias and dD.

    A chunk that does not exist has parts of 0.
    """
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = chunk.to(tl.int64) * HEADS + head
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    index, cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    if sample < 0:
        tl.store(drates_ptr + 2 * place, 0.0)
        tl.store(drates_ptr + 2 * place + 1, 0.0)
        if dweights_ptr is not None:
            tl.store(dweights_ptr + place * SIZE + cols, tl.zeros([BLOCK_P], tl.float32), cols < SIZE)
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    b_ptr += head // GROUPS * STATE_SIZE
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
    total, step = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + STEP * CHUNK)
    last_total = tl.load(vectors_ptr + place * (VECTORS * CHUNK) + (TOTAL * CHUNK + CHUNK - 1))
    dvalues = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for start in tl.range(0, state_width, BLOCK_N, num_stages=STAGES):
        state_cols = start + tl.arange(0, BLOCK_N)
        b = load_tile(b_ptr, first, end, stride_b, STATE_SIZE, state_cols)
        dstate = load_state(dstates_ptr + place * (SIZE * STATE_SIZE), SIZE, STATE_SIZE, cols, state_cols)
        dvalues = tl.dot(b, tl.trans(dstate), dvalues, input_precision="ieee")
    products = chunk.to(tl.int64) * (HEADS // GROUPS) + head // GROUPS
    scores = tl.load(products_ptr + products * (CHUNK * CHUNK) + square_offsets()) * pair_decays(total)
    x = load_tile(x_ptr + head * SIZE, first, end, stride_x, SIZE, cols)
    dy = load_tile(dy_ptr + head * SIZE, first, end, stride_dy, SIZE, cols)
    dvalues *= tl.exp(last_total - total)[:, None]
    rounded_scores = saturate(scores, x_ptr).to(dtype)
    dvalues = tl.dot(tl.trans(rounded_scores), dy, dvalues, input_precision="ieee")
    dx = step[:, None] * dvalues
    dots = tl.zeros([], tl.float32)
    for block in range(PART_BLOCKS):
        dots += tl.load(parts_ptr + ((place * PART_BLOCKS + block) * PARTS + DOTS) * CHUNK)
    if weights_ptr is not None:
        dx += tl.load(weights_ptr + head * SIZE + cols, cols < SIZE, 0.0)[None, :] * dy
        # The second term is NaN if the bounds of the samples are malformed.
        dweights = tl.sum(x.to(tl.float32) * dy.to(tl.float32), 0) + 0.0 * dots
        tl.store(dweights_ptr + place * SIZE + cols, dweights, cols < SIZE)
    store_tile(dx_ptr + head * SIZE, dx, first, end, HEADS * SIZE, SIZE, cols)
    pairs = scores * tl.dot(dy, tl.trans(x), input_precision="ieee") * step[None, :]
    is_later = index[:, None] > index[None, :]
    # Row t of this product has the sums over i >= t. It takes less time than a cumulative sum.
    from_token = (index[:, None] <= index[None, :]).to(tl.float32)
    pairs = tl.dot(from_token, tl.where(is_later, pairs, 0.0), input_precision=PRECISION)
    dlog_decay = tl.sum(tl.where(is_later, pairs, 0.0), 1) + tl.exp(last_total) * dots
    dlog_decay += tl.cumsum(_sum_parts(parts_ptr, place, PART_BLOCKS, READ), 0, reverse=True)
    # The sum of the writes before token t must not contain the write of token t, which may be so much larger that the
    # sum would lose their digits.
    written = _sum_parts(parts_ptr, place, PART_BLOCKS, WRITTEN)
    written = tl.where(index > 0, tl.gather(written, tl.maximum(index - 1, 0), 0), 0.0)
    dlog_decay += tl.cumsum(written, 0)
    # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
    dlog_decay = tl.where(tl.load(vectors + LOG_DECAY * CHUNK) >= MIN_LOG_DECAY, dlog_decay, 0.0 * dlog_decay)
    is_token = index < end - first
    rate, bias = tl.load(rates_ptr + head).to(tl.float32), 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    dt = tl.load(dt_ptr + (first + index) * stride_dt + head, is_token, 0.0)
    unlimited = unlimited_steps(dt, bias, APPLIES_SOFTPLUS)
    slope = tl.full([CHUNK], 1.0, tl.float32)
    if APPLIES_SOFTPLUS:
        # The derivative of the softplus.
        slope = tl.sigmoid(dt.to(tl.float32) + bias)
    is_limited = (unlimited < smallest) | (unlimited > largest)
    dsteps = rate * dlog_decay + tl.sum(x * dvalues, 1)
    ddt = tl.where(is_token, tl.where(is_limited, 0.0, slope) * dsteps, 0.0)
    tl.store(ddt_ptr + (first + index) * HEADS + head, ddt, is_token)
    tl.store(drates_ptr + 2 * place, tl.sum(step * dlog_decay, 0))
    tl.store(drates_ptr + 2 * place + 1, tl.sum(ddt, 0))
