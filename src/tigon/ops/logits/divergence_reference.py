"""The parts that the references of `kl_div`, `jsd` and `tvd` share. The references run where no kernel does."""

from typing import Literal

import torch
from torch import Tensor

DivergenceReduction = Literal["batchmean", "mean", "sum", "none"]


def prepare_distributions(
    input: Tensor, target: Tensor, labels: Tensor | None, ignore_index: int, from_logits: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return student and teacher [..., V] in fp32 (or fp64), with zeros in ignored rows.

    Logits become log-probabilities.
    """
    dtype = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
    x, y = input.to(dtype), target.to(dtype)
    if labels is not None:
        is_ignored = (labels == ignore_index)[..., None]
        x, y = x.masked_fill(is_ignored, 0.0), y.masked_fill(is_ignored, 0.0)
    if from_logits:
        x, y = torch.log_softmax(x / temperature, -1), torch.log_softmax(y / temperature, -1)
    return x, y


def relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return a (log a - log b) for each element. It is 0 if a is 0, even if b is 0 too."""
    a = log_a.exp()
    return a * (log_a.clamp(min=-1e4) - torch.where(a == 0, log_b.clamp(min=-1e4), log_b))


def divisor(x: Tensor, labels: Tensor | None, reduction: DivergenceReduction) -> int:
    """Return the divisor that the host knows. With labels, the device also divides by the number of valid rows."""
    if reduction == "mean":
        return max(x.shape[-1] if labels is not None else x.numel(), 1)
    return max(x.shape[0], 1) if reduction == "batchmean" and labels is None else 1


def reduce_losses(losses: Tensor, labels: Tensor | None, ignore_index: int, reduction: DivergenceReduction) -> Tensor:
    """Return the loss for elementwise losses [..., V]."""
    if labels is not None:
        losses = losses.masked_fill((labels == ignore_index)[..., None], 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    rows = divisor(losses, labels, reduction) if labels is None else (labels != ignore_index).sum().clamp(min=1)
    return losses.sum() / (rows if labels is None else rows * divisor(losses, labels, reduction))
