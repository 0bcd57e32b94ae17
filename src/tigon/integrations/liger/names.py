"""The table from Liger's names to Tigon's objects, for liger-kernel 0.8.5."""

from tigon.integrations.liger.apply import APPLY

LIGER_VERSION = "0.8.5"


def _tables(**files: str) -> dict[str, str]:
    """Return where objects are: the names of each file of this folder, under the same name there."""
    return {name: f"{__package__}.{file}:{name}" for file, names in files.items() for name in names.split()}


_CHUNKED = _tables(
    chunked=(
        "LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss "
        "LigerFusedLinearGRPOLoss LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss "
        "LigerFusedLinearSimPOLoss"
    ),
)
_POLICY_FUNCTIONS = _tables(policy="fused_selective_log_softmax triton_grpo_loss")
# Names that Liger defines in a module of `liger_kernel.chunked_loss` but does not export from the package.
_FURTHER_CHUNKED = _POLICY_FUNCTIONS | _tables(
    chunked=(
        "LigerFusedLinearCPOFunction LigerFusedLinearCosineSimilarityFunction LigerFusedLinearDPOFunction "
        "LigerFusedLinearGRPOFunction LigerFusedLinearJSDFunction LigerFusedLinearKTOFunction "
        "LigerFusedLinearORPOFunction LigerFusedLinearSimPOFunction liger_fused_linear_cosine liger_fused_linear_cpo "
        "liger_fused_linear_dpo liger_fused_linear_grpo liger_fused_linear_jsd liger_fused_linear_kto "
        "liger_fused_linear_orpo liger_fused_linear_simpo"
    ),
    loss_bases=("LigerFusedLinearDistillationBase LigerFusedLinearPPOBase LigerFusedLinearPreferenceBase"),
)
# Liger spreads its classes over these modules. Each of them serves all names.
_CHUNKED_MODULES = (
    "cosine_similarity_loss cpo_loss dpo_loss functional fused_linear_distillation fused_linear_ppo "
    "fused_linear_preference fused_linear_unpaired_preference grpo_loss jsd_loss kto_loss orpo_loss simpo_loss"
)
_FUNCTIONAL = _tables(
    functional=(
        "CrossEntropyOutput liger_cross_entropy liger_fused_add_rms_norm liger_fused_linear_cross_entropy "
        "liger_fused_linear_jsd liger_fused_linear_kl_div liger_fused_linear_scaled_cross_entropy_tp liger_geglu "
        "liger_group_norm liger_jsd liger_kl_div liger_layer_norm liger_modulated_rms_norm liger_rms_norm liger_swiglu "
        "liger_tvd"
    ),
    rotary="liger_qwen2vl_mrope liger_rope",
    rare=(
        "liger_attn_res liger_dyt liger_fused_neighborhood_attention liger_multi_token_attention liger_poly_norm "
        "liger_sparsemax"
    ),
    hyper_connections="liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre",
) | {"liger_relu_squared": "tigon:relu2", "liger_softmax": "tigon:softmax"}
_DISPATCHED = _tables(
    variants=(
        "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div layer_norm "
        "rms_norm rope softmax swiglu"
    ),
)
_OPS = _tables(
    variants=(
        "LigerAttnResFunction LigerCrossEntropyFunction LigerDyTFunction LigerEmbeddingFunction "
        "LigerFusedAddRMSNormFunction LigerFusedCETVDFunction LigerFusedGateUpSiLUMulFunction "
        "LigerFusedLinearCrossEntropyFunction LigerFusedLinearJSDFunction LigerFusedLinearKLDivFunction "
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction LigerFusedMoEFunction "
        "LigerFusedNeighborhoodAttentionFunction LigerGELUMulFunction LigerGroupNormFunction LigerJSDFunction "
        "LigerKLDivLossFunction LigerLayerNormFunction LigerLlama4RopeFunction LigerMHCCoeffsFunction "
        "LigerMHCPostResFunction LigerMHCPreFunction LigerModulatedRMSNormFunction LigerMultiTokenAttentionFunction "
        "LigerPolyNormFunction LigerQwen2VLMRopeFunction LigerRMSNormFunction LigerReLUSquaredFunction "
        "LigerRopeFunction LigerSiLUMulFunction LigerSoftmaxFunction LigerSparsemaxFunction LigerTVDLossFunction "
        "LigerVocabParallelCEFunction"
    ),
)
# Liger spreads its autograd functions over these modules. Each of them serves all names.
_OPS_MODULES = (
    "attn_res cross_entropy dyt experimental experimental.embedding fused_add_rms_norm fused_ce_tvd "
    "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_linear_scaled_cross_entropy fused_moe "
    "fused_neighborhood_attention geglu group_norm jsd kl_div layer_norm llama4_rope mhc mlp modulated_rms_norm "
    "multi_token_attention poly_norm qwen2vl_mrope relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp tvd "
    "vocab_parallel_cross_entropy"
)
_TRANSFORMERS = _tables(
    apply=f"{' '.join(APPLY)} _apply_liger_kernel _apply_liger_kernel_to_instance AutoLigerKernelForCausalLM",
    devices="is_transformers_available",
    hyper_connections="LigerMHC",
    layers=(
        "LigerCrossEntropyLoss LigerFusedAddRMSNorm LigerFusedCETVDLoss LigerFusedLinearCrossEntropyLoss "
        "LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerJSD LigerKLDIVLoss LigerLayerNorm LigerModulatedRMSNorm "
        "LigerRMSNorm LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerReLUSquared "
        "LigerSparsemax LigerTVDLoss LigerVocabParallelCrossEntropy"
    ),
    mlps=(
        "LigerBlockSparseTop2MLP LigerExperts LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerPhi3SwiGLUMLP LigerSwiGLUMLP "
        "LigerSwiGLUMLPForMuseGlimmer LigerTiledGEGLUMLP LigerTiledSwiGLUMLP"
    ),
    rare="LigerDyT LigerMultiTokenAttention LigerPolyNorm",
    rotary="liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb",
) | {
    "LigerSoftmax": "tigon:Softmax",
    # Liger has these classes under two names.
    "LigerFalconH1MLP": f"{__package__}.mlps:LigerFalconH1SwiGLUMLP",
    "LigerMLP": f"{__package__}.mlps:LigerSwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP": f"{__package__}.mlps:LigerSwiGLUMLP",
}  # fmt: skip
# Names that Liger defines in a module of `liger_kernel.transformers` but does not export from the package.
_FURTHER_TRANSFORMERS = _tables(
    apply="MODEL_TYPE_TO_APPLY_LIGER_FN",
    functional="CrossEntropyOutput",
    layers=(
        "LigerGroupNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
        "LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
    ),
    mlps="LigerGEGLUMLPForGemma4 LigerHunyuanV1SwiGLUMLP",
    rotary="liger_multimodal_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
) | {"LigerEmbedding": "torch.nn:Embedding"}
# Liger spreads its classes over these modules. Each of them serves the names of all.
_TRANSFORMERS_MODULES = (
    "auto_model cross_entropy dyt experimental experimental.embedding fused_add_rms_norm fused_ce_tvd "
    "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_neighborhood_attention geglu group_norm jsd "
    "kl_div layer_norm llama4_rope mhc mlp modulated_rms_norm monkey_patch multi_token_attention poly_norm "
    "qwen2vl_mrope relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp trainer_integration tvd "
    "vocab_parallel_cross_entropy"
)
_MEGATRON = _tables(layers="LigerMegatronCrossEntropy LigerMegatronRMSNorm")

