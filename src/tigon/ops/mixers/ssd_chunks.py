r"""The state space dual of Mamba-2 in chunks of 64 tokens, in torch: forward and backward (no autograd).

A token has a step s and the logarithm of a decay g. In a chunk, G is the cumulative sum of g, G_n its last element, L
the decay between two tokens, and S the state before the chunk:

    s     = clamp(softplus(dt + dt_bias)),   g = A s
    L_ij  = exp(G_i - G_j) for i >= j, else 0
    v     = s x                                                  [C, P]
    y     = exp(G) C S^T + (C B^T * L) v + D x
    S'    = exp(G_n) S + (exp(G_n - G) v)^T B                    [P, N]

and the gradient, given dy and dS':

    dv    = (C B^T * L)^T dy + exp(G_n - G) B dS'^T,             dx = s dv + D dy
    dC    = (dy v^T * L) B + exp(G) dy S                         summed over the heads of a group
    dB    = (dy v^T * L)^T C + exp(G_n - G) v dS'                summed over the heads of a group
    dS    = exp(G_n) dS' + (exp(G) dy)^T C
    dg_t  = sum over i >= t > j of (dy v^T * C B^T * L)_ij
            + sum over i >= t of C_i . (exp(G) dy S)_i
            + sum over j < t of B_j . (exp(G_n - G) v dS')_j + exp(G_n) <S, dS'>
    ds    = A dg + x . dv,                                       dA = sum of s dg over tokens

where "." is the dot product of a row. Every term of dg has the decay as a factor, so a strong decay costs no digits.

Everything is in fp32, or in fp64 if an input other than the states is. Only one chunk is in memory at a time, and
forward saves nothing: backward recomputes the states between the chunks.

Shapes: B batch, T tokens, H heads of P features, K groups of R heads that share B and C, N features of B and C, C = 64
tokens of a chunk, M samples.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.mixers.chunks import Chunks, chunks_of, samples_of
from tigon.ops.mixers.delta_rule_pairs import decays_between, sum_after, sum_before, sum_from
from tigon.runtime.autograd import without_autocast


class SSDInputs(NamedTuple):
    """The tensors of the state space dual."""

    x: Tensor  # [B, T, H, P]
    dt: Tensor  # [B, T, H]
    A: Tensor  # [H]
    B: Tensor  # [B, T, K, N]
    C: Tensor  # [B, T, K, N]
    D: Tensor | None  # [H] or [H, P]
    dt_bias: Tensor | None  # [H]
    initial_states: Tensor | None  # [B or M, H, P, N]
    cu_seqlens: Tensor | None  # [M + 1]


class SSDOptions(NamedTuple):
    """The options of the state space dual."""

    # True if a step is the softplus of dt.
    applies_softplus: bool
    # The limits of a step.
    smallest_step: float
    largest_step: float
    # True if the states after the last tokens are returned.
    returns_states: bool


class SSDGradients(NamedTuple):
    """The gradients of the tensors of the state space dual; None for one that is not computed."""

    dx: Tensor | None
    ddt: Tensor | None
    dA: Tensor | None
    dB: Tensor | None
    dC: Tensor | None
    dD: Tensor | None
    ddt_bias: Tensor | None
    dinitial_states: Tensor | None


def state_dtype(inputs: SSDInputs) -> torch.dtype:
    """Return the dtype of the states, in which everything is computed."""
    is_wide = any(x is not None and x.dtype == torch.float64 for x in inputs[:7])
    return torch.float64 if is_wide else torch.float32


def compute_steps(dt: Tensor, bias: Tensor | None, options: SSDOptions) -> Tensor:
    """Return s, for dt and a bias that are broadcast to each other."""
    steps = dt if bias is None else dt + bias
    steps = F.softplus(steps) if options.applies_softplus else steps
    return steps.clamp(options.smallest_step, options.largest_step)


def _step_slopes(dt: Tensor, bias: Tensor | None, options: SSDOptions) -> Tensor:
    """Return the derivative of s by dt. It is 0 where a limit replaces the step."""
    steps = compute_steps(dt, bias, options)
    unlimited = compute_steps(dt, bias, options._replace(smallest_step=-torch.inf, largest_step=torch.inf))
    # The derivative of the softplus is 1 - exp(-s).
    slopes = -torch.expm1(-unlimited) if options.applies_softplus else torch.ones_like(steps)
    return torch.where((steps == unlimited) | unlimited.isnan(), slopes, 0)


# --- one chunk -----------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """The inputs of one chunk, and their decays."""

    x: Tensor  # [B, K, R, C, P]
    steps: Tensor  # [B, K, R, C, 1]
    B: Tensor  # [B, K, 1, C, N]
    C: Tensor
    decay: Tensor  # exp(G), [B, K, R, C, 1]
    rest: Tensor  # exp(G_n - G), [B, K, R, C, 1]
    pairs: Tensor  # L, [B, K, R, C, C]

    @property
    def values(self) -> Tensor:
        """Return v, [B, K, R, C, P]."""
        return self.steps * self.x

    @property
    def scores(self) -> Tensor:
        """Return C B^T * L, [B, K, R, C, C]."""
        return self.C @ self.B.mT * self.pairs

    @property
    def end(self) -> Tensor:
        """Return exp(G_n), [B, K, R, 1, 1]."""
        return self.decay[..., -1:, :]


class _Run:
    """The inputs, the options and the parameters of the heads, which all chunks read."""

    def __init__(self, inputs: SSDInputs, options: SSDOptions) -> None:
        x, _, A, B, _, D, dt_bias, _, bounds = inputs
        self.options = options
        self.inputs, self.groups = inputs, x.shape[2] // B.shape[2]
        self.chunks = Chunks(x.shape[1], self.groups, state_dtype(inputs), chunks_of(x, bounds), bounds)
        self.dtype, self.samples = self.chunks.dtype, samples_of(x, bounds)
        self.is_token = x.new_ones((1, x.shape[1], self.groups), dtype=self.dtype)
        self.A = A.to(self.dtype).view(-1, self.groups, 1, 1)  # [K, R, 1, 1]
        self.dt_bias = None if dt_bias is None else dt_bias.to(self.dtype).view(self.A.shape)
        self.D = None if D is None else D.to(self.dtype).view(*self.A.shape[:3], -1)  # [K, R, 1, 1 or P]

    def load(self, index: int) -> _Chunk:
        x = self.chunks.load(self.inputs.x, index)
        # Steps are computed chunk by chunk, because the bits of a softplus depend on its place. Rows without
        # a token have no step.
        steps = compute_steps(self.load_dt(index), self.dt_bias, self.options)
        is_empty = self.chunks.load(self.is_token, index)[..., None] == 0
        steps = steps.masked_fill(is_empty, 0)
        B, C = (self.chunks.load(y, index, is_per_key=True) for y in (self.inputs.B, self.inputs.C))
        # An infinite rate times a step of 0 is NaN.
        g = (self.A * steps).masked_fill(is_empty, 0)
        return _Chunk(x, steps, B, C, g.cumsum(-2).exp(), sum_after(g).exp(), decays_between(g))

    def load_dt(self, index: int) -> Tensor:
        """Return dt of one chunk, [B, K, R, C, 1]."""
        return self.chunks.load(self.inputs.dt, index)[..., None]

    def split_heads(self, states: Tensor) -> Tensor:
        """Return states [M, H, P, N] as [M, K, R, P, N]."""
        return states.to(self.dtype).unflatten(1, (-1, self.groups))

    def initial_states(self) -> Tensor:
        """Return the states [M, K, R, P, N] before the first tokens, and of one more sample if samples are packed."""
        x, states = self.inputs.x, self.inputs.initial_states
        if states is None:
            states = x.new_zeros((self.samples, *x.shape[2:], self.inputs.B.shape[3]), dtype=self.dtype)
        states = self.split_heads(states)
        chunks = self.chunks
        return states if chunks.sample is None else torch.cat((states, torch.zeros_like(states[:1]))) + chunks.poison


def _next_state(chunk: _Chunk, state: Tensor) -> Tensor:
    return chunk.end * state + (chunk.rest * chunk.values).mT @ chunk.B


def _chunk_gradients(
    chunk: _Chunk, state: Tensor, dy: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dv, dB, dC, dg and dS before a chunk, where dB and dC are not added over heads yet."""
    values, scores = chunk.values, chunk.scores
    dscores = (dy @ values.mT).tril()
    dv_state, dC_state = chunk.rest * (chunk.B @ dstate.mT), chunk.decay * (dy @ state)
    dB_state = chunk.rest * (values @ dstate)
    # Row t of `ends` sums the pairs (i, j) over i >= t, of which those with j < t have token t between them.
    ends = sum_from(dscores * scores)
    dg = ends.tril(-1).sum(-1, keepdim=True) + sum_from((chunk.C * dC_state).sum(-1, keepdim=True))
    dg = dg + sum_before((chunk.B * dB_state).sum(-1, keepdim=True))
    dg = dg + chunk.end * (state * dstate).sum((-2, -1), keepdim=True)
    dpairs = dscores * chunk.pairs
    dB, dC = dpairs.mT @ chunk.C + dB_state, dpairs @ chunk.B + dC_state
    dstate = chunk.end * dstate + (chunk.decay * dy).mT @ chunk.C
    return scores.mT @ dy + dv_state, dB, dC, dg, dstate


