r"""The backward kernels of the gated delta rule. `delta_rule_chunks` and `delta_rule_kernels` have the formulas.

`forward_scan_kernel` recomputes the states before all chunks and E. `backward_scan_kernel` walks from the last chunk to
the first one, with a block of columns of dS in registers; it writes dX, dv and dS after each chunk, and sums dbeta,
which is the dot product of the rows of dX and E. Two kernels then compute the other gradients, for all chunks in
parallel: one computes dq, and one dk, dg and the sum of dbeta.

Gradients that are sums over the features of a row need no products of their own. Each factor of a term of o, such as
the norm of q or the decay of a token, has a gradient that is a dot product of rows. For normalised q and k:

    q . dq = o . do          k . dk = 2 U . dX - v . dv          dG = o . do - v . dv

The first two give the gradients of the norms. dg of a token is the sum of dG over this token and all later ones, and a
term of the last state. For the first token of a chunk, it equals the dot product of S and dS before the chunk. For the
other tokens, dG of the earlier tokens of the chunk is subtracted from that.

The gradient of the system needs no inverse either: dA is -dX U^T. Rows of q and k are not divided by their norms before
a product, which would round them: the other factor is multiplied.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total, N sequences or samples.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    LOG_DECAY,
    MIN_LOG_DECAY,
    OUTPUT_DOTS,
    QUERY,
    READ,
    REST,
    STATE_DOT,
    TOTAL,
    VECTORS,
    WRITE,
    chunks_of_sample,
    decay_of_chunk,
    load_tile,
    norm_factor,
    pair_decays,
    rows_of_chunk,
    rows_to_write,
    square_offsets,
    store_tile,
)
from tigon.runtime.compat.triton import tl, triton


@triton.jit(do_not_specialize=["T", "chunks"])
def backward_scan_kernel(
    q_ptr, k_ptr, do_ptr, errors_ptr, couplings_ptr, scores_ptr, vectors_ptr, totals_ptr, writes_ptr,
    dlast_ptr, bounds_ptr, starts_ptr,  # [N, H, Dk, Dv] fp32 or None, [N + 1] or None, [N] or None
    dx_ptr, dv_ptr, dstates_ptr, dinitial_ptr,  # rows, rows, [M, H, Dk, Dv], [N, H, Dk, Dv] fp32 or None
    dbeta_parts_ptr,  # [M, H, blocks, C] fp32
    T, chunks, stride_q, stride_k, stride_do,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dX, dv and dS after each chunk, and its part of dbeta, for a head of a sequence."""
    blocks: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    block, pid = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, sample = pid % HEADS, pid // HEADS
    first, end, first_chunk, count, poison = chunks_of_sample(bounds_ptr, starts_ptr, sample, T, chunks)
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    q_ptr, k_ptr = q_ptr + head // GROUPS * KEY_SIZE, k_ptr + head // GROUPS * KEY_SIZE
    do_ptr, dx_ptr, dv_ptr = do_ptr + head * VALUE_SIZE, dx_ptr + head * VALUE_SIZE, dv_ptr + head * VALUE_SIZE
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    state_offsets = key_cols[:, None] * VALUE_SIZE + cols[None, :]
    state_mask = (key_cols[:, None] < KEY_SIZE) & (cols[None, :] < VALUE_SIZE)
    state_place = pid.to(tl.int64) * (KEY_SIZE * VALUE_SIZE)
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32) + poison
    if dlast_ptr is not None:
        dstate += tl.load(dlast_ptr + state_place + state_offsets, state_mask, 0.0)
    for step in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - step
        row = first + i * CHUNK
        place = (first_chunk + i) * HEADS + head
        q = load_tile(q_ptr, row, end, stride_q, KEY_SIZE, key_cols)
        k = load_tile(k_ptr, row, end, stride_k, KEY_SIZE, key_cols)
        writes = rows_to_write(k, writes_ptr, head, row, end, HEADS, KEY_SIZE, key_cols)
        do = load_tile(do_ptr, row, end, stride_do, VALUE_SIZE, cols)
        errors = load_tile(errors_ptr + head * VALUE_SIZE, row, end, HEADS * VALUE_SIZE, VALUE_SIZE, cols)
        coupling = tl.load(couplings_ptr + place * (CHUNK * CHUNK) + square_offsets())
        scores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + square_offsets())
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        beta, read = tl.load(vectors + BETA * CHUNK), tl.load(vectors + READ * CHUNK)
        write, query = tl.load(vectors + WRITE * CHUNK), tl.load(vectors + QUERY * CHUNK)
        last_decay = decay_of_chunk(vectors_ptr, totals_ptr, place, KEY_SIZE, key_cols)
        rounded_dstate = dstate.to(dtype)
        dstates = dstates_ptr + place * (KEY_SIZE * VALUE_SIZE)
        tl.store(dstates + state_offsets, rounded_dstate, state_mask)
        dupdates = write[:, None] * tl.dot(writes, rounded_dstate, input_precision="ieee")
        dupdates = tl.dot(tl.trans(scores), do, dupdates, input_precision="ieee")
        derrors = (beta[:, None] * dupdates).to(dtype)
        dx = dupdates - tl.dot(tl.trans(coupling), derrors, input_precision="ieee")
        tl.store(dbeta_parts_ptr + (place * blocks + block) * CHUNK + index, tl.sum(dx * errors, 1))
        store_tile(dx_ptr, dx, row, end, HEADS * VALUE_SIZE, VALUE_SIZE, cols)
        dvalues = beta[:, None] * dx
        store_tile(dv_ptr, dvalues, row, end, HEADS * VALUE_SIZE, VALUE_SIZE, cols)
        scaled_do = (query[:, None] * do).to(dtype)
        dstate = tl.dot(tl.trans(q), scaled_do, last_decay * dstate, input_precision="ieee")
        scaled_dvalues = (-read[:, None] * dvalues).to(dtype)
        dstate = tl.dot(tl.trans(k), scaled_dvalues, dstate, input_precision="ieee")
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + state_place + state_offsets, dstate, state_mask)


