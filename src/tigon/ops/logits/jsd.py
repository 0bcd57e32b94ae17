r"""Generalised Jensen-Shannon divergence of a student Q and a teacher P (Agarwal et al., arXiv:2306.13649).

    M    = beta P + (1 - beta) Q
    loss = beta KL(P || M) + (1 - beta) KL(Q || M);   beta = 0: KL(P || Q),   beta = 1: KL(Q || P)

Shapes: V vocabulary. The kernels, and the gradient, stand in `divergence`.
"""

import math

import torch
from torch import Tensor, nn

from tigon.ops.logits.divergence_kernels import divergence
from tigon.ops.logits.divergence_reference import DivergenceReduction, prepared, reduced, relative_entropy
from tigon.runtime import checks

__all__ = ["JSDLoss", "jsd", "jsd_reference"]


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
    """Eager definition of `jsd`; the tests' ground truth and the CPU path."""
    x, y = prepared(input, target, labels, ignore_index, from_logits, temperature)
    if beta in (0.0, 1.0):
        losses = relative_entropy(x, y) if beta else relative_entropy(y, x)
    else:
        x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)  # no infinities; both exponentials are zero there
        # Not logaddexp, whose second derivative is NaN where the two are far apart.
        log_m = torch.logsumexp(torch.stack((y + math.log(beta), x + math.log1p(-beta))), 0)
        losses = beta * y.exp() * (y - log_m) + (1.0 - beta) * x.exp() * (x - log_m)
    return reduced(losses, labels, ignore_index, reduction)


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
    """Generalised Jensen-Shannon divergence of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. The gradient flows here.
        target: [..., V] log-probabilities of the teacher. If it needs a gradient, the reference runs.
        beta: In [0, 1], the teacher's share of the mixture; 0 is the forward KL(teacher || student), 1 the reverse.
        temperature: Divides the logits. The loss is not multiplied by its square.
        labels: [...] int64 | int32, or None: all rows count.
        ignore_index: Rows with this label have loss and gradient zero, whatever they hold.
        from_logits: Both are logits, and a log-softmax of each is taken inside, in fp32.
        reduction: "batchmean": the sum over `input.shape[0]`, or with `labels` over the valid rows; "mean": over all
            elements, or those of valid rows; "sum"; "none": [..., V].

    Returns:
        The loss, fp32. A mean over no valid row is 0. Equal distributions have loss and gradient of exactly zero.

    Raises:
        TypeError: `input` or `target` is no floating-point tensor, or `labels` no integer tensor.
        ValueError: Shapes or devices do not fit, or an option is out of range.

    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=0.1)
        >>> torch.allclose(loss, tigon.jsd(student, teacher, beta=0.1, from_logits=True), atol=1e-5)
        True
    """
    beta = checks.number("jsd", "beta", beta, 0.0, 1.0)
    logits = {"from_logits": from_logits, "temperature": temperature}
    rows = {"ignore_index": ignore_index, "labels": labels}
    reference = lambda: jsd_reference(
        input, target, beta=beta, reduction=reduction, **logits, **rows
    )  # fmt: skip
    return divergence(
        "jsd", {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd"), reference, input, target, labels, ignore_index,
        from_logits, temperature, reduction, beta=beta,
    )  # fmt: skip


class JSDLoss(nn.Module):
    """`jsd` as a module.

    Args:
        beta: In [0, 1], the teacher's share of the mixture.
        ignore_index: Rows with this label do not count.
        **options: `temperature`, `from_logits`, `reduction`, as `jsd` takes them.

    Example:
        >>> loss = tigon.JSDLoss(beta=0.1, from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100, **options) -> None:
        super().__init__()
        for name in options:
            checks.choice("JSDLoss", "an option", name, ("temperature", "from_logits", "reduction"))
        self.beta, self.ignore_index, self.options = beta, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """input, target [..., V], labels [...] -> as `jsd`."""
        return jsd(input, target, beta=self.beta, ignore_index=self.ignore_index, labels=labels, **self.options)
