"""The losses of `liger_kernel.chunked_loss`, with Liger's order of arguments and results, on `tigon.linear_loss`.

Liger's options `compiled` and `chunk_size` have no effect: nothing is compiled, and Tigon chooses the chunks. A
sequence without tokens has an average log-probability of zero, where Liger's is NaN.

Shapes: N sequences, of which the first half are the chosen ones, L tokens each, P = N / 2 pairs, H features,
V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.head.linear_distillation import DistillationOutput, linear_distillation
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss

__all__ = [
    "LigerFusedLinearCPOLoss", "LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearDPOLoss",
    "LigerFusedLinearJSDLoss", "LigerFusedLinearKTOLoss", "LigerFusedLinearORPOLoss", "LigerFusedLinearSimPOLoss",
]  # fmt: skip

# The losses of pairs and further values, from the log-probabilities (or the log-ratios) of both sequences, [P] each.
PairLoss = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


# --- preferences -----------------------------------------------------------------------------------


def _reduce(log_probs: Tensor, mask: Tensor, averages: bool) -> Tensor:
    """Return the sums of log-probabilities [N, L] over the tokens, or their averages, [N]."""
    sums = (log_probs * mask).sum(-1)
    return sums / mask.sum(-1).clamp(min=1) if averages else sums


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mean of all logits [N, L, V]: the mean hidden state times the mean row of the head."""
    with torch.no_grad():
        tokens = hidden.mean((0, 1), dtype=torch.float32)
        mean = tokens @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)