@triton.jit
def load_state(ptr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, key_cols, cols):
    """Return a block of columns of a state, transposed: [columns, Dk]."""
    state = ptr + key_cols[None, :] * VALUE_SIZE + cols[:, None]
    if key_cols.shape[0] == KEY_SIZE and ((cols.shape[0] - 1) & VALUE_SIZE) == 0:
        tile = tl.load(state)
    else:
        tile = tl.load(state, (key_cols[None, :] < KEY_SIZE) & (cols[:, None] < VALUE_SIZE), 0.0)
    return tile


@triton.jit
def sum_dbeta(parts_ptr, place, BLOCKS: tl.constexpr):
    """Return the sum of the parts of dbeta [C] that the blocks of columns have computed."""
    dbeta = tl.zeros([CHUNK], tl.float32)
    for block in range(BLOCKS):
        dbeta += tl.load(parts_ptr + (place * BLOCKS + block) * CHUNK + tl.arange(0, CHUNK))
    return dbeta


@triton.jit
def _normalise_gradient(dx_hat, x, factor, dots, NORMALISES: tl.constexpr):
    """Return dx, given dx_hat for x_hat = factor * x, and the dot products of the rows of x_hat and dx_hat."""
    if NORMALISES:
        dx_hat = factor[:, None] * (dx_hat - x * (factor * dots)[:, None])
    return dx_hat


