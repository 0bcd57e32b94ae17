"""GRPO (group relative policy optimisation) and its variants: losses of policies that learn from rewards.

With r the ratio p / p_old of a token or of a sequence, A the advantage, and clip(r) the ratio limited to
[1 - e_low, 1 + e_high], the loss of a token is

    grpo, bnpo, dr_grpo, dapo, luspo, gspo, ppo   -min(min(r, delta) A, clip(r) A)
    cispo   -stop_gradient(min(r, e_high)) A log p                                               arXiv:2506.13585
    sapo    -(4 / t) sigmoid(t (r - 1)) A,  t = t_pos where A > 0, else t_neg                    arXiv:2511.20347
    vespo   -stop_gradient(exp(l) w^k exp(-l w)) A log p,  w = the product of the sequence's r   arXiv:2602.10693

and the loss of a batch is

    grpo (arXiv:2402.03300), sapo, gspo (arXiv:2507.18071)   the mean over the sequences of the mean over their tokens
    bnpo, ppo (arXiv:1707.06347)                             the mean over all tokens of this batch
    dapo (arXiv:2503.14476), cispo, vespo                    the sum over all tokens / `num_items_in_batch`
    dr_grpo (arXiv:2503.20783)                               the sum over all tokens / (N `max_completion_length`)
    luspo (arXiv:2602.05261)                                 the mean over the sequences of the sum over their tokens

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

from collections.abc import Callable

from torch import Tensor

from tigon.losses.policy_objectives import (
    GammaWeight,
    Objective,
    PolicyTokens,
    check_clip,
    check_entropy,
    mean_of_means,
    mean_of_sums,
    with_entropy,
)
from tigon.losses.policy_terms import KL_ESTIMATORS, entropy_threshold, on_policy
from tigon.losses.sequences import BatchCounts, Metrics, Sequences, check_per_sequence, check_sequences
from tigon.runtime import checks

# The function that reduces the losses of the tokens to the loss of the batch. None stands for their sum, divided by the
# result of `check_divisor`.
GRPO_LOSSES: dict[str, Callable[[Sequences, Tensor], Tensor] | None] = {
    "grpo": mean_of_means, "bnpo": Sequences.token_mean, "dr_grpo": None, "dapo": None, "cispo": None,
    "sapo": mean_of_means, "luspo": mean_of_sums, "vespo": None, "gspo": mean_of_means,
}  # fmt: skip
# The other types have ratios of tokens by default.
_LEVELS = {"luspo": "sequence", "gspo": "sequence"}
_TYPES_WITHOUT_CLIPPING = ("cispo", "sapo", "vespo")


def grpo_loss(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None, *, loss_type: str = "dapo", importance_sampling_level: str | None = None,
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0,
    kl_estimator: str = "k3", use_bias_correction_kl: bool = True, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0, entropy: Tensor | None = None, entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0, top_entropy_threshold: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None, sampling_log_probs: Tensor | None = None,
    off_policy_mask_threshold: float | None = None, num_items_in_batch: Tensor | float | None = None,
    max_completion_length: int | None = None, cu_seqlens: Tensor | None = None, part_of: BatchCounts | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Return the loss of GRPO (group relative policy optimisation) or of one of its variants, and its metrics.

    For each token it is the loss of the table in this module's docstring, times the importance ratio of the sampling
    engine, plus beta KL. The table also has the mean over the batch. Options have the names and the meaning of TRL's
    `GRPOConfig`. Exponents are limited to 80, so that ratios are finite. A completion without tokens contributes zero.

    Args:
        log_probs: [N, L], or [T] with `cu_seqlens`, fp32: the policy's log-probability of each token. It gets a
            gradient.
        advantages: [N] or the shape of `log_probs`, floating point.
        mask: The shape of `log_probs`, bool: the tokens of the completions that the policy wrote.
        old_log_probs: The shape and the dtype of `log_probs`: the same of the policy that sampled the tokens. By
            default they are those of the policy itself, detached.
        ref_log_probs: The same of the reference model. `beta` needs it.
        loss_type: One of the table: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, gspo.
        importance_sampling_level: `token`, or `sequence` for the ratio exp(mean over the tokens of log p - log p_old).
            The default is `sequence` for luspo and gspo, and `token` for other types.
        epsilon: e_low, not negative.
        epsilon_high: e_high, not negative; by default e_low. For cispo it is the largest ratio and has no default;
            arXiv:2510.13786 has 5.
        delta: The largest ratio with a negative advantage that has a gradient (arXiv:2505.07291), positive. Types
            without clipping need None.
        beta: The weight of the KL divergence from the reference model.
        kl_estimator: `k1`, `k2` or `k3`; see `kl_estimate`.
        use_bias_correction_kl: Multiply the KL estimate by the ratio, which makes the gradient unbiased
            (arXiv:2512.02556).
        sapo_temperature_pos, sapo_temperature_neg: t_pos and t_neg, positive.
        vespo_k_pos, vespo_lambda_pos: k and l for advantages that are not negative; not negative.
        vespo_k_neg, vespo_lambda_neg: The same for negative advantages.
        entropy: The shape of `log_probs`: the entropy of the policy at each token. It gets a gradient from
            `entropy_coef`.
        entropy_coef: The weight of the entropy bonus, the mean entropy of the tokens that are in the policy loss.
        top_entropy_quantile: The share of the tokens in [0, 1], those with the largest entropies, that are in the
            policy loss (arXiv:2506.01939). The KL divergence keeps all tokens.
        top_entropy_threshold: Without dimensions: the smallest of these entropies, if it was computed over several
            batches or ranks; by default `entropy_threshold` computes it from this batch.
        importance_sampling_ratio: [N] or the shape of `log_probs`: the result of the function of that name. vespo takes
            the ratios of tokens only.
        sampling_log_probs: The shape and the dtype of `log_probs`: those of the sampling engine, for
            `off_policy_mask_threshold`; by default `old_log_probs`. NaN means unknown.
        off_policy_mask_threshold: Remove sequences with a negative advantage whose mean of log p_sampling - log p
            exceeds this (arXiv:2512.02556).
        num_items_in_batch: A number, or a tensor without dimensions: the divisor of dapo, cispo and vespo, which counts
            as at least 1. With R ranks it is the number of tokens of the optimizer step on all ranks, divided by R. By
            default it is the number of tokens of this batch. Other types need None.
        max_completion_length: The constant of dr_grpo, positive. Other types need None.
        cu_seqlens: [N + 1], int64 | int32: the boundaries of packed sequences.
        part_of: As in `dpo_loss`.

    Returns:
        The loss, without dimensions, and the metrics: `policy_loss` (without the entropy bonus); `entropy` if it is
        given; `kl` if `beta` is not 0; `clip_ratio/low_mean`, `/high_mean`, `/region_mean`, `/low_min` and `/high_max`
        of types with clipping; `cispo_clip_ratio`; `vespo/phi_seq_mean`. Ratios of sequences give means over the
        sequences, ratios of tokens means over the tokens. The extrema over no sequences are NaN.

        With gradient accumulation divide the loss by the number of steps, but for dapo, cispo and vespo with a
        `num_items_in_batch` that counts the tokens of all steps divide only `entropy_coef`.

    Raises: See `tigon.losses`.
    Source: Shao et al., "DeepSeekMath", arXiv:2402.03300; the tables in this module's docstring.

    Example:
        >>> from tigon.losses import grpo_loss
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-2.0, 0.0]], requires_grad=True)
        >>> advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([[True, True], [True, False]])
        >>> loss, metrics = grpo_loss(log_probs, advantages, mask, loss_type="grpo")
        >>> loss.backward()
        >>> log_probs.grad
        tensor([[-0.2500, -0.2500],
                [ 0.5000,  0.0000]])
    """
    op = "grpo_loss"
    sequences = check_sequences(
        op, log_probs, mask, cu_seqlens, part_of=part_of, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs,
        sampling_log_probs=sampling_log_probs,
    )  # fmt: skip
    checks.choice(op, "loss_type", loss_type, tuple(GRPO_LOSSES))
    advantages_per_sequence = check_per_sequence(op, "advantages", advantages, sequences, or_tokens=True)
    checks.choice(op, "importance_sampling_level", importance_sampling_level, ("token", "sequence", None))
    level = importance_sampling_level or _LEVELS.get(loss_type, "token")
    clip = check_clip(op, epsilon, epsilon_high, delta)
    if clip.delta is not None and loss_type in _TYPES_WITHOUT_CLIPPING:
        raise ValueError(f"{op}: delta must be None for loss_type {loss_type!r}, got {clip.delta:g}")
    if epsilon_high is None and loss_type == "cispo":
        raise ValueError(f"{op}: epsilon_high must be a number for loss_type 'cispo', got None")
    beta = checks.number(op, "beta", beta)
    if beta and ref_log_probs is None:
        raise ValueError(f"{op}: ref_log_probs must be a tensor if beta is {beta:g}, got None")
    checks.choice(op, "kl_estimator", kl_estimator, KL_ESTIMATORS)
    checks.flag(op, use_bias_correction_kl=use_bias_correction_kl)
    objective = Objective(
        loss_type=loss_type,
        is_sequence_level=level == "sequence",
        clip=clip,
        beta=beta,
        kl_estimator=kl_estimator,
        use_bias_correction_kl=use_bias_correction_kl,
        temperature_pos=checks.number(op, "sapo_temperature_pos", sapo_temperature_pos, 0.0, excludes_low=True),
        temperature_neg=checks.number(op, "sapo_temperature_neg", sapo_temperature_neg, 0.0, excludes_low=True),
        gamma_weight=GammaWeight(
            k_pos=checks.number(op, "vespo_k_pos", vespo_k_pos, 0.0),
            lambda_pos=checks.number(op, "vespo_lambda_pos", vespo_lambda_pos, 0.0),
            k_neg=checks.number(op, "vespo_k_neg", vespo_k_neg, 0.0),
            lambda_neg=checks.number(op, "vespo_lambda_neg", vespo_lambda_neg, 0.0),
        ),
    )
    coefficient = check_entropy(op, entropy, entropy_coef, sequences)
    quantile = checks.number(op, "top_entropy_quantile", top_entropy_quantile, 0.0, 1.0)
    selects_tokens = _check_selection(op, entropy, quantile, top_entropy_threshold, sequences, coefficient)
    sampling_ratio = None
    if importance_sampling_ratio is not None:
        sampling_ratio = _check_sampling_ratio(op, importance_sampling_ratio, sequences, loss_type)
    if off_policy_mask_threshold is not None:
        off_policy_mask_threshold = checks.number(op, "off_policy_mask_threshold", off_policy_mask_threshold)
    divisor = check_divisor(op, loss_type, sequences, num_items_in_batch, max_completion_length)

    tokens = PolicyTokens.of(
        sequences, log_probs, advantages, advantages_per_sequence, old_log_probs, ref_log_probs, sampling_ratio
    )
    is_kept = None
    if off_policy_mask_threshold is not None:
        sampled = tokens.old_log_probs if sampling_log_probs is None else sampling_log_probs
        is_kept = on_policy(
            sequences, tokens.log_probs, sampled, tokens.advantages, advantages_per_sequence, off_policy_mask_threshold
        )  # fmt: skip
        is_kept = sequences.expand(is_kept) if advantages_per_sequence else is_kept
    selected = None
    if entropy is not None and selects_tokens:
        if top_entropy_threshold is None:
            top_entropy_threshold = entropy_threshold(entropy, sequences.mask, quantile)
        selected = entropy.detach() >= top_entropy_threshold
        is_kept = selected if is_kept is None else is_kept & selected
    losses = objective.losses(tokens, is_kept)
    total = reduce_losses(sequences, losses.losses, loss_type, divisor)
    loss, shared_metrics = with_entropy(total, sequences, entropy, coefficient, selected)
    return loss, losses.metrics | shared_metrics


