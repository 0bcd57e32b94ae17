"""The divergences of `liger_kernel.transformers`, with Liger's order of arguments, on Tigon's ops.

Shapes: N tokens, V vocabulary, H features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.head.linear_distillation import linear_distillation
from tigon.ops.logits.cross_entropy import cross_entropy
from tigon.ops.logits.divergences import jsd, kl_div, tvd


class LigerJSD(nn.Module):
    """`tigon.jsd` of log-probabilities [N, V]: the student's first, then the teacher's."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return the mean over the tokens whose label is not `ignore_index`, in the dtype of `log_q`."""
        loss = jsd(log_q, log_p, beta=self.beta, labels=shift_labels, ignore_index=self.ignore_index)
        return loss.to(log_q.dtype)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`tigon.kl_div`. A probability of zero adds nothing, so `eps` has no effect."""

    def __init__(self, eps: float = 1e-10, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Return KL(y_true || y_pred) for the student's log-probabilities `y_pred` [N, V]."""
        return kl_div(y_pred, y_true, log_target=self.log_target, reduction=self.reduction)  # type: ignore[arg-type]


class LigerTVDLoss(nn.Module):
    """`tigon.tvd` of probabilities [N, V]."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return half of the sum of absolute differences. `p` gets the gradient."""
        return tvd(p, q, reduction=self.reduction, labels=shift_labels, ignore_index=self.ignore_index)  # type: ignore[arg-type]


class LigerFusedCETVDLoss(nn.Module):
    """The cross entropy and the total variation distance of each token, from the logits [N, V] of both models."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return both terms [N] in fp32."""
        name = type(self).__name__
        if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
            shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
            raise ValueError(
                f"{name}: student_logits and teacher_logits must be 2D and of the same shape, got {shapes}"
            )
        if target.shape != student_logits.shape[:1]:
            raise ValueError(f"{name}: target must have shape ({len(student_logits)},), got {tuple(target.shape)}")
        losses: Any = cross_entropy(student_logits, target, ignore_index=self.ignore_index, reduction="none")
        distances = tvd(
            student_logits, teacher_logits.detach(), reduction="none", from_logits=True, labels=target,
            ignore_index=self.ignore_index,
        )  # fmt: skip
        return losses, distances.sum(-1)


class LigerFusedLinearJSD(nn.Module):
    """The generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation` with fp32 logits."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_temperature(self, temperature)
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.accum_dtype = accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the mean over the tokens, for hidden states [N, H] and heads [V, H]."""
        loss = linear_distillation(
            student_input, student_weight, shift_labels, teacher_hidden=teacher_input, teacher_weight=teacher_weight,
            beta=self.jsd_beta, temperature=self.temperature, ignore_index=self.ignore_index,
            fp32_logits=True, acc_dtype=self.accum_dtype,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss


class LigerFusedLinearKLDivLoss(nn.Module):
    """KL(target || student) for a head and given probabilities [N, V], by `tigon.linear_distillation`."""

    def __init__(
        self, reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_temperature(self, temperature)
        if reduction not in ("batchmean", "mean", "sum"):
            raise ValueError(f"{type(self).__name__}: reduction must be one of batchmean, mean, sum, got {reduction!r}")
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss for hidden states [N, H] and a head [V, H]."""
        loss = linear_distillation(
            # The temperature divides the logits of the student only.
            student_input, student_weight, shift_labels, teacher_probs=target, divergence="kl",
            logit_scale=1.0 / self.temperature, ignore_index=self.ignore_index, acc_dtype=self.accum_dtype,
            reduction="sum" if self.reduction == "sum" else "mean",
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss / len(student_weight) if self.reduction == "mean" else loss


def _check_temperature(loss: nn.Module, temperature: float) -> None:
    if temperature == 0:
        raise ValueError(f"{type(loss).__name__}: temperature must not be 0")
