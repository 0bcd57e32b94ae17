r"""Total variation distance 1/2 sum_j |q_j - p_j| of a student Q and a teacher P.

Shapes: V vocabulary. `divergence_kernels` has the kernels and the gradient.
"""

from typing import Any

from torch import Tensor, nn

from tigon.ops.logits.divergence import divergence
from tigon.ops.logits.divergence_reference import DivergenceReduction, prepare_distributions, reduce_losses
from tigon.runtime import checks

# --- reference -----------------------------------------------------------------------------------


def tvd_reference(
    input: Tensor,
    target: Tensor,
    *,
    reduction: DivergenceReduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    from_logits: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `tvd` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    q, p = prepare_distributions(input, target, labels, ignore_index, from_logits, temperature)
    if from_logits:
        q, p = q.exp(), p.exp()
    return reduce_losses(0.5 * (q - p).abs(), labels, ignore_index, reduction)


# --- public --------------------------------------------------------------------------------------


def tvd(
    input: Tensor,
    target: Tensor,
    *,
    reduction: DivergenceReduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    from_logits: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """Return the total variation distance of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient, which is zero where
            both probabilities are equal.
        target: [..., V] probabilities of the teacher. If it needs a gradient, the reference runs.
        reduction: "batchmean": the sum divided by `input.shape[0]`, or with `labels` by the number of valid rows;
            "mean": the mean over all elements, or over those of valid rows; "sum"; "none": [..., V].
        labels: [...] int64 | int32, or None if all rows are valid.
        ignore_index: Rows with this label have loss and gradient zero, whatever their values are.
        from_logits: Both tensors are logits, and the op computes their softmax in fp32.
        temperature: Divides the logits. Its square does not multiply the loss.

    Returns:
        The loss in fp32. A mean over no valid row is 0.

    Raises:
        TypeError: `input` or `target` is not a floating-point tensor, or `labels` is not an integer tensor.
        ValueError: Shapes or devices do not match, or an option is out of range.

    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv:2307.15190.

    Example:
        >>> tigon.tvd(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]]))
        tensor(0.5000)
    """
    reference = lambda: tvd_reference(
        input, target, reduction=reduction, labels=labels, ignore_index=ignore_index, from_logits=from_logits,
        temperature=temperature,
    )  # fmt: skip
    return divergence(
        "tvd", "tvd", reference, input, target, labels, ignore_index, from_logits, temperature, reduction, is_log=False
    )


class TVDLoss(nn.Module):
    """Compute `tvd` as a module.

    Args:
        reduction: "batchmean" | "mean" | "sum" | "none".
        ignore_index: Rows with this label have loss and gradient zero.
        **options: `from_logits` and `temperature` of `tvd`.

    Raises:
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.TVDLoss(from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, reduction: DivergenceReduction = "batchmean", ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("TVDLoss", "an option", name, ("from_logits", "temperature"))
        self.reduction, self.ignore_index, self.options = reduction, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `tvd` of input and target [..., V] and labels [...]."""
        return tvd(
            input, target, reduction=self.reduction, ignore_index=self.ignore_index, labels=labels, **self.options
        )  # fmt: skip
