r"""The forward kernels of the state space dual. The docstring of `ssd_chunks` has the formulas.

`step_vectors_kernel` computes the steps and decays of all chunks in parallel, and `group_products_kernel` C B^T.
`ssd_scan_kernel` then walks through the chunks of a sequence, with a block of rows of the state S [P, N] in registers,
and writes the state before each chunk. The next state is exp(G_n) S plus a product that does not depend on S, so the
chain between chunks is short. `ssd_outputs_kernel` computes y of all chunks in parallel.

The gradient of the state follows the same recurrence from the last chunk to the first one, where dy takes the place of
x, C that of B, and exp(G) that of the weights of the writes, so one kernel computes both:

    S'  = exp(G_n) S + (exp(G_n - G) s x)^T B
    dS  = exp(G_n) dS' + (exp(G) dy)^T C

Shapes: H heads of P features, K groups of B and C with N features, C = 64 tokens of a chunk, M chunks in total, S
sequences or samples.
"""

from tigon.ops.mixers.delta_rule_kernels import (
    CHUNK,
    MIN_LOG_DECAY,
    chunks_of_sample,
    load_tile,
    pair_decays,
    rows_of_chunk,
    square_offsets,
    store_tile,
)
from tigon.ops.mixers.log_decay import softplus
from tigon.runtime.compat.triton import tl, triton

# The vectors [C] of a chunk of a head in `vectors` [M, H, 4, C], fp32:
#   TOTAL       G
#   STEP        s
#   WRITE       s exp(G_n - G)
#   LOG_DECAY   g, before the limit `MIN_LOG_DECAY`
TOTAL, STEP, WRITE, LOG_DECAY = (tl.constexpr(i) for i in range(4))
VECTORS = tl.constexpr(4)


@triton.jit
def unlimited_steps(dt, bias, APPLIES_SOFTPLUS: tl.constexpr):
    """Return the steps before their limits, in fp32."""
    steps = dt.to(tl.float32) + bias
    if APPLIES_SOFTPLUS:
        steps = softplus(steps)
    return steps


@triton.jit
def limit_steps(steps, smallest, largest):
    """Return the steps within their limits. NaN remains NaN."""
    steps = tl.where(steps < smallest, smallest, steps)
    return tl.where(steps > largest, largest, steps)


