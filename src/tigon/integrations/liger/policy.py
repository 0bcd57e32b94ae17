"""GRPO with Liger's order of arguments and results, on `tigon.linear_loss`. `tigon.GRPOLoss` has more options.

Shapes: N sequences, L tokens each, H features, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss

__all__ = ["LigerFusedLinearGRPOLoss"]

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# Tokens with this target are outside of completions.
IGNORED = -100
# The bounds of log-ratios before an exponential.
LARGEST_LOG_RATIO, SMALLEST_LOG_RATIO = 20.0, math.log(1e-8)


class _Part(NamedTuple):
    """The values of some sequences."""

    # [N, L] in fp32.
    log_probs: Tensor
    # [N, L] in fp32, one inside of completions and zero elsewhere.
    mask: Tensor
    # [N, 1].
    advantages: Tensor
    # [N, L] each.
    old_log_probs: Tensor
    ref_log_probs: Tensor
    # [N, L] or [N, 1], or None.
    rollout_ratio: Tensor | None


class LigerFusedLinearGRPOLoss(nn.Module):
    """GRPO and its variants. Source: Shao et al., arXiv:2402.03300, and the papers of `tigon.losses.grpo_loss`."""

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        positive = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
        if delta is not None:
            positive["delta"] = delta
        for option, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name}: {option} must be above 0, got {value}")
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"{name}: loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
        if importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"{name}: importance_sampling_level must be token or sequence, got {importance_sampling_level!r}"
            )
        if importance_sampling_level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(f"{name}: {loss_type} needs importance_sampling_level='token', got 'sequence'")
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError(f"{name}: dr_grpo needs max_completion_length, got None")
        self.beta, self.use_ref_model, self.loss_type, self.temperature = beta, use_ref_model, loss_type, temperature
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.importance_sampling_level = max_completion_length, importance_sampling_level
        self.sapo_temperatures = sapo_temperature_pos, sapo_temperature_neg
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo = (vespo_k_pos, vespo_lambda_pos), (vespo_k_neg, vespo_lambda_neg)

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Return the loss; and the mean KL divergence, unless beta is 0, and the share of clipped tokens."""
        mask = attention_mask.float()
        # The loss of "luspo" counts the tokens outside of completions too, as those of Liger and TRL do.
        is_ignored = (mask == 0) & (self.loss_type != "luspo")
        targets = torch.where(is_ignored, IGNORED, selected_token_ids)
        if self.use_ref_model and self.beta != 0.0 and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"{type(self).__name__}: use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight"
                )
            with torch.no_grad():
                values = linear_log_probs(
                    ref_input, ref_weight, targets, bias=ref_bias, temperature=self.temperature, ignore_index=IGNORED
                )
            assert isinstance(values, Tensor)
            ref_per_token_logps = values
        divisor, tokens = self._divisor(mask, num_items_in_batch), mask.sum().clamp(min=1.0)
        rollout_ratio = vllm_is_ratio
        if rollout_ratio is not None and rollout_ratio.dim() == 1:
            rollout_ratio = rollout_ratio[:, None]

        def loss_of_part(
            log_probs: Tensor, mask: Tensor, advantages: Tensor, old: Tensor | None, ref: Tensor | None,
            ratio: Tensor | None,
        ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
            same = log_probs.detach()
            old, ref = (same if x is None else x.float() for x in (old, ref))
            part = _Part(log_probs, mask, advantages[:, None].float(), old, ref, ratio)
            losses, kl, is_clipped = self._token_losses(part)
            metrics = [] if kl is None else [(kl.detach() * mask).sum() / tokens]
            metrics.append((is_clipped * mask).sum() / tokens)
            return self._sum(losses, mask) / divisor, tuple(metrics)

        return linear_loss(
            _input, lin_weight, targets, loss_of_part, mask, advantages, old_per_token_logps, ref_per_token_logps,
            rollout_ratio, group="sequence", reduction="sum", bias=bias, temperature=self.temperature,
            ignore_index=IGNORED,
        )  # fmt: skip

    def _token_losses(self, part: _Part) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the losses of all tokens [N, L], the KL divergences or None, and which ratios are clipped."""
        log_ratio = part.log_probs - part.old_log_probs
        if self.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * part.mask).sum(-1) / part.mask.sum(-1).clamp(min=1.0))[:, None]
        ratio, advantages = log_ratio.exp(), part.advantages
        is_clipped = torch.zeros_like(part.mask, dtype=torch.bool)
        if self.loss_type == "cispo":
            is_clipped = (ratio > self.epsilon_high) & (advantages > 0)
            losses = -ratio.clamp(max=self.epsilon_high).detach() * advantages * part.log_probs
        elif self.loss_type == "sapo":
            up, down = (torch.sigmoid(t * (ratio - 1)) * (4 / t) for t in self.sapo_temperatures)
            losses = -torch.where(advantages > 0, up, down) * advantages
        elif self.loss_type == "vespo":
            losses = -self._vespo_weights(part) * advantages * part.log_probs
        else:
            low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
            is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
            limited = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.min(limited * advantages, ratio.clamp(low, high) * advantages)
        if part.rollout_ratio is not None and self.loss_type != "vespo":
            losses = losses * part.rollout_ratio
        kl = None
        if self.beta != 0.0:
            difference = part.ref_log_probs - part.log_probs
            kl = difference.exp() - difference - 1.0
            if self.use_bias_correction_kl:
                kl = kl * ratio
            losses = losses + self.beta * kl
        return losses, kl, is_clipped.expand_as(part.mask)

    @torch.no_grad()
    def _vespo_weights(self, part: _Part) -> Tensor:
        """Return exp(lambda + k log w - lambda w) [N, 1] for the ratio w of each sequence."""
        largest, smallest = LARGEST_LOG_RATIO, SMALLEST_LOG_RATIO
        log_ratio = (part.log_probs - part.old_log_probs).clamp(-largest, largest)
        log_w = (log_ratio * part.mask).sum(-1, keepdim=True)
        if part.rollout_ratio is not None:
            log_w = log_w + part.rollout_ratio.log().clamp(smallest, largest).sum(-1, keepdim=True)
        log_w = log_w.clamp(smallest, largest)
        (k_up, rate_up), (k_down, rate_down) = self.vespo
        is_up = part.advantages >= 0
        k = torch.where(is_up, k_up, k_down)
        rate = torch.where(is_up, rate_up, rate_down).clamp(min=1e-4)
        weights = torch.exp(rate + k * log_w - rate * log_w.exp())
        return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses, weighted as the loss type says."""
        lengths = mask.sum(-1, keepdim=True)
        if self.loss_type in ("grpo", "sapo"):
            return ((losses * mask).sum(-1, keepdim=True) / lengths.clamp(min=1.0)).sum()
        if self.loss_type == "luspo":
            return (losses * lengths).sum() / losses.shape[1]
        return (losses * mask).sum()

    def _divisor(self, mask: Tensor, num_items: Any) -> Tensor | float:
        """Return the divisor of the sum over the batch."""
        if self.loss_type in ("grpo", "sapo", "luspo"):
            return float(len(mask))
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            return float(len(mask) * self.max_completion_length)
        if self.loss_type == "bnpo":
            return mask.sum().clamp(min=1.0)
        is_distributed = dist.is_available() and dist.is_initialized()
        if num_items is not None:
            count = torch.as_tensor(num_items, dtype=torch.float32, device=mask.device)
        else:
            count = mask.sum()
            if is_distributed:
                dist.all_reduce(count)
        return (count / (dist.get_world_size() if is_distributed else 1)).clamp(min=1.0)
