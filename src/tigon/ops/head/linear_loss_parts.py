"""The division of a batch into parts, each of which a loss function of `linear_loss` can compute by itself.

A unit is what must stay in one part: a block of tokens, a sequence, or a pair of sequences. A part has one or more
units in a row, and its logits fit into the budget.

Shapes: N sequences of L tokens each, P = N / 2 pairs: sequences 0..P-1 are the chosen ones, P..N-1 the rejected ones.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.low_rank_logits import Rows

__all__ = ["Group", "Part", "Units", "divide", "find_units", "select_arguments", "select_units"]

Group = Literal["token", "sequence", "pair", "batch"]


class Units(NamedTuple):
    """The units of a batch, and how many tokens of each are computed."""

    group: Group
    # The number of units.
    number: int
    # The number of tokens of a unit, or of one of the two sequences of a pair. The last block of tokens may be shorter.
    length: int
    # The number of computed tokens of each unit.
    sizes: list[int]
    # The computed tokens before each block or sequence, and their number in all.
    offsets: list[int]


class Part(NamedTuple):
    """Some units in a row, and their computed tokens."""

    first: int
    last: int  # exclusive
    # The indices of the computed tokens, among all tokens.
    rows: Rows


def find_units(group: Group, shape: torch.Size, rows: Tensor | None, count: int, token_limit: int) -> Units:
    """Return the units of targets of this shape.

    Args:
        group: What a unit is. All tokens of "batch" are one unit.
        shape: The shape of the targets; [N, L] for sequences and pairs.
        rows: The indices of the computed tokens, in order; None if all are computed.
        count: The number of computed tokens.
        token_limit: The largest number of computed tokens of a part.
    """
    tokens = shape.numel()
    if group == "batch":
        return Units(group, 1, tokens, [count], [0, count])
    # Blocks of a quarter of the limit waste at most a quarter of it.
    length = max(1, token_limit // 4) if group == "token" else shape[1]
    pieces = -(-tokens // max(length, 1)) if group == "token" else shape[0]
    if rows is None:
        offsets = [min(i * length, tokens) for i in range(pieces + 1)]
    else:
        # The host reads these numbers, so it waits for the device once.
        starts = (torch.arange(pieces + 1, device=rows.device) * length).clamp(max=tokens)
        offsets = torch.searchsorted(rows, starts).tolist()
    sizes = [last - first for first, last in itertools.pairwise(offsets)]
    if group == "pair":
        pairs = pieces // 2
        sizes = [sizes[i] + sizes[pairs + i] for i in range(pairs)]
    return Units(group, len(sizes), length, sizes, offsets)


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
    shifts = (0, units.number) if units.group == "pair" else (0,)
    spans = [(units.offsets[first + shift], units.offsets[last + shift]) for shift in shifts]
    if rows is not None:
        return torch.cat([rows[start:stop] for start, stop in spans])
    # The chosen and the rejected sequences of all pairs lie next to each other.
    if spans[0][1] == spans[-1][0] or len(spans) == 1:
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def select_units(x: Tensor, units: Units, part: Part) -> Tensor:
    """Return the tokens of a part of x [T], in the shape in which a loss function takes them.

    That is [C] for tokens, and [n, L] for sequences and pairs; the chosen sequences come first.
    """
    if units.group == "batch":
        return x
    if units.group == "token":
        return x[part.first * units.length : part.last * units.length]
    return _select_sequences(x.view(-1, units.length), units, part)


def _select_sequences(x: Tensor, units: Units, part: Part) -> Tensor:
    """Return the rows of x [N, ...] that belong to the sequences of a part."""
    if units.group == "sequence":
        return x[part.first : part.last]
    if part.first == 0 and part.last == units.number:
        return x
    chosen, rejected = x[: units.number], x[units.number :]
    return torch.cat((chosen[part.first : part.last], rejected[part.first : part.last]))


def select_arguments(arguments: Sequence[Any], shape: torch.Size, units: Units, part: Part) -> list[Any]:
    """Return the arguments of a loss function for a part.

    Tensors of values of tokens [*shape, ...], of sequences [N, ...] or of pairs [P, ...] are cut. Others are returned
    as they are.
    """
    selected: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, Tensor) or argument.dim() == 0 or units.group == "batch":
            selected.append(argument)
        elif units.group == "token":
            is_tokens = argument.shape[: len(shape)] == shape
            selected.append(select_units(argument.flatten(0, len(shape) - 1), units, part) if is_tokens else argument)
        elif len(argument) == shape[0]:
            selected.append(_select_sequences(argument, units, part))
        elif units.group == "pair" and len(argument) == units.number:
            selected.append(argument[part.first : part.last])
        else:
            selected.append(argument)
    return selected
