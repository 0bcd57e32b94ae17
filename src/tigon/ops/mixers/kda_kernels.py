r"""The forward kernels of Kimi Delta Attention that compute chunks in parallel. The scans are those of the gated rule.

The decay between two tokens i > j differs between features, so it must multiply the features of q_i, k_i and k_j before
a product. No exponent may be above 0, so the two factors of a pair meet at a border between the tokens. Level l, from 0
to 5, has the pairs with one token in each half of a block of 2 ** (l + 1) tokens. The border is G at the last token of
the first half. Thus each level is one product of k exp(-|G - border|) with itself, and one with q, in which
other pairs are masked, and the levels have each pair once. One launch
computes levels 0 to 3, with 16 tokens per program, so that fewer pairs are masked. The other computes levels 4 and 5,
with 64.

`kda_rows_kernel` computes G, the inverse norms and the rows that the scans multiply: scale exp(G) q, exp(G) k and
exp(G_L - G) k. `kda_pairs_kernel` computes the scores and K, and then `couplings_kernel` computes Z.

Shapes: H heads of v, Hk heads of q and k, C = 64 tokens of a chunk, M chunks in total.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    BETA,
    CHUNK,
    EPS,
    K_FACTOR,
    MIN_LOG_DECAY,
    Q_FACTOR,
    QUERY,
    READ,
    TOTAL,
    VECTORS,
    WRITE,
    load_tile,
    rows_of_chunk,
    saturate,
    store_tile,
)
from tigon.runtime.compat.triton import tl, triton

# The vector of the products of each token with itself: scale q_i . k_i, and in backward its gradient. The gated delta
# rule stores G there.
SAME = TOTAL


@triton.jit
def load_totals(totals, tokens, cols, SIZE: tl.constexpr):
    """Load G of these tokens and features of a chunk, given the pointer to G [C, Dk]."""
    return tl.load(totals + tokens[:, None] * SIZE + cols[None, :], cols[None, :] < SIZE, 0.0)


@triton.jit
def decay_until_border(total, totals, tokens, cols, level, SIZE: tl.constexpr):
    """Return exp(-|G - border|), given G of these tokens. Each block of 2 ** (level + 1) tokens has a border."""
    borders = (tokens >> (level + 1) << (level + 1)) + (1 << level) - 1
    return tl.exp(-tl.abs(total - load_totals(totals, borders, cols, SIZE)))


@triton.jit
def are_pairs(tokens, level):
    """Return a mask [tokens, tokens]: True if the row is in the second half of a block and the column in its first."""
    half = tokens >> level
    return tl.where(half & 1 == 1, half, -1)[:, None] == tl.where(half & 1 == 0, half + 1, -2)[None, :]


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_rows_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunks_ptr, vectors_ptr,  # rows, rows, rows, rows, [M, 3] or None, [M, H, 11, C]
    totals_ptr, queries_ptr, reads_ptr, writes_ptr,  # [M, H, C, Dk] fp32, and rows [H, Dk]
    T, chunks, groups, stride_q, stride_k, stride_g, stride_beta, scale,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """Compute G, the vectors and the rows of the scans of one chunk of a head."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    index = tl.arange(0, CHUNK)
    place = chunk.to(tl.int64) * HEADS + head
    q_ptr, k_ptr, g_ptr = q_ptr + head // groups * KEY_SIZE, k_ptr + head // groups * KEY_SIZE, g_ptr + head * KEY_SIZE
    q_squares, k_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    same = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
        cols = start + tl.arange(0, BLOCK_K)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, cols).to(tl.float32)
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, cols).to(tl.float32)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
        same += tl.sum(q * k, 1)
    ones = tl.full([CHUNK], 1.0, tl.float32)
    q_factor = tl.rsqrt(q_squares + EPS) if NORMALISES else ones
    k_factor = tl.rsqrt(k_squares + EPS) if NORMALISES else ones
    for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
        cols = start + tl.arange(0, BLOCK_K)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, cols) * (scale * q_factor)[:, None]
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, cols) * k_factor[:, None]
        g = load_tile(g_ptr, first, end, stride_g, KEY_SIZE, cols).to(tl.float32)
        total = tl.cumsum(tl.where(g < MIN_LOG_DECAY, MIN_LOG_DECAY, g), 0)
        totals = totals_ptr + place * (CHUNK * KEY_SIZE)
        tl.store(totals + index[:, None] * KEY_SIZE + cols[None, :], total, cols[None, :] < KEY_SIZE)
        decay = tl.exp(total)
        rest = tl.exp(tl.sum(tl.where(index[:, None] == CHUNK - 1, total, 0.0), 0)[None, :] - total)
        stride: tl.constexpr = HEADS * KEY_SIZE
        store_tile(queries_ptr + head * KEY_SIZE, q * decay, first, end, stride, KEY_SIZE, cols)
        store_tile(reads_ptr + head * KEY_SIZE, k * decay, first, end, stride, KEY_SIZE, cols)
        store_tile(writes_ptr + head * KEY_SIZE, k * rest, first, end, stride, KEY_SIZE, cols)
    rows = first + index
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
    tl.store(vectors + SAME * CHUNK, same * scale * q_factor * k_factor)
    tl.store(vectors + BETA * CHUNK, tl.load(beta_ptr + rows * stride_beta + head, rows < end, 0.0).to(tl.float32))
    tl.store(vectors + Q_FACTOR * CHUNK, q_factor)
    tl.store(vectors + K_FACTOR * CHUNK, k_factor)
    # The rows of the scans have these factors already.
    tl.store(vectors + READ * CHUNK, ones)
    tl.store(vectors + WRITE * CHUNK, ones)
    tl.store(vectors + QUERY * CHUNK, ones)


