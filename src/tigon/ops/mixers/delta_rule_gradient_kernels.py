r"""The backward kernels of the gated delta rule. `delta_rule_chunks` and `delta_rule_kernels` have the formulas.

`forward_scan_kernel` recomputes the states before all chunks and E. `backward_scan_kernel` walks from the last chunk to
the first one, with a block of columns of dS in registers; it writes dX, dv and dS after each chunk, and sums dbeta,
which is the dot product of the rows of dX and E. Three kernels then compute the other gradients, for all chunks in
parallel: `pair_gradients_kernel` those of the products of pairs of tokens, `query_gradients_kernel` dq, and
`key_gradients_kernel` dk, dg and dbeta.

dg of token t is the sum of these parts, which the decay of the token multiplies:

- the pairs (i, j) of tokens of the chunk with j < t <= i,
- what token t and later ones read from the state before the chunk: q . (S do) and k . (S dX),
- what earlier tokens write to the state after the chunk: k . (dS U),
- the product of the states before and after the chunk, S . dS.

If the decay is strong, all of these are small. Shorter formulas exist, such as o . do - v . dv for the gradient of G,
but their terms are as large as for a weak decay, and the difference of rounded terms has no correct digit. For the same
reason, no part is the difference of two sums.

The gradient of the system needs no inverse: dA is -dX U^T. Rows of q and k are not divided by their norms before a
product, which would round them: the other factor is multiplied.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total, N sequences or samples.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    K_FACTOR,
    LOG_DECAY,
    MIN_LOG_DECAY,
    PAIR_PART,
    Q_FACTOR,
    QUERY,
    QUERY_PART,
    READ,
    REST,
    TOTAL,
    VECTORS,
    WRITE,
    chunks_of_sample,
    decay_of_chunk,
    load_tile,
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
    parts_ptr,  # [M, H, blocks, 2, C] fp32
    T, chunks, stride_q, stride_k, stride_do,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dX, dv and dS after each chunk, for a head of a sequence.

    `parts` gets what these columns add to dbeta and to the dot products k . (dS U).
    """
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
        parts = parts_ptr + (place * blocks + block) * (2 * CHUNK) + index
        # Kimi Delta Attention computes dg for each feature, without this part.
        if totals_ptr is None:
            tl.store(parts + CHUNK, beta * tl.sum(dupdates * errors, 1))
        dupdates = tl.dot(tl.trans(scores), do, dupdates, input_precision="ieee")
        derrors = (beta[:, None] * dupdates).to(dtype)
        dx = dupdates - tl.dot(tl.trans(coupling), derrors, input_precision="ieee")
        tl.store(parts, tl.sum(dx * errors, 1))
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
    if ((key_cols.shape[0] - 1) & KEY_SIZE) == 0 and ((cols.shape[0] - 1) & VALUE_SIZE) == 0:
        tile = tl.load(state)
    else:
        tile = tl.load(state, (key_cols[None, :] < KEY_SIZE) & (cols[:, None] < VALUE_SIZE), 0.0)
    return tile


@triton.jit
def sum_parts(parts_ptr, place, BLOCKS: tl.constexpr, PART: tl.constexpr):
    """Return the sum [C] over blocks of columns of one of the two numbers that `backward_scan_kernel` has stored."""
    total = tl.zeros([CHUNK], tl.float32)
    for block in range(BLOCKS):
        total += tl.load(parts_ptr + ((place * BLOCKS + block) * 2 + PART) * CHUNK + tl.arange(0, CHUNK))
    return total


