r"""The forward kernels of the gated delta rule. The docstring of `delta_rule_chunks` has the formulas.

`chunk_pairs_kernel` computes, for all chunks in parallel, the scores (scale q k^T * D) and some vectors, and
`couplings_kernel` computes Z. None of these results depends on the state. `forward_scan_kernel` then walks through the
chunks of a sequence, with a block of columns of the state in registers. The update of a token is U = beta E. The errors
E = v - k S take S with the updates of all tokens before. A scan computes them from the errors Y that take the state
before the chunk:

    E = Y - Z (beta Y)    for Z = (I + K beta)^-1 K, where beta K = A, the system of a chunk

Y itself is not rounded: only the product that is subtracted from it has rounded factors.

A chunk is a chain of three products, k S, Z (beta Y) and k^T U, so the latency of this chain bounds the kernel. Z costs
8 KiB of memory for a chunk of a head in bf16. The usual matrices W = (I + A)^-1 (beta exp(G) k) and (I + A)^-1 (beta v)
would shorten the chain by one product, but they take 32 KiB. Because o is computed in the scan, forward never writes
the states, which take as many bytes.

The products read q and k as they are stored. Their l2 norms are factors of rows, which the vectors contain.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total, N sequences or samples.
"""

from tigon.runtime.compat.triton import tl, triton

# The vectors [C] of a chunk of a head in `vectors` [M, H, 11, C], fp32:
#   TOTAL       G
#   LOG_DECAY   g
#   BETA        beta
#   REST        exp(G_L - G)
#   READ        exp(G) / |k|, which multiplies the rows of k S
#   WRITE       exp(G_L - G) / |k|, which multiplies the rows of U in the next state
#   QUERY       scale exp(G) / |q|, which multiplies the rows of q S
#   Q_FACTOR    1 / |q|, or 1 if q is not normalised
#   K_FACTOR    1 / |k|, or 1 if k is not normalised
#   PAIR_PART   the part of dg that comes from pairs of tokens of the chunk
#   QUERY_PART  the dot products of q and what multiplies it in the gradient of o, S do
TOTAL, LOG_DECAY, BETA, REST, READ, WRITE, QUERY, Q_FACTOR, K_FACTOR, PAIR_PART, QUERY_PART = (
    tl.constexpr(i) for i in range(11)
)
VECTORS = tl.constexpr(11)
CHUNK = tl.constexpr(64)
EPS = tl.constexpr(1e-6)
# The limit of g, whose exponential is 4e-44, almost the smallest number in fp32. Below this limit, the sum of g in a
# chunk would lose digits of the other tokens, and a difference of two sums would be NaN for g = -inf.
MIN_LOG_DECAY = tl.constexpr(-100.0)


@triton.jit(do_not_specialize=["N", "T"])
def chunk_list_kernel(bounds_ptr, chunks_ptr, starts_ptr, N, T, BLOCK_N: tl.constexpr):  # [N + 1], [M, 3], [N]
    """List the chunks of packed samples. Program i writes the sample of chunk i, or -1, its first row and its end.

    The end is that of the sample. Program n also writes the first chunk of sample n. If the bounds are malformed, all
    chunks belong to sample 0, and the first chunk of each sample is -1: the scans then start from states of NaN.
    """
    program = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    sample = tl.full([], -1, tl.int32)
    row, row_end, first_chunk = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    faults = ((tl.load(bounds_ptr) != 0) | (tl.load(bounds_ptr + N) != T)).to(tl.int32)
    for first in range(0, N, BLOCK_N):
        index = first + tl.arange(0, BLOCK_N)
        start = tl.load(bounds_ptr + index, index < N, 0)
        end = tl.load(bounds_ptr + index + 1, index < N, 0)
        faults += tl.sum((start > end).to(tl.int32), 0)
        start, end = start.to(tl.int32), end.to(tl.int32)
        counts = (end - start + CHUNK - 1) // CHUNK
        chunk_ends = before + tl.cumsum(counts, 0)
        chunk_starts = chunk_ends - counts
        first_chunk += tl.sum(tl.where(index == program, chunk_starts, 0), 0)
        is_mine = (chunk_starts <= program) & (program < chunk_ends)
        sample = tl.maximum(sample, tl.max(tl.where(is_mine, index, -1), 0))
        row += tl.sum(tl.where(is_mine, start + (program - chunk_starts) * CHUNK, 0), 0)
        row_end += tl.sum(tl.where(is_mine, end, 0), 0)
        before += tl.sum(counts, 0)
    if faults > 0:
        row, row_end, first_chunk = program * CHUNK, T, tl.full([], -1, tl.int32)
        sample = tl.where(row < T, 0, -1)
    tl.store(chunks_ptr + 3 * program, sample)
    tl.store(chunks_ptr + 3 * program + 1, row)
    tl.store(chunks_ptr + 3 * program + 2, row_end)
    tl.store(starts_ptr + program, first_chunk, program < N)


