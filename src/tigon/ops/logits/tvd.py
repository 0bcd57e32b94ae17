r"""Total variation distance 1/2 sum_j |q_j - p_j| of a student Q and a teacher P.

Shapes: V vocabulary. The kernels, and the gradient, stand in `divergence`.
"""

from torch import Tensor, nn

from tigon.ops.logits.divergence_kernels import divergence
from tigon.ops.logits.divergence_reference import DivergenceReduction, prepared, reduced
from tigon.runtime import checks

__all__ = ["TVDLoss", "tvd", "tvd_reference"]


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
    """Eager definition of `tvd`; the tests' ground truth and the CPU path."""
    q, p = prepared(input, target, labels, ignore_index, from_logits, temperature)
    if from_logits:
        q, p = q.exp(), p.exp()
    return reduced(0.5 * (q - p).abs(), labels, ignore_index, reduction)


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
    """Total variation distance of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] probabilities of the student, fp32 | bf16 | fp16. The gradient flows here; it is zero where both
            probabilities are equal.
        target: [..., V] probabilities of the teacher. If it needs a gradient, the reference runs.
        reduction: "batchmean": the sum over `input.shape[0]`, or with `labels` over the valid rows; "mean": over all
            elements, or those of valid rows; "sum"; "none": [..., V].
        labels: [...] int64 | int32, or None: all rows count.
        ignore_index: Rows with this label have loss and gradient zero, whatever they hold.
        from_logits: Both are logits, and a softmax of each is taken inside, in fp32.
        temperature: Divides the logits. The loss is not multiplied by its square.

    Returns:
        The loss, fp32. A mean over no valid row is 0.

    Raises:
        TypeError: `input` or `target` is no floating-point tensor, or `labels` no integer tensor.
        ValueError: Shapes or devices do not fit, or an option is out of range.

    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv:2307.15190.

    Example:
        >>> tigon.tvd(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]]))
        tensor(0.5000)
    """
    options = {"ignore_index": ignore_index, "from_logits": from_logits, "temperature": temperature}
    reference = lambda: tvd_reference(input, target, reduction=reduction, labels=labels, **options)
    return divergence(
        "tvd", "tvd", reference, input, target, labels, ignore_index, from_logits, temperature, reduction, logs=False
    )


class TVDLoss(nn.Module):
    """`tvd` as a module.

    Args:
        reduction: "batchmean" | "mean" | "sum" | "none".
        ignore_index: Rows with this label do not count.
        **options: `from_logits`, `temperature`, as `tvd` takes them.

    Example:
        >>> loss = tigon.TVDLoss(from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, reduction: DivergenceReduction = "batchmean", ignore_index: int = -100, **options) -> None:
        super().__init__()
        for name in options:
            checks.choice("TVDLoss", "an option", name, ("from_logits", "temperature"))
        self.reduction, self.ignore_index, self.options = reduction, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """input, target [..., V], labels [...] -> as `tvd`."""
        return tvd(
            input, target, reduction=self.reduction, ignore_index=self.ignore_index, labels=labels, **self.options
        )  # fmt: skip
