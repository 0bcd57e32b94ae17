r"""The gradients of Kimi Delta Attention, after the backward scan. `kda_kernels` explains the levels of pairs.

`kda_pair_gradients_kernel` computes the gradients of the products of all pairs of tokens, times beta.
`kda_state_gradients_kernel` computes the parts of dq, dk and dg that come from states, a block of features at a time,
and `kda_level_gradients_kernel` adds those of pairs. This dq and dk are the gradients of the normalised rows. At last,
`kda_norm_gradients_kernel` computes dq and dk, because the norm of a row needs all features.

No part of dg is a difference of sums, which would be noise where the decay is strong. The gradient of g_t sums only the
terms that exp(g_t) multiplies: the reads of the state before the chunk by tokens i >= t, the writes of tokens j < t to
the state after it, and the pairs (i, j) with j < t <= i. The matrices that choose the tokens of such a sum have zeros
and ones, so TF32 rounds each term once.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total.
"""

from tigon.ops.mixers.delta_rule_gradient_kernels import (
    load_state,
    normalise_gradient,
    products_of_errors,
    sum_parts,
)
from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    K_FACTOR,
    MIN_LOG_DECAY,
    Q_FACTOR,
    VECTORS,
    load_tile,
    rows_of_chunk,
    square_offsets,
    store_tile,
)
from tigon.ops.mixers.kda_kernels import SAME, are_pairs, decay_until_border, load_totals
from tigon.runtime.compat.triton import tl, triton


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_pair_gradients_kernel(
    do_ptr, errors_ptr, dx_ptr, couplings_ptr, scores_ptr, vectors_ptr, chunks_ptr, parts_ptr, dbeta_ptr,
    T, chunks, width, stride_do,
    HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dbeta and the gradients of the products of all pairs of tokens of a chunk, for one head.

    The gradients of q k^T replace the scores. The gradient of k k^T plus its transpose replaces Z, because each pair is
    a product of two rows of k. The vector `SAME` gets the gradients of the products of q and k of the same token.
    """
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    place = chunk.to(tl.int64) * HEADS + head
    square = place * (CHUNK * CHUNK) + square_offsets()
    index, stride = tl.arange(0, CHUNK), HEADS * VALUE_SIZE
    start = head * VALUE_SIZE
    dscores, dsystem = products_of_errors(
        do_ptr + start, dx_ptr + start, errors_ptr + start, first, end, stride_do, stride, width,
        VALUE_SIZE, BLOCK_V, STAGES,
    )  # fmt: skip
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
    beta = tl.load(vectors + BETA * CHUNK)
    dscores *= beta[None, :]
    tl.store(scores_ptr + square, dscores)
    tl.store(vectors + SAME * CHUNK, tl.sum(tl.where(index[:, None] == index[None, :], dscores, 0.0), 1))
    dsystem = tl.where(index[:, None] > index[None, :], -dsystem * beta[:, None] * beta[None, :], 0.0)
    tl.store(couplings_ptr + square, dsystem + tl.trans(dsystem))
    rows = first + index
    tl.store(dbeta_ptr + rows * HEADS + head, sum_parts(parts_ptr, place, BLOCKS, 0), rows < end)


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_state_gradients_kernel(
    q_ptr, k_ptr, do_ptr, vectors_ptr, totals_ptr, states_ptr, dstates_ptr, errors_ptr, dx_ptr,
    chunks_ptr, dq_rows_ptr, dk_rows_ptr, dg_rows_ptr,  # [M, 3] or None, rows [Hk, Dk] twice and [H, Dk], in fp32
    T, chunks, groups, width, stride_q, stride_k, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some features that come from states and from products of a token with itself."""
    BLOCKS: tl.constexpr = (KEY_SIZE + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0) // BLOCKS
    chunk, key_head = program // KEY_HEADS, program % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    heads = KEY_HEADS * groups
    stride = heads * VALUE_SIZE
    index, cols = tl.arange(0, CHUNK), tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    vectors = vectors_ptr + (chunk.to(tl.int64) * heads + key_head * groups) * (VECTORS * CHUNK) + index
    q = load_tile(q_ptr + key_head * KEY_SIZE, first, end, stride_q, KEY_SIZE, cols)
    k = load_tile(k_ptr + key_head * KEY_SIZE, first, end, stride_k, KEY_SIZE, cols)
    q = q * (scale * tl.load(vectors + Q_FACTOR * CHUNK))[:, None]
    k = k * tl.load(vectors + K_FACTOR * CHUNK)[:, None]
    dq, dk = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i in range(groups):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        do, dx, errors = do_ptr + head * VALUE_SIZE, dx_ptr + head * VALUE_SIZE, errors_ptr + head * VALUE_SIZE
        totals = totals_ptr + place * (CHUNK * KEY_SIZE)
        state, dstate = states_ptr + place * (KEY_SIZE * VALUE_SIZE), dstates_ptr + place * (KEY_SIZE * VALUE_SIZE)
        queries, reads = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK, BLOCK_K], tl.float32)
        writes = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        dots = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        for start in tl.range(0, width, BLOCK_V, num_stages=1):
            value_cols = start + tl.arange(0, BLOCK_V)
            a = load_state(state, KEY_SIZE, VALUE_SIZE, cols, value_cols)
            b = load_state(dstate, KEY_SIZE, VALUE_SIZE, cols, value_cols)
            dots += a.to(tl.float32) * b.to(tl.float32)
            x = load_tile(do, first, end, stride_do, VALUE_SIZE, value_cols)
            queries = tl.dot(x, a, queries, input_precision="ieee")
            x = load_tile(dx, first, end, stride, VALUE_SIZE, value_cols)
            reads = tl.dot(x, a, reads, input_precision="ieee")
            x = load_tile(errors, first, end, stride, VALUE_SIZE, value_cols)
            writes = tl.dot(x, b, writes, input_precision="ieee")
        total = load_totals(totals, index, cols, KEY_SIZE)
        last = tl.load(totals + (CHUNK - 1) * KEY_SIZE + cols, cols < KEY_SIZE, 0.0)
        beta = tl.load(vectors + i * (VECTORS * CHUNK) + BETA * CHUNK)[:, None]
        dsame = tl.load(vectors + i * (VECTORS * CHUNK) + SAME * CHUNK)[:, None]
        decay = tl.exp(total)
        queries *= decay
        reads *= -beta * decay
        writes *= beta * tl.exp(last[None, :] - total)
        # The sum of the tokens before each token is not that of all until it minus its own term, which may be larger.
        is_earlier = (index[None, :] < index[:, None]).to(tl.float32)
        dg = tl.cumsum(q * queries + k * reads, 0, reverse=True)
        dg += tl.dot(is_earlier, k * writes, input_precision=PRECISION)
        dg += (tl.exp(last) * tl.sum(dots, 0))[None, :]
        store_tile(dg_rows_ptr + head * KEY_SIZE, dg, first, end, heads * KEY_SIZE, KEY_SIZE, cols)
        dq += queries + dsame * k
        dk += reads + writes + dsame * q
    store_tile(dq_rows_ptr + key_head * KEY_SIZE, dq, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, cols)
    store_tile(dk_rows_ptr + key_head * KEY_SIZE, dk, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, cols)