@triton.jit
def rows_of_chunk(chunks_ptr, chunk, T, chunks):
    """Return the sample of a chunk, or -1, its first row, and the end of its sample; rows count through the batch."""
    if chunks_ptr is None:
        sample = chunk // chunks
        first = sample.to(tl.int64) * T + chunk % chunks * CHUNK
        end = (sample.to(tl.int64) + 1) * T
    else:
        sample = tl.load(chunks_ptr + 3 * chunk)
        first = tl.load(chunks_ptr + 3 * chunk + 1).to(tl.int64)
        end = tl.load(chunks_ptr + 3 * chunk + 2).to(tl.int64)
    return sample, first, end


@triton.jit
def _tile(first, end, stride, SIZE: tl.constexpr, cols, ROWS: tl.constexpr):
    """Return the offsets of rows from their first element, and the mask of rows before `end` and columns below SIZE.

    The offsets within a tile take 32 bits, because offsets of 64 bits would take too many registers.
    """
    index = tl.arange(0, ROWS)[:, None]
    mask = index < (end - first).to(tl.int32)
    # The number of columns is a power of 2. A constant mask would take registers.
    if ((cols.shape[0] - 1) & SIZE) != 0:
        mask = mask & (cols[None, :] < SIZE)
    return index * stride + cols[None, :], mask


@triton.jit
def load_tile(ptr, first, end, stride, SIZE: tl.constexpr, cols, ROWS: tl.constexpr = CHUNK):
    """Return the rows from `first` to `end`, at most ROWS, with zeros in other rows and in columns from SIZE on."""
    offsets, mask = _tile(first, end, stride, SIZE, cols, ROWS)
    return tl.load(ptr + first * stride + offsets, mask, 0.0)


@triton.jit
def store_tile(ptr, value, first, end, stride, SIZE: tl.constexpr, cols, ROWS: tl.constexpr = CHUNK):
    offsets, mask = _tile(first, end, stride, SIZE, cols, ROWS)
    tl.store(ptr + first * stride + offsets, value, mask)


@triton.jit
def saturate(x, ptr):
    """Return x in fp32 within the range of the numbers at `ptr`, if these are fp16. NaN remains NaN.

    Keys of large norm and a beta near 0 have elements of Z and E that fp16 does not hold, and infinity times 0 is NaN.
    """
    if ptr.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, x)
        x = tl.where(x < -65504.0, -65504.0, x)
    return x


@triton.jit
def square_offsets():
    """Return the offsets of the elements of a matrix [C, C]."""
    index = tl.arange(0, CHUNK)
    return index[:, None] * CHUNK + index[None, :]


@triton.jit
def norm_factor(x, NORMALISES: tl.constexpr):
    """Return the inverse l2 norms of the rows of a tile, or ones."""
    factor = tl.full([CHUNK], 1.0, tl.float32)
    if NORMALISES:
        x = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) + EPS)
    return factor


@triton.jit
def load_log_decay(ptr, mask):
    """Return g of the rows of a chunk in fp32, at least `MIN_LOG_DECAY`, or NaN where it is NaN."""
    g = tl.load(ptr, mask, 0.0).to(tl.float32)
    return tl.where(g < MIN_LOG_DECAY, MIN_LOG_DECAY, g)


@triton.jit
def pair_decays(total):
    """Return D [C, C]. The exponents of later tokens are masked before the exponential, so nothing overflows."""
    index = tl.arange(0, CHUNK)
    between = total[:, None] - total[None, :]
    return tl.exp(tl.where(index[:, None] >= index[None, :], between, float("-inf")))


