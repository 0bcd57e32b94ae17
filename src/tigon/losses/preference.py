"""DPO and its variants.

With x the sums of log p - log p_ref over the tokens of a completion, x_w of the chosen and x_l of the rejected one:

    sigmoid        -log s(b d)                         d = h(x_w) - h(x_l)           arXiv:2305.18290
    hinge          max(0, 1 - b d)                                                   arXiv:2305.10425
    ipo            (d' - 1 / (2 b))^2                  d' = h(x_w) / n_w - h(x_l) / n_l   arXiv:2310.12036
    sigmoid_norm   -log s(b d')                                                      arXiv:2411.15124
    exo_pair       KL((s(b d), s(-b d)) || (1 - e, e))                               arXiv:2402.00856
    robust         (-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e)                 arXiv:2403.00409
    discopop       (1 - m) -log s(b d) + m exp(-b d),  m = s(b d / tau)              arXiv:2406.08414
    nca_pair       -log s(b x_w) - log s(-b x_w) / 2 - log s(-b x_l) / 2             arXiv:2402.05369
    bco_pair       -log s(b x_w) - log s(-b x_l)                                     arXiv:2404.04656
    sppo_hard      (x_w - 1 / (2 b))^2 + (x_l + 1 / (2 b))^2                         arXiv:2405.00675
    aot            soft(b (sort(log p_w - log p_l) - sort(log p_ref,w - log p_ref,l)))    arXiv:2406.05882
    aot_unpaired   soft(b (sort(x_w) - sort(x_l)))                                   arXiv:2406.05882
    apo_zero       1 - s(b x_w) + s(b x_l)                                           arXiv:2408.06266
    apo_down       s(b x_w) + 1 - s(b (x_w - x_l))                                   arXiv:2408.06266
    sft            -(mean of log p over the tokens of all chosen completions)        arXiv:2404.19733

s is the sigmoid, b `beta`, e `label_smoothing`, n the number of tokens, soft(z) = -(1 - e) log s(z) - e log s(-z), and
h(x) = f'(exp(x)) the score of an f-divergence (arXiv:2309.16240), with r = exp(x):

    reverse_kl  x        forward_kl  1 - 1 / r        js_divergence  log(2 r / (1 + r))
    alpha_divergence     (r^(a - 1) - 1) / (a - 1)

Shapes: N = 2 P sequences, P chosen ones followed by their P rejected ones; L tokens of a padded row, T packed tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.pairs import pair_metrics
from tigon.losses.sequences import (
    BatchCounts,
    Metrics,
    Sequences,
    bounded_exp,
    check_pairs,
    check_per_sequence,
    check_sequences,
    chosen_nll,
    half,
)
from tigon.runtime import checks

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# These losses see h only in the difference d, where the unknown normaliser of h cancels. The others need reverse KL.
_LOSSES_OF_DIFFERENCE = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop", "sft")
_LOSSES_WITH_LABEL_SMOOTHING = ("exo_pair", "robust", "aot", "aot_unpaired")


@dataclass(frozen=True)
class _Pairs:
    """Statistics [P] of the pairs, and the options of their losses."""

    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    # x, the log-ratios to the reference model.
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    # b d and d'.
    logits: Tensor
    average_difference: Tensor
    # The negative mean log-probability of the tokens of all chosen completions, without dimensions.
    chosen_nll: Tensor
    beta: float
    label_smoothing: float
    discopop_tau: float


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - e) log s(z) - e log s(-z), the cross entropy with the label 1 - e."""
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def _exo(x: _Pairs) -> Tensor:
    chosen = x.logits.sigmoid() * (F.logsigmoid(x.logits) - math.log1p(-x.label_smoothing))
    rejected = (-x.logits).sigmoid() * (F.logsigmoid(-x.logits) - math.log(x.label_smoothing))
    return chosen + rejected


def _nca(x: _Pairs) -> Tensor:
    chosen, rejected = x.beta * x.chosen_ratio, x.beta * x.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(x: _Pairs) -> Tensor:
    e = x.label_smoothing
    return (-(1 - e) * F.logsigmoid(x.logits) + e * F.logsigmoid(-x.logits)) / (1 - 2 * e)


