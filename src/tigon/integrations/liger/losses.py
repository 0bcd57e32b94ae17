"""The losses of `liger_kernel.chunked_loss`, with Liger's order of arguments and results, on `tigon.losses`.

Liger's options `compiled` and `chunk_size` have no effect: nothing is compiled, and Tigon chooses the chunks. A
sequence without tokens has an average log-probability of zero, where Liger's is NaN.

Shapes: N sequences, of which the first half are the chosen ones, L tokens each, P = N / 2 pairs, H features,
V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.liger.pairs import pair_loss, reference_log_probs, sequence_values, sum_logits
from tigon.losses import cpo_loss, dpo_loss, kto_loss, orpo_loss, sequence_log_probs
from tigon.ops.head.linear_distillation import DistillationOutput, linear_distillation
from tigon.ops.head.linear_loss import linear_loss

# The types of loss of Liger's DPO. Those with label smoothing are exo_pair and robust.
DPO_TYPES = (
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip


# --- preferences -----------------------------------------------------------------------------------


class LigerFusedLinearCPOLoss(nn.Module):
    """CPO: -log sigmoid(beta (log p_chosen - log p_rejected)). Source: Xu et al., arXiv:2401.08417."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.average_log_prob = compute_nll_loss, average_log_prob

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> tuple:
        """Return the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
        # The loss of SimPO without a margin is that of CPO on averages.
        return _reference_free(self, lin_weight, _input, target, bias, self.average_log_prob, 0.0)


class LigerFusedLinearSimPOLoss(nn.Module):
    """SimPO: CPO on average log-probabilities, with the margin gamma. Source: Meng et al., arXiv:2405.14734."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.gamma = compute_nll_loss, gamma

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> tuple:
        """Return the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
        return _reference_free(self, lin_weight, _input, target, bias, True, self.gamma)


def _reference_free(
    module: Any, weight: Tensor, hidden: Tensor, target: Tensor, bias: Tensor | None, averages: bool, gamma: float
) -> tuple:
    """Return the results of CPO, or of SimPO with averages, by `tigon.losses.cpo_loss`."""

    mask = target != module.ignore_index

    def loss(log_probs: Tensor) -> tuple[Tensor]:
        return cpo_loss(
            log_probs, mask, beta=module.beta, loss_type="simpo" if averages else "sigmoid", cpo_alpha=0.0,
            label_smoothing=module.label_smoothing, simpo_gamma=gamma,
        )[:1]  # fmt: skip

    total, (*metrics, rewards, _) = pair_loss(
        type(module).__name__, hidden, weight, target, bias, loss, ignore_index=module.ignore_index,
        averages=averages, beta=module.beta, alpha=module.alpha, with_nll=module.compute_nll_loss,
    )  # fmt: skip
    return total, (*metrics, *rewards)


class LigerFusedLinearORPOLoss(nn.Module):
    """ORPO: -beta log sigmoid of the log-ratio of the odds p / (1 - p). Source: Hong et al., arXiv:2403.07691."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        """Return the loss and the metrics of CPO; then the means of the log-ratio's log sigmoid and of the log-ratio.

        The negative log-likelihood is that of `nll_target`, if it is given, over the chosen sequences.
        """

        mask = target != self.ignore_index

        def loss(log_probs: Tensor) -> tuple[Tensor, ...]:
            # `pair_loss` adds the likelihood.
            total, metrics = orpo_loss(log_probs, mask, beta=self.beta, nll_mask=torch.zeros_like(mask))
            return total, metrics["log_odds_ratio"], metrics["log_odds_chosen"]

        total, (*metrics, rewards, ratios) = pair_loss(
            type(self).__name__, _input, lin_weight, target, bias, loss, ignore_index=self.ignore_index,
            averages=True, beta=self.beta, nll_target=nll_target, alpha=1.0, with_nll=self.compute_nll_loss,
        )  # fmt: skip
        return total, (*metrics, *rewards, *ratios)


class LigerFusedLinearDPOLoss(nn.Module):
    """DPO with ten types of loss. `tigon.DPOLoss` has more. Source: Rafailov et al., arXiv:2305.18290."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if loss_type not in DPO_TYPES:
            raise ValueError(
                f"{name}: Unsupported loss_type: it must be one of {', '.join(DPO_TYPES)}, got {loss_type!r}"
            )
        if loss_type == "exo_pair" and label_smoothing <= 0.0:
            raise ValueError(f"{name}: label_smoothing must be > 0 for loss_type='exo_pair', got {label_smoothing}")
        if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
            raise ValueError(
                f"{name}: label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {label_smoothing}"
            )
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.use_ref_model, self.average_log_prob, self.loss_type = use_ref_model, average_log_prob, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        """Return the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
        name, averages, reference = type(self).__name__, self.average_log_prob, None
        if self.use_ref_model:
            reference = reference_log_probs(name, ref_input, ref_weight, ref_bias, target, self.ignore_index, averages)

        mask = target != self.ignore_index

        def loss(log_probs: Tensor) -> tuple[Tensor]:
            return dpo_loss(
                sequence_values(log_probs, mask, averages), mask, beta=self.beta, loss_type=self.loss_type,
                label_smoothing=self.label_smoothing if self.loss_type in ("exo_pair", "robust") else 0.0,
                discopop_tau=self.discopop_tau, ref_sequence_log_probs=reference,
            )[:1]  # fmt: skip

        total, (*metrics, rewards, _) = pair_loss(
            name, _input, lin_weight, target, bias, loss, ignore_index=self.ignore_index, averages=averages,
            beta=self.beta, reference=reference, alpha=self.alpha, with_nll=self.compute_nll_loss,
        )  # fmt: skip
        return total, (*metrics, *rewards)


class LigerFusedLinearKTOLoss(nn.Module):
    """KTO: 1 - sigmoid(+-beta (log-ratio - kl)) for desirable (+) and undesirable (-) sequences.

    Source: Ethayarajh et al., arXiv:2402.01306.
    """

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta = ignore_index, beta
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        """Return the loss, and the sums of log-probabilities, logits and rewards of both kinds of sequences."""
        name, averages = type(self).__name__, self.average_log_prob
        if preference_labels is None:
            raise ValueError(f"{name}: preference_labels must be a tensor [N] of bools, got None")
        labels, mask = preference_labels.bool(), target != self.ignore_index
        reference = torch.zeros(len(target), dtype=torch.float32, device=target.device)
        if self.use_ref_model:
            reference = reference_log_probs(name, ref_input, ref_weight, ref_bias, target, self.ignore_index, averages)
        # The loss subtracts both from the log-probability. Liger takes a negative divergence too.
        baseline = reference if kl is None else reference + kl

        def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, Tensor]:
            values = sequence_values(log_probs, mask, averages)
            loss, _ = kto_loss(values, mask, labels, beta=self.beta, ref_sequence_log_probs=baseline)
            return loss, sequence_log_probs(log_probs.detach(), mask, average=averages)

        loss, values = linear_loss(
            _input, lin_weight, target, loss_of_batch, group="sequence", bias=bias, ignore_index=self.ignore_index
        )
        rewards, kinds = self.beta * (values - reference), (labels, ~labels)
        return loss, (
            *((values * kind).sum() for kind in kinds),
            *(sum_logits(_input[kind], lin_weight, bias) for kind in kinds),
            *((rewards * kind).sum() for kind in kinds),
        )


# --- distillation ----------------------------------------------------------------------------------


class _DistillationLoss(nn.Module):
    divergence: Any

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if temperature == 0:
            raise ValueError(f"{type(self).__name__}: temperature must not be 0")
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.return_soft_hard_loss = return_soft_hard_loss

    def _compute(
        self, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, labels: Tensor,
        bias: Tensor | None, teacher_bias: Tensor | None, factor: float,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the loss, and its two terms if they are requested. `factor` scales the divergence."""
        output = linear_distillation(
            hidden.flatten(0, -2), weight, labels.flatten(), bias=bias, teacher_hidden=teacher_hidden.flatten(0, -2),
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, divergence=self.divergence, beta=self.beta,
            temperature=self.temperature, soft_weight=factor * self.weight_soft_loss,
            hard_weight=self.weight_hard_loss, ignore_index=self.ignore_index,
            return_parts=self.return_soft_hard_loss,
        )  # fmt: skip
        if not isinstance(output, DistillationOutput):
            return output
        assert output.divergence is not None
        assert output.cross_entropy is not None
        return output.loss, factor * output.divergence, output.cross_entropy


class LigerFusedLinearJSDLoss(_DistillationLoss):
    """The generalised Jensen-Shannon divergence from a teacher, plus a cross entropy. Source: arXiv:2306.13649.

    The tokens that only a larger padded vocabulary of the teacher has count as impossible for the student. Liger gives
    them a logit of zero.
    """

    divergence = "jsd"

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the loss, or the loss, the divergence and the cross entropy."""
        return self._compute(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, 1.0
        )


class LigerFusedLinearCosineSimilarityLoss(_DistillationLoss):
    """beta (1 - the cosine of the angle between the logits of student and teacher), plus a cross entropy."""

    divergence = "cosine"

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the loss, or the loss, the divergence and the cross entropy."""
        return self._compute(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            self.beta,
        )  # fmt: skip