# --- chunks in parallel --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T", "chunks"])
def chunk_pairs_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr,  # rows, rows, rows, rows, [M, 3] or None
    scores_ptr, vectors_ptr,  # [M, H, C, C], [M, H, 11, C]
    T, chunks, groups, stride_q, stride_k, stride_g, stride_beta, scale,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """Compute the scores and the vectors of one chunk, for all heads that share a head of q and k."""
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    index, cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    rows = first + index
    q = load_tile(q_ptr + key_head * KEY_SIZE, first, end, stride_q, KEY_SIZE, cols)
    k = load_tile(k_ptr + key_head * KEY_SIZE, first, end, stride_k, KEY_SIZE, cols)
    q_factor, k_factor = norm_factor(q, NORMALISES), norm_factor(k, NORMALISES)
    first_place = (chunk.to(tl.int64) * KEY_HEADS + key_head) * groups
    queries = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * q_factor)[:, None] * k_factor[None, :]
    for i in range(groups):
        head = key_head * groups + i
        g = load_log_decay(g_ptr + rows * stride_g + head, rows < end)
        beta = tl.load(beta_ptr + rows * stride_beta + head, rows < end, 0.0).to(tl.float32)
        total = tl.cumsum(g, 0)
        pairs = pair_decays(total)
        tl.store(
            scores_ptr + (first_place + i) * (CHUNK * CHUNK) + square_offsets(), saturate(queries * pairs, scores_ptr)
        )
        vectors = vectors_ptr + (first_place + i) * (VECTORS * CHUNK) + index
        decay = tl.exp(total)
        # The last row of D is exp(G_L - G).
        rest = tl.sum(tl.where(index[:, None] == CHUNK - 1, pairs, 0.0), 0)
        tl.store(vectors + TOTAL * CHUNK, total)
        tl.store(vectors + LOG_DECAY * CHUNK, g)
        tl.store(vectors + BETA * CHUNK, beta)
        tl.store(vectors + READ * CHUNK, decay * k_factor)
        tl.store(vectors + REST * CHUNK, rest)
        tl.store(vectors + WRITE * CHUNK, rest * k_factor)
        tl.store(vectors + QUERY * CHUNK, decay * scale * q_factor)
        tl.store(vectors + Q_FACTOR * CHUNK, q_factor)
        tl.store(vectors + K_FACTOR * CHUNK, k_factor)


# --- the sequence of chunks ----------------------------------------------------------------------