def _sppo(x: _Pairs) -> Tensor:
    return (x.chosen_ratio - 0.5 / x.beta).square() + (x.rejected_ratio + 0.5 / x.beta).square()


def _aot(x: _Pairs) -> Tensor:
    policy = (x.chosen_log_probs - x.rejected_log_probs).sort().values
    reference = (x.chosen_reference - x.rejected_reference).sort().values
    return smoothed(x.beta * (policy - reference), x.label_smoothing)


def _aot_unpaired(x: _Pairs) -> Tensor:
    difference = x.chosen_ratio.sort().values - x.rejected_ratio.sort().values
    return smoothed(x.beta * difference, x.label_smoothing)


def _apo_down(x: _Pairs) -> Tensor:
    difference = x.chosen_ratio - x.rejected_ratio
    return (x.beta * x.chosen_ratio).sigmoid() + (-x.beta * difference).sigmoid()


def _discopop(x: _Pairs) -> Tensor:
    share = (x.logits / x.discopop_tau).sigmoid()
    # One exponential of the sum of the exponents: exp(-b d) alone overflows where m is nearly zero.
    exponential = bounded_exp(F.logsigmoid(x.logits / x.discopop_tau) - x.logits)
    return -F.logsigmoid(x.logits) * (1 - share) + exponential


DPO_LOSSES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda x: -F.logsigmoid(x.logits),
    "hinge": lambda x: F.relu(1 - x.logits),
    "ipo": lambda x: (x.average_difference - 0.5 / x.beta).square(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda x: -F.logsigmoid(x.beta * x.chosen_ratio) - F.logsigmoid(-x.beta * x.rejected_ratio),
    "sppo_hard": _sppo,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": lambda x: (-x.beta * x.chosen_ratio).sigmoid() + (x.beta * x.rejected_ratio).sigmoid(),
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": lambda x: x.chosen_nll.expand_as(x.logits),
    "sigmoid_norm": lambda x: -F.logsigmoid(x.beta * x.average_difference),
}


def _score(ratio: Tensor, divergence: str, alpha: float, is_squared: bool) -> Tensor:
    """Return h(x) of the log-ratios x, limited so that h(x), or its square, is finite."""
    if divergence == "forward_kl":
        return 1 - bounded_exp(-ratio, is_squared=is_squared)
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(ratio)
    # The limit of the alpha-divergence at 1 is the reverse KL divergence.
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return (bounded_exp((alpha - 1) * ratio, is_squared=is_squared) - 1) / (alpha - 1)
    return ratio


def _check_loss_types(loss_type: object, loss_weights: object) -> tuple[list[str], list[float]]:
    types = [loss_type] if isinstance(loss_type, str) else loss_type
    if not isinstance(types, (list, tuple)) or not types:
        raise TypeError(
            f"dpo_loss: loss_type must be a string or a list of strings, got {checks.format_value(loss_type)}"
        )
    for name in types:
        checks.choice("dpo_loss", "loss_type", name, tuple(DPO_LOSSES))
    weights = [1.0] * len(types) if loss_weights is None else loss_weights
    if not isinstance(weights, (list, tuple)) or len(weights) != len(types):
        raise ValueError(
            f"dpo_loss: loss_weights must be a list of {len(types)} numbers, one for each of loss_type "
            f"{checks.format_value(list(types))}, got {checks.format_value(loss_weights)}"
        )
    return list(types), [checks.number("dpo_loss", "loss_weights", weight) for weight in weights]


def _check_label_smoothing(types: list[str], value: object) -> float:
    smoothing = checks.number("dpo_loss", "label_smoothing", value, 0.0, 1.0)
    if smoothing and not set(types) & set(_LOSSES_WITH_LABEL_SMOOTHING):
        raise ValueError(
            f"dpo_loss: label_smoothing must be 0 for loss_type {', '.join(map(repr, types))}, got {smoothing:g}; only "
            f"{', '.join(map(repr, _LOSSES_WITH_LABEL_SMOOTHING))} use it"
        )
    if "robust" in types and smoothing >= 0.5:
        raise ValueError(f"dpo_loss: label_smoothing must be below 0.5 for loss_type 'robust', got {smoothing:g}")
    if "exo_pair" in types and not 0 < smoothing < 1:
        raise ValueError(f"dpo_loss: label_smoothing must be in (0, 1) for loss_type 'exo_pair', got {smoothing:g}")
    return smoothing


