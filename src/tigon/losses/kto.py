"""KTO: a loss of completions that are labelled desirable or undesirable, without pairs.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

import torch
from torch import Tensor

from tigon.losses.sequences import BatchCounts, Metrics, check_labels, check_per_sequence, check_sequences, mean
from tigon.runtime import checks


def kto_kl(
    log_probs: Tensor, mask: Tensor, ref_log_probs: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the KL term of KTO: the mean over the sequences of log p - log p_ref.

    The sequences are prompts with completions of other prompts, and the log-probabilities are those of these
    completions. With several ranks, average the result over the ranks before `kto_loss`, which replaces a negative
    value by zero.

    Args:
        log_probs, mask, ref_log_probs, cu_seqlens: See `dpo_loss`; [N, L] fp32 and bool, or [T] if they are packed.

    Returns:
        The mean, without dimensions and without a gradient.

    Raises: See `tigon.losses`.
    Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, section 4.1.

    Example:
        >>> from tigon.losses import kto_kl
        >>> kto_kl(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-2.0, -2.0]]))
        tensor(1.)
    """
    sequences = check_sequences("kto_kl", log_probs, mask, cu_seqlens, ref_log_probs=ref_log_probs)
    log_probs = log_probs.detach()
    return mean(sequences.sum(log_probs if ref_log_probs is None else log_probs - ref_log_probs.detach()))


def kto_loss(
    log_probs: Tensor, mask: Tensor, is_desirable: Tensor, ref_log_probs: Tensor | None = None,
    kl: Tensor | None = None, *, beta: float = 0.1, loss_type: str = "kto", desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0, ref_sequence_log_probs: Tensor | None = None, cu_seqlens: Tensor | None = None,
    part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of KTO (Kahneman-Tversky optimisation), and its metrics.

    It is the mean over the completions of

        desirable_weight (1 - sigmoid(beta (x - z)))      or      undesirable_weight (1 - sigmoid(beta (z - x)))

    with x = log p - log p_ref of the completion and z = max(0, `kl`). `loss_type="apo_zero_unpaired"` has z = 0. A
    completion without tokens has the log-probability zero.

    Args:
        log_probs, mask, cu_seqlens, part_of: See `dpo_loss`; [N, L] fp32 and bool, or [T] if they are packed.
        is_desirable: [N], bool: the labels of the completions.
        ref_log_probs, ref_sequence_log_probs: As in `dpo_loss`: the shape of `log_probs`, or [N] in place of it.
        kl: Without dimensions, the result of `kto_kl`. It gets no gradient. None means zero, and
            `apo_zero_unpaired` needs None.
        beta: The strength of the reference, positive.
        loss_type: `kto` or `apo_zero_unpaired`.
        desirable_weight, undesirable_weight: The weights of desirable and of undesirable completions, not negative.

    Returns:
        The loss, without dimensions, and the metrics `kl`, `rewards/chosen`, `rewards/rejected`, `rewards/margins`,
        `logps/chosen`, `logps/rejected`, `count/chosen` and `count/rejected`. "Chosen" means desirable. The mean over
        completions that the batch does not have is NaN; the counts are the weights for a mean over several batches.

    Raises: See `tigon.losses`.
    Source: Ethayarajh et al., arXiv:2402.01306 (KTO); D'Oosterlinck et al., arXiv:2408.06266 (APO).

    Example:
        >>> from tigon.losses import kto_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
        >>> loss, metrics = kto_loss(log_probs, log_probs < 0, torch.tensor([True, False]), 2 * log_probs, beta=0.5)
        >>> loss, metrics["rewards/margins"]
        (tensor(0.5533), tensor(-1.))
    """
    op = "kto_loss"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, part_of=part_of, ref_log_probs=ref_log_probs)
    check_labels(op, "is_desirable", is_desirable, sequences)
    if ref_sequence_log_probs is not None:
        if ref_log_probs is not None:
            raise ValueError(f"{op}: only one of ref_log_probs and ref_sequence_log_probs can be given, got both")
        check_per_sequence(op, "ref_sequence_log_probs", ref_sequence_log_probs, sequences)
    checks.choice(op, "loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    if kl is not None:
        checks.tensor(op, kl=kl)
        checks.floating(op, kl=kl)
        checks.shape(op, "kl", kl, ())
        checks.same(op, "device", log_probs=log_probs, kl=kl)
        if loss_type == "apo_zero_unpaired":
            raise ValueError(f"{op}: kl must be None for loss_type 'apo_zero_unpaired', got a Tensor")
    beta = checks.number(op, "beta", beta, 0.0, excludes_low=True)
    desirable_weight = checks.number(op, "desirable_weight", desirable_weight, 0.0)
    undesirable_weight = checks.number(op, "undesirable_weight", undesirable_weight, 0.0)

    log_sums = sequences.sum(log_probs)
    ref_sums = torch.zeros_like(log_sums)
    if ref_sequence_log_probs is not None:
        ref_sums = sequences.neutral(ref_sequence_log_probs)
    if ref_log_probs is not None:
        ref_sums = sequences.sum(ref_log_probs)
    ratios = log_sums - ref_sums.detach()
    divergence = log_sums.new_zeros(()) if kl is None else kl.detach().clamp(min=0).to(log_sums.dtype)
    advantages = beta * (ratios - divergence)
    # 1 - sigmoid(z) = sigmoid(-z) is precise for large z.
    losses = torch.where(
        is_desirable, desirable_weight * (-advantages).sigmoid(), undesirable_weight * advantages.sigmoid()
    )
    if not sequences.has_metrics:
        return sequences.sequence_mean(losses), {}
    metrics = {"kl": divergence}
    for name, is_counted in (("chosen", is_desirable), ("rejected", ~is_desirable)):
        count = is_counted.sum()
        metrics[f"rewards/{name}"] = torch.where(is_counted, beta * ratios.detach(), 0.0).sum() / count
        metrics[f"logps/{name}"] = torch.where(is_counted, log_sums.detach(), 0.0).sum() / count
        metrics[f"count/{name}"] = count
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return sequences.sequence_mean(losses), metrics