@triton.jit
def chunks_of_sample(bounds_ptr, starts_ptr, sample, T, chunks):
    """Return the first row of a sequence or of a packed sample, its end, its first chunk and its number of chunks.

    The last result is 0, or NaN if the bounds of the samples are malformed.
    """
    if bounds_ptr is None:
        first, first_chunk, count = sample.to(tl.int64) * T, sample.to(tl.int64) * chunks, chunks
        end = first + T
        poison = tl.zeros([], tl.float32)
    else:
        first_chunk = tl.load(starts_ptr + sample).to(tl.int64)
        is_valid = first_chunk >= 0
        first = tl.where(is_valid, tl.load(bounds_ptr + sample), 0).to(tl.int64)
        # Sample 0 has all rows if the bounds are malformed.
        end = tl.where(is_valid, tl.load(bounds_ptr + sample + 1), tl.where(sample == 0, T, 0)).to(tl.int64)
        first_chunk = tl.maximum(first_chunk, 0)
        count = ((end - first + CHUNK - 1) // CHUNK).to(tl.int32)
        poison = tl.where(is_valid, 0.0, float("nan"))
    return first, end, first_chunk, count, poison


@triton.jit
def rows_to_write(k, writes_ptr, head, first, end, HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, cols):
    """Return the rows of k that a chunk writes to the state: other rows only if each feature has its own decay."""
    if writes_ptr is not None:
        k = load_tile(writes_ptr + head * KEY_SIZE, first, end, HEADS * KEY_SIZE, KEY_SIZE, cols)
    return k


@triton.jit
def decay_of_chunk(vectors_ptr, totals_ptr, place, KEY_SIZE: tl.constexpr, cols):
    """Return exp(G_L): a number, or a column [Dk, 1] if each feature has its own decay."""
    if totals_ptr is None:
        total = tl.load(vectors_ptr + place * (VECTORS * CHUNK) + (TOTAL * CHUNK + CHUNK - 1))
    else:
        total = tl.load(totals_ptr + (place * CHUNK + CHUNK - 1) * KEY_SIZE + cols, cols < KEY_SIZE, 0.0)[:, None]
    return tl.exp(total)


@triton.jit(do_not_specialize=["T", "chunks"])
def forward_scan_kernel(
    q_ptr, k_ptr, v_ptr, couplings_ptr, scores_ptr, vectors_ptr, totals_ptr, writes_ptr,
    initial_ptr, bounds_ptr, starts_ptr,  # [N, H, Dk, Dv] fp32 or None, [N + 1] or None, [N] or None
    o_ptr, last_ptr, states_ptr, errors_ptr,  # rows, [N, H, Dk, Dv] fp32, [M, H, Dk, Dv], rows; each may be None
    T, chunks, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of o, of the states and of E, for one head of one sequence."""
    blocks: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    block, pid = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, sample = pid % HEADS, pid // HEADS
    first, end, first_chunk, count, poison = chunks_of_sample(bounds_ptr, starts_ptr, sample, T, chunks)
    index, key_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    q_ptr, k_ptr, v_ptr = (
        q_ptr + head // GROUPS * KEY_SIZE,
        k_ptr + head // GROUPS * KEY_SIZE,
        v_ptr + head * VALUE_SIZE,
    )
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    state_offsets = key_cols[:, None] * VALUE_SIZE + cols[None, :]
    state_mask = (key_cols[:, None] < KEY_SIZE) & (cols[None, :] < VALUE_SIZE)
    state_place = pid.to(tl.int64) * (KEY_SIZE * VALUE_SIZE)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32) + poison
    if initial_ptr is not None:
        state += tl.load(initial_ptr + state_place + state_offsets, state_mask, 0.0)
    for i in tl.range(0, count, num_stages=STAGES):
        row = first + i * CHUNK
        place = (first_chunk + i) * HEADS + head
        k = load_tile(k_ptr, row, end, stride_k, KEY_SIZE, key_cols)
        writes = rows_to_write(k, writes_ptr, head, row, end, HEADS, KEY_SIZE, key_cols)
        v = load_tile(v_ptr, row, end, stride_v, VALUE_SIZE, cols)
        coupling = tl.load(couplings_ptr + place * (CHUNK * CHUNK) + square_offsets())
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        beta, read = tl.load(vectors + BETA * CHUNK), tl.load(vectors + READ * CHUNK)
        write = tl.load(vectors + WRITE * CHUNK)
        last_decay = decay_of_chunk(vectors_ptr, totals_ptr, place, KEY_SIZE, key_cols)
        rounded_state = state.to(dtype)
        if states_ptr is not None:
            states = states_ptr + place * (KEY_SIZE * VALUE_SIZE)
            tl.store(states + state_offsets, rounded_state, state_mask)
        errors = v - read[:, None] * tl.dot(k, rounded_state, input_precision="ieee")
        errors -= tl.dot(coupling, (beta[:, None] * errors).to(dtype), input_precision="ieee")
        if errors_ptr is not None:
            saturated = saturate(errors, errors_ptr)
            store_tile(errors_ptr + head * VALUE_SIZE, saturated, row, end, HEADS * VALUE_SIZE, VALUE_SIZE, cols)
        updates = beta[:, None] * errors
        if o_ptr is not None:
            q = load_tile(q_ptr, row, end, stride_q, KEY_SIZE, key_cols)
            scores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + square_offsets())
            query = tl.load(vectors + QUERY * CHUNK)
            o = query[:, None] * tl.dot(q, rounded_state, input_precision="ieee")
            o = tl.dot(scores, updates.to(dtype), o, input_precision="ieee")
            store_tile(o_ptr + head * VALUE_SIZE, o, row, end, HEADS * VALUE_SIZE, VALUE_SIZE, cols)
        weighted_updates = (write[:, None] * updates).to(dtype)
        state = tl.dot(tl.trans(writes), weighted_updates, last_decay * state, input_precision="ieee")
    if last_ptr is not None:
        tl.store(last_ptr + state_place + state_offsets, state, state_mask)
