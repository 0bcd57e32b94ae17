r"""The kernels of Kimi Delta Attention that compute chunks in parallel. The scans are those of the gated delta rule.

The decay between two tokens i > j differs between features, so it must multiply the features of q_i, k_i and k_j before
a product. No exponent may be above 0, so the two factors of a pair meet at a border between the tokens. Level 0 to
5 has the pairs whose tokens are in the two halves of the same block of 2, 4, ... 64 tokens; G at the last token of the
first half is the border. Thus each level is one product of k exp(-|G - border|) with itself, and one with q, in which
other pairs are masked, and the levels have each pair once. The loop over levels is not unrolled, because the compiler
would move the masked matrices of all levels out of the loop over features, and the registers do not hold them.

`kda_pairs_kernel` also stores G and the rows that the scans multiply: scale exp(G) q, exp(G) k and exp(G_L - G) k.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total.
"""

from tigon.ops.mixers.delta_rule_gradient_kernels import load_state, sum_parts
from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    EPS,
    MIN_LOG_DECAY,
    QUERY,
    READ,
    VECTORS,
    WRITE,
    couple,
    load_tile,
    rows_of_chunk,
    saturate,
    square_offsets,
    store_tile,
)
from tigon.runtime.compat.triton import tl, triton

# The border of level h is in the middle of a block of 2 ** (h + 1) tokens.
LEVELS = tl.constexpr(6)


@triton.jit
def _norm_factor(ptr, first, end, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMALISES: tl.constexpr):
    """Return the inverse l2 norms of 64 rows, or ones."""
    factor = tl.full([CHUNK], 1.0, tl.float32)
    if NORMALISES:
        squares = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, SIZE, BLOCK, num_stages=1):
            x = load_tile(ptr, first, end, stride, SIZE, start + tl.arange(0, BLOCK)).to(tl.float32)
            squares += tl.sum(x * x, 1)
        factor = tl.rsqrt(squares + EPS)
    return factor


@triton.jit
def _decay_until_border(total, totals, cols, level, SIZE: tl.constexpr):
    """Return exp(-|G - border|) of 64 tokens, for G [C, columns] and the pointer to G [C, Dk] of the chunk."""
    borders = (tl.arange(0, CHUNK) >> (level + 1) << (level + 1)) + (1 << level) - 1
    border = tl.load(totals + borders[:, None] * SIZE + cols[None, :], cols[None, :] < SIZE, 0.0)
    return tl.exp(-tl.abs(total - border))