# --- all chunks ----------------------------------------------------------------------------------


@without_autocast
def chunked_forward(inputs: SSDInputs, options: SSDOptions) -> tuple[Tensor, Tensor | None]:
    """Return y [B, T, H, P] in the dtype of x, and the last states [B or M, H, P, N] in fp32 or None."""
    run = _Run(inputs, options)
    chunks, initial_states, x = run.chunks, run.initial_states(), inputs.x
    y = x.new_empty(x.shape[0], x.shape[1] + 1, *x.shape[2:])
    state, last_states = initial_states if chunks.sample is None else initial_states[:1], initial_states.clone()
    for i in range(chunks.count):
        chunk, state = run.load(i), chunks.enter(state, initial_states, i)
        y_chunk = chunk.decay * (chunk.C @ state.mT) + chunk.scores @ chunk.values
        chunks.store(y_chunk if run.D is None else y_chunk + run.D * chunk.x, y, i)
        state = _next_state(chunk, state)
        if chunks.sample is None:
            last_states = state
        else:
            last_states.index_copy_(0, chunks.sample[i : i + 1], state)
    if not options.returns_states:
        return y[:, :-1].contiguous(), None
    return y[:, :-1].contiguous(), last_states[: run.samples].flatten(1, 2).contiguous()


def _states_before_chunks(run: _Run) -> list[Tensor]:
    chunks, initial_states = run.chunks, run.initial_states()
    state, states = initial_states if chunks.sample is None else initial_states[:1], []
    for i in range(chunks.count):
        state = chunks.enter(state, initial_states, i)
        states.append(state)
        state = _next_state(run.load(i), state)
    return states