@triton.jit(do_not_specialize=["T", "chunks"])
def kda_pairs_kernel(
    q_ptr, k_ptr, chunks_ptr, vectors_ptr, totals_ptr,  # rows, rows, [M, 3] or None, [M, H, 11, C], [M, H, C, Dk]
    keys_ptr, scores_ptr,  # [M, H, C, C] fp32, [M, H, C, C]
    T, chunks, groups, stride_q, stride_k, scale,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr, FIRST_LEVEL: tl.constexpr, END_LEVEL: tl.constexpr,
):  # fmt: skip
    """Compute the elements of K and of the scores of some levels, for some tokens of one chunk of a head."""
    BLOCKS: tl.constexpr = CHUNK // TOKENS
    place = (tl.program_id(0) // BLOCKS).to(tl.int64)
    chunk, head = (place // HEADS).to(tl.int32), (place % HEADS).to(tl.int32)
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    tokens = tl.program_id(0) % BLOCKS * TOKENS + tl.arange(0, TOKENS)
    first += tl.program_id(0) % BLOCKS * TOKENS
    q_ptr, k_ptr = q_ptr + head // groups * KEY_SIZE, k_ptr + head // groups * KEY_SIZE
    totals = totals_ptr + place * (CHUNK * KEY_SIZE)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + tokens
    q_factor, k_factor = scale * tl.load(vectors + Q_FACTOR * CHUNK), tl.load(vectors + K_FACTOR * CHUNK)
    keys, queries = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
    for start in tl.range(0, KEY_SIZE, BLOCK_K, num_stages=1):
        cols = start + tl.arange(0, BLOCK_K)
        q = load_tile(q_ptr, first, end, stride_q, KEY_SIZE, cols, TOKENS) * q_factor[:, None]
        k = load_tile(k_ptr, first, end, stride_k, KEY_SIZE, cols, TOKENS) * k_factor[:, None]
        total = load_totals(totals, tokens, cols, KEY_SIZE)
        for level in tl.range(FIRST_LEVEL, END_LEVEL, num_stages=1):
            near = decay_until_border(total, totals, tokens, cols, level, KEY_SIZE)
            far_k, far_q = (k * near).to(dtype), (q * near).to(dtype)
            is_pair = are_pairs(tokens, level)
            keys += tl.where(is_pair, tl.dot(far_k, tl.trans(far_k), input_precision="ieee"), 0.0)
            queries += tl.where(is_pair, tl.dot(far_q, tl.trans(far_k), input_precision="ieee"), 0.0)
    square = place * (CHUNK * CHUNK) + tokens[:, None] * CHUNK + tokens[None, :]
    block = tokens >> FIRST_LEVEL
    if FIRST_LEVEL == 0:
        queries += tl.where(block[:, None] == block[None, :], tl.load(vectors + SAME * CHUNK)[:, None], 0.0)
        tl.store(scores_ptr + square, saturate(queries, scores_ptr))
        tl.store(keys_ptr + square, keys)
    else:
        # The other launch stores the pairs within a block of 2 ** FIRST_LEVEL tokens.
        tl.store(scores_ptr + square, saturate(queries, scores_ptr), block[:, None] != block[None, :])
        tl.store(keys_ptr + square, keys, block[:, None] != block[None, :])
