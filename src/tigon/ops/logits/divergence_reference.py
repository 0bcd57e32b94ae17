"""What the references of `kl_div`, `jsd` and `tvd` have in common: they run where no kernel does."""

from typing import Literal

import torch
from torch import Tensor

__all__ = ["DivergenceReduction", "divisor", "prepared", "reduced", "relative_entropy"]

DivergenceReduction = Literal["batchmean", "mean", "sum", "none"]


def prepared(
    input: Tensor, target: Tensor, labels: Tensor | None, ignore_index: int, from_logits: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    """Student and teacher [..., V] in fp32 (fp64), ignored rows finite; logits become log-probabilities."""
    wide = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
    both = input.to(wide), target.to(wide)
    if labels is not None:
        both = tuple(x.masked_fill((labels == ignore_index)[..., None], 0.0) for x in both)
    return tuple(torch.log_softmax(x / temperature, -1) for x in both) if from_logits else both


def relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a (log a - log b) elementwise; 0 where a is, even if b is as well."""
    a = log_a.exp()
    return a * (log_a.clamp(min=-1e4) - torch.where(a == 0, log_b.clamp(min=-1e4), log_b))


def divisor(x: Tensor, labels: Tensor | None, reduction: DivergenceReduction) -> int:
    """What a loss is divided by on the host; with labels, the number of valid rows comes on top."""
    if reduction == "mean":
        return max(x.shape[-1] if labels is not None else x.numel(), 1)
    return max(x.shape[0], 1) if reduction == "batchmean" and labels is None else 1


def reduced(losses: Tensor, labels: Tensor | None, ignore_index: int, reduction: DivergenceReduction) -> Tensor:
    """Elementwise losses [..., V] -> the loss."""
    if labels is not None:
        losses = losses.masked_fill((labels == ignore_index)[..., None], 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    rows = divisor(losses, labels, reduction) if labels is None else (labels != ignore_index).sum().clamp(min=1)
    return losses.sum() / (rows if labels is None else rows * divisor(losses, labels, reduction))
