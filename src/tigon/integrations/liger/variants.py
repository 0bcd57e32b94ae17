"""The names of `liger_kernel.functional` and `liger_kernel.ops`: tables of the same functions with other parameters.

`impl`, `mode` and `backend` choose among Liger's kernels. They have no effect here: Tigon has one kernel for all of
them. `in_place` and `row_mode` have none either.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger import functional, hyper_connections, rare, rotary
from tigon.integrations.liger.signatures import autograd_function, serve
from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.ops.logits.softmax import softmax as tigon_softmax
from tigon.ops.mlps.activations import relu2
from tigon.ops.mlps.glu import swiglu as tigon_swiglu

# The losses, the z-losses, the token accuracy and the predicted tokens.
Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
# A function, its parameters here, and those that have another name in the function.
Row = tuple[Callable[..., Any], str, dict[str, str]]

LOSS_OPTIONS = (
    "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False"
)
LOSS_RESULTS = "return_token_accuracy=False, return_predicted_tokens=False"
HEAD = (
    f"_input, weight, target, bias=None, ce_weight=None, {LOSS_OPTIONS}, accum_dtype=None, use_token_scaling=False, "
    f"{LOSS_RESULTS}"
)
TWO_HEADS = (
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100, "
    "temperature=1.0"
)


def _to_tuple(result: Any) -> Losses:
    """Return the four values of a cross entropy. Values that were not requested are None."""
    return tuple(result) if isinstance(result, functional.CrossEntropyOutput) else (result, None, None, None)  # type: ignore[return-value]


_DISPATCHED: dict[str, Row] = {
    "rms_norm": (
        functional.liger_rms_norm,
        "x, weight, eps=1e-6, *, offset=0.0, casting_mode='llama', in_place=False, row_mode=None",
        {"X": "x", "W": "weight"},
    ),
    "layer_norm": (
        functional.liger_layer_norm, "x, weight, bias=None, eps=1e-6", {"X": "x", "W": "weight", "B": "bias"},
    ),
    "fused_add_rms_norm": (
        functional.liger_fused_add_rms_norm,
        "X, R, W, eps=1e-6, offset=0.0, casting_mode='llama', in_place=False", {},
    ),
    "softmax": (tigon_softmax, "x", {}),
    "swiglu": (functional.liger_swiglu, "a, b, gate_multiplier=1.0, down_multiplier=1.0", {}),
    "geglu": (functional.liger_geglu, "a, b", {}),
    "rope": (rotary.liger_rope, "q, k, cos, sin, position_ids=None, unsqueeze_dim=1", {}),
    "jsd": (
        functional.liger_jsd, "_input, target, shift_labels=None, beta=0.5, ignore_index=-100", {"input": "_input"},
    ),
    "kl_div": (
        functional.liger_kl_div, "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10",
        {"input": "y_pred", "target": "y_true"},
    ),
    "fused_linear_jsd": (functional.fused_linear_jsd, TWO_HEADS, {}),
    "cross_entropy": (functional.cross_entropy, f"input, target, weight=None, {LOSS_OPTIONS}, {LOSS_RESULTS}", {}),
    "fused_linear_cross_entropy": (functional.fused_linear_cross_entropy, HEAD, {"input": "_input"}),
}  # fmt: skip


def _accept_kernel_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the further options `impl`, `mode` and `backend`, which it ignores."""
    signature, names = inspect.signature(function), ("impl", "mode", "backend")
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            value = kwargs.pop(name, None)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{function.__name__}: {name} must be a string or None, got {type(value).__name__}")
        return function(*args, **kwargs)

    vars(wrapped)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *options])
    return wrapped


def _serve(name: str, function: Callable[..., Any], parameters: str, renamed: dict[str, str]) -> Callable[..., Any]:
    has_four = function in (functional.cross_entropy, functional.fused_linear_cross_entropy)
    return serve(name, function, parameters, renamed, _to_tuple if has_four else None)