@without_autocast
def chunked_backward(
    dy: Tensor, dlast_states: Tensor | None, inputs: SSDInputs, options: SSDOptions
) -> SSDGradients:  # fmt: skip
    """Return all gradients, each in the dtype of its tensor."""
    run = _Run(inputs, options)
    chunks, states, samples = run.chunks, _states_before_chunks(run), run.samples
    dstates = torch.zeros_like(run.initial_states())
    if dlast_states is not None:
        dstates[:samples] = run.split_heads(dlast_states)
    poison = 0.0 if chunks.sample is None else chunks.poison
    dstates = dstates + poison
    x, dt, A, B, C, D, dt_bias, initial_states, _ = inputs
    dx, dB, dC = (y.new_zeros(y.shape[0], y.shape[1] + 1, *y.shape[2:]) for y in (x, B, C))
    ddt = dt.new_zeros(x.shape[0], x.shape[1] + 1, x.shape[2])
    dA, ddt_bias = (torch.zeros_like(run.A) + poison for _ in range(2))
    dD = x.new_zeros((), dtype=run.dtype) + poison
    # A chunk of a packed sample reads the gradient of the state of its sample from `dstates`, and writes it there.
    dstate = dstates
    for i in reversed(range(chunks.count)):
        if chunks.sample is not None:
            dstate = dstates.index_select(0, chunks.sample[i : i + 1])
        chunk, chunk_dy = run.load(i), chunks.load(dy, i)
        dv, dB_heads, dC_heads, dg, dstate = _chunk_gradients(chunk, states[i], chunk_dy, dstate)
        dx_chunk = chunk.steps * dv
        if run.D is not None:
            dx_chunk = dx_chunk + run.D * chunk_dy
            dD = dD + (chunk.x * chunk_dy).sum((0, 3))
        dA = dA + (chunk.steps * dg).sum((0, 3), keepdim=True)[0]
        chunks.store(dx_chunk, dx, i)
        chunks.store(dB_heads.sum(2, keepdim=True), dB, i)
        chunks.store(dC_heads.sum(2, keepdim=True), dC, i)
        dsteps = run.A * dg + (chunk.x * dv).sum(-1, keepdim=True)
        # Rows without a token have no gradient: x, B and dy are zeros there, but not the derivative of their steps.
        dsteps = dsteps * _step_slopes(run.load_dt(i), run.dt_bias, options)
        dsteps = dsteps * chunks.load(run.is_token, i)[..., None]
        ddt_bias = ddt_bias + dsteps.sum((0, 3), keepdim=True)[0]
        chunks.store(dsteps.squeeze(-1), ddt, i)
        if chunks.sample is not None:
            dstates.index_copy_(0, chunks.sample[i : i + 1], dstate)
    dx, dB, dC = (y[:, :-1].contiguous() for y in (dx, dB, dC))
    dbias = None if dt_bias is None else ddt_bias.flatten().to(dt_bias.dtype)
    if D is not None:
        dD = dD.expand(*run.A.shape[:2], x.shape[3]).flatten(0, 1)
        dD = (dD.sum(-1) if D.dim() == 1 else dD).to(D.dtype)
    dinitial = None
    if initial_states is not None:
        dinitial = dstate if chunks.sample is None else dstates[:samples]
        dinitial = dinitial.flatten(1, 2).to(initial_states.dtype)
    dA = dA.flatten().to(A.dtype)
    return SSDGradients(dx, ddt[:, :-1].contiguous(), dA, dB, dC, None if D is None else dD, dbias, dinitial)