@triton.jit
def products_of_errors(
    do_ptr, dx_ptr, errors_ptr, first, end, stride_do, stride, width,
    VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return do E^T and dX E^T, both [C, C], for the rows of a chunk of one head."""
    do_products, dx_products = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr, first, end, stride_do, VALUE_SIZE, cols)
        errors = load_tile(errors_ptr, first, end, stride, VALUE_SIZE, cols)
        dx = load_tile(dx_ptr, first, end, stride, VALUE_SIZE, cols)
        do_products = tl.dot(do, tl.trans(errors), do_products, input_precision="ieee")
        dx_products = tl.dot(dx, tl.trans(errors), dx_products, input_precision="ieee")
    return do_products, dx_products


@triton.jit
def normalise_gradient(dx_hat, x, factor, NORMALISES: tl.constexpr):
    """Return dx, given dx_hat for x_hat = factor * x."""
    if NORMALISES:
        dots = factor * tl.sum(x.to(tl.float32) * dx_hat, 1)
        dx_hat = factor[:, None] * (dx_hat - x * (factor * dots)[:, None])
    return dx_hat


@triton.jit(do_not_specialize=["T", "chunks"])
def pair_gradients_kernel(
    k_ptr, do_ptr, errors_ptr, dx_ptr, couplings_ptr, scores_ptr, systems_ptr, vectors_ptr,
    chunks_ptr,  # [M, 3] or None
    T, chunks, groups, width, stride_k, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the products of all pairs of tokens of a chunk, for one head, and their part of dg.

    The gradients of the products q k^T, times the inverse norms of k, replace the scores. Times the inverse norms of q,
    they replace Z, which is not read any more. `systems` [M, H, C, C] gets the gradients of the products k k^T.
    """
    heads = KEY_HEADS * groups
    chunk, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    place = chunk.to(tl.int64) * heads + head
    square = place * (CHUNK * CHUNK) + square_offsets()
    stride = heads * VALUE_SIZE
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    start = head * VALUE_SIZE
    dscores, dsystem = products_of_errors(
        do_ptr + start, dx_ptr + start, errors_ptr + start, first, end, stride_do, stride, width,
        VALUE_SIZE, BLOCK_V, STAGES,
    )  # fmt: skip
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
    total, beta = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + BETA * CHUNK)
    q_factor, k_factor = tl.load(vectors + Q_FACTOR * CHUNK), tl.load(vectors + K_FACTOR * CHUNK)
    is_later = index[:, None] > index[None, :]
    dscores *= beta[None, :]
    products = tl.where(is_later, dscores * tl.load(scores_ptr + square), 0.0)
    # All threads have loaded their scores before others store gradients in their place.
    tl.debug_barrier()
    decays = pair_decays(total)
    dscores *= scale * decays
    tl.store(scores_ptr + square, dscores * k_factor[None, :])
    tl.store(couplings_ptr + square, dscores * q_factor[:, None])
    dsystem = tl.where(is_later, -dsystem * decays, 0.0) * beta[:, None] * beta[None, :]
    k = load_tile(k_ptr + head // groups * KEY_SIZE, first, end, stride_k, KEY_SIZE, key_cols)
    products += dsystem * (tl.dot(k, tl.trans(k), input_precision="ieee") * k_factor[:, None] * k_factor[None, :])
    # Row t of the cumulative sum has the sums over i >= t.
    part = tl.sum(tl.where(is_later, tl.cumsum(products, 0, reverse=True), 0.0), 1)
    tl.store(vectors + PAIR_PART * CHUNK, part)
    # Each pair of keys is the product of two rows of k, and both get its gradient.
    tl.store(systems_ptr + square, (dsystem + tl.trans(dsystem)) * k_factor[None, :])


@triton.jit(do_not_specialize=["T", "chunks"])
def query_gradients_kernel(
    q_ptr, k_ptr, do_ptr, scores_ptr, vectors_ptr, states_ptr, chunks_ptr,  # [M, 3] or None
    dq_ptr,  # rows
    T, chunks, groups, width, stride_q, stride_k, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq of one chunk, for all heads that share a head of q and k, and the dot products q . (S do).

    The sum over these heads stays in registers, so its order is fixed.
    """
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    heads = KEY_HEADS * groups
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    q_ptr, k_ptr = q_ptr + key_head * KEY_SIZE, k_ptr + key_head * KEY_SIZE
    first_place = chunk.to(tl.int64) * heads + key_head * groups
    q_factor = tl.load(vectors_ptr + first_place * (VECTORS * CHUNK) + Q_FACTOR * CHUNK + index)
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i in tl.range(0, groups, disable_licm=True):
        place = first_place + i
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        decay = tl.exp(tl.load(vectors + TOTAL * CHUNK)) * scale
        state_ptr = states_ptr + place * (KEY_SIZE * VALUE_SIZE)
        q, part = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols), tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_V)
            do_of_head = do_ptr + (key_head * groups + i) * VALUE_SIZE
            do = load_tile(do_of_head, first, end, stride_do, VALUE_SIZE, cols)
            state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
            part += tl.sum(do * tl.dot(q, tl.trans(state), input_precision="ieee"), 1)
            dq = tl.dot((decay[:, None] * do).to(q_ptr.dtype.element_ty), state, dq, input_precision="ieee")
        tl.store(vectors + QUERY_PART * CHUNK, decay * q_factor * part)
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
        dscores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + square_offsets())
        dq = tl.dot(dscores, k, dq, input_precision="ieee")
    q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
    dq = normalise_gradient(dq, q, q_factor, NORMALISES)
    store_tile(dq_ptr + key_head * KEY_SIZE, dq, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)


@triton.jit(do_not_specialize=["T", "chunks"])
def key_gradients_kernel(
    q_ptr, k_ptr, errors_ptr, dx_ptr, couplings_ptr, systems_ptr, vectors_ptr, states_ptr, dstates_ptr, chunks_ptr,
    parts_ptr, dk_ptr, dg_ptr, dbeta_ptr,  # [M, H, BLOCKS, 2, C] fp32, rows, rows, rows
    T, chunks, groups, width, stride_q, stride_k,
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
    first_place = chunk.to(tl.int64) * heads + key_head * groups
    k_factor = tl.load(vectors_ptr + first_place * (VECTORS * CHUNK) + K_FACTOR * CHUNK + index)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i in tl.range(0, groups, disable_licm=True):
        head, place = key_head * groups + i, first_place + i
        square = place * (CHUNK * CHUNK) + square_offsets()
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total, beta = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + BETA * CHUNK)
        read, write = -beta * tl.exp(total), beta * tl.load(vectors + REST * CHUNK)
        state_ptr = states_ptr + place * (KEY_SIZE * VALUE_SIZE)
        dstate_ptr = dstates_ptr + place * (KEY_SIZE * VALUE_SIZE)
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
        read_part, state_dots = tl.zeros([CHUNK], tl.float32), tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_V)
            dx = load_tile(dx_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            errors = load_tile(errors_ptr + head * VALUE_SIZE, first, end, stride, VALUE_SIZE, cols)
            state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
            dstate = load_state(dstate_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
            read_part += tl.sum(dx * tl.dot(k, tl.trans(state), input_precision="ieee"), 1)
            dk = tl.dot((read[:, None] * dx).to(dtype), state, dk, input_precision="ieee")
            dk = tl.dot((write[:, None] * errors).to(dtype), dstate, dk, input_precision="ieee")
            state_dots += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
        dk = tl.dot(tl.load(systems_ptr + square), k, dk, input_precision="ieee")
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
        dk = tl.dot(tl.trans(tl.load(couplings_ptr + square)), q, dk, input_precision="ieee")
        reads = tl.load(vectors + QUERY_PART * CHUNK) + read * k_factor * read_part
        writes = sum_parts(parts_ptr, place, BLOCKS, 1)
        # The sum of the writes before token t must not contain the write of token t, which may be so much larger that
        # the sum would lose their digits.
        writes = tl.where(index > 0, tl.gather(writes, tl.maximum(index - 1, 0), 0), 0.0)
        dlog_decay = tl.cumsum(reads, 0, reverse=True) + tl.cumsum(writes, 0) + tl.load(vectors + PAIR_PART * CHUNK)
        last_total = tl.load(vectors_ptr + place * (VECTORS * CHUNK) + (TOTAL * CHUNK + CHUNK - 1))
        dlog_decay += tl.exp(last_total) * tl.sum(state_dots)
        # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
        g = tl.load(vectors + LOG_DECAY * CHUNK)
        dlog_decay = tl.where(g > MIN_LOG_DECAY, dlog_decay, 0.0 * dlog_decay)
        tl.store(dg_ptr + (first + index) * heads + head, dlog_decay, index < end - first)
        dbeta = sum_parts(parts_ptr, place, BLOCKS, 0)
        tl.store(dbeta_ptr + (first + index) * heads + head, dbeta, index < end - first)
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    dk = normalise_gradient(dk, k, k_factor, NORMALISES)
    store_tile(dk_ptr + key_head * KEY_SIZE, dk, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)