DISPATCHED = {name: _accept_kernel_options(_serve(name, *row)) for name, row in _DISPATCHED.items()}
globals().update(DISPATCHED)


_OPS: dict[str, Row] = {
    "LigerCrossEntropyFunction": (
        functional.cross_entropy, f"_input, target, weight, {LOSS_OPTIONS}, {LOSS_RESULTS}", {"input": "_input"},
    ),
    "LigerFusedAddRMSNormFunction": _DISPATCHED["fused_add_rms_norm"],
    "LigerFusedLinearCrossEntropyFunction": (
        functional.fused_linear_cross_entropy, f"{HEAD}, ce_impl=None, ce_mode=None, chunk_mem_const=1",
        {"input": "_input"},
    ),
    "LigerFusedLinearJSDFunction": (
        functional.fused_linear_jsd, f"{TWO_HEADS}, accum_dtype=None, jsd_impl=None, jsd_mode=None", {},
    ),
    "LigerFusedLinearScaledCrossEntropyFunction": (
        functional.scaled_cross_entropy,
        "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False, "
        "selected_token_ids=None",
        {"hidden": "_input"},
    ),
    "LigerFusedMoEFunction": (
        moe_mlp, "x, gate_up_proj, down_proj, top_k_index, top_k_weights", {"up_proj": "gate_up_proj"},
    ),
    "LigerJSDFunction": (
        functional.liger_jsd,
        "_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None",
        {"input": "_input"},
    ),
    "LigerKLDivLossFunction": _DISPATCHED["kl_div"],
    "LigerLlama4RopeFunction": (
        rotary.liger_llama4_text_rotary_pos_emb, "q, k, freqs_cis, BLOCK_SIZE=None", {"xq": "q", "xk": "k"},
    ),
    "LigerMHCCoeffsFunction": (
        hyper_connections.liger_mhc_coeffs,
        "x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult",
        {},
    ),
    "LigerRMSNormFunction": (
        functional.liger_rms_norm, "X, W, eps, offset=0.0, casting_mode='llama', in_place=True, row_mode=None", {},
    ),
    "LigerTVDLossFunction": (
        functional.liger_tvd, "p, q, shift_labels=None, reduction='batchmean', ignore_index=-100",
        {"input": "p", "target": "q"},
    ),
    "LigerFusedGateUpSiLUMulFunction": (tigon_swiglu, "y, in_place=False", {"gate": "y"}),
    "LigerEmbeddingFunction": (F.embedding, "embeddings, indices", {"weight": "embeddings", "input": "indices"}),
}  # fmt: skip

OPS: dict[str, Any] = {name: _serve("apply", *row) for name, row in _OPS.items()} | {
    "LigerAttnResFunction": rare.liger_attn_res,
    "LigerDyTFunction": rare.liger_dyt,
    "LigerFusedCETVDFunction": functional.fused_ce_tvd,
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerFusedLinearScaledCrossEntropyTPFunction": functional.liger_fused_linear_scaled_cross_entropy_tp,
    "LigerFusedNeighborhoodAttentionFunction": rare.liger_fused_neighborhood_attention,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerMHCPostResFunction": hyper_connections.liger_mhc_post_res,
    "LigerMHCPreFunction": hyper_connections.liger_mhc_pre,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerMultiTokenAttentionFunction": rare.liger_multi_token_attention,
    "LigerPolyNormFunction": rare.liger_poly_norm,
    "LigerQwen2VLMRopeFunction": rotary.liger_qwen2vl_mrope,
    "LigerReLUSquaredFunction": relu2,
    "LigerRopeFunction": rotary.liger_rope,
    "LigerSiLUMulFunction": functional.liger_swiglu,
    "LigerSoftmaxFunction": tigon_softmax,
    "LigerSparsemaxFunction": rare.liger_sparsemax,
    "LigerVocabParallelCEFunction": functional.vocab_parallel_cross_entropy,
}
globals().update({name: autograd_function(name, function) for name, function in OPS.items()})