@triton.jit(do_not_specialize=["T", "chunks"])
def step_vectors_kernel(
    dt_ptr, rates_ptr, bias_ptr, chunks_ptr, vectors_ptr,  # rows, [H], [H] or None, [M, 3] or None, [M, H, 4, C]
    T, chunks, stride_dt, smallest, largest,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, APPLIES_SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Compute the vectors of one chunk for a block of heads. Rows without a token have no step."""
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    block, chunk = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    index, heads = tl.arange(0, CHUNK), block * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    mask = (index[:, None] < end - first) & is_head[None, :]
    dt = tl.load(dt_ptr + (first + index)[:, None] * stride_dt + heads[None, :], mask, 0.0)
    bias = tl.zeros([BLOCK_H], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + heads, is_head, 0.0).to(tl.float32)
    rates = tl.load(rates_ptr + heads, is_head, 0.0).to(tl.float32)
    steps = limit_steps(unlimited_steps(dt, bias[None, :], APPLIES_SOFTPLUS), smallest, largest)
    steps = tl.where(mask, steps, 0.0)
    # An infinite rate times the step 0 of a row without a token is NaN.
    log_decay = tl.where(mask, rates[None, :] * steps, 0.0)
    total = tl.cumsum(tl.where(log_decay < MIN_LOG_DECAY, MIN_LOG_DECAY, log_decay), 0)
    last_total = tl.sum(tl.where(index[:, None] == CHUNK - 1, total, 0.0), 0)
    places = (chunk.to(tl.int64) * HEADS + heads) * (VECTORS * CHUNK)
    vectors = vectors_ptr + places[None, :] + index[:, None]
    tl.store(vectors + TOTAL * CHUNK, total, is_head[None, :])
    tl.store(vectors + STEP * CHUNK, steps, is_head[None, :])
    tl.store(vectors + WRITE * CHUNK, steps * tl.exp(last_total[None, :] - total), is_head[None, :])
    tl.store(vectors + LOG_DECAY * CHUNK, log_decay, is_head[None, :])


@triton.jit(do_not_specialize=["T", "chunks", "state_width"])
def group_products_kernel(
    b_ptr, c_ptr, chunks_ptr, products_ptr,  # rows, rows, [M, 3] or None, [M, K, C, C] fp32
    T, chunks, state_width, stride_b, stride_c,
    K: tl.constexpr, STATE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute C B^T of one chunk of one group. All heads of the group share it."""
    chunk, group = tl.program_id(0) // K, tl.program_id(0) % K
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.range(0, state_width, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        b = load_tile(b_ptr + group * STATE_SIZE, first, end, stride_b, STATE_SIZE, cols)
        c = load_tile(c_ptr + group * STATE_SIZE, first, end, stride_c, STATE_SIZE, cols)
        products = tl.dot(c, tl.trans(b), products, input_precision="ieee")
    place = chunk.to(tl.int64) * K + group
    tl.store(products_ptr + place * (CHUNK * CHUNK) + square_offsets(), products)


@triton.jit(do_not_specialize=["T", "chunks"])
def ssd_scan_kernel(
    x_ptr, b_ptr, vectors_ptr, initial_ptr,  # rows, rows, [M, H, 4, C], [S, H, P, N] fp32 or None
    bounds_ptr, starts_ptr, last_ptr, states_ptr,  # [S + 1] or None, [S] or None, [S, H, P, N] or None, [M, H, P, N]
    T, chunks, stride_x, stride_b,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, IS_GRADIENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of the state before each chunk and of the last state, in fp32, for one head of a
    sequence.

    `IS_GRADIENT` computes the gradient of the state from dy and C in place of x and B: `initial` is then the gradient
    of the last state, `states` gets the gradient after each chunk, and `last` that of the first state.
    """
    blocks: tl.constexpr = (SIZE + BLOCK_P - 1) // BLOCK_P
    block, pid = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, sample = pid % HEADS, pid // HEADS
    first, end, first_chunk, count, poison = chunks_of_sample(bounds_ptr, starts_ptr, sample, T, chunks)
    index, state_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    cols = block * BLOCK_P + tl.arange(0, BLOCK_P)
    x_ptr, b_ptr = x_ptr + head * SIZE, b_ptr + head // GROUPS * STATE_SIZE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    state_offsets = cols[:, None] * STATE_SIZE + state_cols[None, :]
    state_mask = (cols[:, None] < SIZE) & (state_cols[None, :] < STATE_SIZE)
    state_place = pid.to(tl.int64) * (SIZE * STATE_SIZE)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32) + poison
    if initial_ptr is not None:
        state += tl.load(initial_ptr + state_place + state_offsets, state_mask, 0.0)
    for step in tl.range(0, count, num_stages=STAGES):
        i = step
        if IS_GRADIENT:
            i = count - 1 - step
        row = first + i * CHUNK
        place = (first_chunk + i) * HEADS + head
        x = load_tile(x_ptr, row, end, stride_x, SIZE, cols)
        b = load_tile(b_ptr, row, end, stride_b, STATE_SIZE, state_cols)
        vectors = vectors_ptr + place * (VECTORS * CHUNK)
        last_total = tl.load(vectors + (TOTAL * CHUNK + CHUNK - 1))
        rounded_state = state.to(dtype)
        tl.store(states_ptr + place * (SIZE * STATE_SIZE) + state_offsets, rounded_state, state_mask)
        if IS_GRADIENT:
            weight = tl.exp(tl.load(vectors + TOTAL * CHUNK + index))
        else:
            weight = tl.load(vectors + WRITE * CHUNK + index)
        weighted_x = (weight[:, None] * x).to(dtype)
        state = tl.dot(tl.trans(weighted_x), b, tl.exp(last_total) * state, input_precision="ieee")
    if last_ptr is not None:
        tl.store(last_ptr + state_place + state_offsets, state, state_mask)


@triton.jit
def load_state(ptr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr, rows, cols):
    """Return a block of a state [P, N]."""
    offsets = rows[:, None] * STATE_SIZE + cols[None, :]
    if ((rows.shape[0] - 1) & SIZE) == 0 and ((cols.shape[0] - 1) & STATE_SIZE) == 0:
        tile = tl.load(ptr + offsets)
    else:
        tile = tl.load(ptr + offsets, (rows[:, None] < SIZE) & (cols[None, :] < STATE_SIZE), 0.0)
    return tile


@triton.jit(do_not_specialize=["T", "chunks", "state_width"])
def ssd_outputs_kernel(
    x_ptr, c_ptr, vectors_ptr, products_ptr, states_ptr,  # rows, rows, [M, H, 4, C], [M, K, C, C], [M, H, P, N]
    weights_ptr, chunks_ptr, y_ptr,  # [H, P] fp32 or None, [M, 3] or None, rows
    T, chunks, state_width, stride_x, stride_c,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y of one chunk of one head."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sample, first, end = rows_of_chunk(chunks_ptr, chunk, T, chunks)
    if sample < 0:
        return
    place = chunk.to(tl.int64) * HEADS + head
    cols = tl.arange(0, BLOCK_P)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    y = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for start in tl.range(0, state_width, BLOCK_N, num_stages=STAGES):
        state_cols = start + tl.arange(0, BLOCK_N)
        c = load_tile(c_ptr + head // GROUPS * STATE_SIZE, first, end, stride_c, STATE_SIZE, state_cols)
        state = load_state(states_ptr + place * (SIZE * STATE_SIZE), SIZE, STATE_SIZE, cols, state_cols)
        y = tl.dot(c, tl.trans(state), y, input_precision="ieee")
    vectors = vectors_ptr + place * (VECTORS * CHUNK) + tl.arange(0, CHUNK)
    total = tl.load(vectors + TOTAL * CHUNK)
    products = chunk.to(tl.int64) * (HEADS // GROUPS) + head // GROUPS
    scores = tl.load(products_ptr + products * (CHUNK * CHUNK) + square_offsets()) * pair_decays(total)
    scores = (scores * tl.load(vectors + STEP * CHUNK)[None, :]).to(dtype)
    x = load_tile(x_ptr + head * SIZE, first, end, stride_x, SIZE, cols)
    y = tl.dot(scores, x, tl.exp(total)[:, None] * y, input_precision="ieee")
    if weights_ptr is not None:
        y += tl.load(weights_ptr + head * SIZE + cols, cols < SIZE, 0.0)[None, :] * x
    store_tile(y_ptr + head * SIZE, y, first, end, HEADS * SIZE, SIZE, cols)
