"""The division of a batch into parts, for each of which `linear_loss` computes the logits once.

A unit is a set of tokens that must stay in one part: a sequence or a pair of sequences, whose loss couples its tokens,
or a block of tokens. A part has one or more consecutive units, and its logits fit into the budget.

Shapes: T tokens, N sequences of L tokens each (or packed ones of any length), P = N / 2 pairs: sequences 0..P-1 are the
chosen ones, P..N-1 the rejected ones.
"""

import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import ChunkConfig, ChunkPlan, Head, HeadSettings, bytes_of_logit
from tigon.ops.head.computed_rows import Rows
from tigon.runtime.device import device_kind, device_of

Group = Literal["token", "sequence", "pair", "batch"]


class _Units(NamedTuple):
    """The units of a batch, and how many tokens of each are computed."""

    group: Group
    sizes: list[int]  # The number of computed tokens of each unit
    # The first computed token of each block or sequence among those of the batch, and the end of the last one.
    offsets: list[int]

    def spans(self, first: int, last: int) -> list[slice]:
        """Return the blocks or sequences of units `first` to `last`: of a pair, the chosen and the rejected ones."""
        shifts = (0, len(self.sizes)) if self.group == "pair" else (0,)
        return [slice(first + shift, last + shift) for shift in shifts]


def _find_units(
    group: Group, shape: torch.Size, rows: Tensor | None, count: int, token_limit: int, cu_seqlens: Tensor | None
) -> _Units:
    """Return the units of targets of this shape, of which `rows` [count] are computed, or all if it is None. Tokens
    before the first packed sequence belong to its unit, and tokens after the last one to the last unit."""
    tokens = shape.numel()
    if group == "batch" or not tokens:
        return _Units("batch", [count], [0, count])
    # The host reads numbers of the device below, so it waits for the device once.
    if cu_seqlens is not None and rows is not None:
        offsets = torch.searchsorted(rows, cu_seqlens.to(rows.device, torch.int64)).tolist()
    elif cu_seqlens is not None:
        offsets = [min(max(bound, 0), tokens) for bound in cu_seqlens.tolist()]
    else:
        # Blocks of a quarter of the limit waste at most a quarter of it.
        length = max(1, token_limit // 4) if group == "token" else shape[1]
        offsets = [min(i * length, tokens) for i in range(-(-tokens // length) + 1)]
        if rows is not None:
            offsets = torch.searchsorted(rows, torch.tensor(offsets, device=rows.device)).tolist()
    if len(offsets) == 1 or offsets != sorted(offsets):
        # There is no sequence, or the boundaries decrease.
        return _Units("batch", [count], [0, count])
    offsets[0], offsets[-1] = 0, count
    sizes = [last - first for first, last in itertools.pairwise(offsets)]
    if group == "pair":
        pairs = len(sizes) // 2
        sizes = [sizes[i] + sizes[pairs + i] for i in range(pairs)]
    return _Units(group, sizes, offsets)


def _divide(units: _Units, rows: Tensor | None, token_limit: int, device: torch.device) -> list[Rows] | None:
    """Return the rows of parts of at most `token_limit` computed tokens, without empty ones; None if a unit has more
    tokens."""
    if any(size > token_limit for size in units.sizes):
        return None
    ends, size = [0], 0
    for i, unit_size in enumerate(units.sizes):
        if size and size + unit_size > token_limit:
            ends.append(i)
            size = 0
        size += unit_size
    if size:
        ends.append(len(units.sizes))
    return [_rows_of(units, first, last, rows, device) for first, last in itertools.pairwise(ends)]


def _rows_of(units: _Units, first: int, last: int, rows: Tensor | None, device: torch.device) -> Rows:
    """Return the computed tokens of units `first` to `last`."""
    spans = [(units.offsets[span.start], units.offsets[span.stop]) for span in units.spans(first, last)]
    if rows is not None:
        return torch.cat([rows[start:stop] for start, stop in spans])
    # The chosen and the rejected sequences of all pairs lie next to each other.
    if spans[0][1] == spans[-1][0] or len(spans) == 1:
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def divide_batch(
    head: Head, settings: HeadSettings, shape: torch.Size, group: Group, cu_seqlens: Tensor | None, *, may_wait: bool
) -> ChunkPlan | None:
    """Return the parts of a batch; None if a unit exceeds the budget, or if the host must not wait for the sizes."""
    x, weight, _, _, rows, count = head
    max_logits_mib = settings.max_logits_mib
    token_bytes = len(weight) * bytes_of_logit(x)
    config = ChunkConfig.choose((device_kind(x), False), device_of(x))
    may_sum_in_fp32 = settings.needs.dw and weight.element_size() == 2
    spare_tokens = x.shape[1] if may_sum_in_fp32 and not settings.sums_in_fp32 else 0
    limit = config.token_limit(count, token_bytes, max_logits_mib, spare_tokens)
    if count <= limit:
        # One part needs no division.
        group = "batch"
    if group != "batch" and cu_seqlens is not None and cu_seqlens.is_cuda and not may_wait:
        return None
    units = _find_units(group, shape, rows, count, limit, cu_seqlens)
    parts = _divide(units, rows, limit, x.device)
    if parts is None:
        parts = _divide(units, rows, config.unit_limit(token_bytes, max_logits_mib), x.device)
        # With more than `max_chunks` parts, the fp32 sum of dW would take memory in addition to these logits.
        if parts is not None and may_sum_in_fp32 and len(parts) > config.max_chunks:
            parts = None
    if parts is None:
        return None
    sums_in_fp32 = settings.sums_in_fp32 or (may_sum_in_fp32 and len(parts) > config.max_chunks)
    return ChunkPlan(parts, sums_in_fp32, rows is None)
