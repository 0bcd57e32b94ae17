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
from tigon.integrations.liger.dispatched import HEAD_PARAMETERS, LOSS_OPTIONS, LOSS_RESULTS
from tigon.integrations.liger.signatures import serve
from tigon.ops.experts.choice_order import route
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.logits.cross_entropy import cross_entropy as tigon_cross_entropy
from tigon.ops.mlps.glu import swiglu

# --- functions whose arguments differ from those of `liger_kernel.transformers.functional` ---------


def _fused_ce_tvd(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and the total variation distance of each token, from logits [N, V]."""
    losses: tuple[Tensor, Tensor] = divergences.LigerFusedCETVDLoss(ignore_index)(
        student_logits, teacher_logits, target
    )
    return losses


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


def _gate_up_silu_mul(y: Tensor, in_place: bool = False) -> Tensor:
    """Return silu(gate) * up for y = [gate | up], by `tigon.swiglu`."""
    return swiglu(y)


def _embedding(embeddings: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of embeddings [V, H] at the indices, a call of torch."""
    return F.embedding(indices, embeddings)


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

# Classes whose function has other parameters: the function, Liger's parameters, and names that differ.
_RENAMED: dict[str, tuple[Callable[..., Any], str, dict[str, str]]] = {
    "LigerCrossEntropyFunction": (
        dispatched.cross_entropy, f"_input, target, weight, {LOSS_OPTIONS}, {LOSS_RESULTS}", {"input": "_input"},
    ),
    "LigerFusedLinearCrossEntropyFunction": (
        dispatched.fused_linear_cross_entropy, f"{HEAD_PARAMETERS}, ce_impl=None, ce_mode=None, chunk_mem_const=1", {},
    ),
    "LigerFusedLinearJSDFunction": (
        functional.liger_fused_linear_jsd,
        "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
        "ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None",
        {},
    ),
    "LigerFusedLinearScaledCrossEntropyFunction": (
        functional.token_nll,
        "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False, "
        "selected_token_ids=None",
        {"hidden": "_input"},
    ),
    "LigerFusedLinearScaledCrossEntropyTPFunction": (
        functional.liger_fused_linear_scaled_cross_entropy_tp,
        "_input, weight, target, tp_group, temperature=1.0, ignore_index=-100, tiles_per_reduce=1, "
        "return_entropy=False",
        {"input": "_input"},
    ),
    "LigerFusedMoEFunction": (
        moe_mlp, "x, gate_up_proj, down_proj, top_k_index, top_k_weights", {"up_proj": "gate_up_proj"},
    ),
    "LigerJSDFunction": (
        functional.liger_jsd,
        "_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None",
        {"input": "_input"},
    ),
    "LigerKLDivLossFunction": (
        functional.liger_kl_div, "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10",
        {"input": "y_pred", "target": "y_true"},
    ),
    "LigerLlama4RopeFunction": (
        rare.liger_llama4_text_rotary_pos_emb, "q, k, freqs_cis, BLOCK_SIZE=None", {"xq": "q", "xk": "k"},
    ),
    "LigerMHCCoeffsFunction": (
        hyper_connections.liger_mhc_coeffs,
        "x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult",
        {},
    ),
    "LigerRMSNormFunction": (
        functional.liger_rms_norm, "X, W, eps, offset=0.0, casting_mode='llama', in_place=True, row_mode=None", {},
    ),
    "LigerSiLUMulFunction": (dispatched.swiglu, "a, b, gate_multiplier=1.0, down_multiplier=1.0", {}),
    "LigerTVDLossFunction": (
        functional.liger_tvd, "p, q, shift_labels=None, reduction='batchmean', ignore_index=-100",
        {"input": "p", "target": "q"},
    ),
}  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LigerAttnResFunction": functional.liger_attn_res,
    "LigerDyTFunction": functional.liger_dyt,
    "LigerEmbeddingFunction": _embedding,
    "LigerFusedAddRMSNormFunction": dispatched.fused_add_rms_norm,
    "LigerFusedCETVDFunction": _fused_ce_tvd,
    "LigerFusedGateUpSiLUMulFunction": _gate_up_silu_mul,
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerFusedNeighborhoodAttentionFunction": functional.liger_fused_neighborhood_attention,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerMHCPostResFunction": hyper_connections.liger_mhc_post_res,
    "LigerMHCPreFunction": hyper_connections.liger_mhc_pre,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerMultiTokenAttentionFunction": functional.liger_multi_token_attention,
    "LigerPolyNormFunction": functional.liger_poly_norm,
    "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
    "LigerReLUSquaredFunction": functional.liger_relu_squared,
    "LigerRopeFunction": functional.liger_rope,
    "LigerSoftmaxFunction": functional.liger_softmax,
    "LigerSparsemaxFunction": functional.liger_sparsemax,
    "LigerVocabParallelCEFunction": _vocab_parallel_cross_entropy,
}
FUNCTIONS |= {name: serve("apply", *row) for name, row in _RENAMED.items()}


def _make_class(name: str, function: Callable[..., Any]) -> type:
    return type(name, (), {"apply": staticmethod(function), "__doc__": function.__doc__})


globals().update({name: _make_class(name, function) for name, function in FUNCTIONS.items()})
