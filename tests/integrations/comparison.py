"""The comparison of a result of the alias for Liger with its formula, and a formula that several tests share."""

from typing import Any

import torch
from torch import Tensor


def assert_same(ours: Any, expected: Any, leaves: tuple[Tensor, ...]) -> None:
    """Compare two results and their gradients, for an upstream gradient that differs from value to value."""
    torch.testing.assert_close(ours, expected)
    upstream = torch.linspace(0.5, 1.5, expected.numel()).view_as(expected)
    gradients = (torch.autograd.grad(x, leaves, upstream.to(x.dtype), retain_graph=True) for x in (ours, expected))
    for gradient, other in zip(*gradients, strict=True):
        # A sum over tokens rounds as its largest terms do.
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6 * max(1.0, float(other.abs().max())))


def jsd_of(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of each row of logits."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixture = ((1 - beta) * q + beta * p).log()
    kl = lambda x: (x * (x.log() - mixture)).sum(-1)
    return beta * kl(p) + (1 - beta) * kl(q)


# Sequences, tokens, features and vocabulary of the losses of sequences.
N, L, H, V = 6, 5, 16, 37


def make_head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states [N, L, H], a head [V, H], its bias, and targets with tokens that are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator) for s in ((N, L, H), (V, H), (V,)))
    targets = torch.randint(V, (N, L), generator=generator)
    targets[0, :2], targets[4, 3:] = -100, -100
    return hidden.requires_grad_(), (weight * 0.3).requires_grad_(), (bias * 0.1).requires_grad_(), targets


def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return the log-probabilities [N, L] of the targets, zero where they are ignored."""
    logits = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
    return logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
