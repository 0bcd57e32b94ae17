r"""Kullback-Leibler divergence KL(P || Q) = sum_j p_j (log p_j - log q_j) of a teacher P from a student Q.

Shapes: V vocabulary. The kernels, and the gradient, stand in `divergence`.
"""

import torch
from torch import Tensor, nn

from tigon.ops.logits.divergence_kernels import divergence
from tigon.ops.logits.divergence_reference import DivergenceReduction, prepared, reduced, relative_entropy
from tigon.runtime import checks

__all__ = ["KLDivLoss", "kl_div", "kl_div_reference"]


# --- reference -----------------------------------------------------------------------------------


def kl_div_reference(
    input: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    reduction: DivergenceReduction = "mean",
    from_logits: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    labels: Tensor | None = None,
) -> Tensor:
    """Eager definition of `kl_div`; the tests' ground truth and the CPU path."""
    x, y = prepared(input, target, labels, ignore_index, from_logits, temperature)
    if log_target or from_logits:
        losses = relative_entropy(y, x)
    else:
        losses = torch.xlogy(y, y) - y * torch.where(y == 0, x.clamp(min=-1e4), x)
    return reduced(losses, labels, ignore_index, reduction)


# --- public --------------------------------------------------------------------------------------


def kl_div(
    input: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    reduction: DivergenceReduction = "mean",
    from_logits: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    labels: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.kl_div` of distributions over the last dimension: KL(target || input), in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. The gradient flows here.
        target: [..., V] probabilities of the teacher; log-probabilities with `log_target`. If it needs a gradient,
            the reference runs.
        log_target: Whether `target` is in log space.
        reduction: "none" for [..., V], as in torch; "sum"; "batchmean": the sum over `input.shape[0]`, or with
            `labels` over the valid rows; "mean": over all elements, or those of valid rows.
        from_logits: Both are logits, and a softmax of each is taken inside, in fp32; `log_target` does not matter.
        temperature: Divides the logits. The loss is not multiplied by its square, as some recipes do.
        ignore_index: Rows with this label have loss and gradient zero, whatever they hold.
        labels: [...] int64 | int32, or None: all rows count.

    Returns:
        The loss, fp32. A mean over no valid row is 0. A target of probability zero contributes zero, also where the
        student's is zero (torch gives NaN there); a student's zero under a positive target gives infinity.

    Raises:
        TypeError: `input` or `target` is no floating-point tensor, or `labels` no integer tensor.
        ValueError: Shapes or devices do not fit, or an option is out of range.

    Source: Kullback and Leibler, "On Information and Sufficiency", 1951; from logits with a temperature, Hinton et al.,
    arXiv:1503.02531.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        >>> torch.allclose(loss, tigon.kl_div(student, teacher, from_logits=True, reduction="batchmean"), atol=1e-5)
        True
    """
    checks.flag("kl_div", log_target=log_target)
    logs = {"log_target": log_target, "from_logits": from_logits}
    rows = {"ignore_index": ignore_index, "labels": labels}
    reference = lambda: kl_div_reference(
        input, target, reduction=reduction, temperature=temperature, **logs, **rows
    )  # fmt: skip
    return divergence(
        "kl_div", "kl", reference, input, target, labels, ignore_index, from_logits, temperature, reduction,
        logs=log_target,
    )  # fmt: skip


class KLDivLoss(nn.KLDivLoss):
    """`torch.nn.KLDivLoss` computed by `kl_div`, with its further options as keywords.

    Args:
        reduction: "none" | "mean" | "sum" | "batchmean".
        log_target: Whether the target is in log space.
        **options: `from_logits`, `temperature`, `ignore_index`, as `kl_div` takes them.

    Example:
        >>> loss = tigon.KLDivLoss(reduction="batchmean", from_logits=True, temperature=2.0)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(
        self, size_average=None, reduce=None, reduction: DivergenceReduction = "mean", log_target: bool = False,
        **options,
    ) -> None:  # fmt: skip
        deprecated = {"size_average": size_average, "reduce": reduce}
        checks.flag("KLDivLoss", log_target=log_target, **{k: x for k, x in deprecated.items() if x is not None})
        super().__init__(size_average, reduce, reduction, log_target)
        for name in options:
            checks.choice("KLDivLoss", "an option", name, ("from_logits", "temperature", "ignore_index"))
        self.options = options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """input, target [..., V], labels [...] -> as `kl_div`."""
        return kl_div(
            input, target, log_target=self.log_target, reduction=self.reduction, labels=labels, **self.options
        )  # fmt: skip
