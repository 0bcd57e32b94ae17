"""The chunks of 64 tokens in which torch computes linear recurrences, and the packed samples of the chunks.

Shapes: B batch, T tokens, H heads, C = 64 tokens of a chunk, N samples. A group is the heads of H that share a head of
another tensor, such as the heads of v that share a head of k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.runtime import checks
from tigon.runtime.device import PLAIN, cdiv

CHUNK = 64


def samples_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return how many sequences of x [B, T, ...] have a state of their own: the batch, or the packed samples."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunks_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of chunks of each sequence, or the largest possible number of chunks of all packed samples."""
    tokens = x.shape[1]
    is_packed = cu_seqlens is not None and tokens > 0
    return tokens // CHUNK + samples_of(x, cu_seqlens) if is_packed else cdiv(tokens, CHUNK)


class Chunks:
    """The chunks of a batch of sequences, or of packed samples. Each chunk starts at the start of its sample or later.

    Without `cu_seqlens`, the sequences of the batch have their chunks in parallel. With it, `sample` is the sample of
    each chunk on the device, or N for a chunk that does not exist. Nothing waits for the device. If the bounds are
    malformed, sample 0 has all tokens, and `poison`, which is added to all states, is NaN, not 0.
    """

    def __init__(self, tokens: int, groups: int, dtype: torch.dtype, count: int, cu_seqlens: Tensor | None) -> None:
        self.tokens, self.groups, self.dtype, self.count = tokens, groups, dtype, count
        self.sample: Tensor | None = None
        if cu_seqlens is None:
            return
        bounds = cu_seqlens.long()
        is_valid = (bounds[0] == 0) & (bounds[-1] == self.tokens) & (bounds.diff() >= 0).all()
        bounds = torch.where(is_valid, bounds, F.pad(torch.full_like(bounds[1:], self.tokens), (1, 0)))
        self.poison = torch.where(is_valid, 0.0, torch.nan)
        ends = (bounds.diff() + CHUNK - 1).div(CHUNK, rounding_mode="floor").cumsum(0)
        starts = F.pad(ends, (1, 0))
        index = torch.arange(self.count, device=bounds.device)
        self.sample = torch.searchsorted(ends, index, right=True)
        sample = self.sample.clamp(max=ends.shape[0] - 1)
        self.place = index - starts[sample]
        rows = (bounds[sample] + CHUNK * self.place)[:, None] + torch.arange(CHUNK, device=bounds.device)
        is_token = (rows < bounds[sample + 1][:, None]) & (self.sample < ends.shape[0])[:, None]
        # Row T is no token.
        self.rows = torch.where(is_token, rows, self.tokens)

    def load(self, x: Tensor, chunk: int, is_per_key: bool = False) -> Tensor:
        """Return one chunk of x [B, T, H, ...] as [B, H / R, R, C, ...], where R is `groups`, or 1 with `is_per_key`.

        Rows without a token are zeros.
        """
        if self.sample is None:
            x = x[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        else:
            rows = self.rows[chunk]
            is_token = (rows < self.tokens).view(1, -1, *[1] * (x.dim() - 2))
            x = x.index_select(1, rows.clamp(max=self.tokens - 1)).masked_fill(~is_token, 0)
        x = x.to(self.dtype).unflatten(2, (-1, 1 if is_per_key else self.groups)).movedim(1, 3)
        missing = CHUNK - x.shape[3]
        # One layout, because the order of a sum depends on it, and packed samples equal separate ones bit for bit.
        return F.pad(x, (0, 0) * (x.dim() - 4) + (0, missing)) if missing else x.contiguous()

    def store(self, part: Tensor, x: Tensor, chunk: int) -> None:
        """Write one chunk [B, H / R, R, C, ...] to x [B, T + 1, H, ...], whose last row takes rows without a token."""
        part = part.movedim(3, 1).flatten(2, 3).to(x.dtype)
        if self.sample is None:
            start, end = chunk * CHUNK, min((chunk + 1) * CHUNK, self.tokens)
            x[:, start:end] = part[:, : end - start]
        else:
            x.index_copy_(1, self.rows[chunk], part)

    def enter(self, state: Tensor, initial_states: Tensor, chunk: int) -> Tensor:
        """Return the state before a chunk: that of the chunk before it, or the initial one of its sample."""
        if self.sample is None:
            return state
        first = initial_states.index_select(0, self.sample[chunk : chunk + 1])
        return torch.where(self.place[chunk] == 0, first, state)


def check_bounds(op: str, bounds: Tensor, tokens: int) -> None:
    """Check the bounds of packed samples; their values only on the CPU, because reading others would wait."""
    checks.integer(op, cu_seqlens=bounds)
    if bounds.dim() != 1 or bounds.shape[0] < 2:
        raise ValueError(f"{op}: cu_seqlens must have shape (N + 1,) with N > 0, got {tuple(bounds.shape)}")
    if type(bounds) not in PLAIN or bounds.device.type != "cpu" or torch.compiler.is_compiling():
        return
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0 or last != tokens or bool((bounds.diff() < 0).any()):
        raise ValueError(f"{op}: cu_seqlens must ascend from 0 to T = {tokens}, got {bounds[:9].tolist()}")
