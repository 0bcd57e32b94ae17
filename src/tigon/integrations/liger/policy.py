"""GRPO with Liger's order of arguments and results, on `tigon.GRPOLoss` and `tigon.losses.grpo_loss`.

Values at masked tokens have no effect, also in "luspo", whose mean in Liger has them too.

Shapes: N sequences, L tokens each, H features, V vocabulary.
"""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.integrations.liger.signatures import serve
from tigon.losses.modules import GRPOLoss
from tigon.losses.policy import grpo_loss
from tigon.losses.policy_objectives import GammaWeight, Objective, PolicyTokens, check_clip
from tigon.losses.sequences import Metrics, Sequences
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.logits.cross_entropy import cross_entropy

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TYPES_WITHOUT_CLIPPING = ("cispo", "sapo", "vespo")
# The parameters of the weights of VESPO, in the order of `GammaWeight`.
GAMMA = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
# The target of tokens outside of completions.
IGNORED = -100


# GRPO's loss for each combination of options, so that a call does not check them again.
_module = functools.lru_cache(maxsize=16)(GRPOLoss)


def check_grpo(loss: Any) -> None:
    """Refuse options of GRPO that are wrong, or that its type of loss lacks."""
    name = type(loss).__name__
    positive: dict[str, float] = {}
    if loss.loss_type == "sapo":
        positive = {option: getattr(loss, option) for option in ("sapo_temperature_pos", "sapo_temperature_neg")}
    if loss.delta is not None:
        positive["delta"] = loss.delta
    for option, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name}: {option} must be above 0, got {value}")
    if loss.loss_type == "dr_grpo" and loss.max_completion_length is None:
        raise ValueError(f"{name}: dr_grpo needs max_completion_length, got None")
    _check_loss_type(name, loss.loss_type)
    level = loss.importance_sampling_level
    if level not in ("token", "sequence"):
        raise ValueError(f"{name}: importance_sampling_level must be token or sequence, got {level!r}")


