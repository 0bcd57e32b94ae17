r"""Kullback-Leibler divergence KL(P || Q) = sum_j p_j (log p_j - log q_j) of a teacher P from a student Q.

Shapes: V vocabulary. `divergence_kernels` has the kernels and the gradient.
"""

from typing import Any, cast

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
    """Compute `kl_div` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    x, y = prepare_distributions(input, target, labels, ignore_index, from_logits, temperature)
    if log_target or from_logits:
        losses = relative_entropy(y, x)
    else:
        losses = torch.xlogy(y, y) - y * torch.where(y == 0, x.clamp(min=-1e4), x)
    return reduce_losses(losses, labels, ignore_index, reduction)


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
    """Return `torch.nn.functional.kl_div` of distributions over the last dimension, KL(target || input), in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient.
        target: [..., V] probabilities of the teacher, or log-probabilities with `log_target`. If it needs a gradient,
            the reference runs.
        log_target: Whether `target` holds log-probabilities.
        reduction: "none" for [..., V], as in torch; "sum"; "batchmean": the sum divided by `input.shape[0]`, or with
            `labels` by the number of valid rows; "mean": the mean over all elements, or over those of valid rows.
        from_logits: Both tensors are logits, and the op computes their softmax in fp32. `log_target` then has no
            effect.
        temperature: Divides the logits. Unlike in some recipes, its square does not multiply the loss.
        ignore_index: Rows with this label have loss and gradient zero, whatever their values are.
        labels: [...] int64 | int32, or None if all rows are valid.

    Returns:
        The loss in fp32. A mean over no valid row is 0. If the probability of the teacher is zero, the element
        contributes zero, even if that of the student is zero too (where torch returns NaN). If only the probability of
        the student is zero, the loss is infinity.

    Raises:
        TypeError: `input` or `target` is not a floating-point tensor, or `labels` is not an integer tensor.
        ValueError: Shapes or devices do not match, or an option is out of range.

    Source: Kullback and Leibler, "On Information and Sufficiency", 1951; from logits with a temperature, Hinton et al.,
    arXiv:1503.02531.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        >>> torch.allclose(loss, tigon.kl_div(student, teacher, from_logits=True, reduction="batchmean"), atol=1e-5)
        True
    """
    checks.flag("kl_div", log_target=log_target)
    reference = lambda: kl_div_reference(
        input, target, log_target=log_target, reduction=reduction, from_logits=from_logits, temperature=temperature,
        ignore_index=ignore_index, labels=labels,
    )  # fmt: skip
    return divergence(
        "kl_div", "kl", reference, input, target, labels, ignore_index, from_logits, temperature, reduction,
        is_log=log_target,
    )  # fmt: skip


class KLDivLoss(nn.KLDivLoss):
    """Compute `kl_div` as a module with the constructor of `torch.nn.KLDivLoss` and further options.

    Args:
        size_average, reduce: Deprecated arguments of torch's module.
        reduction: "none" | "mean" | "sum" | "batchmean".
        log_target: Whether the target holds log-probabilities.
        **options: `from_logits`, `temperature` and `ignore_index` of `kl_div`.

    Raises:
        TypeError: `log_target` is not a bool.
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.KLDivLoss(reduction="batchmean", from_logits=True, temperature=2.0)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: DivergenceReduction = "mean",
        log_target: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        deprecated = {"size_average": size_average, "reduce": reduce}
        checks.flag("KLDivLoss", log_target=log_target, **{k: x for k, x in deprecated.items() if x is not None})
        super().__init__(size_average, reduce, reduction, log_target)
        for name in options:
            checks.choice("KLDivLoss", "an option", name, ("from_logits", "temperature", "ignore_index"))
        self.options = options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `kl_div` of input and target [..., V] and labels [...]."""
        reduction = cast(DivergenceReduction, self.reduction)
        return kl_div(input, target, log_target=self.log_target, reduction=reduction, labels=labels, **self.options)