@triton.jit
def _are_pairs(level):
    """Return True for the pairs [C, C] of a token in the second half of a block and one in the first half."""
    half = tl.arange(0, CHUNK) >> level
    return tl.where(half & 1 == 1, half, -1)[:, None] == tl.where(half & 1 == 0, half + 1, -2)[None, :]


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_pairs_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr,  # rows, rows, rows, rows, [M, 3] or None
    couplings_ptr, scores_ptr, vectors_ptr,  # [M, H, C, C], [M, H, C, C], [M, H, 11, C]
    totals_ptr, queries_ptr, reads_ptr, writes_ptr,  # [M, H, C, Dk] fp32, and rows [H, Dk]
    T, chunks, groups, stride_q, stride_k, stride_g, stride_beta, scale,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALISES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute Z, the scores, G and the rows of the scans of one chunk of a head."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    index = tl.arange(0, CHUNK)
    place = chunk.to(tl.int64) * HEADS + head
    q_ptr, k_ptr, g_ptr = q_ptr + head // groups * KEY_SIZE, k_ptr + head // groups * KEY_SIZE, g_ptr + head * KEY_SIZE
    totals = totals_ptr + place * (CHUNK * KEY_SIZE)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    q_factor = _norm_factor(q_ptr, first, end, stride_q, KEY_SIZE, BLOCK_K, NORMALISES) * scale
    k_factor = _norm_factor(k_ptr, first, end, stride_k, KEY_SIZE, BLOCK_K, NORMALISES)
    keys, queries = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    same = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
        cols = start + tl.arange(0, BLOCK_K)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, cols) * q_factor[:, None]
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, cols) * k_factor[:, None]
        g = load_tile(g_ptr, first, end, stride_g, KEY_SIZE, cols).to(tl.float32)
        total = tl.cumsum(tl.where(g < MIN_LOG_DECAY, MIN_LOG_DECAY, g), 0)
        tl.store(totals + index[:, None] * KEY_SIZE + cols[None, :], total, cols[None, :] < KEY_SIZE)
        decay = tl.exp(total)
        rest = tl.exp(tl.sum(tl.where(index[:, None] == CHUNK - 1, total, 0.0), 0)[None, :] - total)
        stride: tl.constexpr = HEADS * KEY_SIZE
        store_tile(queries_ptr + head * KEY_SIZE, q * decay, first, end, stride, KEY_SIZE, cols)
        store_tile(reads_ptr + head * KEY_SIZE, k * decay, first, end, stride, KEY_SIZE, cols)
        store_tile(writes_ptr + head * KEY_SIZE, k * rest, first, end, stride, KEY_SIZE, cols)
        same += tl.sum(q * k, 1)
        # All threads have stored G before others load the borders.
        tl.debug_barrier()
        for level in tl.range(0, LEVELS, num_stages=1):
            near = _decay_until_border(total, totals, cols, level, KEY_SIZE)
            far_k, far_q = (k * near).to(dtype), (q * near).to(dtype)
            is_pair = _are_pairs(level)
            keys += tl.where(is_pair, tl.dot(far_k, tl.trans(far_k), input_precision="ieee"), 0.0)
            queries += tl.where(is_pair, tl.dot(far_q, tl.trans(far_k), input_precision="ieee"), 0.0)
    queries += tl.where(index[:, None] == index[None, :], same[:, None], 0.0)
    tl.store(scores_ptr + place * (CHUNK * CHUNK) + square_offsets(), queries)
    rows = first + index
    beta = tl.load(beta_ptr + rows * stride_beta + head, rows < end, 0.0).to(tl.float32)
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
    tl.store(vectors + BETA * CHUNK, beta)
    # The rows have these factors already.
    ones = tl.full([CHUNK], 1.0, tl.float32)
    tl.store(vectors + READ * CHUNK, ones)
    tl.store(vectors + WRITE * CHUNK, ones)
    tl.store(vectors + QUERY * CHUNK, ones)
    coupling = couple(keys, beta, PRECISION)
    tl.store(couplings_ptr + place * (CHUNK * CHUNK) + square_offsets(), saturate(coupling, couplings_ptr))


# --- gradients -----------------------------------------------------------------------------------


