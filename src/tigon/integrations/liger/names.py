"""The table from Liger's names to Tigon's objects, for liger-kernel 0.8.5."""

from tigon.integrations.liger.apply import APPLY

LIGER_VERSION = "0.8.5"

_HERE = "tigon.integrations.liger"


def _table(module: str, names: str) -> dict[str, str]:
    """Return where the objects of these names are: in a module of this folder, under the same name."""
    return {name: f"{_HERE}.{module}:{name}" for name in names.split()}


_PATCHING = _table("apply", " ".join(APPLY)) | _table(
    "apply", "_apply_liger_kernel _apply_liger_kernel_to_instance AutoLigerKernelForCausalLM"
)
_LAYERS = _table("layers", "LigerCrossEntropyLoss LigerFusedAddRMSNorm LigerFusedLinearCrossEntropyLoss LigerRMSNorm")
_NORMS = _table("norms", "LigerModulatedRMSNorm LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered")
_CHUNKED = _table(
    "losses",
    "LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss LigerFusedLinearJSDLoss "
    "LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss",
)
_POLICY = _table("policy", "LigerFusedLinearGRPOLoss")
_LOSS_FUNCTIONS = _table(
    "loss_functions",
    "LigerFusedLinearCPOFunction LigerFusedLinearCosineSimilarityFunction LigerFusedLinearDPOFunction "
    "LigerFusedLinearGRPOFunction LigerFusedLinearJSDFunction LigerFusedLinearKTOFunction LigerFusedLinearORPOFunction "
    "LigerFusedLinearSimPOFunction liger_fused_linear_cosine liger_fused_linear_cpo liger_fused_linear_dpo "
    "liger_fused_linear_grpo liger_fused_linear_jsd liger_fused_linear_kto liger_fused_linear_orpo "
    "liger_fused_linear_simpo",
)
_LOSS_BASES = _table(
    "loss_bases",
    "LigerFusedLinearDistillationBase LigerFusedLinearPPOBase LigerFusedLinearPreferenceBase "
    "LigerFusedLinearUnpairedPreferenceBase _ChunkedSelectiveLogProbFunction _selective_logprob_backward",
)
_POLICY_FUNCTIONS = {
    name: f"{_HERE}.policy:{name.removeprefix('_')}"
    for name in ("_reduce_grpo_loss", "fused_selective_log_softmax", "get_gamma_weights", "triton_grpo_loss")
}
# Names that Liger defines in a module of `liger_kernel.chunked_loss` but does not export from the package.
FURTHER_CHUNKED_LOSS = _LOSS_FUNCTIONS | _LOSS_BASES | _POLICY_FUNCTIONS
# Liger spreads its classes over these modules. Each of them serves all names.
_CHUNKED_MODULES = (
    "cosine_similarity_loss cpo_loss dpo_loss functional fused_linear_distillation fused_linear_ppo "
    "fused_linear_preference fused_linear_unpaired_preference grpo_loss jsd_loss kto_loss orpo_loss simpo_loss"
)
_DIVERGENCES = _table(
    "divergences",
    "LigerFusedCETVDLoss LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerJSD LigerKLDIVLoss LigerTVDLoss",
)
_RARE = _table(
    "rare",
    "LigerMultiTokenAttention LigerPolyNorm LigerSparsemax LigerSwiGLUMLPForMuseGlimmer LigerTiledGEGLUMLP "
    "LigerTiledSwiGLUMLP is_transformers_available liger_llama4_text_rotary_pos_emb "
    "liger_llama4_vision_rotary_pos_emb",
)
_FUNCTIONAL = _table(
    "functional",
    "liger_attn_res liger_cross_entropy liger_dyt liger_fused_add_rms_norm liger_fused_linear_cross_entropy "
    "liger_fused_linear_jsd liger_fused_linear_kl_div liger_fused_linear_scaled_cross_entropy_tp "
    "liger_fused_neighborhood_attention liger_geglu liger_group_norm liger_jsd liger_kl_div liger_layer_norm "
    "liger_modulated_rms_norm liger_multi_token_attention liger_poly_norm liger_qwen2vl_mrope liger_relu_squared "
    "liger_rms_norm liger_rope liger_softmax liger_sparsemax liger_swiglu liger_tvd",
) | _table("layers", "CrossEntropyOutput")
_DISPATCHED = _table(
    "dispatched",
    "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div layer_norm "
    "rms_norm rope softmax swiglu",
)
# Modules of `liger_kernel.ops` and the autograd functions that Liger defines there.
_OPS_MODULES = {
    "attn_res": "LigerAttnResFunction",
    "cross_entropy": "LigerCrossEntropyFunction",
    "dyt": "LigerDyTFunction",
    "experimental.embedding": "LigerEmbeddingFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_ce_tvd": "LigerFusedCETVDFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    "fused_linear_scaled_cross_entropy": (
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction"
    ),
    "fused_moe": "LigerFusedMoEFunction",
    "fused_neighborhood_attention": "LigerFusedNeighborhoodAttentionFunction",
    "geglu": "LigerGELUMulFunction",
    "group_norm": "LigerGroupNormFunction",
    "jsd": "LigerJSDFunction",
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mhc": "LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction",
    "modulated_rms_norm": "LigerModulatedRMSNormFunction",
    "multi_token_attention": "LigerMultiTokenAttentionFunction",
    "poly_norm": "LigerPolyNormFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction",
    "tvd": "LigerTVDLossFunction",
    "vocab_parallel_cross_entropy": "LigerVocabParallelCEFunction",
}
_OPS_BY_MODULE = {module: _table("autograd_functions", names) for module, names in _OPS_MODULES.items()}
_OPS = {name: source for table in _OPS_BY_MODULE.values() for name, source in table.items()}
# Names of a module of `liger_kernel.ops` that are no autograd functions.
FURTHER_OPS = {
    "fused_moe": _table("autograd_functions", "compute_routing_metadata"),
    "swiglu": _table("devices", "infer_device_arch") | {"_should_tile": f"{_HERE}.devices:should_tile"},
}
_UTILS = _table(
    "devices",
    "_infer_amd_arch _infer_npu_arch _infer_nvidia_arch _infer_xpu_arch get_total_gpu_memory infer_comm_backend "
    "infer_device infer_device_arch is_npu_available is_peft_available transformers_version_dispatch",
)
_MHC_FUNCTIONS = _table(
    "hyper_connections", "liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre"
)
_DIRECT = {
    "LigerMHC": f"{_HERE}.hyper_connections:LigerMHC",
    "LigerSoftmax": "tigon:Softmax",
    "LigerVocabParallelCrossEntropy": f"{_HERE}.autograd_functions:LigerVocabParallelCrossEntropy",
}
_MLPS = _table(
    "mlps",
    "LigerBlockSparseTop2MLP LigerDyT LigerExperts LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP "
    "LigerLayerNorm LigerMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerReLUSquared LigerSwiGLUMLP",
) | _table("functional", "liger_rotary_pos_emb")
_TRANSFORMERS = _PATCHING | _LAYERS | _NORMS | _MLPS | _DIVERGENCES | _RARE | _DIRECT
# Names that Liger defines in a module of `liger_kernel.transformers` but does not export from the package.
FURTHER_TRANSFORMERS = (
    _table("apply", "MODEL_TYPE_TO_APPLY_LIGER_FN")
    | _table(
        "functional",
        "liger_multimodal_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    )
    | _table("mlps", "LigerGEGLUMLPForGemma4 LigerHunyuanV1SwiGLUMLP")
    | _table(
        "norms",
        "LigerGroupNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
        "LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next",
    )
    | _table("rare", "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionLayer")
    | _table("layers", "CrossEntropyOutput")
    | {"LigerEmbedding": "torch.nn:Embedding"}
)
# Liger spreads its classes over these modules. Each of them serves the names of all.
_TRANSFORMERS_MODULES = (
    "auto_model cross_entropy dyt experimental experimental.embedding fused_add_rms_norm fused_ce_tvd "
    "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_neighborhood_attention geglu group_norm jsd "
    "kl_div layer_norm llama4_rope mhc mlp modulated_rms_norm monkey_patch multi_token_attention poly_norm "
    "qwen2vl_mrope relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp trainer_integration tvd "
    "vocab_parallel_cross_entropy"
)
_MEGATRON = _table(
    "megatron",
    "LigerMegatronCrossEntropy LigerMegatronRMSNorm LigerMegatronSwiGLU apply_liger_kernel_to_megatron",
)

# Module names of `liger_kernel` and the names that each of them serves.
MODULES: dict[str, dict[str, str]] = {
    "liger_kernel": {},
    "liger_kernel.functional": _DISPATCHED,
    "liger_kernel.utils": _UTILS,
    "liger_kernel.ops": _OPS,
    "liger_kernel.ops.experimental": {},
    "liger_kernel.ops.mlp": {},
    "liger_kernel.ops.tiled_mlp": {},
    **{f"liger_kernel.ops.{module}": table | FURTHER_OPS.get(module, {}) for module, table in _OPS_BY_MODULE.items()},
    "liger_kernel.transformers": _TRANSFORMERS,
    "liger_kernel.transformers.functional": _FUNCTIONAL | _MHC_FUNCTIONS,
    **{
        f"liger_kernel.transformers.{module}": _TRANSFORMERS | FURTHER_TRANSFORMERS | _OPS
        for module in _TRANSFORMERS_MODULES.split()
    },
    "liger_kernel.megatron": _MEGATRON,
    **{f"liger_kernel.megatron.{name}": _MEGATRON for name in ("cross_entropy", "monkey_patch", "rms_norm", "swiglu")},
    "liger_kernel.chunked_loss": _CHUNKED | _POLICY,
    **{
        f"liger_kernel.chunked_loss.{module}": _CHUNKED | _POLICY | FURTHER_CHUNKED_LOSS
        for module in _CHUNKED_MODULES.split()
    },
    **dict.fromkeys(("liger_kernel.ops.grpo_loss", "liger_kernel.transformers.grpo_loss"), _POLICY_FUNCTIONS),
}

# What to use in place of a name that is not served.
NOT_SERVED = {
    "GrpoLossFunction": "use triton_grpo_loss of liger_kernel.transformers.grpo_loss, or tigon.losses",
    "LigerMLPFunction": "use LigerMLP of liger_kernel.transformers, or tigon.swiglu between the linears",
    "LigerTiledMLPFunction": "use LigerTiledSwiGLUMLP or LigerTiledGEGLUMLP of liger_kernel.transformers",
    "apply_tiled_mlp": "use LigerTiledSwiGLUMLP or LigerTiledGEGLUMLP of liger_kernel.transformers",
}

# Modules whose import fails, and what to use in their place.
_ONE_BACKEND = "use liger_kernel.functional, whose ops run on Tigon's kernels without a choice of back ends"
NOT_SERVED_MODULES = dict.fromkeys(
    ("backends", "ops.backends", "ops.cute", "ops.cutedsl", "ops.cutile", "transformers.moe"), _ONE_BACKEND
) | {
    "env_report": "use `tigon env`",
    "ops.experimental.mm_int8int2": "use torch.matmul; Tigon has no product of int8 and int2",
    **dict.fromkeys(
        ("ops._nvidia_shared", "ops.configure", "ops.fused_moe_kernels", "ops.utils"),
        "use the ops of tigon; Tigon has no kernels under this name",
    ),
    "testing": "use tigon.testing",
    "transformers.fsdp": "use tigon.patch(model), which works with FSDP",
    "transformers.model": "use tigon.patch(model), which needs no forward of its own for each type",
    "transformers.trainer": "use trl's ORPOTrainer on a model that tigon.patch has patched",
    "triton": "use tigon; Tigon does not change triton",
}  # fmt: skip
