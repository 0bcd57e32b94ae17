r"""The gated delta rule and Kimi Delta Attention in chunks of 64 tokens, in torch: forward and backward (no autograd).

A chunk reads the state S before it and writes the state after it. G is the cumulative sum of g in the chunk, D its
decay, and L its last token. The rule of one chunk is the solution of a triangular system (the WY form):

    D_ij  = exp(G_i - G_j) for i >= j, else 0
    A     = strict_lower(beta_i (k_i . k_j) D_ij)
    X     = beta (v - exp(G) k S)                              [C, Dv]
    U     = (I + A)^-1 X                                       [C, Dv], the updates of the state
    o     = scale (exp(G) q S + (q k^T * D) U)
    S'    = exp(G_L) S + (exp(G_L - G) k)^T U

and its gradient, with dX from the transposed system:

    dU    = scale (q k^T * D)^T do + exp(G_L - G) k dS'
    dX    = (I + A)^-T dU,   dA = -strict_lower(dX U^T),   dv = beta dX
    dq    = scale (exp(G) do S^T + (do U^T * D) k)
    k_out = (dA * D) k - exp(G) dX S^T                         the part of dk that beta multiplies
    k_in  = exp(G_L - G) U dS'^T + (dA * D)^T (beta k) + scale (do U^T * D)^T q
    dk    = beta k_out + k_in,   dbeta = k . k_out + dX . v
    dS    = exp(G_L) dS' + scale (exp(G) q)^T do - (beta exp(G) k)^T dX
    dg_t  = sum over i >= t > j of (do U^T * scale q k^T * D + dA * A)_ij
            + sum over i >= t of exp(G_i) (scale q_i . (do S^T)_i - beta_i k_i . (dX S^T)_i)
            + sum over j < t of k_j . exp(G_L - G_j) (U dS'^T)_j + exp(G_L) <S, dS'>

where "." is the dot product of a row. `delta_rule_pairs` has the products of pairs, with D. If g has a number for each
feature of a head of k, exp(G) is a matrix [C, Dk], k_i . k_j D_ij is a sum over features, each with a D of its own, and
the dot products in dg are those of single features.

Everything is in fp32, or in fp64 if an input is. Only one chunk is in memory at a time, and forward saves nothing:
backward recomputes the states between the chunks.

Shapes: B batch, T tokens, Hk heads of q and k, R heads of v for each of them, C = 64 tokens of a chunk, N samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.chunks import Chunks, chunks_of, samples_of
from tigon.ops.mixers.delta_rule_pairs import FeaturePairs, TokenPairs, sum_after, sum_before, sum_from
from tigon.runtime.autograd import without_autocast

# The number that is added to the sum of squares of a row of q or k.
NORM_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """The tensors of the gated delta rule."""

    q: Tensor  # [B, T, Hk, Dk]
    k: Tensor  # [B, T, Hk, Dk]
    v: Tensor  # [B, T, Hk R, Dv]
    g: Tensor  # [B, T, Hk R], or [B, T, Hk R, Dk] with a decay of each feature
    beta: Tensor  # [B, T, Hk R]
    initial_state: Tensor | None  # [B or N, Hk R, Dk, Dv]
    cu_seqlens: Tensor | None  # [N + 1]


class DeltaOptions(NamedTuple):
    """The options of the gated delta rule."""

    scale: float
    # True if q and k are divided by their l2 norms.
    normalises: bool
    # True if the state after the last token is returned.
    returns_state: bool


class DeltaGradients(NamedTuple):
    """The gradients of the tensors of the gated delta rule; None for one that is not computed."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dinitial_state: Tensor | None


def count_samples(inputs: DeltaInputs) -> int:
    """Return how many sequences have a state of their own: the batch, or the packed samples."""
    return samples_of(inputs.q, inputs.cu_seqlens)


def count_chunks(inputs: DeltaInputs) -> int:
    """Return the number of chunks of each sequence, or the largest possible number of chunks of all packed samples."""
    return chunks_of(inputs.q, inputs.cu_seqlens)


def state_dtype(inputs: DeltaInputs) -> torch.dtype:
    """Return the dtype of the state, in which everything is computed."""
    is_wide = any(x.dtype == torch.float64 for x in inputs[:5])
    return torch.float64 if is_wide else torch.float32


def _chunks_of_inputs(inputs: DeltaInputs) -> Chunks:
    groups = inputs.v.shape[2] // inputs.q.shape[2]
    return Chunks(inputs.q.shape[1], groups, state_dtype(inputs), count_chunks(inputs), inputs.cu_seqlens)