def _check_selection(
    op: str, entropy: Tensor | None, quantile: float, threshold: Tensor | None, sequences: Sequences, coefficient: float
) -> bool:
    """Check the options that select tokens by their entropy, and return whether they do."""
    selects_tokens = quantile < 1 or threshold is not None
    if entropy is None and selects_tokens:
        raise ValueError(f"{op}: entropy must be a tensor if tokens are selected by their entropy, got None")
    if threshold is not None:
        checks.tensor(op, top_entropy_threshold=threshold)
        checks.shape(op, "top_entropy_threshold", threshold, ())
        checks.same(op, "device", mask=sequences.mask, top_entropy_threshold=threshold)
    if sequences.part_of is not None and selects_tokens and (threshold is None or coefficient):
        raise ValueError(
            f"{op}: part_of must be None if tokens are selected by the entropies of the whole batch; pass "
            "top_entropy_threshold, and an entropy_coef of 0"
        )
    return selects_tokens


def _check_sampling_ratio(op: str, ratio: Tensor, sequences: Sequences, loss_type: str) -> Tensor:
    """Return the importance ratios of the sampling engine as values of tokens."""
    if loss_type == "vespo":
        checks.tensor(op, importance_sampling_ratio=ratio)
        checks.shape(op, "importance_sampling_ratio", ratio, sequences.mask.shape)
    if check_per_sequence(op, "importance_sampling_ratio", ratio, sequences, or_tokens=True) and loss_type != "vespo":
        return sequences.expand(ratio)
    return ratio


