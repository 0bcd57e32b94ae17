"""The metrics of pairs of completions, and the loss of a reward model.

Shapes: N = 2 P sequences, P chosen ones followed by their P rejected ones; L tokens of a padded row, T packed tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.sequences import Metrics, check_labels, check_pairs, check_sequences, half, mean
from tigon.runtime import checks


def pair_metrics(rewards: Tensor, log_probs: Tensor) -> Metrics:
    """Return the metrics of the rewards [2P] and the log-probabilities [2P] of pairs."""
    chosen, rejected = half(rewards.detach())
    chosen_log_probs, rejected_log_probs = half(log_probs.detach())
    return {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/accuracies": mean((chosen > rejected).to(rewards.dtype)),
        "rewards/margins": mean(chosen - rejected),
        "logps/chosen": mean(chosen_log_probs),
        "logps/rejected": mean(rejected_log_probs),
    }


def preference_token_metrics(
    mask: Tensor, *, entropy: Tensor | None = None, mean_logits: Tensor | None = None, is_top1: Tensor | None = None,
    is_chosen: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Metrics:  # fmt: skip
    """Return the metrics of tokens that TRL reports in addition to those of a preference loss.

    Args:
        mask: [N, L], or [T] with `cu_seqlens`, bool: the tokens of the completions.
        entropy: The shape of `mask`, floating point: the entropy of the policy at each token.
        mean_logits: The shape of `mask`, floating point: the mean of the logits at each token.
        is_top1: The shape of `mask`, bool: whether the token has the largest logit.
        is_chosen: [N], bool: the chosen sequences. By default they are the first half, as in `dpo_loss`.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.

    Returns:
        `entropy` (the mean over all tokens), `logits/chosen` and `logits/rejected` (the means over the tokens of the
        chosen and of the rejected sequences) and `mean_token_accuracy` (the share of the tokens of chosen sequences
        that have the largest logit), each if its tensor is given. A mean over no tokens is zero.

    Raises: See `tigon.losses`.
    Source: `DPOTrainer` and `KTOTrainer` of TRL 1.16.

    Example:
        >>> from tigon.losses import preference_token_metrics
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> preference_token_metrics(mask, is_top1=torch.tensor([[True, False], [True, True]]))
        {'mean_token_accuracy': tensor(0.5000)}
    """
    op = "preference_token_metrics"
    checks.tensor(op, mask=mask)
    shown = {"entropy": entropy, "mean_logits": mean_logits, "is_top1": is_top1}
    sequences = check_sequences(op, torch.empty_like(mask, dtype=torch.float32), mask, cu_seqlens)
    for name, value in shown.items():
        if value is not None:
            checks.tensor(op, **{name: value})
            checks.shape(op, name, value, mask.shape)
    checks.floating(op, entropy=entropy, mean_logits=mean_logits)
    if is_top1 is not None:
        checks.boolean(op, is_top1=is_top1)
    if is_chosen is None:
        check_pairs(op, sequences)
        is_chosen = torch.arange(sequences.count, device=mask.device) < sequences.count // 2
    else:
        check_labels(op, "is_chosen", is_chosen, sequences)

    def mean_over(is_counted: Tensor, values: Tensor) -> Tensor:
        total = torch.where(is_counted, sequences.sum(values.detach().float()), 0.0).sum()
        return total / torch.where(is_counted, sequences.lengths, 0).sum().clamp(min=1)

    metrics = {}
    if entropy is not None:
        metrics["entropy"] = sequences.token_mean(entropy.detach().float())
    if mean_logits is not None:
        metrics["logits/chosen"] = mean_over(is_chosen, mean_logits)
        metrics["logits/rejected"] = mean_over(~is_chosen, mean_logits)
    if is_top1 is not None:
        metrics["mean_token_accuracy"] = mean_over(is_chosen, is_top1)
    return metrics


def bradley_terry_loss(
    rewards: Tensor, margin: Tensor | None = None, *, center_rewards_coefficient: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return the loss of a reward model on pairs, and its metrics.

    It is the mean over the pairs of -log sigmoid(r_w - r_l - margin) + c (r_w + r_l)^2.

    Args:
        rewards: [2P], fp32 | bf16 | fp16: the rewards of the P chosen completions, then those of the rejected ones.
        margin: [P], floating point: the margin by which the chosen completion of each pair should win.
        center_rewards_coefficient: c, which keeps the mean of the rewards near zero; None means 0.

    Returns:
        The loss, without dimensions, in fp32, and the metrics `min_reward`, `mean_reward`, `max_reward`, `accuracy` and
        `margin`. Without pairs all of them are zero.

    Raises: See `tigon.losses`.
    Source: Ouyang et al., arXiv:2203.02155; the margin of Touvron et al., arXiv:2307.09288; the centering of Eisenstein
        et al., arXiv:2312.09244.

    Example:
        >>> from tigon.losses import bradley_terry_loss
        >>> loss, metrics = bradley_terry_loss(torch.tensor([2.0, 1.0, 1.0, 3.0]))
        >>> loss, metrics["accuracy"]
        (tensor(1.2201), tensor(0.5000))
    """
    op = "bradley_terry_loss"
    checks.tensor(op, rewards=rewards)
    checks.floating(op, rewards=rewards, margin=margin)
    if rewards.dim() != 1 or len(rewards) % 2:
        raise ValueError(f"{op}: rewards must have shape [2P], chosen and then rejected, got {tuple(rewards.shape)}")
    if margin is not None:
        checks.shape(op, "margin", margin, (len(rewards) // 2,))
    checks.same(op, "device", rewards=rewards, margin=margin)
    coefficient = 0.0
    if center_rewards_coefficient is not None:
        coefficient = checks.number(op, "center_rewards_coefficient", center_rewards_coefficient, 0.0)

    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    chosen, rejected = half(rewards)
    difference = chosen - rejected
    loss = mean(-F.logsigmoid(difference if margin is None else difference - margin))
    if coefficient:
        loss = loss + coefficient * mean((chosen + rejected).square())
    values = rewards.detach() if len(rewards) else rewards.detach().new_zeros(1)
    metrics = {
        "min_reward": values.min(),
        "mean_reward": values.mean(),
        "max_reward": values.max(),
        "accuracy": mean((difference.detach() > 0).to(values.dtype)),
        "margin": mean(difference.detach()),
    }
    return loss, metrics
