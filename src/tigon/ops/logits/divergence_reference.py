"""The divergences of `divergences` and of `distillation` in torch, which run where no kernel does.

Shapes: V vocabulary.
"""

import math
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


def jsd_kind(beta: float) -> str:
    """Return the kind of divergence that the generalised Jensen-Shannon divergence of this beta is."""
    return {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")


def elementwise_divergence(x: Tensor, y: Tensor, kind: str, beta: float) -> Tensor:
    """Return the losses [..., V] of log-probabilities x of the student and y of the teacher."""
    if kind == "kl":
        return relative_entropy(y, x)
    if kind == "reverse_kl":
        return relative_entropy(x, y)
    if kind == "tvd":
        return 0.5 * (x.exp() - y.exp()).abs()
    # The exponentials of the lowest number and of -inf are both zero.
    x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
    # The second derivative of logaddexp would be NaN where the two numbers are far apart.
    log_m = torch.logsumexp(torch.stack((y + math.log(beta), x + math.log1p(-beta))), 0)
    return beta * y.exp() * (y - log_m) + (1.0 - beta) * x.exp() * (x - log_m)


def divergence_reference(
    kind: str, input: Tensor, target: Tensor, *, reduction: DivergenceReduction = "batchmean",
    labels: Tensor | None = None, ignore_index: int = -100, from_logits: bool = False, temperature: float = 1.0,
    is_log: bool = True, beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute a divergence by its eager definition.

    `is_log` says whether the target, and for "tvd" also the input, holds logarithms.
    """
    x, y = prepare_distributions(input, target, labels, ignore_index, from_logits, temperature)
    if is_log or from_logits:
        losses = elementwise_divergence(x, y, kind, beta)
    elif kind == "tvd":
        losses = 0.5 * (x - y).abs()
    else:
        losses = torch.xlogy(y, y) - y * torch.where(y == 0, x.clamp(min=-1e4), x)
    return reduce_losses(losses, labels, ignore_index, reduction)


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
