"""The objectives of policies: how a ratio and an advantage make a loss, and what the losses report.

The docstring of `tigon.losses.policy` has the formulas. Ratios and advantages are values of tokens or of sequences.

Shapes: N sequences, L tokens of a padded row, T packed tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.losses.policy_terms import extremum
from tigon.losses.sequences import Metrics, Sequences, mean
from tigon.runtime import checks

__all__ = [
    "Clip",
    "GammaWeight",
    "check_clip",
    "check_entropy",
    "choose",
    "clip_metrics",
    "mean_of_means",
    "mean_of_sums",
    "sapo",
    "with_entropy",
]


# --- objectives ----------------------------------------------------------------------------------


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
        """Return the weights of log w."""
        k = choose(advantages >= 0, self.k_pos, self.k_neg, log_weight.dtype)
        decay = choose(advantages >= 0, self.lambda_pos, self.lambda_neg, log_weight.dtype).clamp(min=1e-4)
        return (decay + k * log_weight - decay * log_weight.exp()).exp()


def sapo(ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """Return -(4 / t) sigmoid(t (r - 1)) A."""
    temperature = choose(advantages > 0, temperature_pos, temperature_neg, ratio.dtype)
    return -4 / temperature * (temperature * (ratio - 1)).sigmoid() * advantages


def mean_of_means(sequences: Sequences, values: Tensor) -> Tensor:
    """Return the mean over the sequences of the mean over their tokens."""
    return sequences.sequence_mean(sequences.mean(values))


def mean_of_sums(sequences: Sequences, values: Tensor) -> Tensor:
    """Return the mean over the sequences of the sum over their tokens."""
    return sequences.sequence_mean(sequences.sum(values))


# --- parts that the losses share -----------------------------------------------------------------


def check_clip(op: str, epsilon: object, epsilon_high: object, delta: object) -> Clip:
    """Return the bounds of the ratio."""
    low = checks.number(op, "epsilon", epsilon, 0.0)
    high = low if epsilon_high is None else checks.number(op, "epsilon_high", epsilon_high, 0.0)
    return Clip(low, high, None if delta is None else checks.number(op, "delta", delta, 0.0, excludes_low=True))


def check_entropy(op: str, entropy: Tensor | None, entropy_coef: object, sequences: Sequences) -> float:
    """Return the weight of the entropy bonus."""
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