@triton.jit
def _dots_of_states(
    width, a_ptr, b_ptr, key_cols, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Return the dot products of the rows [Dv] of two states."""
    products = tl.zeros([BLOCK_V, key_cols.shape[0]], tl.float32)
    for start in tl.range(0, width, BLOCK_V, num_stages=1):
        cols = start + tl.arange(0, BLOCK_V)
        a = load_state(a_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
        products += a.to(tl.float32) * load_state(b_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols).to(tl.float32)
    return tl.sum(products, 0)


@triton.jit
def _state_product(
    width, x_ptr, first, end, stride_x, state_ptr, key_cols,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return x S^T, for the rows x [C, Dv] and some rows [Dv] of a state S."""
    product = tl.zeros([CHUNK, key_cols.shape[0]], tl.float32)
    for start in tl.range(0, width, BLOCK_V, num_stages=1):
        cols = start + tl.arange(0, BLOCK_V)
        x = load_tile(x_ptr, first, end, stride_x, VALUE_SIZE, cols)
        state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
        product = tl.dot(x, state, product, input_precision="ieee")
    return product


@triton.jit
def _pair_gradients(
    width, errors_ptr, dx_ptr, do_ptr, first, end, stride_errors, stride_do,
    VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return do E^T and -dX E^T, both [C, C]."""
    dscores, dsystem = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.range(0, width, BLOCK_V, num_stages=1):
        cols = start + tl.arange(0, BLOCK_V)
        errors = load_tile(errors_ptr, first, end, stride_errors, VALUE_SIZE, cols)
        do = load_tile(do_ptr, first, end, stride_do, VALUE_SIZE, cols)
        dx = load_tile(dx_ptr, first, end, stride_errors, VALUE_SIZE, cols)
        dscores = tl.dot(do, tl.trans(errors), dscores, input_precision="ieee")
        dsystem = tl.dot(dx, tl.trans(errors), dsystem, input_precision="ieee")
    return dscores, -dsystem


@triton.jit
def _add_pairs(
    dq, dk, dtotal, q, k, total, totals, dscores, dsystem, cols, SIZE: tl.constexpr
):  # fmt: skip
    """Add the gradients of all pairs. `dscores` is do U^T, and `dsystem` the sum of beta dA and its transpose."""
    dtype: tl.constexpr = dscores.dtype
    index = tl.arange(0, CHUNK)
    # Two loops, because the registers do not hold all terms of both gradients.
    for level in tl.range(0, LEVELS, num_stages=1):
        near = _decay_until_border(total, totals, cols, level, SIZE)
        dpairs = tl.where(_are_pairs(level), dscores, tl.zeros_like(dscores))
        dq_part = near * tl.dot(dpairs, (k * near).to(dtype), input_precision="ieee")
        dtotal += q * dq_part
        dq += dq_part
    for level in tl.range(0, LEVELS, num_stages=1):
        near = _decay_until_border(total, totals, cols, level, SIZE)
        half = index >> level
        dpairs = tl.where((half[:, None] ^ half[None, :]) == 1, dsystem, tl.zeros_like(dsystem))
        dk_part = tl.dot(dpairs, (k * near).to(dtype), input_precision="ieee")
        dpairs = tl.where(_are_pairs(level), dscores, tl.zeros_like(dscores))
        dk_part = near * tl.dot(tl.trans(dpairs), (q * near).to(dtype), dk_part, input_precision="ieee")
        # The rows of a system are tokens of a second half, and its columns those of a first half.
        is_second = half & 1 == 1
        dtotal += tl.where(is_second, 1.0, -1.0)[:, None] * k * dk_part
        dk += dk_part
    return dq, dk, dtotal


@triton.jit
def _add_tile(ptr, value, first, end, stride, SIZE: tl.constexpr, cols, is_first):
    """Add a tile to memory, or store it if it is the first one."""
    if not is_first:
        value += load_tile(ptr, first, end, stride, SIZE, cols)
    store_tile(ptr, value, first, end, stride, SIZE, cols)


@triton.jit
def _store_gradient(
    ptr, sums_ptr, x_ptr, first, end, stride_x, scale, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """Store the gradient of q or k, given the sums over heads of that of scale x * factor."""
    stride: tl.constexpr = KEY_HEADS * KEY_SIZE
    factor = _norm_factor(x_ptr, first, end, stride_x, KEY_SIZE, BLOCK_K, NORMALISES)
    dots = tl.zeros([CHUNK], tl.float32)
    if NORMALISES:
        for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
            cols = start + tl.arange(0, BLOCK_K)
            x = load_tile(x_ptr, first, end, stride_x, KEY_SIZE, cols).to(tl.float32)
            dots += tl.sum(x * load_tile(sums_ptr, first, end, stride, KEY_SIZE, cols), 1)
    for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
        cols = start + tl.arange(0, BLOCK_K)
        dx = load_tile(sums_ptr, first, end, stride, KEY_SIZE, cols)
        if NORMALISES:
            x = load_tile(x_ptr, first, end, stride_x, KEY_SIZE, cols).to(tl.float32)
            dx -= x * (factor * factor * dots)[:, None]
        store_tile(ptr, dx * (factor * scale)[:, None], first, end, stride, KEY_SIZE, cols)


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_gradients_kernel(
    q_ptr, k_ptr, g_ptr, do_ptr, vectors_ptr, totals_ptr, states_ptr, dstates_ptr, errors_ptr, dx_ptr,
    chunks_ptr, parts_ptr, dq_sums_ptr, dk_sums_ptr,  # [M, 3] or None, [M, H, BLOCKS, 2, C] fp32, rows in fp32 twice
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,  # rows
    T, chunks, groups, width, stride_q, stride_k, stride_g, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg and dbeta of one chunk, for all heads that share a head of q and k, a few features at a time.

    The sums of dq and dk over these heads are in memory, because the norm of a row needs all features.
    """
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    heads = KEY_HEADS * groups
    stride = heads * VALUE_SIZE
    index = tl.arange(0, CHUNK)
    rows = first + index
    q_ptr, k_ptr = q_ptr + key_head * KEY_SIZE, k_ptr + key_head * KEY_SIZE
    dq_sums_ptr, dk_sums_ptr = dq_sums_ptr + key_head * KEY_SIZE, dk_sums_ptr + key_head * KEY_SIZE
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    key_stride: tl.constexpr = KEY_HEADS * KEY_SIZE
    q_factor = _norm_factor(q_ptr, first, end, stride_q, KEY_SIZE, BLOCK_K, NORMALISES) * scale
    k_factor = _norm_factor(k_ptr, first, end, stride_k, KEY_SIZE, BLOCK_K, NORMALISES)
    for i in range(groups):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        do, dx, errors = do_ptr + head * VALUE_SIZE, dx_ptr + head * VALUE_SIZE, errors_ptr + head * VALUE_SIZE
        beta = tl.load(vectors_ptr + place * (VECTORS * CHUNK) + BETA * CHUNK + index)
        totals = totals_ptr + place * (CHUNK * KEY_SIZE)
        state, dstate = states_ptr + place * (KEY_SIZE * VALUE_SIZE), dstates_ptr + place * (KEY_SIZE * VALUE_SIZE)
        dscores, dsystem = _pair_gradients(
            width, errors, dx, do, first, end, stride, stride_do, VALUE_SIZE, BLOCK_V
        )  # fmt: skip
        dscores *= beta[None, :]
        dsystem = tl.where(index[:, None] > index[None, :], dsystem * beta[:, None] * beta[None, :], 0.0)
        dsystem = (dsystem + tl.trans(dsystem)).to(dtype)
        dsame = tl.sum(tl.where(index[:, None] == index[None, :], dscores, 0.0), 1)
        dscores = dscores.to(dtype)
        for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
            cols = start + tl.arange(0, BLOCK_K)
            q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, cols) * q_factor[:, None]
            k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, cols) * k_factor[:, None]
            total = tl.load(totals + index[:, None] * KEY_SIZE + cols[None, :], cols[None, :] < KEY_SIZE, 0.0)
            last = tl.load(totals + (CHUNK - 1) * KEY_SIZE + cols, cols < KEY_SIZE, 0.0)
            decay = tl.exp(total)
            dq = decay * _state_product(width, do, first, end, stride_do, state, cols, KEY_SIZE, VALUE_SIZE, BLOCK_V)
            dtotal = q * dq
            dk = -beta[:, None] * decay
            dk *= _state_product(width, dx, first, end, stride, state, cols, KEY_SIZE, VALUE_SIZE, BLOCK_V)
            dtotal += k * dk
            write = beta[:, None] * tl.exp(last[None, :] - total)
            write *= _state_product(width, errors, first, end, stride, dstate, cols, KEY_SIZE, VALUE_SIZE, BLOCK_V)
            dlast = tl.exp(last) * _dots_of_states(width, state, dstate, cols, KEY_SIZE, VALUE_SIZE, BLOCK_V)
            dlast += tl.sum(k * write, 0)
            dtotal += tl.where(index[:, None] == CHUNK - 1, dlast[None, :], 0.0) - k * write
            dq += dsame[:, None] * k
            dk += write + dsame[:, None] * q
            dq, dk, dtotal = _add_pairs(dq, dk, dtotal, q, k, total, totals, dscores, dsystem, cols, KEY_SIZE)
            dlog_decay = tl.cumsum(dtotal, 0, reverse=True)
            # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
            g = load_tile(g_ptr + head * KEY_SIZE, first, end, stride_g, KEY_SIZE, cols)
            dlog_decay = tl.where(g < MIN_LOG_DECAY, 0.0 * dlog_decay, dlog_decay)
            store_tile(dg_ptr + head * KEY_SIZE, dlog_decay, first, end, heads * KEY_SIZE, KEY_SIZE, cols)
            _add_tile(dq_sums_ptr, dq, first, end, key_stride, KEY_SIZE, cols, i == 0)
            _add_tile(dk_sums_ptr, dk, first, end, key_stride, KEY_SIZE, cols, i == 0)
        tl.store(dbeta_ptr + rows * heads + head, sum_parts(parts_ptr, place, BLOCKS, 0), rows < end)
        # All threads have stored their sums before others load them.
        tl.debug_barrier()
    _store_gradient(
        dq_ptr + key_head * KEY_SIZE, dq_sums_ptr, q_ptr, first, end, stride_q, scale,
        KEY_HEADS, KEY_SIZE, BLOCK_K, NORMALISES,
    )  # fmt: skip
    _store_gradient(
        dk_ptr + key_head * KEY_SIZE, dk_sums_ptr, k_ptr, first, end, stride_k, 1.0,
        KEY_HEADS, KEY_SIZE, BLOCK_K, NORMALISES,
    )  # fmt: skip
