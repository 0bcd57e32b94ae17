"""The rows that the losses of a head compute: all of them, or those whose target is not ignored.

Shapes: T tokens, H hidden, C tokens of a chunk.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tigon.ops.logits.token.types import Shard
from tigon.ops.logits.valid_rows import ValidRows
from tigon.ops.logits.vocab_parallel import largest_shard

# The rows of a chunk in tensors [T, ...]: a slice of consecutive rows, or the indices of any rows.
Rows = slice | Tensor

Values = TypeVar("Values", bound=NamedTuple)

# With fewer multiplications in one product, it costs a GPU more to find the ignored tokens than it saves. 2^35 take 0.1
# ms on an H200.
MIN_MULTIPLICATIONS = 2**35
# All tokens are computed if at most one in this many tokens is ignored, because copying the rows of the other tokens
# would cost more.
TOKENS_PER_IGNORED = 64


def find_rows(target: Tensor, ignore_index: int, multiplications: int) -> ValidRows | None:
    """Return the valid rows, or None if a graph fixes the sizes or if finding the rows costs more than it saves."""
    if torch.compiler.is_compiling() or target.device.type not in ("cpu", "cuda"):
        return None
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    is_worth_it = target.device.type == "cpu" or multiplications >= MIN_MULTIPLICATIONS
    return ValidRows(target, ignore_index) if is_worth_it else None


def rows_to_compute(
    valid_rows: ValidRows | bool | None, x: Tensor, target: Tensor, ignore_index: int, shard: Shard
) -> tuple[Tensor | None, int]:
    """Return the rows of x [T, H] to compute, and their number. None means all rows. All rows are computed if the
    caller requests it by `valid_rows=False`, or if few rows are ignored. In compiled code the number is -1: the
    operator finds the rows when it runs, by another call of this function without `valid_rows`."""
    m = target.numel()
    if torch.compiler.is_compiling():
        return None, m if valid_rows is False else -1
    if valid_rows is None or (valid_rows and target.is_cuda and torch.cuda.is_current_stream_capturing()):
        valid_rows = find_rows(target, ignore_index, x.numel() * max(largest_shard(shard), 1))
    if not isinstance(valid_rows, ValidRows):
        return None, m
    if (m - valid_rows.count) * TOKENS_PER_IGNORED <= m:
        return None, m
    return valid_rows.rows, valid_rows.count


def select(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def select_some(x: Tensor | None, rows: Rows) -> Tensor | None:
    """Return the rows of x, or x itself if it is None, empty, or one value for all rows."""
    return x if x is None or x.dim() == 0 or len(x) == 0 else select(x, rows)


def select_each(values: Values, rows: Rows) -> Values:
    """Return a NamedTuple with the rows of each of its tensors."""
    return values._make(select_some(x, rows) for x in values)


def write_rows(whole: Tensor, rows: Rows, values: Tensor) -> None:
    """Write the values to the rows of `whole`, in its dtype."""
    if isinstance(rows, slice):
        whole[rows] = values
    else:
        whole.index_copy_(0, rows, values.to(whole.dtype))


def without_ignored(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the hidden states [C, H] of a chunk, with zeros for ignored tokens. Their d(logits) are zero, but zero
    times a hidden state that is infinite or NaN would be NaN in dW."""
    return x.where((target != ignore_index)[:, None], 0.0)
