"""The losses of `liger_kernel.chunked_loss` as functions, with Liger's results, on `tigon.losses`.

`chunked.py` serves them as modules and as autograd functions. Liger's options `compiled` and `chunk_size` have no
effect: nothing is compiled, and Tigon chooses the chunks. A sequence without tokens has an average log-probability of
zero, where Liger's is NaN.

Shapes: N sequences, of which the first half are the chosen ones, L tokens each, P = N / 2 pairs, H features,
V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.integrations.liger.functional import check_temperature
from tigon.integrations.liger.pairs import pair_loss, reference_log_probs, sequence_values, sum_logits
from tigon.losses import cpo_loss, dpo_loss, kto_loss, orpo_loss, sequence_log_probs
from tigon.ops.head.linear_distillation import DistillationOutput, linear_distillation
from tigon.ops.head.linear_loss import linear_loss

# Of these types of Liger's DPO, exo_pair and robust use label smoothing.
DPO_TYPES = (
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip


def cpo(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, ignore_index: int, beta: float,
    alpha: float, label_smoothing: float, compute_nll_loss: bool, average_log_prob: bool = False,
    name: str = "LigerFusedLinearCPOLoss", gamma: float = 0.0,
) -> tuple:  # fmt: skip
    """CPO: -log sigmoid(beta (log p_chosen - log p_rejected)). Source: Xu et al., arXiv:2401.08417. The results are the
    loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
    mask = target != ignore_index

    def loss(log_probs: Tensor) -> tuple[Tensor]:
        # The loss of SimPO without a margin is that of CPO on averages.
        return cpo_loss(
            log_probs, mask, beta=beta, loss_type="simpo" if average_log_prob else "sigmoid", cpo_alpha=0.0,
            label_smoothing=label_smoothing, simpo_gamma=gamma,
        )[:1]  # fmt: skip

    total, (*metrics, rewards, _) = pair_loss(
        name, hidden, weight, target, bias, loss, ignore_index=ignore_index, averages=average_log_prob, beta=beta,
        alpha=alpha, with_nll=compute_nll_loss,
    )  # fmt: skip
    return total, (*metrics, *rewards)


def simpo(**arguments: Any) -> tuple:
    """SimPO: CPO on average log-probabilities, with the margin gamma. Source: Meng et al., arXiv:2405.14734. The
    results are the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
    return cpo(average_log_prob=True, name="LigerFusedLinearSimPOLoss", **arguments)


def orpo(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, ignore_index: int, beta: float,
    compute_nll_loss: bool, nll_target: Tensor | None = None,
) -> tuple:  # fmt: skip
    """ORPO: -beta log sigmoid of the log-ratio of the odds p / (1 - p). Source: Hong et al., arXiv:2403.07691. The
    results are the loss and the metrics of CPO; then the means of the log-ratio's log sigmoid and of the log-ratio. The
    negative log-likelihood is that of `nll_target`, if it is given, over the chosen sequences."""
    mask = target != ignore_index

    def loss(log_probs: Tensor) -> tuple[Tensor, ...]:
        # `pair_loss` adds the likelihood.
        total, metrics = orpo_loss(log_probs, mask, beta=beta, nll_mask=torch.zeros_like(mask))
        return total, metrics["log_odds_ratio"], metrics["log_odds_chosen"]

    total, (*metrics, rewards, ratios) = pair_loss(
        "LigerFusedLinearORPOLoss", hidden, weight, target, bias, loss, ignore_index=ignore_index, averages=True,
        beta=beta, nll_target=nll_target, alpha=1.0, with_nll=compute_nll_loss,
    )  # fmt: skip
    return total, (*metrics, *rewards, *ratios)


def check_dpo(loss_type: str, label_smoothing: float) -> None:
    """Refuse an unknown type of DPO, or a label smoothing that the type does not allow."""
    name = "LigerFusedLinearDPOLoss"
    if loss_type not in DPO_TYPES:
        raise ValueError(f"{name}: Unsupported loss_type: it must be one of {', '.join(DPO_TYPES)}, got {loss_type!r}")
    if loss_type == "exo_pair" and label_smoothing <= 0.0:
        raise ValueError(f"{name}: label_smoothing must be > 0 for loss_type='exo_pair', got {label_smoothing}")
    if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"{name}: label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {label_smoothing}"
        )


def dpo(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, ref_input: Tensor | None,
    ref_weight: Tensor | None, ref_bias: Tensor | None, ignore_index: int, beta: float, alpha: float,
    compute_nll_loss: bool, use_ref_model: bool, average_log_prob: bool, loss_type: Any, label_smoothing: float,
    discopop_tau: float,
) -> tuple:  # fmt: skip
    """DPO with ten types of loss. `tigon.DPOLoss` has more. Source: Rafailov et al., arXiv:2305.18290. The results are
    the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
    check_dpo(loss_type, label_smoothing)
    name, reference, mask = "LigerFusedLinearDPOLoss", None, target != ignore_index
    if use_ref_model:
        reference = reference_log_probs(name, (ref_input, ref_weight, ref_bias), target, ignore_index, average_log_prob)

    def loss(log_probs: Tensor) -> tuple[Tensor]:
        return dpo_loss(
            sequence_values(log_probs, mask, average_log_prob), mask, beta=beta, loss_type=loss_type,
            label_smoothing=label_smoothing if loss_type in ("exo_pair", "robust") else 0.0,
            discopop_tau=discopop_tau, ref_sequence_log_probs=reference,
        )[:1]  # fmt: skip

    total, (*metrics, rewards, _) = pair_loss(
        name, hidden, weight, target, bias, loss, ignore_index=ignore_index, averages=average_log_prob, beta=beta,
        reference=reference, alpha=alpha, with_nll=compute_nll_loss,
    )  # fmt: skip
    return total, (*metrics, *rewards)


