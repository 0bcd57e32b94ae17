"""Parts of the losses of policies that are useful on their own: KL estimators, masks of tokens, corrections.

No function reads a tensor on the host, and all shapes are known in advance.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

import math

import torch
from torch import Tensor

from tigon.losses.sequences import Metrics, Sequences, bounded_exp, check_per_sequence, check_sequences, mean
from tigon.runtime import checks

KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) for each token that the policy sampled.

    With d = log p_ref - log p:

        k1  -d               unbiased, may be negative
        k2  d^2 / 2          biased, its gradient is that of the KL divergence
        k3  exp(d) - d - 1   unbiased, never negative

    Args:
        log_probs: Any shape, fp32: the policy's log-probability of each token. It gets a gradient.
        ref_log_probs: The shape of `log_probs`: the same of the reference model.
        estimator: `k1`, `k2` or `k3`.

    Returns:
        The shape and the dtype of `log_probs`. exp(d) is limited to exp(80), so that k3 is finite.

    Raises: See `tigon.losses`.
    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html; k3 in GRPO: Shao et al.,
        arXiv:2402.03300.

    Example:
        >>> from tigon.losses import kl_estimate
        >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
        tensor([0.0000, 0.7183])
    """
    op = "kl_estimate"
    checks.tensor(op, log_probs=log_probs, ref_log_probs=ref_log_probs)
    checks.floating(op, log_probs=log_probs, ref_log_probs=ref_log_probs)
    checks.shape(op, "ref_log_probs", ref_log_probs, log_probs.shape)
    checks.same(op, "device", log_probs=log_probs, ref_log_probs=ref_log_probs)
    checks.choice(op, "estimator", estimator, KL_ESTIMATORS)
    difference = ref_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return bounded_exp(difference) - difference - 1


def entropy_threshold(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Return the smallest entropy of the top `quantile` of the tokens.

    It is the quantile 1 - `quantile` of the entropies of the tokens that count, with linear interpolation, as
    `torch.quantile` computes it. Here the number of these tokens stays on the GPU, and it may be of any size.

    Args:
        entropy: Any shape, fp32: the entropy of each token.
        mask: The shape of `entropy`, bool: the tokens that count.
        quantile: The share of the tokens in [0, 1]: 0.2 selects the fifth with the largest entropies, and 0 the token
            with the largest entropy.

    Returns:
        The threshold, without dimensions and without a gradient. It is infinite if no token counts.

    Raises: See `tigon.losses`.
    Source: Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939.

    Example:
        >>> from tigon.losses import entropy_threshold
        >>> entropy = torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.4, 9.9]])
        >>> entropy_threshold(entropy, entropy < 1, 0.25)
        tensor(0.4000)
    """
    op = "entropy_threshold"
    checks.tensor(op, entropy=entropy, mask=mask)
    checks.floating(op, entropy=entropy)
    checks.boolean(op, mask=mask)
    checks.shape(op, "mask", mask, entropy.shape)
    checks.same(op, "device", entropy=entropy, mask=mask)
    quantile = checks.number(op, "quantile", quantile, 0.0, 1.0)
    entropy = entropy.detach() if entropy.dtype == torch.float64 else entropy.detach().float()
    # Tokens that do not count are last. One more infinite value makes the indices valid if there are no tokens.
    ordered = torch.where(mask, entropy, math.inf).flatten().sort().values
    ordered = torch.cat((ordered, ordered.new_full((1,), math.inf)))
    last = (mask.sum() - 1).clamp(min=0)
    rank = (1 - quantile) * last.to(ordered.dtype)
    # fp32 rounds ranks above 2^24, perhaps upwards.
    below = rank.floor().to(torch.int64).minimum(last)
    low = ordered.index_select(0, below.view(1)).view(())
    high = ordered.index_select(0, (below + 1).minimum(last).view(1)).view(())
    # Infinity minus infinity is NaN in the interpolation, so it is left out where both values are equal.
    return torch.where(low == high, low, torch.lerp(low, high, rank - below))


def off_policy_mask(
    log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor, mask: Tensor, threshold: float, *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return which tokens or sequences stay in the loss: those that the policy may still learn from.

    A sequence leaves the loss if its advantage is negative and the mean over its tokens of
    log p_sampling - log p exceeds `threshold`.

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the policy's log-probability of each token.
        sampling_log_probs: The shape and the dtype of `log_probs`: the same when the tokens were sampled. NaN means
            unknown and counts as no difference.
        advantages: [N] or the shape of `log_probs`.
        mask: The shape of `log_probs`, bool: the tokens of the completions.
        threshold: The largest mean difference, finite.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.

    Returns:
        The shape of `advantages`, bool: True for what stays.

    Raises: See `tigon.losses`.
    Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, equation 9.

    Example:
        >>> from tigon.losses import off_policy_mask
        >>> log_probs, sampling_log_probs = torch.tensor([[-3.0], [-3.0]]), torch.tensor([[-1.0], [-1.0]])
        >>> off_policy_mask(log_probs, sampling_log_probs, torch.tensor([1.0, -1.0]), log_probs < 0, 0.5)
        tensor([ True, False])
    """
    op = "off_policy_mask"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, sampling_log_probs=sampling_log_probs)
    per_sequence = check_per_sequence(op, "advantages", advantages, sequences, or_tokens=True)
    threshold = checks.number(op, "threshold", threshold)
    return on_policy(sequences, log_probs, sampling_log_probs, advantages, per_sequence, threshold)


