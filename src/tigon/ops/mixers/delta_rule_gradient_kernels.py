r"""The backward kernels of the gated delta rule. The docstring of `delta_rule_chunks` has the formulas.

`forward_scan_kernel` recomputes the states before all chunks and U. `backward_scan_kernel` walks from the last chunk to
the first one, with a block of columns of dS in registers; it writes dX and dv, and dS after each chunk.
`chunk_gradients_kernel` then computes the other gradients, for all chunks in parallel.

The gradient of G needs no products of its own, because each of its terms is the dot product of a row of q or k with a
term of dq or dk. The gradient of the system needs no inverse either: dA is -dX U^T. Rows of q and k are not divided by
their norms before a product, which would round them: the other factor is multiplied.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total, N sequences or samples.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    DQUERY,
    LOG_DECAY,
    MIN_LOG_DECAY,
    QUERY,
    READ,
    REST,
    TOTAL,
    VECTORS,
    WRITE,
    chunks_of_sample,
    decay_of_chunk,
    dot_of_parts,
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
    q_ptr, k_ptr, do_ptr, inverse_ptr, scores_ptr, vectors_ptr, totals_ptr, writes_ptr,
    dlast_ptr, bounds_ptr, starts_ptr,  # [N, H, Dk, Dv] fp32 or None, [N + 1] or None, [N] or None
    dx_ptr, dv_ptr, dstates_ptr, dinitial_ptr,  # rows, rows, [M, H, Dk, Dv], [N, H, Dk, Dv] fp32 or None
    T, chunks, stride_q, stride_k, stride_do,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dX, of dv and of dS after each chunk, for one head of one sequence."""
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
        inverse = tl.load(inverse_ptr + place * (CHUNK * CHUNK) + square_offsets())
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
        dx = dot_of_parts(tl.trans(inverse), dupdates)
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
def add_state_product(
    term, width, x_ptr, first, end, stride_x, factors, state_ptr, key_cols,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return term + (factors * x) S^T, for the rows x [C, Dv] and a state S."""
    for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_V)
        x = load_tile(x_ptr, first, end, stride_x, VALUE_SIZE, cols)
        state = load_state(state_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
        term = tl.dot((x * factors[:, None]).to(state.dtype), state, term, input_precision="ieee")
    return term


@triton.jit
def _dot_of_states(
    width, a_ptr, b_ptr, key_cols, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Return the sum of the products of the elements of two states."""
    products = tl.zeros([BLOCK_V, key_cols.shape[0]], tl.float32)
    for start in range(0, width, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        a = load_state(a_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
        b = load_state(b_ptr, KEY_SIZE, VALUE_SIZE, key_cols, cols)
        products += a.to(tl.float32) * b.to(tl.float32)
    return tl.sum(products)


@triton.jit
def pair_gradients(
    width, updates_ptr, dx_ptr, do_ptr, v_ptr, first, end, stride_updates, stride_do, stride_v,
    VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return do U^T and -dX U^T, both [C, C], and the dot products of the rows of dX and v. Without dX, only do U^T."""
    dscores, dsystem = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dbeta = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, width, BLOCK_V, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_V)
        updates = load_tile(updates_ptr, first, end, stride_updates, VALUE_SIZE, cols)
        do = load_tile(do_ptr, first, end, stride_do, VALUE_SIZE, cols)
        dscores = tl.dot(do, tl.trans(updates), dscores, input_precision="ieee")
        if dx_ptr is not None:
            dx = load_tile(dx_ptr, first, end, stride_updates, VALUE_SIZE, cols)
            v = load_tile(v_ptr, first, end, stride_v, VALUE_SIZE, cols)
            dsystem = tl.dot(dx, tl.trans(updates), dsystem, input_precision="ieee")
            dbeta += tl.sum(dx.to(tl.float32) * v.to(tl.float32), 1)
    return dscores, -dsystem, dbeta


@triton.jit
def _row_dots(a, b):
    return tl.sum(a.to(tl.float32) * b, 1)


@triton.jit
def _normalise_gradient(dx_hat, x, factor, NORMALISES: tl.constexpr):
    """Return the gradient of a tile x, given that of x * factor."""
    if NORMALISES:
        dx_hat = factor[:, None] * (dx_hat - x * (factor * factor * _row_dots(x, dx_hat))[:, None])
    return dx_hat


@triton.jit
def _key_gradients(
    dk, width, q_ptr, k_ptr, q_factor, k_factor, do_ptr, dx_ptr, updates_ptr, v_ptr, vectors, state, dstate, dg, dbeta,
    first, end, stride, stride_q, stride_k, stride_do, stride_v, scale, key_cols,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dg and dbeta of one chunk of a head, and return dk with its part. `vectors` has the part of dG from dq."""
    index = tl.arange(0, CHUNK)
    total, beta = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + BETA * CHUNK)
    dtotal = tl.load(vectors + DQUERY * CHUNK)
    dscores, dsystem, dbeta_values = pair_gradients(
        width, updates_ptr, dx_ptr, do_ptr, v_ptr, first, end, stride, stride_do, stride_v, VALUE_SIZE, BLOCK_V, STAGES
    )
    pairs = pair_decays(total)
    # q and k are loaded before each use, because the registers do not hold them through the loops. Without a barrier,
    # the compiler would load them once.
    tl.debug_barrier()
    q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    dscores = (dscores * pairs * (scale * q_factor)[:, None]).to(q.dtype)
    dsystem = tl.where(index[:, None] > index[None, :], dsystem * pairs, 0.0)
    dsystem_rows = (dsystem * (beta * k_factor)[:, None]).to(k.dtype)
    dsystem = (dsystem * k_factor[None, :]).to(k.dtype)
    # The sum of two products that start from zero: Triton gives a chain of products another layout, which spills.
    term = tl.dot(tl.trans(dsystem_rows), k, input_precision="ieee")
    term += tl.dot(tl.trans(dscores), q, input_precision="ieee")
    dk += term
    dtotal -= k_factor * _row_dots(k, term)

    term = add_state_product(
        tl.zeros([CHUNK, key_cols.shape[0]], tl.float32), width, dx_ptr, first, end, stride, -tl.exp(total), state,
        key_cols, KEY_SIZE, VALUE_SIZE, BLOCK_V, STAGES,
    )  # fmt: skip
    tl.debug_barrier()
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    term = tl.dot(dsystem, k, term, input_precision="ieee")
    key_dots = k_factor * _row_dots(k, term)
    dtotal += beta * key_dots
    dk += beta[:, None] * term

    term = add_state_product(
        tl.zeros([CHUNK, key_cols.shape[0]], tl.float32), width, updates_ptr, first, end, stride,
        tl.load(vectors + REST * CHUNK), dstate, key_cols, KEY_SIZE, VALUE_SIZE, BLOCK_V, STAGES,
    )  # fmt: skip
    tl.debug_barrier()
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    next_state_dots = k_factor * _row_dots(k, term)
    dtotal += tl.where(index == CHUNK - 1, tl.sum(next_state_dots), 0.0) - next_state_dots
    dlog_decay = tl.cumsum(dtotal, 0, reverse=True)
    # The decay of a token whose g was below the limit has underflowed. A product, because NaN must remain NaN.
    g = tl.load(vectors + LOG_DECAY * CHUNK)
    tl.store(dg, tl.where(g > MIN_LOG_DECAY, dlog_decay, 0.0 * dlog_decay), index < end - first)
    tl.store(dbeta, dbeta_values + key_dots, index < end - first)
    return dk + term


@triton.jit(do_not_specialize=["T", "chunks"])
def chunk_gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, vectors_ptr, states_ptr, dstates_ptr, updates_ptr, dx_ptr, chunks_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,  # rows
    T, chunks, groups, width, stride_q, stride_k, stride_v, stride_do, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALISES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg and dbeta of one chunk, for all heads that share a head of q and k.

    The sums over these heads stay in registers, so their order is fixed. The registers do not hold dq and dk at once,
    so there are two loops over the heads, and the second one reads its rows and states from the L2 cache. dg is the sum
    of dG over the later tokens of the chunk.
    """
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    heads = KEY_HEADS * groups
    stride = heads * VALUE_SIZE
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    rows = first + index
    q_ptr, k_ptr = q_ptr + key_head * KEY_SIZE, k_ptr + key_head * KEY_SIZE

    # Each iteration loads q and k again, because the registers do not hold them beside the sums.
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i in range(groups):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        do, updates = do_ptr + head * VALUE_SIZE, updates_ptr + head * VALUE_SIZE
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total, g = tl.load(vectors + TOTAL * CHUNK), tl.load(vectors + LOG_DECAY * CHUNK)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
        q_factor, k_factor = norm_factor(q, NORMALISES), norm_factor(k, NORMALISES)
        dscores, _, _ = pair_gradients(
            width, updates, None, do, None, first, end, stride, stride_do, 0, VALUE_SIZE, BLOCK_V, STAGES
        )
        dscores = (dscores * pair_decays(total) * (scale * k_factor)[None, :]).to(k.dtype)
        state, dstate = states_ptr + place * (KEY_SIZE * VALUE_SIZE), dstates_ptr + place * (KEY_SIZE * VALUE_SIZE)
        dlast = tl.exp(tl.sum(g, 0)) * _dot_of_states(width, state, dstate, key_cols, KEY_SIZE, VALUE_SIZE, BLOCK_V)
        term = add_state_product(
            tl.zeros([CHUNK, BLOCK_K], tl.float32), width, do, first, end, stride_do, tl.exp(total) * scale, state,
            key_cols, KEY_SIZE, VALUE_SIZE, BLOCK_V, STAGES,
        )  # fmt: skip
        term = tl.dot(dscores, k, term, input_precision="ieee")
        dtotal = q_factor * _row_dots(q, term) + tl.where(index == CHUNK - 1, dlast, 0.0)
        tl.store(vectors + DQUERY * CHUNK, dtotal)
        dq += term
    q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
    dq = _normalise_gradient(dq, q, norm_factor(q, NORMALISES), NORMALISES)
    store_tile(dq_ptr + key_head * KEY_SIZE, dq, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)
    # All threads have stored their parts of dG before others load them.
    tl.debug_barrier()

    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i in range(groups):
        head = key_head * groups + i
        place = chunk.to(tl.int64) * heads + head
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, key_cols)
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
        dk = _key_gradients(
            dk, width, q_ptr, k_ptr, norm_factor(q, NORMALISES), norm_factor(k, NORMALISES),
            do_ptr + head * VALUE_SIZE, dx_ptr + head * VALUE_SIZE,
            updates_ptr + head * VALUE_SIZE, v_ptr + head * VALUE_SIZE, vectors_ptr + place * (VECTORS * CHUNK) + index,
            states_ptr + place * (KEY_SIZE * VALUE_SIZE), dstates_ptr + place * (KEY_SIZE * VALUE_SIZE),
            dg_ptr + rows * heads + head, dbeta_ptr + rows * heads + head,
            first, end, stride, stride_q, stride_k, stride_do, stride_v, scale, key_cols,
            KEY_SIZE, VALUE_SIZE, BLOCK_V, STAGES,
        )  # fmt: skip
    k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, key_cols)
    dk = _normalise_gradient(dk, k, norm_factor(k, NORMALISES), NORMALISES)
    store_tile(dk_ptr + key_head * KEY_SIZE, dk, first, end, KEY_HEADS * KEY_SIZE, KEY_SIZE, key_cols)
