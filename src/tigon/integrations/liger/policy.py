"""GRPO with Liger's order of arguments and results, on `tigon.GRPOLoss` and `tigon.losses.grpo_loss`.

Values at masked tokens have no effect, also in "luspo", whose mean in Liger has them too.

Shapes: N sequences, L tokens each, H features, V vocabulary.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.losses.modules import GRPOLoss
from tigon.losses.policy import check_divisor, grpo_loss, reduce_losses
from tigon.losses.policy_objectives import GammaWeight, Objective, PolicyTokens, check_clip
from tigon.losses.sequences import Metrics, Sequences
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.logits.cross_entropy import cross_entropy

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TYPES_WITHOUT_CLIPPING = ("cispo", "sapo", "vespo")
# Tokens with this target are outside of completions.
IGNORED = -100


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
        positive: dict[str, float] = {}
        if loss_type == "sapo":
            positive = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
        if delta is not None:
            positive["delta"] = delta
        for option, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name}: {option} must be above 0, got {value}")
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError(f"{name}: dr_grpo needs max_completion_length, got None")
        _check_loss_type(name, loss_type)
        if importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"{name}: importance_sampling_level must be token or sequence, got {importance_sampling_level!r}"
            )
        self.beta, self.use_ref_model, self.loss_type, self.temperature = beta, use_ref_model, loss_type, temperature
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.importance_sampling_level = max_completion_length, importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self._loss: tuple[dict[str, Any], GRPOLoss] | None = None

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Return the loss; and the mean KL divergence, unless beta is 0, and the share of clipped tokens."""
        name, mask = type(self).__name__, attention_mask != 0
        _check_level(name, self.loss_type, self.importance_sampling_level)
        targets = torch.where(mask, selected_token_ids, IGNORED)
        ref = ref_per_token_logps if self.use_ref_model else None
        if ref is not None and ref_input is not None:
            warnings.warn(
                f"{name}: ref_input is ignored, because the log-probabilities of the reference are given. "
                "Using ref_per_token_logps.",
                stacklevel=2,
            )
        if self.use_ref_model and self.beta != 0.0 and ref is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(f"{name}: use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight")
            with torch.no_grad():
                log_probs = linear_log_probs(
                    ref_input,
                    ref_weight,
                    targets,
                    bias=ref_bias,
                    temperature=float(self.temperature),
                    ignore_index=IGNORED,
                )
            assert isinstance(log_probs, Tensor)
            ref = log_probs
        ratio = ratio_of_tokens(name, vllm_is_ratio, mask, self.loss_type)
        loss, metrics = self._module(ref is not None)(
            _input, lin_weight, targets, _of_tokens(advantages, mask), _cast(old_per_token_logps, _input),
            bias=bias, ref_log_probs=_cast(ref, _input), importance_sampling_ratio=ratio,
            num_items_in_batch=_divisor(self.loss_type, mask, num_items_in_batch),
        )  # fmt: skip
        return loss, _metrics_of_liger(loss, metrics, self.beta)

    def _module(self, has_reference: bool) -> GRPOLoss:
        """Return the loss for the current values of the attributes."""
        options = _options(
            self.loss_type, self.importance_sampling_level, self.epsilon_low, self.epsilon_high, self.delta,
            self.beta if has_reference else 0.0, self.use_bias_correction_kl, self.max_completion_length,
            sapo_temperature_pos=self.sapo_temperature_pos, sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos, vespo_lambda_pos=self.vespo_lambda_pos, vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg, temperature=float(self.temperature),
        )  # fmt: skip
        if self._loss is None or self._loss[0] != options:
            self._loss = dict(options), GRPOLoss(**options)
        return self._loss[1]


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple:  # fmt: skip
    """Return GRPO of logits [N, L + 1, V], whose last row of each sequence predicts no token.

    With `reduce` the result is the loss and Liger's metrics; otherwise the losses, the KL divergences (None if beta is
    0) and which ratios are clipped, [N, L] each, with zeros at masked tokens. `inplace` has no effect.
    """
    op = "triton_grpo_loss"
    _check_loss_type(op, loss_type)
    _check_level(op, loss_type, importance_sampling_level)
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"{op}: ref_logp must be a tensor if beta is {beta:g}, got None")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    log_probs = _log_probs_of_logits(logits, completion_ids, mask, temperature)
    weights = {
        "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
        "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg,
    }  # fmt: skip
    options = _options(
        loss_type, importance_sampling_level, eps_low, eps_high, delta, beta, use_bias_correction_kl,
        max_completion_length or mask.shape[1], **weights,
    )  # fmt: skip
    advantages, ratio = _of_tokens(advantages, mask), ratio_of_tokens(op, vllm_is_ratio, mask, loss_type)
    old, ref = _cast(old_logp, logits), _cast(ref_logp, logits)
    if reduce:
        loss, metrics = grpo_loss(
            log_probs, advantages, mask, old, ref, importance_sampling_ratio=ratio,
            num_items_in_batch=_divisor(loss_type, mask, num_items_in_batch), **options,
        )  # fmt: skip
        return loss, list(_metrics_of_liger(loss, metrics, beta))
    sequences = Sequences(mask, None)
    objective = Objective(
        loss_type, importance_sampling_level == "sequence", check_clip(op, eps_low, eps_high, options.get("delta")),
        beta, "k3", use_bias_correction_kl, sapo_temperature_pos, sapo_temperature_neg,
        GammaWeight(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
    )  # fmt: skip
    tokens = objective.losses(PolicyTokens.of(sequences, log_probs, advantages, False, old, ref, ratio))
    is_clipped = torch.zeros_like(mask) if tokens.is_clipped is None else tokens.is_clipped & mask
    divergence = None if tokens.divergence is None else sequences.masked(tokens.divergence)
    return sequences.masked(tokens.losses), divergence, is_clipped.to(log_probs.dtype)


def reduce_grpo_loss(
    per_token_loss: Tensor, completion_mask: Tensor | None, loss_type: str, max_completion_length: int | None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss of the batch from losses [N, L] of tokens."""
    op = "_reduce_grpo_loss"
    _check_loss_type(op, loss_type)
    mask = torch.ones_like(per_token_loss, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    sequences, length = Sequences(mask, None), max_completion_length or mask.shape[1]
    divisor = check_divisor(
        op, loss_type, sequences, _divisor(loss_type, mask, num_items_in_batch),
        length if loss_type == "dr_grpo" else None,
    )  # fmt: skip
    return reduce_losses(sequences, per_token_loss, loss_type, divisor)


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probabilities [N, L] of the last L tokens for logits [N, L + 1, V], without gradients."""
    length = logits.shape[1] - 1
    ids = input_ids[:, -length:]
    return _log_probs_of_logits(logits, ids, None if mask is None else mask[:, -length:] != 0, temperature)


@torch.no_grad()
def get_gamma_weights(
    advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """Return the weights [N, 1] of VESPO for advantages [N] and log-ratios [N, L]."""
    sequences, gamma = Sequences(mask != 0, None), GammaWeight(k_pos, lambda_pos, k_neg, lambda_neg)
    ratio = ratio_of_tokens("get_gamma_weights", importance_sampling_ratio, sequences.mask, "vespo")
    ratio = None if ratio is None else torch.where(sequences.mask, ratio, 1.0)
    return gamma.weights(gamma.log_ratios(sequences, log_ratio_per_token, ratio), advantages)[:, None]


# --- between the arguments of Liger and those of Tigon ---------------------------------------------


def _check_loss_type(name: str, loss_type: str) -> None:
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"{name}: loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")


def _check_level(name: str, loss_type: str, level: str) -> None:
    if level == "sequence" and loss_type in TYPES_WITHOUT_CLIPPING:
        raise ValueError(
            f"{name}: Sequence-level importance sampling is not supported for loss_type {loss_type!r}; pass "
            "importance_sampling_level='token', got 'sequence'"
        )


def _options(
    loss_type: str, level: str, low: float, high: float, delta: float | None, beta: float,
    use_bias_correction_kl: bool, max_completion_length: int | None, **others: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of `tigon.losses.grpo_loss`, without those that Liger ignores for this type."""
    used = {name: value for name, value in others.items() if name.partition("_")[0] in (loss_type, "temperature")}
    return used | {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon": low, "epsilon_high": high,
        "delta": None if loss_type in TYPES_WITHOUT_CLIPPING else delta, "beta": beta,
        "use_bias_correction_kl": use_bias_correction_kl,
        "max_completion_length": max_completion_length if loss_type == "dr_grpo" else None,
    }  # fmt: skip


def _cast(values: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the values in the dtype that log-probabilities have for hidden states or logits `like`."""
    return None if values is None else values.to(torch.promote_types(like.dtype, torch.float32))


def _of_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages [N] as values [N, L] of tokens, so that metrics are means over the tokens."""
    advantages = advantages.to(torch.promote_types(advantages.dtype, torch.float32))
    return advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages


def ratio_of_tokens(name: str, ratio: Tensor | None, mask: Tensor, loss_type: str) -> Tensor | None:
    """Return ratios [N], [N, 1] or [N, L] of the sampling engine as values [N, L] of tokens."""
    if ratio is None:
        return None
    shape, sequences = tuple(mask.shape), len(mask)
    if tuple(ratio.shape) not in ((sequences,), (sequences, 1), shape):
        raise ValueError(
            f"{name}: vllm_is_ratio must have shape {(sequences,)}, {(sequences, 1)} or {shape}, got "
            f"{tuple(ratio.shape)}"
        )
    ratio = ratio.float()
    if tuple(ratio.shape) == shape:
        return ratio
    ratio = ratio.view(sequences, 1)
    if loss_type != "vespo":
        return ratio.expand(shape)
    # "vespo" multiplies the ratios of all tokens. The first token that counts gets the ratio of the sequence.
    return torch.where(mask & (mask.cumsum(-1) == 1), ratio, 1.0)


def _divisor(loss_type: str, mask: Tensor, num_items: Any) -> Tensor | None:
    """Return the divisor of the sum over the batch, or None for a type that has another."""
    return compute_dapo_normalizer(mask, num_items) if loss_type in ("dapo", "cispo", "vespo") else None


def compute_dapo_normalizer(attention_mask: Tensor, num_items_in_batch: Tensor | float | None = None) -> Tensor:
    """Return the number of tokens of the batch on all ranks, divided by the number of ranks, and at least 1."""
    is_distributed = dist.is_available() and dist.is_initialized()
    if num_items_in_batch is not None:
        count = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=attention_mask.device)
    else:
        count = attention_mask.sum(dtype=torch.float32)
        if is_distributed:
            dist.all_reduce(count)
    return (count / (dist.get_world_size() if is_distributed else 1)).clamp(min=1.0)


def _metrics_of_liger(loss: Tensor, metrics: Metrics, beta: float) -> tuple[Tensor, ...]:
    """Return the mean KL divergence, unless beta is 0, and the share of clipped tokens."""
    zero = torch.zeros_like(loss.detach())
    is_clipped = metrics.get("clip_ratio/region_mean", metrics.get("cispo_clip_ratio", zero))
    return (is_clipped,) if beta == 0.0 else (metrics.get("kl", zero), is_clipped)


def _log_probs_of_logits(logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """Return the log-probabilities [N, L] of tokens, zero at masked tokens, for logits [N, L + 1, V]."""
    targets = ids if mask is None else torch.where(mask, ids, IGNORED)
    losses = cross_entropy(
        logits[:, :-1], targets, reduction="none", logit_scale=1.0 / temperature, ignore_index=IGNORED
    )
    assert isinstance(losses, Tensor)
    return -losses
