"""PPO (proximal policy optimisation) with its value function, and RLOO (REINFORCE leave-one-out).

`policy` has the formula of the clipped objective, which both share.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

import torch
from torch import Tensor

from tigon.losses.policy_objectives import check_clip, check_entropy, clip_metrics, with_entropy
from tigon.losses.sequences import BatchCounts, Metrics, bounded_exp, check_per_sequence, check_sequences
from tigon.runtime import checks


def rloo_loss(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, old_log_probs: Tensor | None = None, *, epsilon: float = 0.2,
    epsilon_high: float | None = None, delta: float | None = None, entropy: Tensor | None = None,
    entropy_coef: float = 0.0, cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of RLOO (REINFORCE leave-one-out), and its metrics.

    It is the mean over the sequences of -min(min(r, delta) A, clip(r) A), where r = exp(log p - log p_old) is the ratio
    of the probabilities of the whole completion. The advantage of a completion is its reward minus the mean reward of
    the other completions of the prompt.

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the policy's log-probability of each token. It gets a
            gradient.
        advantages: [N], floating point.
        mask: The shape of `log_probs`, bool: the tokens of the completions.
        old_log_probs: The shape and the dtype of `log_probs`: the same of the policy that sampled the tokens. By
            default they are those of the policy itself, detached.
        epsilon: The lower bound of the ratio is 1 - epsilon.
        epsilon_high: The upper bound of the ratio is 1 + epsilon_high; by default epsilon.
        delta: The largest ratio with a negative advantage that has a gradient, positive.
        entropy: The shape of `log_probs`: the entropy of the policy at each token.
        entropy_coef: The weight of the entropy bonus, the mean entropy of the tokens.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.
        part_of: As in `dpo_loss`.

    Returns:
        The loss, without dimensions, and the metrics `policy_loss`, `entropy` if it is given, and
        `clip_ratio/low_mean`, `/high_mean`, `/region_mean`, `/low_min` and `/high_max`.

    Raises: See `tigon.losses`.
    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv:2402.14740.

    Example:
        >>> from tigon.losses import rloo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, 0.0]])
        >>> rloo_loss(log_probs, torch.tensor([1.0, -3.0]), log_probs < 0, log_probs + 0.05)[1]["policy_loss"]
        tensor(0.9744)
    """
    op = "rloo_loss"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, part_of=part_of, old_log_probs=old_log_probs)
    check_per_sequence(op, "advantages", advantages, sequences)
    clip = check_clip(op, epsilon, epsilon_high, delta)
    coefficient = check_entropy(op, entropy, entropy_coef, sequences)

    advantages = advantages.detach().to(log_probs.dtype)
    sums = sequences.sum(log_probs)
    old_sums = sums.detach() if old_log_probs is None else sequences.sum(old_log_probs.detach())
    ratio = bounded_exp(sums - old_sums)
    loss, metrics = with_entropy(sequences.sequence_mean(clip.loss(ratio, advantages)), sequences, entropy, coefficient)
    if not sequences.has_metrics:
        return loss, {}
    return loss, metrics | clip_metrics(sequences, *clip.is_clipped(ratio, advantages), sums.dtype, True)


def ppo_loss(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, old_log_probs: Tensor | None = None, *, epsilon: float = 0.2,
    epsilon_high: float | None = None, delta: float | None = None, entropy: Tensor | None = None,
    entropy_coef: float = 0.0, cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the clipped objective of PPO (proximal policy optimisation) as a loss, and its metrics.

    It is the mean over the tokens of -min(min(r, delta) A, clip(r) A), where r = p / p_old is the ratio of a token.

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the policy's log-probability of each token.
        advantages: The shape of `log_probs`, or [N], floating point.
        delta: The largest ratio with a negative advantage that has a gradient, positive; the dual clipping of
            arXiv:1912.09729.
        mask, old_log_probs, epsilon, epsilon_high, entropy, entropy_coef, cu_seqlens, part_of: As in `rloo_loss`.

    Returns:
        The loss, without dimensions, and the metrics of `rloo_loss`, of tokens, with `kl`: the mean of
        (log p - log p_old)^2 / 2, which estimates KL(p_old || p).

    Raises: See `tigon.losses`.
    Source: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7.

    Example:
        >>> from tigon.losses import ppo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0]])
        >>> ppo_loss(log_probs, torch.tensor([[1.0, -2.0]]), log_probs < 0, log_probs - 0.5)[0]
        tensor(1.0487)
    """
    op = "ppo_loss"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, part_of=part_of, old_log_probs=old_log_probs)
    per_sequence = check_per_sequence(op, "advantages", advantages, sequences, or_tokens=True)
    clip = check_clip(op, epsilon, epsilon_high, delta)
    coefficient = check_entropy(op, entropy, entropy_coef, sequences)

    advantages = sequences.neutral(advantages.detach().to(log_probs.dtype), per_sequence)
    advantages = sequences.expand(advantages) if per_sequence else advantages
    log_ratio = sequences.masked(log_probs - (log_probs if old_log_probs is None else old_log_probs).detach())
    ratio = bounded_exp(log_ratio)
    loss = sequences.token_mean(clip.loss(ratio, advantages))
    loss, metrics = with_entropy(loss, sequences, entropy, coefficient)
    if not sequences.has_metrics:
        return loss, {}
    metrics["kl"] = sequences.token_mean(0.5 * log_ratio.detach().square())
    return loss, metrics | clip_metrics(sequences, *clip.is_clipped(ratio, advantages), ratio.dtype, False)


def ppo_value_loss(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None = None, *, epsilon: float = 0.2,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the clipped loss of PPO's value function, and its metrics.

    It is the mean over the tokens of max((v - R)^2, (v_clip - R)^2) / 2, where v_clip is v, limited to
    [v_old - epsilon, v_old + epsilon].

    Args:
        values: [N, L], or [T] with `cu_seqlens`, fp32: the value of each token. It gets a gradient.
        returns: The shape and the dtype of `values`: the return R of each token.
        mask: The shape of `values`, bool: the tokens of the completions.
        old_values: The shape and the dtype of `values`: the values when the tokens were sampled. None means no
            clipping.
        epsilon: The half width of the interval, not negative.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.

    Returns:
        The loss, without dimensions, and the metrics `value_loss` and, with `old_values`, `value_clip_ratio`: the share
        of the tokens where the clipped value has the larger error.

    Raises: See `tigon.losses`.
    Source: Schulman et al., arXiv:1707.06347; the clipping is that of its reference implementation.

    Example:
        >>> from tigon.losses import ppo_value_loss
        >>> values = torch.tensor([[1.0, 2.0]])
        >>> ppo_value_loss(values, torch.tensor([[0.0, 2.0]]), values > 0)[0]
        tensor(0.2500)
    """
    op = "ppo_value_loss"
    sequences = check_sequences(op, values, mask, cu_seqlens, name="values", returns=returns, old_values=old_values)
    epsilon = checks.number(op, "epsilon", epsilon, 0.0)
    values, returns = sequences.masked(values), sequences.masked(returns.detach())
    errors = (values - returns).square()
    metrics: Metrics = {}
    if old_values is not None:
        old_values = sequences.masked(old_values.detach())
        clipped = torch.clamp(values, old_values - epsilon, old_values + epsilon)
        clipped_errors = (clipped - returns).square()
        is_clipped = (clipped_errors > errors).detach().to(values.dtype)
        metrics["value_clip_ratio"] = sequences.token_mean(is_clipped)
        errors = torch.maximum(errors, clipped_errors)
    loss = 0.5 * sequences.token_mean(errors)
    return loss, metrics | {"value_loss": loss.detach()}