@triton.jit
def _sum_between(terms, tokens, level, PRECISION: tl.constexpr):
    """For each token t, sum the terms [tokens, features] of those pairs of a level that have t between them.

    If t is in a second half, these are the terms from t to the end of this half. In a first half, they are those from
    its start to the token before t.
    """
    half = tokens >> level
    is_second = half & 1 == 1
    start, end = tl.where(is_second, tokens, half << level), tl.where(is_second, (half + 1) << level, tokens)
    is_between = (tokens[None, :] >= start[:, None]) & (tokens[None, :] < end[:, None])
    return tl.dot(is_between.to(tl.float32), terms, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_level_gradients_kernel(
    q_ptr, k_ptr, g_ptr, vectors_ptr, totals_ptr, couplings_ptr, scores_ptr,  # both have the gradients of pairs
    chunks_ptr, dq_rows_ptr, dk_rows_ptr, dg_rows_ptr, dg_ptr,  # [M, 3] or None, fp32 rows of gradients, rows or None
    T, chunks, groups, stride_q, stride_k, stride_g, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, FIRST_LEVEL: tl.constexpr, END_LEVEL: tl.constexpr,
):  # fmt: skip
    """Add the gradients that come from the pairs of some levels, for some tokens and features.

    The last launch stores the finished gradient of g in `dg`. In the other launch, `dg` is None.
    """
    BLOCKS: tl.constexpr = (KEY_SIZE + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0) // BLOCKS
    cols = tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    start = program % (CHUNK // TOKENS) * TOKENS
    program = program // (CHUNK // TOKENS)
    chunk, key_head = program // KEY_HEADS, program % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    first += start
    tokens = start + tl.arange(0, TOKENS)
    square = tokens[:, None] * CHUNK + tokens[None, :]
    heads = KEY_HEADS * groups
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    vectors = vectors_ptr + (chunk.to(tl.int64) * heads + key_head * groups) * (VECTORS * CHUNK) + tokens
    key_place, key_stride = key_head * KEY_SIZE, KEY_HEADS * KEY_SIZE
    for i in range(groups):
        q = load_tile(q_ptr + key_place, first, end, stride_q, KEY_SIZE, cols, TOKENS)
        k = load_tile(k_ptr + key_place, first, end, stride_k, KEY_SIZE, cols, TOKENS)
        q = q * (scale * tl.load(vectors + Q_FACTOR * CHUNK))[:, None]
        k = k * tl.load(vectors + K_FACTOR * CHUNK)[:, None]
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        totals = totals_ptr + place * (CHUNK * KEY_SIZE)
        total = load_totals(totals, tokens, cols, KEY_SIZE)
        scores, systems = scores_ptr + place * (CHUNK * CHUNK), couplings_ptr + place * (CHUNK * CHUNK)
        stride = heads * KEY_SIZE
        dg = load_tile(dg_rows_ptr + head * KEY_SIZE, first, end, stride, KEY_SIZE, cols, TOKENS)
        # Two loops, because the registers do not hold both gradients.
        dq = load_tile(dq_rows_ptr + key_place, first, end, key_stride, KEY_SIZE, cols, TOKENS)
        for level in tl.range(FIRST_LEVEL, END_LEVEL, num_stages=1):
            near = decay_until_border(total, totals, tokens, cols, level, KEY_SIZE)
            dpairs = tl.where(are_pairs(tokens, level), tl.load(scores + square), 0.0)
            product = near * tl.dot(dpairs, (k * near).to(dtype), input_precision="ieee")
            dg += _sum_between(q * product, tokens, level, PRECISION)
            dq += product
        store_tile(dq_rows_ptr + key_place, dq, first, end, key_stride, KEY_SIZE, cols, TOKENS)
        dk = load_tile(dk_rows_ptr + key_place, first, end, key_stride, KEY_SIZE, cols, TOKENS)
        for level in tl.range(FIRST_LEVEL, END_LEVEL, num_stages=1):
            near = decay_until_border(total, totals, tokens, cols, level, KEY_SIZE)
            half = tokens >> level
            dpairs = tl.where((half ^ 1)[:, None] == half[None, :], tl.load(systems + square), 0.0)
            product = tl.dot(dpairs, (k * near).to(dtype), input_precision="ieee")
            dpairs = tl.where(are_pairs(tokens, level), tl.load(scores + square), 0.0)
            product = near * tl.dot(tl.trans(dpairs), (q * near).to(dtype), product, input_precision="ieee")
            dg += _sum_between(k * product, tokens, level, PRECISION)
            dk += product
        store_tile(dk_rows_ptr + key_place, dk, first, end, key_stride, KEY_SIZE, cols, TOKENS)
        if dg_ptr is None:
            store_tile(dg_rows_ptr + head * KEY_SIZE, dg, first, end, stride, KEY_SIZE, cols, TOKENS)
        else:
            # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
            g = load_tile(g_ptr + head * KEY_SIZE, first, end, stride_g, KEY_SIZE, cols, TOKENS)
            dg = tl.where(g < MIN_LOG_DECAY, 0.0 * dg, dg)
            store_tile(dg_ptr + head * KEY_SIZE, dg, first, end, stride, KEY_SIZE, cols, TOKENS)
        # All threads have stored their sums before others load them for the next head.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_norm_gradients_kernel(
    q_ptr, k_ptr, vectors_ptr, chunks_ptr, dq_rows_ptr, dk_rows_ptr, dq_ptr, dk_ptr,
    T, chunks, groups, stride_q, stride_k, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """Compute dq and dk of one chunk of a head of q and k, given the gradients of normalised rows."""
    chunk, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    vectors = vectors_ptr + (chunk.to(tl.int64) * KEY_HEADS + head) * groups * (VECTORS * CHUNK) + tl.arange(0, CHUNK)
    cols, stride = tl.arange(0, BLOCK_K), KEY_HEADS * KEY_SIZE
    place = head * KEY_SIZE
    factor = tl.load(vectors + Q_FACTOR * CHUNK)
    q = load_tile(q_ptr + place, first, end, stride_q, KEY_SIZE, cols)
    dq = scale * load_tile(dq_rows_ptr + place, first, end, stride, KEY_SIZE, cols)
    store_tile(dq_ptr + place, normalise_gradient(dq, q, factor, NORMALISES), first, end, stride, KEY_SIZE, cols)
    k = load_tile(k_ptr + place, first, end, stride_k, KEY_SIZE, cols)
    dk = load_tile(dk_rows_ptr + place, first, end, stride, KEY_SIZE, cols)
    factor = tl.load(vectors + K_FACTOR * CHUNK)
    store_tile(dk_ptr + place, normalise_gradient(dk, k, factor, NORMALISES), first, end, stride, KEY_SIZE, cols)
