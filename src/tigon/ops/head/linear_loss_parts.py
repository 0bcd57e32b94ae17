"""The division of a batch into parts, each of which a loss function of `linear_loss` can compute by itself.

A unit is what must stay in one part: a block of tokens, a sequence, or a pair of sequences. A part has one or more
units in a row, and its logits fit into the budget.

Shapes: T tokens, N sequences of L tokens each (or packed ones of any length), P = N / 2 pairs: sequences 0..P-1 are the
chosen ones, P..N-1 the rejected ones.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.low_rank_logits import Rows

__all__ = [
    "Group",
    "Part",
    "Units",
    "divide",
    "find_units",
    "select_arguments",
    "select_boundaries",
    "select_units",
]

Group = Literal["token", "sequence", "pair", "batch"]


class Units(NamedTuple):
    """The units of a batch, and how many tokens of each are computed."""

    group: Group
    # The number of units.
    number: int
    # The first token of each block or sequence, and the end of the last one.
    bounds: list[int]
    # Whether the sequences are packed, not rows of L tokens.
    is_packed: bool
    # The number of computed tokens of each unit.
    sizes: list[int]
    # The first computed token of each block or sequence among those of the batch, and the end of the last one.
    offsets: list[int]

    def spans(self, first: int, last: int) -> list[slice]:
        """Return the blocks or sequences of units `first` to `last`: of a pair, the chosen and the rejected ones."""
        shifts = (0, self.number) if self.group == "pair" else (0,)
        return [slice(first + shift, last + shift) for shift in shifts]


class Part(NamedTuple):
    """Some units in a row, and their computed tokens."""

    first: int
    last: int  # exclusive
    # The indices of the computed tokens, among all tokens.
    rows: Rows


def find_units(
    group: Group, shape: torch.Size, rows: Tensor | None, count: int, token_limit: int, cu_seqlens: Tensor | None
) -> Units:
    """Return the units of targets of this shape.

    Args:
        group: What a unit is. All tokens of "batch" are one unit.
        shape: The shape of the targets; [N, L] for sequences and pairs, or [T] if they are packed.
        rows: The indices of the computed tokens, in order; None if all are computed.
        count: The number of computed tokens.
        token_limit: The largest number of computed tokens of a part.
        cu_seqlens: [N + 1], the boundaries of packed sequences, or None.
    """
    tokens = shape.numel()
    if group == "batch":
        return Units(group, 1, [0, tokens], cu_seqlens is not None, [count], [0, count])
    # The host reads numbers of the device below, so it waits for the device once.
    if cu_seqlens is not None and rows is not None:
        starts = cu_seqlens.to(rows.device, torch.int64)
        bounds, offsets = torch.stack((starts, torch.searchsorted(rows, starts))).tolist()
    elif cu_seqlens is not None:
        bounds = offsets = cu_seqlens.tolist()
    else:
        # Blocks of a quarter of the limit waste at most a quarter of it.
        length = max(1, token_limit // 4) if group == "token" else shape[1]
        pieces = -(-tokens // max(length, 1)) if group == "token" else shape[0]
        bounds = [min(i * length, tokens) for i in range(pieces + 1)]
        offsets = bounds
        if rows is not None:
            offsets = torch.searchsorted(rows, torch.tensor(bounds, device=rows.device)).tolist()
    sizes = [last - first for first, last in itertools.pairwise(offsets)]
    if group == "pair":
        pairs = len(sizes) // 2
        sizes = [sizes[i] + sizes[pairs + i] for i in range(pairs)]
    return Units(group, len(sizes), bounds, cu_seqlens is not None, sizes, offsets)


def divide(units: Units, rows: Tensor | None, token_limit: int, device: torch.device) -> list[Part] | None:
    """Return parts of at most `token_limit` computed tokens; None if a unit has more than that."""
    if any(size > token_limit for size in units.sizes):
        return None
    parts: list[Part] = []
    first, size = 0, 0
    for i, unit_size in enumerate(units.sizes):
        if i > first and size + unit_size > token_limit:
            parts.append(Part(first, i, _rows_of(units, first, i, rows, device)))
            first, size = i, 0
        size += unit_size
    if units.number:
        parts.append(Part(first, units.number, _rows_of(units, first, units.number, rows, device)))
    return parts


def _rows_of(units: Units, first: int, last: int, rows: Tensor | None, device: torch.device) -> Rows:
    """Return the computed tokens of units `first` to `last`."""
    spans = [(units.offsets[span.start], units.offsets[span.stop]) for span in units.spans(first, last)]
    if rows is not None:
        return torch.cat([rows[start:stop] for start, stop in spans])
    # The chosen and the rejected sequences of all pairs lie next to each other.
    if spans[0][1] == spans[-1][0] or len(spans) == 1:
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def select_units(x: Tensor, units: Units, part: Part) -> Tensor:
    """Return the tokens of a part of x [T], in the shape in which a loss function takes them.

    That is [C] for tokens and for packed sequences, and [n, L] for other sequences; the chosen sequences come first.
    """
    if units.group == "batch":
        return x
    if units.group == "token" or units.is_packed:
        return _select_tokens(x, units, part)
    return _select_sequences(x.view(len(units.bounds) - 1, -1), units, part)


def _join(x: Tensor, spans: list[slice]) -> Tensor:
    if len(spans) == 1 or spans[0].stop == spans[1].start:
        return x[spans[0].start : spans[-1].stop]
    return torch.cat([x[span] for span in spans])


def _select_tokens(x: Tensor, units: Units, part: Part) -> Tensor:
    """Return the rows of x [T, ...] that belong to the tokens of a part."""
    bounds = units.bounds
    return _join(x, [slice(bounds[span.start], bounds[span.stop]) for span in units.spans(part.first, part.last)])


def _select_sequences(x: Tensor, units: Units, part: Part) -> Tensor:
    """Return the rows of x [N, ...] that belong to the sequences of a part."""
    return _join(x, units.spans(part.first, part.last))


def select_boundaries(cu_seqlens: Tensor, units: Units, part: Part) -> Tensor:
    """Return the boundaries [n + 1] of the packed sequences of a part among its tokens."""
    if units.group == "batch":
        return cu_seqlens
    pieces, end = [cu_seqlens.new_zeros(1)], 0
    for span in units.spans(part.first, part.last):
        start = units.bounds[span.start]
        pieces.append(cu_seqlens[span.start + 1 : span.stop + 1] - start + end)
        end += units.bounds[span.stop] - start
    return torch.cat(pieces)


def select_arguments(arguments: Sequence[Any], shape: torch.Size, units: Units, part: Part) -> list[Any]:
    """Return the arguments of a loss function for a part.

    Tensors of values of tokens [*shape, ...], of sequences [N, ...] or of pairs [P, ...] are cut. Others are returned
    as they are.
    """
    sequences = len(units.bounds) - 1
    selected: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, Tensor) or argument.dim() == 0 or units.group == "batch":
            selected.append(argument)
        elif units.group == "token":
            is_tokens = argument.shape[: len(shape)] == shape
            selected.append(_select_tokens(argument.flatten(0, len(shape) - 1), units, part) if is_tokens else argument)
        elif units.is_packed and len(argument) == shape[0]:
            selected.append(_select_tokens(argument, units, part))
        elif len(argument) == sequences:
            selected.append(_select_sequences(argument, units, part))
        elif units.group == "pair" and len(argument) == units.number:
            selected.append(argument[part.first : part.last])
        else:
            selected.append(argument)
    return selected
