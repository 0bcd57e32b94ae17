"""The autograd functions of `liger_kernel.ops`: classes whose `apply` takes Liger's arguments in Liger's order.

The classes have no `forward` and `backward` of their own, because Tigon's ops are differentiable themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.integrations.frameworks import token_losses
from tigon.integrations.liger import dispatched, divergences, functional, hyper_connections, rare
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.logits.cross_entropy import cross_entropy as tigon_cross_entropy
from tigon.ops.mlps.glu import swiglu

__all__ = ["FUNCTIONS", "LigerVocabParallelCrossEntropy", "compute_routing_metadata"]


# --- functions whose arguments differ from those of `liger_kernel.transformers.functional` ---------


def _cross_entropy(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Return `tigon.cross_entropy` of logits [T, V] as four values: loss, z-loss, token accuracy, predicted tokens."""
    return dispatched.cross_entropy(
        _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def _fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: Any = None, ce_mode: Any = None, chunk_mem_const: int = 1,
) -> Any:  # fmt: skip
    """Return `tigon.linear_cross_entropy` of hidden states [T, H] and a head [V, H] as four values."""
    return dispatched.fused_linear_cross_entropy(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def _fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None, jsd_impl: Any = None, jsd_mode: Any = None,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of two heads, by `tigon.linear_distillation`."""
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
        temperature, accum_dtype,
    )  # fmt: skip


def _jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100,
    jsd_impl: Any = None, jsd_mode: Any = None,
) -> Tensor:  # fmt: skip
    """Return `tigon.jsd` of log-probabilities [N, V]."""
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


def _kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """Return `tigon.kl_div` of log-probabilities [N, V]."""
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target)


def _tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """Return `tigon.tvd` of probabilities [N, V]."""
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


def _rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return `tigon.rms_norm` of X, in its dtype."""
    return functional.liger_rms_norm(X, W, eps, offset, casting_mode)


def _fused_ce_tvd(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and the total variation distance of each token, from logits [N, V]."""
    losses: tuple[Tensor, Tensor] = divergences.LigerFusedCETVDLoss(ignore_index)(
        student_logits, teacher_logits, target
    )
    return losses


def _fused_moe(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return `tigon.moe_mlp` of x [T, H] for the K experts of each token."""
    return moe_mlp(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


def compute_routing_metadata(topk_indices: Tensor, E: int, block_m_token: int = 64) -> tuple[Tensor, ...]:
    """Return the rows of the choices [T, K] sorted by expert, all in int32.

    Returns:
        the number of rows [E] of each expert, and the first row of each and the end [E + 1]; the token [T K] and the
        choice [T K] of each row, and the row [T K] of each choice; the first row and the expert of each tile of
        `block_m_token` rows.
    """
    routing = route(topk_indices, E)
    starts = F.pad(routing.ends, (1, 0))
    counts = starts.diff()
    tiles = (counts + block_m_token - 1) // block_m_token
    expert = torch.arange(E, device=starts.device).repeat_interleave(tiles)
    tile = torch.arange(len(expert), device=starts.device) - (tiles.cumsum(0) - tiles)[expert]
    token = routing.order // topk_indices.shape[1]
    rows = token, routing.order, routing.slot.flatten(), starts[expert] + tile * block_m_token, expert
    return counts, starts, *(row.int() for row in rows)


def _mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, allow_fp32: bool,
    tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the coefficients of hyper-connections in fp32; see `LigerMHC`."""
    return hyper_connections.liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps,
        pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip


def _gate_up_silu_mul(y: Tensor, in_place: bool = False) -> Tensor:
    """Return silu(gate) * up for y = [gate | up], by `tigon.swiglu`."""
    return swiglu(y)


def _embedding(embeddings: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of embeddings [V, H] at the indices, a call of torch."""
    return F.embedding(indices, embeddings)


def _llama4_rope(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
    """Return q and k [B, L, heads, D], whose adjacent pairs are multiplied by complex numbers."""
    return rare.liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Any:
    """Return silu(a * gate_multiplier) * b * down_multiplier, by `tigon.swiglu`."""
    return dispatched.swiglu(a, b, gate_multiplier, down_multiplier)


def _scaled_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
    m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return -log p(target) [T], and further values on request, by `tigon.linear_log_probs`."""
    return functional.token_nll(_input, weight, target, temperature, ignore_index, return_entropy, selected_token_ids)


def _scaled_cross_entropy_tp(
    _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100,
    tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """Return -log p(target) [T] for a head whose rows are sharded over the group."""
    return functional.liger_fused_linear_scaled_cross_entropy_tp(
        _input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )


def _vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int, label_smoothing: float,
    label_smoothing_formula: str, label_smoothing_mode: str,
) -> Tensor:  # fmt: skip
    """Return the losses [S, B] of logits [S, B, V_p] sharded over the group, by `tigon.cross_entropy`."""
    _check_smoothing("LigerVocabParallelCEFunction", label_smoothing_formula, label_smoothing_mode)
    if vocab_parallel_logits.dim() != 3:
        raise ValueError(
            "LigerVocabParallelCEFunction: vocab_parallel_logits must be 3-D, [S, B, V_p], got "
            f"{tuple(vocab_parallel_logits.shape)}"
        )
    ranks = 1 if tp_group is None else tp_group.size()
    if label_smoothing == 0.0:
        return token_losses(vocab_parallel_logits, target, ignore_index, tp_group if ranks > 1 else None)
    if ranks > 1 and label_smoothing_mode == "partition":
        raise ValueError(
            "LigerVocabParallelCEFunction: label_smoothing_mode 'partition' gives each of the "
            f"{ranks} ranks another loss and is not served; use 'global'"
        )
    v = ranks * vocab_parallel_logits.shape[-1]
    if label_smoothing_formula == "megatron":
        label_smoothing = label_smoothing * v / (v - 1)
    sharding: dict[str, Any] = {"process_group": tp_group, "vocab_size": v} if ranks > 1 else {}
    losses = tigon_cross_entropy(
        vocab_parallel_logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none",
        **sharding,
    )  # fmt: skip
    assert isinstance(losses, Tensor)
    return losses


def _check_smoothing(name: str, formula: str, mode: str) -> None:
    if formula not in ("pytorch", "megatron"):
        raise ValueError(f"{name}: label_smoothing_formula must be 'pytorch' or 'megatron', got {formula!r}")
    if mode not in ("global", "partition"):
        raise ValueError(f"{name}: label_smoothing_mode must be 'global' or 'partition', got {mode!r}")


class LigerVocabParallelCrossEntropy(nn.Module):
    """`tigon.cross_entropy` of logits [S, B, V_p], whose columns are sharded over the ranks of a group.

    "megatron" spreads the smoothed share over the V - 1 other classes, "pytorch" over all V.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "pytorch", label_smoothing_mode: str = "global",
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        _check_smoothing(name, label_smoothing_formula, label_smoothing_mode)
        if reduction != "none":
            raise ValueError(f"{name}: reduction must be 'none', got {reduction!r}")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"{name}: label_smoothing must be in [0, 1), got {label_smoothing!r}")
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        """Return the losses [S, B] in fp32 of targets [S, B], which are indices of the whole vocabulary."""
        return _vocab_parallel_cross_entropy(
            vocab_parallel_logits, target, tp_group, self.ignore_index, self.label_smoothing,
            self.label_smoothing_formula, self.label_smoothing_mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the options that `print` shows."""
        names = ("ignore_index", "label_smoothing", "reduction", "label_smoothing_formula", "label_smoothing_mode")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


# --- the table -------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LigerAttnResFunction": functional.liger_attn_res,
    "LigerCrossEntropyFunction": _cross_entropy,
    "LigerDyTFunction": functional.liger_dyt,
    "LigerEmbeddingFunction": _embedding,
    "LigerFusedAddRMSNormFunction": dispatched.fused_add_rms_norm,
    "LigerFusedCETVDFunction": _fused_ce_tvd,
    "LigerFusedGateUpSiLUMulFunction": _gate_up_silu_mul,
    "LigerFusedLinearCrossEntropyFunction": _fused_linear_cross_entropy,
    "LigerFusedLinearJSDFunction": _fused_linear_jsd,
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerFusedLinearScaledCrossEntropyFunction": _scaled_cross_entropy,
    "LigerFusedLinearScaledCrossEntropyTPFunction": _scaled_cross_entropy_tp,
    "LigerFusedMoEFunction": _fused_moe,
    "LigerFusedNeighborhoodAttentionFunction": functional.liger_fused_neighborhood_attention,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerJSDFunction": _jsd,
    "LigerKLDivLossFunction": _kl_div,
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerLlama4RopeFunction": _llama4_rope,
    "LigerMHCCoeffsFunction": _mhc_coeffs,
    "LigerMHCPostResFunction": hyper_connections.liger_mhc_post_res,
    "LigerMHCPreFunction": hyper_connections.liger_mhc_pre,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerMultiTokenAttentionFunction": functional.liger_multi_token_attention,
    "LigerPolyNormFunction": functional.liger_poly_norm,
    "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
    "LigerReLUSquaredFunction": functional.liger_relu_squared,
    "LigerRMSNormFunction": _rms_norm,
    "LigerRopeFunction": functional.liger_rope,
    "LigerSiLUMulFunction": _silu_mul,
    "LigerSoftmaxFunction": functional.liger_softmax,
    "LigerSparsemaxFunction": functional.liger_sparsemax,
    "LigerTVDLossFunction": _tvd,
    "LigerVocabParallelCEFunction": _vocab_parallel_cross_entropy,
}


def _make_class(name: str, function: Callable[..., Any]) -> type:
    return type(name, (), {"apply": staticmethod(function), "__doc__": function.__doc__})


globals().update({name: _make_class(name, function) for name, function in FUNCTIONS.items()})
