"""Sums over the tokens of each sequence, and the checks of arguments that all losses share.

Tokens come in two layouts. Padded tokens are [N, L]: row n holds sequence n, and `mask` is False at its padding. Packed
tokens are [T]: sequence n holds the tokens from `cu_seqlens[n]` up to `cu_seqlens[n + 1]`. No function reads the values
of `mask` or `cu_seqlens` on the host, so all shapes are known without waiting for the GPU.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime import checks

# The metrics of a loss: detached tensors without dimensions, by the names that TRL logs.
Metrics = dict[str, Tensor]

# exp(80) = 5.5e34 leaves room in fp32 for products and sums, so that a loss never becomes infinity minus infinity.
LARGEST_EXPONENT = 80.0


def bounded_exp(exponent: Tensor, *, is_squared: bool = False) -> Tensor:
    """Return exp(exponent), with exponents limited so that the result stays finite.

    Exponents above 80 count as 80 and get no gradient. If the caller squares the result, the limit is 40.
    """
    return exponent.clamp(max=LARGEST_EXPONENT / 2 if is_squared else LARGEST_EXPONENT).exp()


def mean(values: Tensor) -> Tensor:
    """Return the mean of `values`, which is zero and differentiable if there are none."""
    return values.sum() / max(values.numel(), 1)


def half(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split the values [2P] of P pairs into those of the chosen and those of the rejected completions."""
    pairs = len(values) // 2
    return values[:pairs], values[pairs:]


class BatchCounts(NamedTuple):
    """The sequences and the tokens of a batch, by which the losses divide. `batch_counts` returns them."""

    sequences: int  # N, or its sum over the parts of a batch
    tokens: Tensor  # [], int64: the tokens that count
    chosen_tokens: Tensor  # [], int64: those of the first half of the sequences, which are the chosen ones


