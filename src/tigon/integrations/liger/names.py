"""The table from Liger's names to Tigon's objects, for liger-kernel 0.8.5."""

from tigon.integrations.liger.apply import APPLY

__all__ = ["LIGER_VERSION", "MODULES", "NOT_SERVED"]

LIGER_VERSION = "0.8.5"

_HERE = "tigon.integrations.liger"
_PATCHING = {
    name: f"{_HERE}.apply:{name}"
    for name in (*APPLY, "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "AutoLigerKernelForCausalLM")
}
_LAYERS = {
    name: f"{_HERE}.layers:{name}"
    for name in (
        "LigerCrossEntropyLoss", "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss", "LigerRMSNorm",
    )
}  # fmt: skip
_CHUNKED = {
    name: f"{_HERE}.losses:{name}"
    for name in (
        "LigerFusedLinearCPOLoss", "LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearDPOLoss",
        "LigerFusedLinearJSDLoss", "LigerFusedLinearKTOLoss", "LigerFusedLinearORPOLoss", "LigerFusedLinearSimPOLoss",
    )
}  # fmt: skip
_POLICY = {"LigerFusedLinearGRPOLoss": f"{_HERE}.policy:LigerFusedLinearGRPOLoss"}
_DIVERGENCES = {
    name: f"{_HERE}.divergences:{name}"
    for name in (
        "LigerFusedCETVDLoss", "LigerFusedLinearJSD", "LigerFusedLinearKLDivLoss", "LigerJSD", "LigerKLDIVLoss",
        "LigerTVDLoss",
    )
}  # fmt: skip
_RARE = {
    name: f"{_HERE}.rare:{name}"
    for name in (
        "LigerModulatedRMSNorm", "LigerMultiTokenAttention", "LigerPolyNorm", "LigerRMSNormForMuseGlimmer",
        "LigerRMSNormForMuseGlimmerTextCentered", "LigerSparsemax", "LigerSwiGLUMLPForMuseGlimmer",
        "LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP", "is_transformers_available", "liger_llama4_text_rotary_pos_emb",
        "liger_llama4_vision_rotary_pos_emb",
    )
}  # fmt: skip
_FUNCTIONAL = {
    name: f"{_HERE}.functional:{name}"
    for name in (
        "liger_attn_res", "liger_cross_entropy", "liger_dyt", "liger_fused_add_rms_norm",
        "liger_fused_linear_cross_entropy", "liger_fused_linear_jsd", "liger_fused_linear_kl_div",
        "liger_fused_linear_scaled_cross_entropy_tp", "liger_fused_neighborhood_attention", "liger_geglu",
        "liger_group_norm", "liger_jsd", "liger_kl_div", "liger_layer_norm", "liger_modulated_rms_norm",
        "liger_multi_token_attention", "liger_poly_norm", "liger_qwen2vl_mrope", "liger_relu_squared",
        "liger_rms_norm", "liger_rope", "liger_softmax", "liger_sparsemax", "liger_swiglu", "liger_tvd",
    )
}  # fmt: skip
_DISPATCHED = {
    name: f"{_HERE}.dispatched:{name}"
    for name in (
        "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd",
        "kl_div", "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
    )
}  # fmt: skip
# Modules of `liger_kernel.ops` and the autograd functions that Liger defines there.
_OPS_MODULES = {
    "attn_res": "LigerAttnResFunction",
    "cross_entropy": "LigerCrossEntropyFunction",
    "dyt": "LigerDyTFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    "fused_linear_scaled_cross_entropy": (
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction"
    ),
    "fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
    "geglu": "LigerGELUMulFunction",
    "group_norm": "LigerGroupNormFunction",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "modulated_rms_norm": "LigerModulatedRMSNormFunction",
    "multi_token_attention": "LigerMultiTokenAttentionFunction",
    "poly_norm": "LigerPolyNormFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": "LigerSiLUMulFunction",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
_OPS_BY_MODULE = {
    module: {name: f"{_HERE}.autograd_functions:{name}" for name in names.split()}
    for module, names in _OPS_MODULES.items()
}
_OPS = {name: source for table in _OPS_BY_MODULE.values() for name, source in table.items()}
_UTILS = {
    name: f"{_HERE}.devices:{name}"
    for name in (
        "get_total_gpu_memory", "infer_comm_backend", "infer_device", "is_npu_available", "is_peft_available",
        "transformers_version_dispatch",
    )
}  # fmt: skip
_DIRECT = {
    "LigerSoftmax": "tigon:Softmax",
    "LigerVocabParallelCrossEntropy": f"{_HERE}.autograd_functions:LigerVocabParallelCrossEntropy",
}
_MLPS = {
    name: f"{_HERE}.mlps:{name}"
    for name in (
        "LigerBlockSparseTop2MLP", "LigerDyT", "LigerFalconH1MLP", "LigerFalconH1SwiGLUMLP", "LigerGEGLUMLP",
        "LigerLayerNorm", "LigerMLP", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerReLUSquared",
        "LigerSwiGLUMLP", "liger_rotary_pos_emb",
    )
}  # fmt: skip
_TRANSFORMERS = _PATCHING | _LAYERS | _MLPS | _DIVERGENCES | _RARE | _DIRECT

# Module names of `liger_kernel` and the names that each of them serves.
MODULES: dict[str, dict[str, str]] = {
    "liger_kernel": {},
    "liger_kernel.functional": _DISPATCHED,
    "liger_kernel.utils": _UTILS,
    "liger_kernel.ops": _OPS,
    **{f"liger_kernel.ops.{module}": table for module, table in _OPS_BY_MODULE.items()},
    "liger_kernel.transformers": _TRANSFORMERS,
    "liger_kernel.transformers.functional": _FUNCTIONAL,
    "liger_kernel.transformers.monkey_patch": _PATCHING,
    "liger_kernel.transformers.auto_model": _PATCHING,
    "liger_kernel.transformers.cross_entropy": _LAYERS,
    "liger_kernel.transformers.fused_linear_cross_entropy": _LAYERS,
    "liger_kernel.transformers.rms_norm": _LAYERS,
    "liger_kernel.transformers.swiglu": _MLPS,
    "liger_kernel.transformers.geglu": _MLPS,
    "liger_kernel.transformers.layer_norm": _MLPS,
    "liger_kernel.transformers.rope": _MLPS,
    "liger_kernel.transformers.llama4_rope": _RARE,
    "liger_kernel.transformers.jsd": _DIVERGENCES,
    "liger_kernel.transformers.kl_div": _DIVERGENCES,
    "liger_kernel.transformers.tvd": _DIVERGENCES,
    "liger_kernel.transformers.fused_linear_jsd": _DIVERGENCES,
    "liger_kernel.transformers.fused_linear_kl_div": _DIVERGENCES,
    "liger_kernel.transformers.tiled_mlp": _RARE,
    "liger_kernel.chunked_loss": _CHUNKED | _POLICY,
    "liger_kernel.chunked_loss.cosine_similarity_loss": _CHUNKED,
    "liger_kernel.chunked_loss.cpo_loss": _CHUNKED,
    "liger_kernel.chunked_loss.dpo_loss": _CHUNKED,
    "liger_kernel.chunked_loss.grpo_loss": _POLICY,
    "liger_kernel.chunked_loss.jsd_loss": _CHUNKED,
    "liger_kernel.chunked_loss.kto_loss": _CHUNKED,
    "liger_kernel.chunked_loss.orpo_loss": _CHUNKED,
    "liger_kernel.chunked_loss.simpo_loss": _CHUNKED,
}

# Hyper-connections mix several residual streams by small matrices, which no model of transformers does.
_NO_MHC = "use the layer's own residual streams in torch; Tigon has no hyper-connections"

# What to use in place of a name that is not served.
NOT_SERVED = dict.fromkeys(
    (
        "LigerMHC", "LigerMHCCoeffsFunction", "LigerMHCPostResFunction", "LigerMHCPreFunction", "liger_mhc_apply",
        "liger_mhc_coeffs", "liger_mhc_forward", "liger_mhc_post_res", "liger_mhc_pre",
    ),
    _NO_MHC,
) | {
    "GrpoLossFunction": "use LigerFusedLinearGRPOLoss of liger_kernel.chunked_loss, or tigon.losses",
    "LigerEmbeddingFunction": "use torch.nn.functional.embedding",
    "LigerExperts": "use tigon.patch(model), which replaces the experts, or tigon.moe_mlp",
    "LigerFusedCETVDFunction": "use LigerFusedCETVDLoss of liger_kernel.transformers",
    "LigerFusedGateUpSiLUMulFunction": "use tigon.swiglu(y), which takes gate and up packed in one tensor",
    "LigerFusedMoEFunction": "use tigon.moe_mlp",
    "LigerLlama4RopeFunction": "use liger_llama4_text_rotary_pos_emb of liger_kernel.transformers",
    "LigerMLPFunction": "use LigerMLP of liger_kernel.transformers, or tigon.swiglu between the linears",
    "LigerTiledMLPFunction": "use LigerTiledSwiGLUMLP or LigerTiledGEGLUMLP of liger_kernel.transformers",
    "apply_tiled_mlp": "use LigerTiledSwiGLUMLP or LigerTiledGEGLUMLP of liger_kernel.transformers",
    "infer_device_arch": "use torch.cuda.get_device_capability()",
}  # fmt: skip