def dpo_adds_up(loss_type: str | Sequence[str], use_weighting: bool) -> bool:
    """Return whether the loss of a batch is a sum over its pairs. Sorts, and weights of the mean NLL, couple them."""
    types = [loss_type] if isinstance(loss_type, str) else loss_type
    return not ({"aot", "aot_unpaired"} & set(types) or (use_weighting and "sft" in types))


def _limited(sequences: Sequences, values: Tensor, ld_alpha: float | None) -> Tensor:
    """Return the sums [2P]. `ld_alpha` weighs the tokens beyond the length of the shorter completion of the pair."""
    if ld_alpha is None:
        return sequences.sum(values)
    shorter = torch.minimum(*half(sequences.lengths)).repeat(2)
    is_beyond = sequences.positions() > sequences.expand(shorter)
    return sequences.sum(torch.where(is_beyond, ld_alpha * values, values))


def dpo_loss(
    log_probs: Tensor, mask: Tensor, ref_log_probs: Tensor | None = None, *, beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid", loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0, f_divergence_type: str = "reverse_kl", f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05, ld_alpha: float | None = None, use_weighting: bool = False,
    log_sum_sq_probs: Tensor | None = None, ref_sequence_log_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of DPO (direct preference optimisation) or of one of its variants, and its metrics.

    For `loss_type="sigmoid"` it is the mean over the pairs of

        -log sigmoid(beta (log p(y_w) - log p_ref(y_w) - log p(y_l) + log p_ref(y_l)))

    The docstring of this module has the formulas and the papers of all types. Options have the names and the meaning of
    TRL's `DPOConfig`. A completion without tokens has the log-probability zero.

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the policy's log-probability of each token. The first half
            of the sequences are the chosen ones, the second half the rejected ones, in the same order.
        mask: The shape of `log_probs`, bool: the tokens of the completions.
        ref_log_probs: The shape and the dtype of `log_probs`: the same of the reference model. If it is None, and so
            is `ref_sequence_log_probs`, the reference gives all completions the same probability.
        beta: The strength of the reference, positive; for `ipo` it is the tau of the paper.
        loss_type: A key of the table in this module's docstring, or a list of keys. The losses are added.
        loss_weights: The factors of the losses of the list; by default 1.
        label_smoothing: The probability that a label is wrong, in [0, 1]: below 0.5 for `robust`, in (0, 1) for
            `exo_pair`; `aot` and `aot_unpaired` use it too. Other types need 0.
        f_divergence_type: `reverse_kl`, `forward_kl`, `js_divergence` or `alpha_divergence` (arXiv:2309.16240).
        f_alpha_divergence_coef: The a of `alpha_divergence`.
        discopop_tau: The temperature of `discopop`, positive.
        ld_alpha: LD-DPO (arXiv:2409.06411): the weight in [0, 1] of the tokens of a completion beyond the length of
            the other completion of the pair.
        use_weighting: WPO (arXiv:2406.11827): weigh each pair by exp(a_w + a_l), where a is the mean over the tokens of
            log p(y_t) - log_sum_sq_probs. The weights get no gradient. `aot` and `aot_unpaired` refuse it, because they
            sort the pairs.
        log_sum_sq_probs: The shape and the dtype of `log_probs`: log(sum over the vocabulary of p^2). `use_weighting`
            needs it.
        ref_sequence_log_probs: [N], the dtype of `log_probs`, in place of `ref_log_probs`: the reference's sums, which
            were computed with the same `ld_alpha`.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.
        part_of: The counts of the whole batch, from `batch_counts`, if these sequences are a part of it. The losses of
            all parts then add up to the loss of the batch, and the result has no metrics.

    Returns:
        The loss, without dimensions, and the metrics `rewards/chosen`, `rewards/rejected`, `rewards/accuracies`,
        `rewards/margins`, `logps/chosen` and `logps/rejected`. A reward is beta (log p - log p_ref).

    Raises: See `tigon.losses`.
    Source: Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290; the table in this module's docstring.

    Example:
        >>> from tigon.losses import dpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
        >>> ref_log_probs = torch.tensor([[-2.0, -2.0], [-1.0, -3.0]])
        >>> loss, metrics = dpo_loss(log_probs, log_probs < 0, ref_log_probs, beta=0.5)
        >>> loss, metrics["rewards/margins"]
        (tensor(0.3133), tensor(1.))
    """
    op = "dpo_loss"
    sequences = check_sequences(
        op, log_probs, mask, cu_seqlens, part_of=part_of, ref_log_probs=ref_log_probs,
        log_sum_sq_probs=log_sum_sq_probs,
    )  # fmt: skip
    check_pairs(op, sequences)
    if ref_sequence_log_probs is not None:
        if ref_log_probs is not None:
            raise ValueError(f"{op}: only one of ref_log_probs and ref_sequence_log_probs can be given, got both")
        check_per_sequence(op, "ref_sequence_log_probs", ref_sequence_log_probs, sequences)
    types, weights = _check_loss_types(loss_type, loss_weights)
    beta = checks.number(op, "beta", beta, 0.0, excludes_low=True)
    smoothing = _check_label_smoothing(types, label_smoothing)
    checks.choice(op, "f_divergence_type", f_divergence_type, F_DIVERGENCES)
    unsupported = [name for name in types if name not in _LOSSES_OF_DIFFERENCE]
    if f_divergence_type != "reverse_kl" and unsupported:
        raise ValueError(
            f"{op}: f_divergence_type must be 'reverse_kl' for loss_type {', '.join(map(repr, unsupported))}, "
            f"got {f_divergence_type!r}"
        )
    alpha = checks.number(op, "f_alpha_divergence_coef", f_alpha_divergence_coef)
    tau = checks.number(op, "discopop_tau", discopop_tau, 0.0, excludes_low=True)
    if ld_alpha is not None:
        ld_alpha = checks.number(op, "ld_alpha", ld_alpha, 0.0, 1.0)
    checks.flag(op, use_weighting=use_weighting)
    if use_weighting and log_sum_sq_probs is None:
        raise ValueError(f"{op}: log_sum_sq_probs must be a tensor if use_weighting is True, got None")
    sorting = [name for name in types if name in ("aot", "aot_unpaired")]
    if use_weighting and sorting:
        raise ValueError(f"{op}: use_weighting must be False for loss_type {sorting[0]!r}, which sorts the pairs")
    if part_of is not None and not dpo_adds_up(types, use_weighting):
        raise ValueError(
            f"{op}: part_of must be None for loss_type {', '.join(map(repr, types))} with use_weighting="
            f"{use_weighting}, whose loss of a batch is not a sum over its pairs"
        )

    sums = _limited(sequences, log_probs, ld_alpha)
    ref_sums = torch.zeros_like(sums) if ref_sequence_log_probs is None else sequences.neutral(ref_sequence_log_probs)
    if ref_log_probs is not None:
        ref_sums = _limited(sequences, ref_log_probs, ld_alpha)
    ratios = sums - ref_sums.detach()
    scores = _score(ratios, f_divergence_type, alpha, "ipo" in types)
    chosen_score, rejected_score = half(scores)
    chosen_average, rejected_average = half(scores / sequences.lengths.clamp(min=1))
    nll = chosen_nll(sequences, log_probs)
    if part_of is not None:
        # The mean over the pairs of the batch divides this by more than the pairs of this part.
        nll = nll * (part_of.sequences / max(sequences.count, 1))
    pairs = _Pairs(
        *half(sums), *half(ref_sums.detach()), *half(ratios), beta * (chosen_score - rejected_score),
        chosen_average - rejected_average, nll, beta, smoothing, tau,
    )  # fmt: skip
    losses = torch.zeros_like(pairs.logits)
    for name, weight in zip(types, weights, strict=True):
        losses = losses + weight * DPO_LOSSES[name](pairs)
    if log_sum_sq_probs is not None and use_weighting:
        chosen_weight, rejected_weight = half(sequences.mean((log_probs - log_sum_sq_probs).detach()))
        losses = losses * (chosen_weight + rejected_weight).exp()
    return sequences.pair_mean(losses), pair_metrics(beta * ratios, sums) if sequences.has_metrics else {}