def _split_heads(state: Tensor, groups: int) -> Tensor:
    """Return states [N, Hk R, Dk, Dv] as [N, Hk, R, Dk, Dv]."""
    return state.unflatten(1, (-1, groups))


def _initial_states(inputs: DeltaInputs, chunks: Chunks) -> Tensor:
    """Return the states [N, Hk, R, Dk, Dv] before the first tokens, and of one more sample if samples are packed."""
    n, heads = count_samples(inputs), inputs.v.shape[2]
    shape = n, heads, inputs.k.shape[3], inputs.v.shape[3]
    state = inputs.initial_state
    state = inputs.q.new_zeros(shape, dtype=chunks.dtype) if state is None else state.to(chunks.dtype)
    state = _split_heads(state, chunks.groups)
    return state if chunks.sample is None else torch.cat((state, torch.zeros_like(state[:1]))) + chunks.poison


# --- one chunk -----------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """One chunk: its inputs, and what does not depend on the state. E is Dk for a decay of each feature, else 1."""

    q: Tensor  # [B, Hk, 1, C, Dk]
    k: Tensor
    v: Tensor  # [B, Hk, R, C, Dv]
    beta: Tensor  # [B, Hk, R, C, 1]
    decay: Tensor  # exp(G), [B, Hk, R, C, E]
    rest: Tensor  # exp(G_L - G), [B, Hk, R, C, E]
    pairs: TokenPairs | FeaturePairs

    @property
    def end(self) -> Tensor:
        """Return exp(G_L), [B, Hk, R, E, 1]."""
        return self.decay[..., -1, :, None]

    @property
    def system(self) -> Tensor:
        """Return A, [B, Hk, R, C, C]."""
        return self.beta * self.pairs.keys

    def fit(self, dg: Tensor) -> Tensor:
        """Return the gradient of g [..., E], given that of a decay of each feature [..., Dk]."""
        return dg if self.decay.shape[-1] > 1 else dg.sum(-1, keepdim=True)


def _norm_factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _load_chunk(inputs: DeltaInputs, options: DeltaOptions, chunks: Chunks, index: int) -> _Chunk:
    q, k = (chunks.load(x, index, is_per_key=True) for x in (inputs.q, inputs.k))
    if options.normalises:
        q, k = q * _norm_factor(q), k * _norm_factor(k)
    v, g, beta = (chunks.load(x, index) for x in (inputs.v, inputs.g, inputs.beta))
    pairs = FeaturePairs(q, k, g) if inputs.g.dim() == 4 else TokenPairs(q, k, g := g[..., None])
    return _Chunk(q, k, v, beta[..., None], g.cumsum(-2).exp(), sum_after(g).exp(), pairs)


def _updates(chunk: _Chunk, state: Tensor) -> Tensor:
    """Return U."""
    x = chunk.beta * (chunk.v - (chunk.decay * chunk.k) @ state)
    return torch.linalg.solve_triangular(chunk.system, x, upper=False, unitriangular=True)


def _next_state(chunk: _Chunk, state: Tensor, updates: Tensor) -> Tensor:
    return chunk.end * state + (chunk.rest * chunk.k).mT @ updates