# Module names of `liger_kernel` and the names that each of them serves.
MODULES: dict[str, dict[str, str]] = {
    "liger_kernel": {},
    "liger_kernel.functional": _DISPATCHED,
    "liger_kernel.utils": _tables(devices="infer_device is_npu_available is_peft_available"),
    "liger_kernel.ops": _OPS,
    **{f"liger_kernel.ops.{name}": _OPS for name in _OPS_MODULES.split()},
    "liger_kernel.transformers": _TRANSFORMERS,
    "liger_kernel.transformers.functional": _FUNCTIONAL,
    **{
        f"liger_kernel.transformers.{name}": _TRANSFORMERS | _FURTHER_TRANSFORMERS | _OPS
        for name in _TRANSFORMERS_MODULES.split()
    },
    "liger_kernel.megatron": _MEGATRON,
    **{f"liger_kernel.megatron.{name}": _MEGATRON for name in ("cross_entropy", "rms_norm", "swiglu")},
    "liger_kernel.chunked_loss": _CHUNKED,
    **{f"liger_kernel.chunked_loss.{name}": _CHUNKED | _FURTHER_CHUNKED for name in _CHUNKED_MODULES.split()},
    **dict.fromkeys(("liger_kernel.ops.grpo_loss", "liger_kernel.transformers.grpo_loss"), _POLICY_FUNCTIONS),
}

_ATTENTION = "use liger_fused_neighborhood_attention of liger_kernel.transformers.functional between linear layers"
_MEGATRON_RECIPE = "use LigerMegatronRMSNorm and LigerMegatronCrossEntropy as docs/trainers.md shows"
# What to use in place of a name that is not served.
NOT_SERVED = {
    "GrpoLossFunction": "use triton_grpo_loss of liger_kernel.transformers.grpo_loss, or tigon.losses",
    "LigerFusedNeighborhoodAttention": _ATTENTION,
    "LigerFusedNeighborhoodAttentionLayer": _ATTENTION,
    "LigerFusedLinearUnpairedPreferenceBase": "use tigon.linear_loss, which takes any loss of log-probabilities",
    "LigerMegatronSwiGLU": "use tigon.swiglu",
    "LigerMLPFunction": "use LigerMLP of liger_kernel.transformers, or tigon.swiglu between the linears",
    "LigerTiledMLPFunction": "use LigerTiledSwiGLUMLP or LigerTiledGEGLUMLP of liger_kernel.transformers",
    "apply_liger_kernel_to_megatron": _MEGATRON_RECIPE,
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
    "megatron.monkey_patch": _MEGATRON_RECIPE,
    "testing": "use tigon.testing",
    "transformers.fsdp": "use tigon.patch(model), which works with FSDP",
    "transformers.model": "use tigon.patch(model), which needs no forward of its own for each type",
    "transformers.trainer": "use trl's ORPOTrainer on a model that tigon.patch has patched",
    "triton": "use tigon; Tigon does not change triton",
}  # fmt: skip
