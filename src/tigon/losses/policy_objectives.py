"""The objectives of policies: how a ratio and an advantage make a loss, and what the losses report.

The docstring of `tigon.losses.policy` has the formulas. Ratios and advantages are values of tokens or of sequences.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.losses.policy_terms import extremum, kl_estimate
from tigon.losses.sequences import Metrics, Sequences, bounded_exp, mean
from tigon.runtime import checks


def choose(condition: Tensor, x: float, y: float, dtype: torch.dtype) -> Tensor:
    """Return x where the condition holds and y elsewhere. `torch.where` of two numbers would round them to fp32."""
    numbers = condition.new_full((), x, dtype=dtype), condition.new_full((), y, dtype=dtype)
    return torch.where(condition, *numbers)


@dataclass(frozen=True)
class Clip:
    """The bounds of the ratio: [1 - low, 1 + high], and `delta` above which a ratio counts as `delta`."""

    low: float
    high: float
    delta: float | None

    def loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return -min(min(r, delta) A, clip(r) A)."""
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(self._limited(ratio) * advantages, clipped * advantages)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the lower and where the upper bound removes the gradient."""
        ratio = self._limited(ratio.detach())
        return (ratio < 1 - self.low) & (advantages < 0), (ratio > 1 + self.high) & (advantages > 0)

    def _limited(self, ratio: Tensor) -> Tensor:
        return ratio if self.delta is None else ratio.clamp(max=self.delta)


@dataclass(frozen=True)
class GammaWeight:
    """exp(l) w^k exp(-l w), the weight of VESPO, with other k and l for negative advantages."""

    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float

    # The limits of the logarithm of a ratio.
    smallest, largest = math.log(1e-8), 20.0

    def log_ratios(self, sequences: Sequences, log_ratio: Tensor, sampling_ratio: Tensor | None) -> Tensor:
        """Return log w [N], the sum of the log-ratios of the tokens."""
        log_weight = sequences.sum(log_ratio.clamp(-self.largest, self.largest))
        if sampling_ratio is not None:
            log_weight = log_weight + sequences.sum(sampling_ratio.log().clamp(self.smallest, self.largest))
        return log_weight.clamp(self.smallest, self.largest)

    def weights(self, log_weight: Tensor, advantages: Tensor) -> Tensor:
        k = choose(advantages >= 0, self.k_pos, self.k_neg, log_weight.dtype)
        decay = choose(advantages >= 0, self.lambda_pos, self.lambda_neg, log_weight.dtype).clamp(min=1e-4)
        return (decay + k * log_weight - decay * log_weight.exp()).exp()


def _sapo(ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    temperature = choose(advantages > 0, temperature_pos, temperature_neg, ratio.dtype)
    return -4 / temperature * (temperature * (ratio - 1)).sigmoid() * advantages


def mean_of_means(sequences: Sequences, values: Tensor) -> Tensor:
    return sequences.sequence_mean(sequences.mean(values))


def mean_of_sums(sequences: Sequences, values: Tensor) -> Tensor:
    return sequences.sequence_mean(sequences.sum(values))


class PolicyTokens(NamedTuple):
    """The arguments of a loss. Values of masked tokens and of empty sequences are zero, and their ratios are one."""

    sequences: Sequences
    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    # These are [N], or values of tokens.
    advantages: Tensor
    advantages_per_sequence: bool
    sampling_ratio: Tensor | None  # The importance ratios of the sampling engine, as values of tokens

    @staticmethod
    def of(
        sequences: Sequences, log_probs: Tensor, advantages: Tensor, advantages_per_sequence: bool,
        old_log_probs: Tensor | None, ref_log_probs: Tensor | None, sampling_ratio: Tensor | None,
    ) -> "PolicyTokens":  # fmt: skip
        """Replace the values that do not count, because in backward even zero times NaN would be NaN."""
        log_probs = sequences.masked(log_probs)
        return PolicyTokens(
            sequences,
            log_probs,
            log_probs.detach() if old_log_probs is None else sequences.masked(old_log_probs.detach()),
            None if ref_log_probs is None else sequences.masked(ref_log_probs.detach()),
            sequences.neutral(advantages.detach().to(log_probs.dtype), advantages_per_sequence),
            advantages_per_sequence,
            None if sampling_ratio is None else torch.where(sequences.mask, sampling_ratio.detach(), 1.0),
        )


class TokenLosses(NamedTuple):
    """The losses of tokens, and values for the metrics. Those of masked tokens are finite, but have no meaning."""

    losses: Tensor
    divergence: Tensor | None  # The KL divergence of each token, not multiplied by beta. It is None if beta is 0.
    # True where a bound removes the gradient: values of tokens or of sequences. It is None for types without clipping.
    is_clipped: Tensor | None
    metrics: Metrics


@dataclass(frozen=True)
class Objective:
    """The options of the loss of a token in GRPO and its variants. `tigon.losses.policy` gives the formulas."""

    loss_type: str
    is_sequence_level: bool
    clip: Clip
    beta: float
    kl_estimator: str
    use_bias_correction_kl: bool
    temperature_pos: float
    temperature_neg: float
    gamma_weight: GammaWeight

    def losses(self, tokens: PolicyTokens, is_kept: Tensor | None = None) -> TokenLosses:
        """Return the losses of tokens. Where `is_kept` is False, only the KL divergence remains."""
        sequences, log_probs, dtype = tokens.sequences, tokens.log_probs, tokens.log_probs.dtype
        log_ratio = log_probs - tokens.old_log_probs
        # The ratios and the advantages are both values of sequences, or both values of tokens.
        by_sequence = tokens.advantages_per_sequence and (self.is_sequence_level or self.loss_type == "vespo")
        advantage = tokens.advantages
        if tokens.advantages_per_sequence and not by_sequence:
            advantage = sequences.expand(advantage)
        to_tokens = sequences.expand if by_sequence else lambda values: values
        average = mean if by_sequence else sequences.token_mean
        if self.is_sequence_level:
            sequence_ratio = bounded_exp(sequences.mean(log_ratio))
            token_ratio = sequences.expand(sequence_ratio)
            ratio = sequence_ratio if by_sequence else token_ratio
        else:
            ratio = token_ratio = bounded_exp(log_ratio)
        metrics: Metrics = {}
        is_clipped = None
        if self.loss_type == "cispo":
            losses = to_tokens(-ratio.detach().clamp(max=self.clip.high) * advantage) * log_probs
            is_clipped = (ratio.detach() > self.clip.high) & (advantage > 0)
            if sequences.has_metrics:
                metrics["cispo_clip_ratio"] = average(is_clipped.to(dtype))
        elif self.loss_type == "vespo":
            log_weight = self.gamma_weight.log_ratios(sequences, log_ratio.detach(), tokens.sampling_ratio)
            weight = self.gamma_weight.weights(log_weight if by_sequence else sequences.expand(log_weight), advantage)
            losses = to_tokens(-weight * advantage) * log_probs
            if sequences.has_metrics:
                metrics["vespo/phi_seq_mean"] = average(weight)
        elif self.loss_type == "sapo":
            losses = to_tokens(_sapo(ratio, advantage, self.temperature_pos, self.temperature_neg))
        else:
            losses = to_tokens(self.clip.loss(ratio, advantage))
            low, high = self.clip.is_clipped(ratio, advantage)
            is_clipped = low | high
            if sequences.has_metrics:
                metrics |= clip_metrics(sequences, low, high, dtype, by_sequence)
        if is_kept is not None:
            losses = torch.where(is_kept, losses, 0.0)
        if tokens.sampling_ratio is not None and self.loss_type != "vespo":
            losses = losses * tokens.sampling_ratio
        divergence = None
        if self.beta and tokens.ref_log_probs is not None:
            divergence = kl_estimate(log_probs, tokens.ref_log_probs, self.kl_estimator)
            if self.use_bias_correction_kl:
                divergence = divergence * token_ratio
            losses = losses + self.beta * divergence
            if sequences.has_metrics:
                metrics["kl"] = sequences.token_mean(divergence.detach())
        return TokenLosses(losses, divergence, is_clipped, metrics)


def check_clip(op: str, epsilon: object, epsilon_high: object, delta: object) -> Clip:
    low = checks.number(op, "epsilon", epsilon, 0.0)
    high = low if epsilon_high is None else checks.number(op, "epsilon_high", epsilon_high, 0.0)
    return Clip(low, high, None if delta is None else checks.number(op, "delta", delta, 0.0, excludes_low=True))


def check_entropy(op: str, entropy: Tensor | None, entropy_coef: object, sequences: Sequences) -> float:
    coefficient = checks.number(op, "entropy_coef", entropy_coef)
    if entropy is not None:
        checks.tensor(op, entropy=entropy)
        checks.floating(op, entropy=entropy)
        checks.shape(op, "entropy", entropy, sequences.mask.shape)
        checks.same(op, "device", mask=sequences.mask, entropy=entropy)
    elif coefficient:
        raise ValueError(f"{op}: entropy must be a tensor if entropy_coef is {coefficient:g}, got None")
    return coefficient


def clip_metrics(sequences: Sequences, low: Tensor, high: Tensor, dtype: torch.dtype, per_sequence: bool) -> Metrics:
    """Return the shares of clipped ratios: their means, and the extrema of the shares of the sequences."""
    low, high, region = low.to(dtype), high.to(dtype), (low | high).to(dtype)
    if per_sequence:
        shares, average, has_share = (lambda x: x), mean, torch.ones_like(low, dtype=torch.bool)
    else:
        shares, average, has_share = sequences.mean, sequences.token_mean, sequences.lengths > 0
    return {
        "clip_ratio/low_mean": average(low),
        "clip_ratio/high_mean": average(high),
        "clip_ratio/region_mean": average(region),
        "clip_ratio/low_min": extremum(shares(low), has_share, largest=False, empty=math.nan),
        "clip_ratio/high_max": extremum(shares(high), has_share, largest=True, empty=math.nan),
    }


def with_entropy(
    loss: Tensor, sequences: Sequences, entropy: Tensor | None, coefficient: float, selected: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Subtract the entropy bonus: the mean entropy of the tokens, or of the selected ones."""
    metrics = {"policy_loss": loss.detach()} if sequences.has_metrics else {}
    if entropy is not None:
        entropy = entropy.to(loss.dtype)
    if entropy is not None and sequences.has_metrics:
        metrics["entropy"] = sequences.token_mean(entropy.detach())
    if entropy is not None and coefficient:
        if selected is None:
            return loss - coefficient * sequences.masked(entropy).sum() / sequences.token_count(), metrics
        mask = sequences.mask & selected
        loss = loss - coefficient * torch.where(mask, entropy, 0.0).sum() / mask.sum().clamp(min=1)
    return loss, metrics