@triton.jit(do_not_specialize=["T", "chunks"])
def query_gradients_kernel(
    q_ptr, k_ptr, do_ptr, o_ptr, errors_ptr, scores_ptr, vectors_ptr, states_ptr, dstates_ptr,
    chunks_ptr, bounds_ptr, dinitial_ptr,  # [M, 3] or None, [N + 1] or None, [N, H, Dk, Dv] fp32 or None
    dq_ptr,  # rows
    T, chunks, groups, width, stride_q, stride_k, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq of one chunk, for all heads that share a head of q and k.

    The sum over these heads stays in registers, so its order is fixed. The kernel replaces the scores by the gradients
    of the products q k^T, and stores two dot products in `vectors`, for `key_gradients_kernel`.
    """
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    if bounds_ptr is None:
        is_first = chunk % chunks == 0
    else:
        # If the bounds are malformed, chunk 0 may not start at the bound of its sample.
        is_first = (chunk == 0) | (first == tl.load(bounds_ptr + sample).to(tl.int64))
    heads = KEY_HEADS * groups
    stride = heads * VALUE_SIZE
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    k = load_tile(k_ptr + key_head * KEY_SIZE, first, end, stride_k, KEY_SIZE, key_cols)
    k_factor = norm_factor(k, NORMALISES)
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dots = tl.zeros([CHUNK], tl.float32)
    for i in tl.range(0, groups, disable_licm=True):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total, beta = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + BETA * CHUNK)
        decay = tl.exp(total) * scale
        state_ptr = states_ptr + place * (KEY_SIZE * VALUE_SIZE)
        # dS before this chunk is dS after the preceding one. dS before a first chunk is in `dinitial_ptr`.
        dstate_ptr = dstates_ptr + (place - tl.where(is_first, 0, heads)) * (KEY_SIZE * VALUE_SIZE)
        dscores, output_dots = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        state_dots = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_V)
            do = load_tile(do_ptr + head * VALUE_SIZE, first, end, stride_do, VALUE_SIZE, cols)
            o = load_tile(o_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            errors = load_tile(errors_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
            dstate = load_state(dstate_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
            dscores = tl.dot(do, tl.trans(errors), dscores, input_precision="ieee")
            dq = tl.dot((decay[:, None] * do).to(k.dtype), state, dq, input_precision="ieee")
            output_dots += tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
            state_dots += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
        dscores *= pair_decays(total) * (scale * beta)[None, :]
        tl.store(scores_ptr + place * (CHUNK * CHUNK) + square_offsets(), dscores)
        dq = tl.dot((dscores * k_factor[None, :]).to(k.dtype), k, dq, input_precision="ieee")
        state_dot = tl.where(is_first, 0.0, tl.sum(state_dots))
        if dinitial_ptr is not None:
            dstate_ptr = dinitial_ptr + (sample.to(tl.int64) * heads + head) * (KEY_SIZE * VALUE_SIZE)
            for start in range(0, tl.where(is_first, width, 0), BLOCK_V):
                cols = start + tl.arange(0, BLOCK_V)
                state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
                state_dot += tl.sum(state * load_state(dstate_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols))
        tl.store(vectors + OUTPUT_DOTS * CHUNK, output_dots)
        tl.store(vectors + STATE_DOT * CHUNK, tl.zeros_like(output_dots) + state_dot)
        dots += output_dots
    q = load_tile(q_ptr + key_head * KEY_SIZE, first, end, stride_q, KEY_SIZE, key_cols)
    dq = _normalise_gradient(dq, q, norm_factor(q, NORMALISES), dots, NORMALISES)
    store_tile(dq_ptr + key_head * KEY_SIZE, dq, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)


@triton.jit(do_not_specialize=["T", "chunks"])
def key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, errors_ptr, dx_ptr, scores_ptr, vectors_ptr, states_ptr, dstates_ptr, chunks_ptr,
    dbeta_parts_ptr, dk_ptr, dg_ptr, dbeta_ptr,  # [M, H, BLOCKS, C] fp32, rows, rows, rows
    T, chunks, groups, width, stride_q, stride_k, stride_v,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, NORMALISES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dk, dg and dbeta of one chunk, for all heads that share a head of q and k."""
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    heads = KEY_HEADS * groups
    stride = heads * VALUE_SIZE
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    q_ptr, k_ptr = q_ptr + key_head * KEY_SIZE, k_ptr + key_head * KEY_SIZE
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dots = tl.zeros([CHUNK], tl.float32)
    for i in tl.range(0, groups, disable_licm=True):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total, beta = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + BETA * CHUNK)
        read, write = -beta * tl.exp(total), beta * tl.load(vectors + REST * CHUNK)
        dsystem = tl.zeros([CHUNK, CHUNK], tl.float32)
        value_dots = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_V)
            errors = load_tile(errors_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            dx = load_tile(dx_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            v = load_tile(v_ptr + head * VALUE_SIZE, first, end, stride_v, VALUE_SIZE, cols)
            state = load_state(states_ptr + place * (KEY_SIZE * VALUE_SIZE), KEY_SIZE, VALUE_SIZE, key_cols, cols)
            dstate = load_state(dstates_ptr + place * (KEY_SIZE * VALUE_SIZE), KEY_SIZE, VALUE_SIZE, key_cols, cols)
            dsystem = tl.dot(dx, tl.trans(errors), dsystem, input_precision="ieee")
            dk = tl.dot((read[:, None] * dx).to(dtype), state, dk, input_precision="ieee")
            dk = tl.dot((write[:, None] * errors).to(dtype), dstate, dk, input_precision="ieee")
            value_dots += tl.sum(dx.to(tl.float32) * v.to(tl.float32), 1)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
        dscores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + square_offsets())
        dscores = (dscores * norm_factor(q, NORMALISES)[:, None]).to(dtype)
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision="ieee")
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
        k_factor = norm_factor(k, NORMALISES)
        dsystem = tl.where(index[:, None] > index[None, :], -dsystem * pair_decays(total), 0.0)
        dsystem *= beta[:, None] * beta[None, :]
        # Each pair of keys is the product of two rows of k, and both get its gradient.
        dsystem = (dsystem + tl.trans(dsystem)) * k_factor[None, :]
        dk = tl.dot(dsystem.to(dtype), k, dk, input_precision="ieee")
        dtotal = tl.load(vectors + OUTPUT_DOTS * CHUNK) - beta * value_dots
        dlog_decay = tl.load(vectors + STATE_DOT * CHUNK) - (tl.cumsum(dtotal, 0) - dtotal)
        # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
        g = tl.load(vectors + LOG_DECAY * CHUNK)
        dlog_decay = tl.where(g > MIN_LOG_DECAY, dlog_decay, 0.0 * dlog_decay)
        dbeta = sum_dbeta(dbeta_parts_ptr, place, BLOCKS)
        tl.store(dg_ptr + (first + index) * heads + head, dlog_decay, index < end - first)
        tl.store(dbeta_ptr + (first + index) * heads + head, dbeta, index < end - first)
        dots += beta * (2.0 * dbeta - value_dots)
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    dk = _normalise_gradient(dk, k, norm_factor(k, NORMALISES), dots, NORMALISES)
    store_tile(dk_ptr + key_head * KEY_SIZE, dk, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)