def _chunk_gradients(
    chunk: _Chunk, state: Tensor, do: Tensor, dstate: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """Return dq, dk, dv, dg and dbeta of a chunk, where dq and dk are not added over heads yet, and dS before it."""
    q, k, v, beta, decay, rest, pairs = chunk
    updates, scaled_do = _updates(chunk, state), scale * do
    dupdates = pairs.queries.mT @ scaled_do + (rest * k) @ dstate
    dx = torch.linalg.solve_triangular(chunk.system.mT, dupdates, upper=True, unitriangular=True)
    dsystem = -(dx @ updates.mT).tril(-1)
    dq, dk, dg = pairs.gradients(beta * dsystem, (scaled_do @ updates.mT).tril())
    dq_state, k_state, dk_next = decay * (scaled_do @ state.mT), decay * (dx @ state.mT), rest * (updates @ dstate.mT)
    dbeta = (dsystem * pairs.keys).sum(-1) + (dx * v).sum(-1) - (k * k_state).sum(-1)
    dg = dg + sum_from(chunk.fit(q * dq_state - beta * k * k_state)) + sum_before(chunk.fit(k * dk_next))
    dg = dg + chunk.fit((chunk.end * state * dstate).sum(-1)).unsqueeze(-2)
    dstate = chunk.end * dstate + (decay * q).mT @ scaled_do - (beta * decay * k).mT @ dx
    dg = dg.squeeze(-1) if isinstance(pairs, TokenPairs) else dg
    return [dq + dq_state, dk - beta * k_state + dk_next, beta * dx, dg, dbeta], dstate


def _norm_gradient(dx_hat: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given that of x * factor(x)."""
    factor = _norm_factor(x)
    return factor * (dx_hat - x * factor.square() * (x * dx_hat).sum(-1, keepdim=True))


# --- all chunks ----------------------------------------------------------------------------------


@without_autocast
def chunked_forward(inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor, Tensor | None]:
    """Return o [B, T, H, Dv] in the dtype of v, and the last state [B or N, H, Dk, Dv] in fp32 or None."""
    chunks = _chunks_of_inputs(inputs)
    initial_states = _initial_states(inputs, chunks)
    v = inputs.v
    o = v.new_empty(v.shape[0], v.shape[1] + 1, *v.shape[2:])
    state, last_states = initial_states if chunks.sample is None else initial_states[:1], initial_states.clone()
    for i in range(chunks.count):
        chunk, state = _load_chunk(inputs, options, chunks, i), chunks.enter(state, initial_states, i)
        updates = _updates(chunk, state)
        o_chunk = (chunk.decay * chunk.q) @ state + chunk.pairs.queries @ updates
        chunks.store(options.scale * o_chunk, o, i)
        state = _next_state(chunk, state, updates)
        if chunks.sample is None:
            last_states = state
        else:
            last_states.index_copy_(0, chunks.sample[i : i + 1], state)
    if not options.returns_state:
        return o[:, :-1].contiguous(), None
    return o[:, :-1].contiguous(), last_states[: count_samples(inputs)].flatten(1, 2).contiguous()


def _states_before_chunks(inputs: DeltaInputs, options: DeltaOptions, chunks: Chunks) -> list[Tensor]:
    initial_states = _initial_states(inputs, chunks)
    state = initial_states if chunks.sample is None else initial_states[:1]
    states = []
    for i in range(chunks.count):
        chunk, state = _load_chunk(inputs, options, chunks, i), chunks.enter(state, initial_states, i)
        states.append(state)
        state = _next_state(chunk, state, _updates(chunk, state))
    return states


@without_autocast
def chunked_backward(
    do: Tensor, dlast_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions
) -> DeltaGradients:
    """Return all gradients, each in the dtype of its tensor."""
    chunks = _chunks_of_inputs(inputs)
    states = _states_before_chunks(inputs, options, chunks)
    samples = count_samples(inputs)
    dstates = torch.zeros_like(_initial_states(inputs, chunks))
    if dlast_state is not None:
        dstates[:samples] = _split_heads(dlast_state.to(chunks.dtype), chunks.groups)
    if chunks.sample is not None:
        dstates = dstates + chunks.poison
    gradients = [x.new_zeros(x.shape[0], x.shape[1] + 1, *x.shape[2:]) for x in inputs[:5]]
    # A chunk of a packed sample reads the gradient of the state of its sample from `dstates`, and writes it there.
    dstate = dstates
    for i in reversed(range(chunks.count)):
        if chunks.sample is not None:
            dstate = dstates.index_select(0, chunks.sample[i : i + 1])
        chunk, chunk_do = _load_chunk(inputs, options, chunks, i), chunks.load(do, i)
        parts, dstate = _chunk_gradients(chunk, states[i], chunk_do, dstate, options.scale)
        # The heads of v that share a head of q and k add their gradients.
        for j, x in enumerate((inputs.q, inputs.k)):
            parts[j] = parts[j].sum(2, keepdim=True)
            if options.normalises:
                parts[j] = _norm_gradient(parts[j], chunks.load(x, i, is_per_key=True))
        for part, gradient in zip(parts, gradients, strict=True):
            chunks.store(part, gradient, i)
        if chunks.sample is not None:
            dstates.index_copy_(0, chunks.sample[i : i + 1], dstate)
    dinitial = None
    if inputs.initial_state is not None:
        dinitial = dstate if chunks.sample is None else dstates[:samples]
        dinitial = dinitial.flatten(1, 2).to(inputs.initial_state.dtype)
    dq, dk, dv, dg, dbeta = (x[:, :-1].contiguous() for x in gradients)
    return DeltaGradients(dq, dk, dv, dg, dbeta, dinitial)