def on_policy(
    sequences: Sequences, log_probs: Tensor, sampling_log_probs: Tensor, advantages: Tensor, per_sequence: bool,
    threshold: float,
) -> Tensor:  # fmt: skip
    """Return the result of `off_policy_mask` for arguments that were checked."""
    difference = torch.nan_to_num(sampling_log_probs.detach() - log_probs.detach(), nan=0.0)
    is_close = sequences.mean(difference) <= threshold
    return (advantages >= 0) | (is_close if per_sequence else sequences.expand(is_close))


def importance_sampling_ratio(
    log_probs: Tensor, sampling_log_probs: Tensor, mask: Tensor, *, mode: str = "sequence_mask",
    clip_min: float | None = None, clip_max: float | None = 3.0, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the importance ratios that correct for an engine which sampled with other log-probabilities.

    The ratio of a token is exp(log p - log p_sampling), and that of a sequence is the product over its tokens.

        token_truncate      the ratios of tokens, limited to [clip_min, clip_max]
        token_mask          the ratios of tokens; those outside the interval become zero
        sequence_truncate   the ratios of sequences, limited to the interval
        sequence_mask       the ratios of sequences; those outside the interval become zero

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the log-probabilities that the training engine computes with
            the weights that sampled the tokens.
        sampling_log_probs: The shape and the dtype of `log_probs`: those of the sampling engine. NaN means unknown and
            counts as no difference.
        mask: The shape of `log_probs`, bool: the tokens of the completions.
        mode: One of the table. TRL calls it `vllm_importance_sampling_mode`.
        clip_min: The lower bound, not negative; None means that there is none.
        clip_max: The upper bound, positive and above `clip_min`; None means that there is none.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.

    Returns:
        The ratios without a gradient, [N] for modes of sequences and in the shape of `log_probs` for modes of tokens,
        where a token that does not count has the ratio 1; and the metrics `sampling/sampling_logp_difference/mean` and
        `/max` (of the absolute differences) and `sampling/importance_sampling_ratio/min`, `/mean` and `/max`. Without
        tokens the metrics are zero.

    Raises: See `tigon.losses`.
    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        https://fengyao.notion.site/off-policy-rl; the modes of TRL 1.16.

    Example:
        >>> from tigon.losses import importance_sampling_ratio
        >>> log_probs, sampling_log_probs = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
        >>> importance_sampling_ratio(log_probs, sampling_log_probs, log_probs < 0, mode="token_truncate")[0]
        tensor([[1., 3.]])
    """
    op = "importance_sampling_ratio"
    sequences = check_sequences(op, log_probs, mask, cu_seqlens, sampling_log_probs=sampling_log_probs)
    checks.choice(op, "mode", mode, IMPORTANCE_SAMPLING_MODES)
    low = None if clip_min is None else checks.number(op, "clip_min", clip_min, 0.0)
    high = None if clip_max is None else checks.number(op, "clip_max", clip_max, 0.0, excludes_low=True)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{op}: clip_min must be below clip_max, got {low:g} and {high:g}")
    if mode.endswith("truncate") and low is None and high is None:
        raise ValueError(f"{op}: clip_min or clip_max must be a number for mode {mode!r}, got None for both")

    difference = (log_probs - sampling_log_probs).detach()
    is_known = sequences.mask & ~difference.isnan()
    difference = torch.where(is_known, difference, 0.0)
    per_sequence = mode.startswith("sequence")
    ratio = bounded_exp(sequences.sum(difference) if per_sequence else difference)
    if mode.endswith("truncate"):
        ratio = ratio.clamp(low, high)
    else:
        is_inside = (ratio >= (-math.inf if low is None else low)) & (ratio <= (math.inf if high is None else high))
        ratio = torch.where(is_inside, ratio, 0.0)
    if not per_sequence:
        # The bounds may exclude 1, the ratio of the tokens that do not count.
        ratio = torch.where(sequences.mask, ratio, 1.0)
    is_counted = torch.ones_like(ratio, dtype=torch.bool) if per_sequence else sequences.mask
    metrics = {
        "sampling/sampling_logp_difference/mean": difference.abs().sum() / is_known.sum().clamp(min=1),
        "sampling/sampling_logp_difference/max": extremum(difference.abs(), is_known, largest=True),
        "sampling/importance_sampling_ratio/min": extremum(ratio, is_counted, largest=False),
        "sampling/importance_sampling_ratio/mean": mean(ratio) if per_sequence else sequences.token_mean(ratio),
        "sampling/importance_sampling_ratio/max": extremum(ratio, is_counted, largest=True),
    }
    return ratio, metrics


def extremum(values: Tensor, is_counted: Tensor, *, largest: bool, empty: float = 0.0) -> Tensor:
    """Return the largest or the smallest of the values that count, or `empty` if there are none."""
    bound = -math.inf if largest else math.inf
    # One more value makes the reduction valid for tensors without elements.
    candidates = torch.cat((torch.where(is_counted, values, bound).flatten(), values.new_full((1,), bound)))
    result = candidates.amax() if largest else candidates.amin()
    return torch.where(is_counted.any(), result, empty)
