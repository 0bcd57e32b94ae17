"""The tables from Liger's names to Tigon's objects, for liger-kernel 0.8.5."""

from types import ModuleType
from typing import Any

from torch import nn

from tigon.integrations.liger import (
    apply,
    chunked,
    functional,
    hyper_connections,
    layers,
    loss_bases,
    mlps,
    policy,
    rare,
    rotary,
    variants,
)
from tigon.ops.logits import softmax
from tigon.ops.mlps.activations import relu2

LIGER_VERSION = "0.8.5"


Table = dict[str, Any]


def _named(prefix: str | tuple[str, ...], *modules: ModuleType) -> Table:
    """Return the objects of some files of this folder whose names begin with `prefix`."""
    return {name: value for module in modules for name, value in vars(module).items() if name.startswith(prefix)}


def _pick(module: ModuleType, names: str) -> Table:
    return {name: getattr(module, name) for name in names.split()}


_CHUNKED = {name: value for name, value in _named("Liger", chunked).items() if name.endswith("Loss")}
_POLICY_FUNCTIONS = _pick(policy, "fused_selective_log_softmax triton_grpo_loss")
# Names that Liger defines in a module of `liger_kernel.chunked_loss` but does not export from the package.
_FURTHER_CHUNKED = _POLICY_FUNCTIONS | _named(("LigerFusedLinear", "liger_"), chunked, loss_bases)
# Liger spreads its classes over these modules. Each of them serves all names.
_CHUNKED_MODULES = (
    "cosine_similarity_loss cpo_loss dpo_loss functional fused_linear_distillation fused_linear_ppo "
    "fused_linear_preference fused_linear_unpaired_preference grpo_loss jsd_loss kto_loss orpo_loss simpo_loss"
)
_FUNCTIONAL = _named("liger_", functional, rare, hyper_connections) | {
    **_pick(functional, "CrossEntropyOutput"), **_pick(rotary, "liger_qwen2vl_mrope liger_rope"),
    "liger_relu_squared": relu2, "liger_softmax": softmax.softmax,
}  # fmt: skip
_OPS = _named("Liger", variants)
# Liger spreads its autograd functions and its classes over modules. Each of them serves the names of all.
_SHARED_MODULES = (
    "cross_entropy dyt experimental experimental.embedding fused_add_rms_norm fused_ce_tvd "
    "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_neighborhood_attention geglu group_norm "
    "jsd kl_div layer_norm llama4_rope mhc mlp modulated_rms_norm multi_token_attention poly_norm qwen2vl_mrope "
    "relu_squared rms_norm rope softmax sparsemax swiglu tiled_mlp tvd vocab_parallel_cross_entropy"
)
_OPS_MODULES = f"{_SHARED_MODULES} attn_res fused_linear_scaled_cross_entropy fused_moe"
_MEGATRON = _named("LigerMegatron", layers)
# Names that Liger defines in a module of `liger_kernel.transformers` but does not export from the package.
_FURTHER_TRANSFORMERS = {
    **_pick(apply, "MODEL_TYPE_TO_APPLY_LIGER_FN"),
    **_pick(functional, "CrossEntropyOutput"),
    **_pick(
        layers,
        "LigerGroupNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
        "LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next",
    ),
    **_pick(mlps, "LigerGEGLUMLPForGemma4 LigerHunyuanV1SwiGLUMLP"),
    **_pick(rotary, "liger_multimodal_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision"),
    "LigerEmbedding": nn.Embedding,
}
_CLASSES = _named("Liger", layers, mlps, rare, hyper_connections)
_TRANSFORMERS = {
    **{name: value for name, value in _CLASSES.items() if name not in _MEGATRON | _FURTHER_TRANSFORMERS},
    **apply.APPLY,
    **_pick(apply, "_apply_liger_kernel _apply_liger_kernel_to_instance AutoLigerKernelForCausalLM"),
    **_pick(apply, "is_transformers_available"),
    **_pick(rotary, "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb"),
    "LigerSoftmax": softmax.Softmax,
    # Liger has these classes under two names.
    "LigerFalconH1MLP": mlps.LigerFalconH1SwiGLUMLP,
    "LigerMLP": mlps.LigerSwiGLUMLP,
    "LigerQwen3MoeSwiGLUMLP": mlps.LigerSwiGLUMLP,
}
_TRANSFORMERS_MODULES = f"{_SHARED_MODULES} auto_model monkey_patch trainer_integration"

MODULES: dict[str, Table] = {
    "liger_kernel": {},
    "liger_kernel.functional": variants.DISPATCHED,
    "liger_kernel.utils": _pick(apply, "infer_device is_npu_available is_peft_available"),
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
# Each entry says what replaces a name that is not served.
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
