"""What the losses of sequences of the alias share: their log-probabilities and Liger's metrics, on `tigon.linear_loss`.

Shapes: N sequences, of which the first half are the chosen ones if they are pairs, L tokens each, P = N / 2 pairs, H
features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.losses import dpo_loss, sequence_log_probs
from tigon.losses.sequences import half
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss

# It takes log-probabilities [N, L], and returns the loss of the pairs and further values.
PairLoss = Callable[[Tensor], tuple[Tensor, ...]]


def sequence_values(log_probs: Tensor, mask: Tensor, averages: bool) -> Tensor:
    """Return log-probabilities whose sums over the tokens are those of the sequences, or the averages."""
    return log_probs / mask.sum(-1, keepdim=True).clamp(min=1) if averages else log_probs


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mean of all logits [N, L, V]: the mean hidden state times the mean row of the head."""
    with torch.no_grad():
        tokens = hidden.mean((0, 1), dtype=torch.float32)
        mean = tokens @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def sum_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of all logits [N, L, V]."""
    if hidden.numel() == 0:
        return hidden.new_zeros((), dtype=torch.float32)
    return _mean_logits(hidden, weight, bias) * (hidden.shape[0] * hidden.shape[1] * weight.shape[0])


def reference_log_probs(
    name: str, model: tuple[Tensor | None, Tensor | None, Tensor | None], target: Tensor, ignore_index: int,
    averages: bool,
) -> Tensor:  # fmt: skip
    """Return the log-probabilities [N] of the sequences under a reference model: hidden states, head and bias."""
    hidden, weight, bias = model
    if hidden is None or weight is None:
        raise ValueError(f"{name}: use_ref_model=True needs ref_input and ref_weight")
    with torch.no_grad():
        log_probs = linear_log_probs(hidden, weight, target, bias=bias, ignore_index=ignore_index)
    assert isinstance(log_probs, Tensor)
    return sequence_log_probs(log_probs, target != ignore_index, average=averages)


def pair_loss(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, loss: PairLoss, *,
    ignore_index: int, averages: bool, beta: float, reference: Tensor | None = None, nll_target: Tensor | None = None,
    alpha: float = 0.0, with_nll: bool = False, adds_up: bool = True,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """Return a loss of pairs plus `alpha` times the likelihood's, and Liger's metrics. The log-probability of a
    sequence is the sum over its tokens, or with `averages` the average. `reference` [N] are those of the reference
    model, and `beta` is the factor of the rewards. With `with_nll`, the negative log-likelihood of the chosen sequences
    is computed, for `nll_target` [N, L] if its targets differ from `target`. `adds_up` says that the loss of the batch
    is the sum of the losses of its pairs."""
    pairs, length = len(target) // 2, target.shape[1]
    if len(target) % 2:
        raise ValueError(f"{name}: the number of sequences must be even, got {len(target)}")
    logits = [_mean_logits(part, weight, bias) for part in (hidden[:pairs], hidden[pairs:])]
    mask = nll_mask = target != ignore_index
    if nll_target is not None and with_nll:
        hidden, target, mask, nll_mask = _add_targets(hidden, target, nll_target, ignore_index)

    def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        total, *values = loss(log_probs[:, :length])
        nll = log_probs.new_zeros(())
        if with_nll:
            # This type of `dpo_loss` is the likelihood alone.
            nll = dpo_loss(log_probs, nll_mask, loss_type="sft")[0]
            total = total + alpha * nll
        sequences = sequence_log_probs(log_probs.detach(), mask, average=averages)
        rewards = beta * (sequences if reference is None else sequences - reference)
        return total, (*half(sequences), nll.detach(), half(rewards), values)

    total, (chosen, rejected, nll, rewards, values) = linear_loss(
        hidden, weight, target, loss_of_batch, group="pair" if adds_up else "batch", bias=bias,
        ignore_index=ignore_index,
    )  # fmt: skip
    return total, (chosen, rejected, *logits, nll, rewards, values)


def _add_targets(
    hidden: Tensor, target: Tensor, nll_target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states and targets of 2L tokens, the mask of the pairs, and that of the likelihood. A position has
    one target. Where the two targets of a position differ, its hidden state is there a second time with the target of
    the likelihood. Only the chosen sequences have a likelihood."""
    mask, nll_mask = target != ignore_index, nll_target != ignore_index
    nll_mask[len(target) // 2 :] = False
    differs = mask & nll_mask & (target != nll_target)
    first = torch.where(mask, target, nll_target.where(nll_mask, ignore_index))
    second = nll_target.where(differs, ignore_index)
    return (
        torch.cat((hidden, hidden), 1),
        torch.cat((first, second), 1),
        torch.cat((mask, torch.zeros_like(mask)), 1),
        torch.cat((nll_mask & ~differs, differs), 1),
    )