def kto(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, preference_labels: Tensor | None, *,
    ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, kl: Tensor | None,
    ignore_index: int, beta: float, use_ref_model: bool, average_log_prob: bool,
) -> tuple:  # fmt: skip
    """KTO: 1 - sigmoid(+-beta (log-ratio - kl)) for desirable (+) and undesirable (-) sequences. The results are the
    loss, and the sums of log-probabilities, logits and rewards of both kinds of sequences. Source: Ethayarajh et al.,
    arXiv:2402.01306."""
    name = "LigerFusedLinearKTOLoss"
    if preference_labels is None:
        raise ValueError(f"{name}: preference_labels must be a tensor [N] of bools, got None")
    labels, mask = preference_labels.bool(), target != ignore_index
    reference = torch.zeros(len(target), dtype=torch.float32, device=target.device)
    if use_ref_model:
        reference = reference_log_probs(name, (ref_input, ref_weight, ref_bias), target, ignore_index, average_log_prob)
    # The loss subtracts both from the log-probability. Liger takes a negative divergence too.
    baseline = reference if kl is None else reference + kl

    def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        values = sequence_values(log_probs, mask, average_log_prob)
        loss, _ = kto_loss(values, mask, labels, beta=beta, ref_sequence_log_probs=baseline)
        return loss, sequence_log_probs(log_probs.detach(), mask, average=average_log_prob)

    loss, values = linear_loss(
        hidden, weight, target, loss_of_batch, group="sequence", bias=bias, ignore_index=ignore_index
    )
    rewards, kinds = beta * (values - reference), (labels, ~labels)
    return loss, (
        *((values * kind).sum() for kind in kinds),
        *(sum_logits(hidden[kind], weight, bias) for kind in kinds),
        *((rewards * kind).sum() for kind in kinds),
    )


def jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
    student_bias: Tensor | None, teacher_bias: Tensor | None, *, weight_hard_loss: float, weight_soft_loss: float,
    beta: float, temperature: float, ignore_index: int, return_soft_hard_loss: bool,
    divergence: Any = "jsd", factor: float = 1.0, name: str = "LigerFusedLinearJSDLoss",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The generalised Jensen-Shannon divergence from a teacher, plus a cross entropy. Source: arXiv:2306.13649. The
    result is the loss, or the loss, the divergence and the cross entropy. The tokens that only a larger padded
    vocabulary of the teacher has count as impossible for the student. Liger gives them a logit of zero."""
    check_temperature(name, temperature)
    output = linear_distillation(
        student_input.flatten(0, -2), student_weight, true_labels.flatten(), bias=student_bias,
        teacher_hidden=teacher_input.flatten(0, -2), teacher_weight=teacher_weight, teacher_bias=teacher_bias,
        divergence=divergence, beta=beta, temperature=temperature, soft_weight=factor * weight_soft_loss,
        hard_weight=weight_hard_loss, ignore_index=ignore_index, return_parts=return_soft_hard_loss,
    )  # fmt: skip
    if not isinstance(output, DistillationOutput):
        return output
    assert output.divergence is not None
    assert output.cross_entropy is not None
    return output.loss, factor * output.divergence, output.cross_entropy


def cosine(*, beta: float, **arguments: Any) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Return beta (1 - the cosine of the angle between the logits of student and teacher), plus a cross entropy."""
    name = "LigerFusedLinearCosineSimilarityLoss"
    return jsd(beta=beta, divergence="cosine", factor=beta, name=name, **arguments)