class _PairLoss(nn.Module):
    """A loss of pairs plus `alpha` times the negative log-likelihood of the chosen sequences."""

    ignore_index: int
    alpha: float
    compute_nll_loss: bool
    average_log_prob: bool

    def _compute(
        self, weight: Tensor, hidden: Tensor, target: Tensor, bias: Tensor | None, pair_loss: PairLoss,
        reference: Tensor | None = None, nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Return the loss and Liger's metrics.

        Args:
            weight: [V, H].
            hidden: [N, L, H].
            target: [N, L].
            bias: [V] or None.
            pair_loss: Takes log-probabilities, or log-ratios if `reference` is not None.
            reference: The log-probabilities [N] of the sequences under the reference model.
            nll_target: [N, L], the targets of the negative log-likelihood if they differ from `target`.
        """
        name, pairs = type(self).__name__, len(target) // 2
        if len(target) % 2:
            raise ValueError(f"{name}: the number of sequences must be even, got {len(target)}")
        mask = target != self.ignore_index
        nll_mask = mask
        if nll_target is not None:
            nll_mask = nll_target != self.ignore_index
            # One log-probability for each position serves both terms.
            target = torch.where(mask, target, nll_target)
        nll_count = nll_mask[:pairs].sum().clamp(min=1)

        def loss_of_part(
            log_probs: Tensor, mask: Tensor, nll_mask: Tensor, reference: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            count = len(log_probs) // 2
            sequences = _reduce(log_probs, mask, self.average_log_prob)
            nll = log_probs.new_zeros(())
            if self.compute_nll_loss:
                nll = -(log_probs[:count] * nll_mask[:count]).sum() / nll_count
            ratios = sequences if reference is None else sequences - reference
            losses, *values = pair_loss(ratios[:count], ratios[count:])
            metrics = sequences[:count], sequences[count:], nll, *values
            return losses.sum() / pairs + self.alpha * nll, tuple(value.detach() for value in metrics)

        loss, (chosen, rejected, nll, *values) = linear_loss(
            hidden, weight, target, loss_of_part, mask, nll_mask, reference,
            group="pair", reduction="sum", bias=bias, ignore_index=self.ignore_index,
        )  # fmt: skip
        logits = (_mean_logits(half, weight, bias) for half in (hidden[:pairs], hidden[pairs:]))
        return loss, (chosen, rejected, *logits, nll, *values)


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


class LigerFusedLinearCPOLoss(_PairLoss):
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
        return self._compute(lin_weight, _input, target, bias, self._loss)

    def _loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        losses = _smoothed(self.beta * (chosen - rejected), self.label_smoothing)
        return losses, self.beta * chosen, self.beta * rejected


class LigerFusedLinearSimPOLoss(_PairLoss):
    """SimPO: CPO on average log-probabilities, with the margin gamma. Source: Meng et al., arXiv:2405.14734."""

    average_log_prob = True

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.gamma = compute_nll_loss, gamma

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> tuple:
        """Return the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
        return self._compute(lin_weight, _input, target, bias, self._loss)

    def _loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        losses = _smoothed(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)
        return losses, self.beta * chosen, self.beta * rejected


class LigerFusedLinearORPOLoss(_PairLoss):
    """ORPO: -beta log sigmoid of the log-ratio of the odds p / (1 - p). Source: Hong et al., arXiv:2403.07691."""

    average_log_prob = True
    alpha = 1.0

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

        Where `nll_target` and `target` both have a token, it must be the same one.
        """
        pairs = len(target) // 2
        loss, metrics = self._compute(lin_weight, _input, target, bias, self._loss, nll_target=nll_target)
        *others, ratios, log_odds = metrics
        return loss, (*others, ratios.sum() / pairs, log_odds.sum() / pairs)

    def _loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
        ratios = F.logsigmoid(log_odds)
        return -self.beta * ratios, self.beta * chosen, self.beta * rejected, ratios, log_odds


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) for x < 0 without cancellation."""
    return torch.log(-torch.expm1(x))


def _exo(chosen: Tensor, rejected: Tensor, beta: float, epsilon: float, tau: float) -> Tensor:
    margin, smoothing = beta * (chosen - rejected), chosen.new_tensor(epsilon)
    up = margin.sigmoid() * (F.logsigmoid(margin) - torch.log1p(-smoothing))
    return up + (-margin).sigmoid() * (F.logsigmoid(-margin) - smoothing.log())


def _nca(chosen: Tensor, rejected: Tensor, beta: float, epsilon: float, tau: float) -> Tensor:
    chosen, rejected = beta * chosen, beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(chosen: Tensor, rejected: Tensor, beta: float, epsilon: float, tau: float) -> Tensor:
    margin = beta * (chosen - rejected)
    return (-(1 - epsilon) * F.logsigmoid(margin) + epsilon * F.logsigmoid(-margin)) / (1 - 2 * epsilon)


def _discopop(chosen: Tensor, rejected: Tensor, beta: float, epsilon: float, tau: float) -> Tensor:
    margin = beta * (chosen - rejected)
    share = (margin / tau).sigmoid()
    return -F.logsigmoid(margin) * (1 - share) + (-margin).exp() * share


# The losses of DPO from the log-ratios of the chosen and rejected sequences, beta, label smoothing and tau.
DPO_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float, float], Tensor]] = {
    "sigmoid": lambda chosen, rejected, beta, *_: -F.logsigmoid(beta * (chosen - rejected)),
    "hinge": lambda chosen, rejected, beta, *_: (1 - beta * (chosen - rejected)).relu(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda chosen, rejected, beta, *_: -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected),
    "sppo_hard": lambda chosen, rejected, beta, *_: (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
    "apo_zero": lambda chosen, rejected, beta, *_: 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid(),
    "apo_down": lambda chosen, rejected, beta, *_: (
        (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid()
    ),
    "discopop": _discopop,
}


class LigerFusedLinearDPOLoss(_PairLoss):
    """DPO with ten types of loss. `tigon.DPOLoss` has more. Source: Rafailov et al., arXiv:2305.18290."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if loss_type not in DPO_LOSSES:
            raise ValueError(f"{name}: loss_type must be one of {', '.join(DPO_LOSSES)}, got {loss_type!r}")
        if loss_type == "exo_pair" and label_smoothing <= 0.0:
            raise ValueError(f"{name}: label_smoothing must be above 0 for exo_pair, got {label_smoothing}")
        if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
            raise ValueError(f"{name}: label_smoothing must be in [0, 0.5) for robust, got {label_smoothing}")
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.use_ref_model, self.average_log_prob, self.loss_type = use_ref_model, average_log_prob, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        """Return the loss, and the log-probabilities, mean logits, NLL and rewards of both halves."""
        reference = None
        if self.use_ref_model:
            reference = _reference(
                self, ref_input, ref_weight, ref_bias, target, self.ignore_index, self.average_log_prob
            )
        return self._compute(lin_weight, _input, target, bias, self._loss, reference)

    def _loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        losses = DPO_LOSSES[self.loss_type](chosen, rejected, self.beta, self.label_smoothing, self.discopop_tau)
        return losses, self.beta * chosen, self.beta * rejected


def _reference(
    loss: nn.Module, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, target: Tensor,
    ignore_index: int, averages: bool,
) -> Tensor:  # fmt: skip
    """Return the log-probabilities [N] of the sequences under the reference model."""
    if hidden is None or weight is None:
        raise ValueError(f"{type(loss).__name__}: use_ref_model=True needs ref_input and ref_weight")
    with torch.no_grad():
        log_probs = linear_log_probs(hidden, weight, target, bias=bias, ignore_index=ignore_index)
    assert isinstance(log_probs, Tensor)
    return _reduce(log_probs, target != ignore_index, averages)


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
        if preference_labels is None:
            raise ValueError(f"{type(self).__name__}: preference_labels must be a tensor [N] of bools, got None")
        labels, sequences = preference_labels.bool(), len(target)
        reference = None
        if self.use_ref_model:
            reference = _reference(
                self, ref_input, ref_weight, ref_bias, target, self.ignore_index, self.average_log_prob
            )

        def loss_of_part(
            log_probs: Tensor, mask: Tensor, labels: Tensor, reference: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            values = _reduce(log_probs, mask, self.average_log_prob)
            ratios = values if reference is None else values - reference
            margin = ratios if kl is None else ratios - kl
            losses = 1 - torch.sigmoid(self.beta * torch.where(labels, margin, -margin))
            return losses.sum() / sequences, (values.detach(), self.beta * ratios.detach())

        loss, (values, rewards) = linear_loss(
            _input, lin_weight, target, loss_of_part, target != self.ignore_index, labels, reference,
            group="sequence", reduction="sum", bias=bias, ignore_index=self.ignore_index,
        )  # fmt: skip
        kinds = labels, ~labels
        logits = (_sum_logits(_input[kind], lin_weight, bias) for kind in kinds)
        return loss, (
            *((values * kind).sum() for kind in kinds), *logits, *((rewards * kind).sum() for kind in kinds)
        )  # fmt: skip


def _sum_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of all logits [N, L, V]."""
    if hidden.numel() == 0:
        return hidden.new_zeros((), dtype=torch.float32)
    return _mean_logits(hidden, weight, bias) * (hidden.shape[0] * hidden.shape[1] * weight.shape[0])


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
