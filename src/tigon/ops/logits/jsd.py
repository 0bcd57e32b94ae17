r"""Generalised Jensen-Shannon divergence of a student Q and a teacher P (Agarwal et al., arXiv:2306.13649).

    M    = beta P + (1 - beta) Q
    loss = beta KL(P || M) + (1 - beta) KL(Q || M);   beta = 0: KL(P || Q),   beta = 1: KL(Q || P)

Shapes: V vocabulary. `divergence_kernels` has the kernels and the gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.logits.divergence import divergence
from tigon.ops.logits.divergence_reference import (
    DivergenceReduction,
    prepare_distributions,
    reduce_losses,
    relative_entropy,
)
from tigon.runtime import checks

# --- reference -----------------------------------------------------------------------------------


def jsd_reference(
    input: Tensor,
    target: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    from_logits: bool = False,
    reduction: DivergenceReduction = "batchmean",
) -> Tensor:
    """Compute `jsd` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    x, y = prepare_distributions(input, target, labels, ignore_index, from_logits, temperature)
    if beta in (0.0, 1.0):
        losses = relative_entropy(x, y) if beta else relative_entropy(y, x)
    else:
        # The exponentials of the lowest number and of -inf are both zero.
        x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
        # The second derivative of logaddexp would be NaN where the two numbers are far apart.
        log_m = torch.logsumexp(torch.stack((y + math.log(beta), x + math.log1p(-beta))), 0)
        losses = beta * y.exp() * (y - log_m) + (1.0 - beta) * x.exp() * (x - log_m)
    return reduce_losses(losses, labels, ignore_index, reduction)


# --- public --------------------------------------------------------------------------------------


def jsd(
    input: Tensor,
    target: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    from_logits: bool = False,
    reduction: DivergenceReduction = "batchmean",
) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient.
        target: [..., V] log-probabilities of the teacher. If it needs a gradient, the reference runs.
        beta: In [0, 1], the share of the teacher in the mixture. 0 is KL(teacher || student), and 1 is
            KL(student || teacher).
        temperature: Divides the logits. Its square does not multiply the loss.
        labels: [...] int64 | int32, or None if all rows are valid.
        ignore_index: Rows with this label have loss and gradient zero, whatever their values are.
        from_logits: Both tensors are logits, and the op computes their log-softmax in fp32.
        reduction: "batchmean": the sum divided by `input.shape[0]`, or with `labels` by the number of valid rows;
            "mean": the mean over all elements, or over those of valid rows; "sum"; "none": [..., V].

    Returns:
        The loss in fp32. A mean over no valid row is 0. Equal distributions have loss and gradient of exactly zero.

    Raises:
        TypeError: `input` or `target` is not a floating-point tensor, or `labels` is not an integer tensor.
        ValueError: Shapes or devices do not match, or an option is out of range.

    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=0.1)
        >>> torch.allclose(loss, tigon.jsd(student, teacher, beta=0.1, from_logits=True), atol=1e-5)
        True
    """
    beta = checks.number("jsd", "beta", beta, 0.0, 1.0)
    reference = lambda: jsd_reference(
        input, target, beta=beta, temperature=temperature, labels=labels, ignore_index=ignore_index,
        from_logits=from_logits, reduction=reduction,
    )  # fmt: skip
    return divergence(
        "jsd", {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd"), reference, input, target, labels, ignore_index,
        from_logits, temperature, reduction, beta=beta,
    )  # fmt: skip


class JSDLoss(nn.Module):
    """Compute `jsd` as a module.

    Args:
        beta: In [0, 1], the share of the teacher in the mixture.
        ignore_index: Rows with this label have loss and gradient zero.
        **options: `temperature`, `from_logits` and `reduction` of `jsd`.

    Raises:
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.JSDLoss(beta=0.1, from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("JSDLoss", "an option", name, ("temperature", "from_logits", "reduction"))
        self.beta, self.ignore_index, self.options = beta, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `jsd` of input and target [..., V] and labels [...]."""
        return jsd(input, target, beta=self.beta, ignore_index=self.ignore_index, labels=labels, **self.options)