class Sequences:
    """The tokens of N sequences: which token belongs to which sequence, and which tokens count.

    Args:
        mask: [N, L] or [T], bool: the tokens that count.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences; None for padded tokens.
        part_of: The counts of the whole batch, if these sequences are a part of it. The means of losses then divide by
            them, so that the losses of all parts add up to that of the batch. A part has no metrics.
    """

    def __init__(self, mask: Tensor, cu_seqlens: Tensor | None, part_of: BatchCounts | None = None) -> None:
        self.rows: Tensor | None = None
        self.part_of, self.has_metrics = part_of, part_of is None
        self.mask = mask
        if cu_seqlens is None:
            self.count = len(mask)
        else:
            self.count = len(cu_seqlens) - 1
            index = torch.arange(len(mask), device=mask.device)
            # The number of the sequence of each token. Tokens outside all sequences get the number N.
            rows = torch.searchsorted(cu_seqlens.to(index.dtype), index, right=True) - 1
            self.rows = rows.remainder(self.count + 1)
            self.mask = mask & (self.rows < self.count)
        self.lengths = self._sum(self.mask.to(torch.int64))
        """[N], int64: the number of tokens of each sequence that count."""

    def _sum(self, values: Tensor) -> Tensor:
        if self.rows is None:
            return values.sum(-1)
        return values.new_zeros(self.count + 1).index_add(0, self.rows, values)[: self.count]

    def masked(self, values: Tensor) -> Tensor:
        """Return `values` with zeros at the tokens that do not count, whatever is stored there, even NaN."""
        return torch.where(self.mask, values, 0.0)

    def neutral(self, values: Tensor, per_sequence: bool = True) -> Tensor:
        """Return values [N] with zeros for sequences without tokens. Values of tokens are returned as by `masked`."""
        return torch.where(self.lengths > 0, values, 0.0) if per_sequence else self.masked(values)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums [N] of the values of each sequence. The sum of no tokens is zero."""
        return self._sum(self.masked(values))

    def mean(self, values: Tensor) -> Tensor:
        """Return the means [N] of the values of each sequence. The mean of no tokens is zero."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def token_count(self) -> Tensor:
        return (self.mask.sum() if self.part_of is None else self.part_of.tokens).clamp(min=1)

    def sequence_count(self) -> int:
        return max(self.count if self.part_of is None else self.part_of.sequences, 1)

    def token_mean(self, values: Tensor) -> Tensor:
        """Return the sum over the tokens, divided by the number of tokens of the batch. It is zero for no tokens."""
        return self.masked(values).sum() / self.token_count()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N], divided by the number of sequences of the batch."""
        return values.sum() / self.sequence_count()

    def pair_mean(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N / 2], divided by the number of pairs of the batch."""
        return values.sum() / max(self.sequence_count() // 2, 1)

    def expand(self, values: Tensor) -> Tensor:
        """Give each token the value of its sequence: return `values` [N] as [N, 1] (padded) or as [T] (packed)."""
        if self.rows is None:
            return values.unsqueeze(-1)
        return torch.cat((values, values.new_zeros(1))).index_select(0, self.rows)

    def positions(self) -> Tensor:
        """Return, for each token that counts, its position 1, 2, ... among the tokens of its sequence that count."""
        counts = self.mask.to(torch.int64).cumsum(-1)
        return counts if self.rows is None else counts - self.expand(self.lengths.cumsum(0) - self.lengths)


def _check_dtype(op: str, name: str, value: Any) -> None:
    """Check that log-probabilities are fp32. The error does not name fp64, which only tests of gradients use."""
    checks.tensor(op, **{name: value})
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: {name} must be a float32 tensor, got {value.dtype}")


def check_sequences(
    op: str, log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None, name: str = "log_probs",
    part_of: BatchCounts | None = None, **others: Tensor | None,
) -> Sequences:  # fmt: skip
    """Check `log_probs`, called `name` in messages, and the other tensors of tokens, and return their sequences."""
    _check_dtype(op, name, log_probs)
    checks.boolean(op, mask=mask)
    if cu_seqlens is None:
        if log_probs.dim() != 2:
            raise ValueError(f"{op}: {name} must have shape [N, L] without cu_seqlens, got {tuple(log_probs.shape)}")
    else:
        checks.integer(op, cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(f"{op}: cu_seqlens must have shape [N + 1], got {tuple(cu_seqlens.shape)}")
        if log_probs.dim() != 1:
            raise ValueError(f"{op}: {name} must have shape [T] with cu_seqlens, got {tuple(log_probs.shape)}")
    checks.shape(op, "mask", mask, log_probs.shape)
    for other, value in others.items():
        if value is not None:
            _check_dtype(op, other, value)
            checks.shape(op, other, value, log_probs.shape)
    checks.same(op, "dtype", **{name: log_probs}, **others)
    checks.same(op, "device", **{name: log_probs}, mask=mask, cu_seqlens=cu_seqlens, **others)
    if part_of is not None and not isinstance(part_of, BatchCounts):
        raise TypeError(f"{op}: part_of must be the result of batch_counts or None, got {checks.format_value(part_of)}")
    return Sequences(mask, cu_seqlens, part_of)


def check_pairs(op: str, sequences: Sequences) -> None:
    if sequences.count % 2:
        raise ValueError(
            f"{op}: log_probs must have an even number of sequences, the chosen ones and then the rejected ones, "
            f"got {sequences.count}"
        )


def chosen_nll(sequences: Sequences, log_probs: Tensor) -> Tensor:
    """Return the negative mean of the log-probabilities of the tokens of all chosen completions."""
    part_of = sequences.part_of
    count = half(sequences.lengths)[0].sum() if part_of is None else part_of.chosen_tokens
    return -half(sequences.sum(log_probs))[0].sum() / count.clamp(min=1)


def check_labels(op: str, name: str, labels: Any, sequences: Sequences) -> None:
    """Check that `labels` is a bool tensor [N]."""
    checks.boolean(op, **{name: labels})
    checks.shape(op, name, labels, (sequences.count,))
    checks.same(op, "device", mask=sequences.mask, **{name: labels})


def check_per_sequence(op: str, name: str, value: Any, sequences: Sequences, or_tokens: bool = False) -> bool:
    """Check that `value` is a floating-point tensor [N], or also tokens; return whether it is [N].

    Where there are as many packed tokens as sequences, [N] means one value for each sequence.
    """
    checks.tensor(op, **{name: value})
    checks.floating(op, **{name: value})
    shapes = [(sequences.count,), *([tuple(sequences.mask.shape)] if or_tokens else [])]
    if tuple(value.shape) not in shapes:
        raise ValueError(
            f"{op}: {name} must have shape {' or '.join(map(str, dict.fromkeys(shapes)))}, got {tuple(value.shape)}"
        )
    checks.same(op, "device", mask=sequences.mask, **{name: value})
    return tuple(value.shape) == shapes[0]


def sequence_log_probs(
    log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None, *, average: bool = False
) -> Tensor:
    """Return the log-probability of each sequence: the sum over its tokens, log p(y) = sum_t log p(y_t | y_<t).

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the log-probability of each token. It gets a gradient.
        mask: The shape of `log_probs`, bool: the tokens that count. Other tokens may hold anything.
        cu_seqlens: [N + 1], int64 | int32: sequence n holds the packed tokens from `cu_seqlens[n]` up to
            `cu_seqlens[n + 1]`. Tokens outside all sequences do not count.
        average: Return the mean over the tokens in place of the sum.

    Returns:
        [N] in the dtype of `log_probs`. It is zero for a sequence without tokens.

    Raises: See `tigon.losses`.

    Example:
        >>> from tigon.losses import sequence_log_probs
        >>> log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, 0.0, 0.0]])
        >>> sequence_log_probs(log_probs, log_probs < 0)
        tensor([-7., -3.])
        >>> packed = torch.tensor([-1.0, -2.0, -4.0, -3.0])
        >>> sequence_log_probs(packed, packed < 0, torch.tensor([0, 3, 4]))
        tensor([-7., -3.])
    """
    sequences = check_sequences("sequence_log_probs", log_probs, mask, cu_seqlens)
    checks.flag("sequence_log_probs", average=average)
    return sequences.mean(log_probs) if average else sequences.sum(log_probs)


def batch_counts(mask: Tensor, cu_seqlens: Tensor | None = None) -> BatchCounts:
    """Return the counts of a batch, with which the losses of its parts add up to the loss of the batch.

    A batch that is too large for one step is cut into parts. The mean of the losses of the parts is not the loss of the
    batch if the parts have different numbers of tokens. With `part_of=batch_counts(...)` a loss divides by the numbers
    of the whole batch, so the sum over the parts is exact. For a batch on several ranks, add up the counts of all
    ranks, and divide them by the number of ranks if the gradients are averaged.

    Args:
        mask: [N, L], or [T] with `cu_seqlens`, bool: the tokens that count.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.

    Returns:
        `sequences`, a number; `tokens` and `chosen_tokens`, tensors without dimensions on the device of the mask.
        `chosen_tokens` are those of the first half of the sequences.

    Raises: See `tigon.losses`.

    Example:
        >>> from tigon.losses import batch_counts, simpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -2.0], [-2.0, -3.0], [-1.0, -3.0]])
        >>> counts = batch_counts(log_probs < 0)
        >>> parts = [log_probs[[0, 2]], log_probs[[1, 3]]]
        >>> torch.stack([simpo_loss(part, part < 0, part_of=counts)[0] for part in parts]).sum()
        tensor(0.8133)
        >>> simpo_loss(log_probs, log_probs < 0)[0]
        tensor(0.8133)
    """
    checks.tensor("batch_counts", mask=mask)
    values = torch.empty_like(mask, dtype=torch.float32)
    sequences = check_sequences("batch_counts", values, mask, cu_seqlens, name="the mask")
    return BatchCounts(sequences.count, sequences.mask.sum(), half(sequences.lengths)[0].sum())