def grpo(
    hidden: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
    bias: Tensor | None, ref_per_token_logps: Tensor | None, old_per_token_logps: Tensor | None, *,
    ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, vllm_is_ratio: Tensor | None,
    num_items_in_batch: Tensor | float | None, use_ref_model: bool, loss_type: str, importance_sampling_level: str,
    beta: float, temperature: float, **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """GRPO and its variants. Source: Shao et al., arXiv:2402.03300, and the papers of `tigon.losses.grpo_loss`. The
    results are the loss; and the mean KL divergence, unless beta is 0, and the share of clipped tokens."""
    name, mask = "LigerFusedLinearGRPOLoss", attention_mask != 0
    _check_level(name, loss_type, importance_sampling_level)
    targets = torch.where(mask, selected_token_ids, IGNORED)
    ref = ref_per_token_logps if use_ref_model else None
    if ref is not None and ref_input is not None:
        warnings.warn(
            f"{name}: ref_input is ignored, because the log-probabilities of the reference are given. "
            "Using ref_per_token_logps.",
            stacklevel=3,
        )
    if use_ref_model and beta != 0.0 and ref is None:
        if ref_input is None or ref_weight is None:
            raise ValueError(f"{name}: use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight")
        with torch.no_grad():
            log_probs = linear_log_probs(
                ref_input, ref_weight, targets, bias=ref_bias, temperature=float(temperature), ignore_index=IGNORED
            )
        assert isinstance(log_probs, Tensor)
        ref = log_probs
    options = _options(
        loss_type, importance_sampling_level, beta=beta if ref is not None else 0.0, temperature=float(temperature),
        **options,
    )  # fmt: skip
    loss, metrics = _module(**options)(
        hidden, weight, targets, _of_tokens(advantages, mask), _cast(old_per_token_logps, hidden),
        bias=bias, ref_log_probs=_cast(ref, hidden),
        importance_sampling_ratio=ratio_of_tokens(name, vllm_is_ratio, mask, loss_type),
        num_items_in_batch=_divisor(loss_type, mask, num_items_in_batch),
    )  # fmt: skip
    return loss, _metrics_of_liger(loss, metrics, beta)


def grpo_of_logits(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None, *, temperature: float, beta: float, loss_type: str, reduce: bool,
    importance_sampling_level: str, max_completion_length: int | None, vllm_is_ratio: Tensor | None,
    num_items_in_batch: Tensor | float | None, **options: Any,
) -> tuple:  # fmt: skip
    """Return GRPO of logits [N, L + 1, V], whose last row of each sequence predicts no token. With `reduce` the result
    is the loss and Liger's metrics; otherwise the losses, the KL divergences (None if beta is 0) and which ratios are
    clipped, [N, L] each, with zeros at masked tokens. `inplace` has no effect."""
    op = "triton_grpo_loss"
    _check_loss_type(op, loss_type)
    _check_level(op, loss_type, importance_sampling_level)
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"{op}: ref_logp must be a tensor if beta is {beta:g}, got None")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    log_probs = _log_probs_of_logits(logits, completion_ids, mask, temperature)
    advantages, ratio = _of_tokens(advantages, mask), ratio_of_tokens(op, vllm_is_ratio, mask, loss_type)
    old, ref = _cast(old_logp, logits), _cast(ref_logp, logits)
    used = _options(
        loss_type, importance_sampling_level, beta=beta,
        max_completion_length=max_completion_length or mask.shape[1], **options,
    )  # fmt: skip
    if reduce:
        loss, metrics = grpo_loss(
            log_probs, advantages, mask, old, ref, importance_sampling_ratio=ratio,
            num_items_in_batch=_divisor(loss_type, mask, num_items_in_batch), **used,
        )  # fmt: skip
        return loss, list(_metrics_of_liger(loss, metrics, beta))
    sequences, gamma = Sequences(mask, None), (options[f"vespo_{name}"] for name in GAMMA)
    objective = Objective(
        loss_type, importance_sampling_level == "sequence",
        check_clip(op, used["epsilon"], used["epsilon_high"], used["delta"]), beta, "k3",
        options["use_bias_correction_kl"], options["sapo_temperature_pos"], options["sapo_temperature_neg"],
        GammaWeight(*gamma),
    )  # fmt: skip
    tokens = objective.losses(PolicyTokens.of(sequences, log_probs, advantages, False, old, ref, ratio))
    is_clipped = torch.zeros_like(mask) if tokens.is_clipped is None else tokens.is_clipped & mask
    divergence = None if tokens.divergence is None else sequences.masked(tokens.divergence)
    return sequences.masked(tokens.losses), divergence, is_clipped.to(log_probs.dtype)


triton_grpo_loss = serve(
    "triton_grpo_loss", grpo_of_logits,
    "logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, temperature=0.9, beta=0.04, "
    "eps_low=0.2, eps_high=0.4, inplace=True, loss_type='dapo', max_completion_length=None, "
    "importance_sampling_level='token', reduce=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, "
    "vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, vespo_k_pos=2.0, "
    "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0",
    {"epsilon_low": "eps_low", "epsilon_high": "eps_high"},
)  # fmt: skip


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probabilities [N, L] of the last L tokens for logits [N, L + 1, V], without gradients."""
    length = logits.shape[1] - 1
    ids = input_ids[:, -length:]
    return _log_probs_of_logits(logits, ids, None if mask is None else mask[:, -length:] != 0, temperature)


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
    loss_type: str, level: str, *, epsilon_low: float, delta: float | None, max_completion_length: int | None,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of `tigon.losses.grpo_loss`, without those that Liger ignores for this type."""
    prefixes = {"sapo", "vespo"} - {loss_type}
    return {name: value for name, value in others.items() if name.partition("_")[0] not in prefixes} | {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon": epsilon_low,
        "delta": None if loss_type in TYPES_WITHOUT_CLIPPING else delta,
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
