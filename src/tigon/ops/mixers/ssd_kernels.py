r"""The forward kernels of the state space dual. The docstring of `ssd_chunks` has the formulas.

`step_vectors_kernel` computes the steps and decays of all chunks in parallel. `ssd_scan_kernel` then walks through the
chunks of a sequence, with a block of rows of the state S [P, N] in registers. The next state is exp(G_L) S plus a
product that does not depend on S, so the chain between chunks is short, and the pipeline loads ahead.

The gradient of the state follows the same recurrence from the last chunk to the first one, where dy takes the place of
x, C that of B, and exp(G) that of the weights of the writes:

    S'  = exp(G_L) S + (exp(G_L - G) s x)^T B
    dS  = exp(G_L) dS' + (exp(G) dy)^T C

Therefore one kernel computes both. Because y is computed in the scan, forward never writes the states, which take as
many bytes as x for N = 64 and more for larger ones.

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
    saturate,
    store_tile,
)
from tigon.ops.mixers.log_decay import softplus
from tigon.runtime.compat.triton import tl, triton

# The vectors [C] of a chunk of a head in `vectors` [M, H, 4, C], fp32:
#   TOTAL       G
#   STEP        s
#   WRITE       s exp(G_L - G)
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
    log_decay = rates[None, :] * steps
    total = tl.cumsum(tl.where(log_decay < MIN_LOG_DECAY, MIN_LOG_DECAY, log_decay), 0)
    last_total = tl.sum(tl.where(index[:, None] == CHUNK - 1, total, 0.0), 0)
    places = (chunk.to(tl.int64) * HEADS + heads) * (VECTORS * CHUNK)
    vectors = vectors_ptr + places[None, :] + index[:, None]
    tl.store(vectors + TOTAL * CHUNK, total, is_head[None, :])
    tl.store(vectors + STEP * CHUNK, steps, is_head[None, :])
    tl.store(vectors + WRITE * CHUNK, steps * tl.exp(last_total[None, :] - total), is_head[None, :])
    tl.store(vectors + LOG_DECAY * CHUNK, log_decay, is_head[None, :])


@triton.jit(do_not_specialize=["T", "chunks"])
def ssd_scan_kernel(
    x_ptr, b_ptr, c_ptr, vectors_ptr, weights_ptr,  # rows, rows, rows, [M, H, 4, C], [H, P] fp32 or None
    initial_ptr, bounds_ptr, starts_ptr,  # [S, H, P, N] fp32 or None, [S + 1] or None, [S] or None
    y_ptr, last_ptr, states_ptr,  # rows, [S, H, P, N] fp32, [M, H, P, N]; each may be None
    T, chunks, stride_x, stride_b, stride_c,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, IS_GRADIENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of the states, and of columns of y, for one head of one sequence.

    `states` gets the state before each chunk. `IS_GRADIENT` computes the gradient of the state from dy and C in place
    of x and B: `initial` is then the gradient of the last state, `states` gets the gradient after each chunk, and
    `last` that of the first state.
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
        vectors = vectors_ptr + place * (VECTORS * CHUNK) + index
        total = tl.load(vectors + TOTAL * CHUNK)
        last_total = tl.load(vectors_ptr + place * (VECTORS * CHUNK) + (TOTAL * CHUNK + CHUNK - 1))
        rounded_state = saturate(state, x_ptr).to(dtype)
        if states_ptr is not None:
            tl.store(states_ptr + place * (SIZE * STATE_SIZE) + state_offsets, rounded_state, state_mask)
        if y_ptr is not None:
            c = load_tile(c_ptr + head // GROUPS * STATE_SIZE, row, end, stride_c, STATE_SIZE, state_cols)
            scores = tl.dot(c, tl.trans(b), input_precision="ieee") * pair_decays(total)
            scores = saturate(scores * tl.load(vectors + STEP * CHUNK)[None, :], x_ptr).to(dtype)
            y = tl.exp(total)[:, None] * tl.dot(c, tl.trans(rounded_state), input_precision="ieee")
            y = tl.dot(scores, x, y, input_precision="ieee")
            if weights_ptr is not None:
                y += tl.load(weights_ptr + head * SIZE + cols, cols < SIZE, 0.0)[None, :] * x
            store_tile(y_ptr + head * SIZE, y, row, end, HEADS * SIZE, SIZE, cols)
        if IS_GRADIENT:
            weight = tl.exp(total)
        else:
            weight = tl.load(vectors + WRITE * CHUNK)
        weighted_x = saturate(weight[:, None] * x, x_ptr).to(dtype)
        state = tl.dot(tl.trans(weighted_x), b, tl.exp(last_total) * state, input_precision="ieee")
    if last_ptr is not None:
        tl.store(last_ptr + state_place + state_offsets, state, state_mask)
