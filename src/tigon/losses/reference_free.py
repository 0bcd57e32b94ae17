"""Losses of preferences without a reference model: ORPO, CPO and SimPO.

Shapes: N = 2 P sequences, P chosen ones followed by their P rejected ones; L tokens of a padded row, T packed tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.pairs import pair_metrics
from tigon.losses.preference import smoothed
from tigon.losses.sequences import (
    BatchCounts,
    Metrics,
    Sequences,
    bounded_exp,
    check_pairs,
    check_sequences,
    chosen_nll,
    half,
    mean,
)
from tigon.runtime import checks

CPO_TYPES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")


def _log_odds(average: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the averages log p.

    The result is finite, because p counts as at most 1 - eps. Each branch of log(1 - p) is precise where it is used.
    """
    average = average.clamp(max=-torch.finfo(average.dtype).eps)
    is_small = average < -math.log(2)
    # The argument of the branch that is not used is replaced, because its gradient could be infinite times zero.
    small = torch.where(is_small, average, -1.0)
    large = torch.where(is_small, -0.5, average)
    return average - torch.where(is_small, torch.log1p(-small.exp()), torch.log(-torch.expm1(large)))


def orpo_loss(
    log_probs: Tensor, mask: Tensor, *, beta: float = 0.1, nll_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of ORPO (odds ratio preference optimisation), and its metrics.

    It is nll - beta mean(log sigmoid(log odds(a_w) - log odds(a_l))), with a the mean of log p over the tokens of a
    completion, log odds(a) = a - log(1 - exp(a)), and nll the negative mean of log p over the tokens of all chosen
    completions. The odds ratio of a pair counts as 1 if one of its completions has no tokens.

    Args:
        log_probs, mask, cu_seqlens, part_of: See `dpo_loss`; [N, L] fp32 and bool, or [T] if they are packed.
        beta: The weight of the odds ratio, not negative; the lambda of the paper.
        nll_mask: The shape of `log_probs`, bool: the tokens of the NLL term, of which only those of chosen sequences
            count. By default they are those of `mask`. TRL uses the tokens of prompts too: `log_probs` must then hold
            their log-probabilities. The `chosen_tokens` of `part_of` are tokens of this mask.

    Returns:
        The loss, without dimensions, and the metrics of `dpo_loss`, where rewards are beta a and `logps` are a, with
        `nll_loss`, `log_odds_ratio` (the mean of log sigmoid) and `log_odds_chosen` (the mean of its argument).

    Raises: See `tigon.losses`.
    Source: Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", arXiv:2403.07691.

    Example:
        >>> from tigon.losses import orpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
        >>> loss, metrics = orpo_loss(log_probs, log_probs < 0)
        >>> loss, metrics["nll_loss"]
        (tensor(1.5271), tensor(1.5000))
    """
    op = "orpo_loss"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, part_of=part_of)
    check_pairs(op, sequences)
    beta = checks.number(op, "beta", beta, 0.0)
    nll_sequences = sequences
    if nll_mask is not None:
        checks.boolean(op, nll_mask=nll_mask)
        checks.shape(op, "nll_mask", nll_mask, log_probs.shape)
        checks.same(op, "device", log_probs=log_probs, nll_mask=nll_mask)
        nll_sequences = Sequences(nll_mask, cu_seqlens, part_of)

    averages = sequences.mean(log_probs)
    has_tokens = torch.logical_and(*half(sequences.lengths > 0))
    chosen_odds, rejected_odds = half(_log_odds(averages))
    log_odds_ratio = torch.where(has_tokens, chosen_odds - rejected_odds, 0.0)
    nll = chosen_nll(nll_sequences, log_probs)
    preference = sequences.pair_mean(F.logsigmoid(log_odds_ratio))
    if not sequences.has_metrics:
        return nll - beta * preference, {}
    metrics = pair_metrics(beta * averages, averages) | {
        "nll_loss": nll.detach(),
        "log_odds_ratio": preference.detach(),
        "log_odds_chosen": mean(log_odds_ratio.detach()),
    }
    return nll - beta * preference, metrics


def cpo_loss(
    log_probs: Tensor, mask: Tensor, *, beta: float = 0.1, loss_type: str = "sigmoid", cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0, simpo_gamma: float = 0.5, alpha: float = 0.0, cu_seqlens: Tensor | None = None,
    part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of CPO (contrastive preference optimisation) or of a variant, and its metrics.

    It is mean(l) + cpo_alpha nll, with d the difference of the rewards of the chosen and of the rejected completion:

        sigmoid   l = -log sigmoid(beta d)
        hinge     l = max(0, 1 - beta d)
        ipo       l = (d - 1 / (2 beta))^2
        simpo     l = -log sigmoid(beta d - simpo_gamma)
        alphapo   the same as simpo, with cpo_alpha = 0

    The reward is the sum of log p over the tokens, and for ipo, simpo and alphapo the mean, which is zero for a
    completion without tokens. With alpha = a other than 0 it is (1 - exp(-a log p)) / a of that value. Options have the
    names and the meaning of TRL's `CPOConfig`.

    Args:
        log_probs, mask, cu_seqlens, part_of: See `dpo_loss`; [N, L] fp32 and bool, or [T] if they are packed.
        beta: The scale of the rewards, positive.
        loss_type: One of the table.
        cpo_alpha: The weight of the NLL term, not negative.
        label_smoothing: e in [0, 1] for sigmoid, simpo and alphapo: -log sigmoid(z) becomes
            -(1 - e) log sigmoid(z) - e log sigmoid(-z). Other types need 0.
        simpo_gamma: The margin of simpo and alphapo.
        alpha: The shape of the reward (AlphaPO).

    Returns:
        The loss, without dimensions, and the metrics of `dpo_loss`, where a reward is beta times the reward above and
        `logps` are the sums or means of log p, with `nll_loss`.

    Raises: See `tigon.losses`.
    Source: Xu et al., arXiv:2401.08417 (CPO); Meng et al., arXiv:2405.14734 (SimPO); Gupta et al., arXiv:2501.03884
        (AlphaPO).

    Example:
        >>> from tigon.losses import cpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
        >>> loss, metrics = cpo_loss(log_probs, log_probs < 0, beta=0.5)
        >>> loss, metrics["nll_loss"]
        (tensor(1.8133), tensor(1.5000))
    """
    return _cpo_loss(
        "cpo_loss", log_probs, mask, cu_seqlens, beta=beta, loss_type=loss_type, cpo_alpha=cpo_alpha,
        label_smoothing=label_smoothing, simpo_gamma=simpo_gamma, alpha=alpha, part_of=part_of,
    )  # fmt: skip


def simpo_loss(
    log_probs: Tensor, mask: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0,
    cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of SimPO (simple preference optimisation), and its metrics.

    It is the mean over the pairs of -log sigmoid(beta (a_w - a_l) - gamma), with a the mean of log p over the tokens of
    a completion, which is zero if it has none. `cpo_loss` computes the same by `loss_type="simpo"` and `cpo_alpha=0`.

    Args:
        log_probs, mask, cu_seqlens, part_of: See `dpo_loss`; [N, L] fp32 and bool, or [T] if they are packed.
        beta: The scale of the rewards, positive.
        gamma: The margin by which the chosen completion should win.
        label_smoothing: e in [0, 1]: -log sigmoid(z) becomes -(1 - e) log sigmoid(z) - e log sigmoid(-z).

    Returns:
        The loss, without dimensions, and the metrics of `dpo_loss`, where a reward is beta a and `logps` are a, with
        `nll_loss`, which is not part of the loss.

    Raises: See `tigon.losses`.
    Source: Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv:2405.14734.

    Example:
        >>> from tigon.losses import simpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
        >>> simpo_loss(log_probs, log_probs < 0)[0]
        tensor(0.3133)
    """
    return _cpo_loss(
        "simpo_loss", log_probs, mask, cu_seqlens, beta=beta, loss_type="simpo", cpo_alpha=0.0,
        label_smoothing=label_smoothing, simpo_gamma=gamma, alpha=0.0, part_of=part_of,
    )  # fmt: skip


def _cpo_loss(
    op: str, log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None, *, beta: float, loss_type: str,
    cpo_alpha: float, label_smoothing: float, simpo_gamma: float, alpha: float, part_of: BatchCounts | None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss and the metrics of `cpo_loss`, with `op` in messages."""
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, part_of=part_of)
    check_pairs(op, sequences)
    beta = checks.number(op, "beta", beta, 0.0, excludes_low=True)
    checks.choice(op, "loss_type", loss_type, CPO_TYPES)
    cpo_alpha = checks.number(op, "cpo_alpha", cpo_alpha, 0.0)
    label_smoothing = checks.number(op, "label_smoothing", label_smoothing, 0.0, 1.0)
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise ValueError(f"{op}: label_smoothing must be 0 for loss_type {loss_type!r}, got {label_smoothing:g}")
    gamma = checks.number(op, "gamma" if op == "simpo_loss" else "simpo_gamma", simpo_gamma)
    alpha = checks.number(op, "alpha", alpha)

    scores = sequences.sum(log_probs) if loss_type in ("sigmoid", "hinge") else sequences.mean(log_probs)
    rewards = scores if alpha == 0 else (1 - bounded_exp(-alpha * scores, is_squared=loss_type == "ipo")) / alpha
    chosen, rejected = half(rewards)
    logits = beta * (chosen - rejected)
    if loss_type == "hinge":
        losses = F.relu(1 - logits)
    elif loss_type == "ipo":
        losses = (chosen - rejected - 0.5 / beta).square()
    else:
        losses = smoothed(logits if loss_type == "sigmoid" else logits - gamma, label_smoothing)
    nll = chosen_nll(sequences, log_probs)
    loss = sequences.pair_mean(losses)
    if cpo_alpha and loss_type != "alphapo":
        loss = loss + cpo_alpha * nll
    if not sequences.has_metrics:
        return loss, {}
    return loss, pair_metrics(beta * rewards, scores) | {"nll_loss": nll.detach()}