def reduce_losses(sequences: Sequences, losses: Tensor, loss_type: str, divisor: Tensor | float) -> Tensor:
    reduce = GRPO_LOSSES[loss_type]
    return sequences.masked(losses).sum() / divisor if reduce is None else reduce(sequences, losses)


def check_divisor(
    op: str, loss_type: str, sequences: Sequences, num_items_in_batch: object, max_completion_length: object
) -> Tensor | float:
    is_constant, is_count = loss_type == "dr_grpo", loss_type in ("dapo", "cispo", "vespo")
    if is_constant == (max_completion_length is None):
        rule = "be an int" if is_constant else "be None"
        raise ValueError(
            f"{op}: max_completion_length must {rule} for loss_type {loss_type!r}, "
            f"got {checks.format_value(max_completion_length)}"
        )
    if num_items_in_batch is not None and not is_count:
        raise ValueError(
            f"{op}: num_items_in_batch must be None for loss_type {loss_type!r}, "
            f"got {checks.format_value(num_items_in_batch)}"
        )
    if is_constant:
        return float(sequences.sequence_count() * checks.size(op, "max_completion_length", max_completion_length))
    if num_items_in_batch is None:
        return sequences.token_count()
    if not isinstance(num_items_in_batch, Tensor):
        return max(checks.number(op, "num_items_in_batch", num_items_in_batch, 0.0), 1.0)
    checks.shape(op, "num_items_in_batch", num_items_in_batch, ())
    checks.same(op, "device", mask=sequences.mask, num_items_in_batch=num_items_in_batch)
    return num_items_in_batch.detach().clamp(min=1)
