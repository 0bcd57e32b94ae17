"""Build a tiny model of any decoder type from its config class. Only the exceptions at the end name types.

Fields get small values by their name. If a list has one entry for each layer, one layer of each kind remains, so that
the model has dense and sparse layers, and layers with sliding and with full attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 131

# The fields that get each value.
_FIELDS = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    0: "pad_token_id num_nextn_predict_layers",
    1: "bos_token_id first_k_dense_replace num_dense_layers max_window_layers n_group topk_group n_shared_experts "
    "num_shared_experts moe_num_shared_experts num_expert_group num_mem_blocks",
    2: "eos_token_id decoder_start_token_id eod_token_id sep_token_id num_key_value_heads num_kv_heads "
    "num_query_groups swa_num_key_value_heads o_groups index_n_heads num_experts_per_tok moe_topk moe_k "
    "num_experts_per_token zero_expert_num mamba_n_groups n_groups mamba_ngroups mamba_expand expand "
    "linear_num_key_heads linear_num_heads",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads swa_num_attention_heads "
    "index_topk sliding_window window_size attention_window_size sliding_window_size num_experts n_routed_experts "
    "num_local_experts moe_num_experts mamba_n_heads mamba_num_heads n_mamba_heads mamba_chunk_size chunk_size "
    "block_size mamba_dt_rank time_step_rank linear_num_value_heads adapter_rank",
    8: "hidden_size_per_layer_input rotary_dim hc_lowrank attention_chunk_size mamba_d_state state_size ssm_state_size",
    16: "head_dim swa_head_dim kv_channels v_head_dim qk_nope_head_dim global_head_dim attention_head_dim "
    "linear_head_dim swa_v_head_dim d_kv qk_rope_head_dim kv_lora_rank o_lora_rank index_head_dim "
    "query_pre_attn_scalar linear_key_head_dim linear_value_head_dim",
    24: "q_lora_rank",
    32: "dim_model_base qk_head_dim mamba_d_head mamba_head_dim mamba_headdim",
    48: "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp "
    "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size",
    64: "hidden_size d_model n_embd word_embed_proj_dim embedding_dim lru_width attention_hidden_size embedding_size "
    "hidden_size_global encoder_hash_byte_group_vocab max_position_embeddings n_positions n_ctx max_seq_len "
    "context_length original_max_position_embeddings model_max_length max_sequence_length seq_length",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size dense_intermediate_size",
    128: "mamba_d_ssm",
}
SIZES = {name: value for value, names in _FIELDS.items() for name in names.split()}

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def _one_of_each(lists: list[list]) -> list[int]:
    """Return positions of layers, at least two, that have every combination of the entries in the lists."""
    rows = list(zip(*lists, strict=True))
    positions = [i for i, row in enumerate(rows) if row not in rows[:i]][:6]
    return positions if len(positions) > 1 else [0, 1][: len(rows)]


def tiny_config(config: PreTrainedConfig, exceptions: dict[str, Any]) -> PreTrainedConfig:
    """Return a small config of the same class as a config of defaults."""
    fields = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    aliases = {v: k for k, v in config.attribute_map.items()}
    count = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    small_fields: dict[str, Any] = {}
    per_layer = {k: v for k, v in fields.items() if isinstance(v, (list, tuple)) and count and len(v) == count > 1}
    positions = _one_of_each([list(map(str, v)) for v in per_layer.values()]) if per_layer else [0, 1]
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small_fields[name] = tiny_config(value, exceptions.get(name, {}))
        elif name in per_layer:
            small_fields[name] = [value[i] for i in positions]
        elif name in LAYERS and isinstance(value, int):
            small_fields[name] = len(positions)
        elif value is not None or name.endswith("token_id") or name == "head_dim":
            small = SIZES.get(name, SIZES.get(aliases.get(name)))
            small_fields |= {} if small is None else {name: small}
    heads = "num_attention_heads", "num_key_value_heads"
    if heads[0] in small_fields and (
        "q_lora_rank" in fields or all(fields.get(name) == fields.get(heads[0]) for name in heads)
    ):
        # Some attention layers have no groups of heads.
        small_fields["num_key_value_heads"] = small_fields[heads[0]]
    small_fields |= {k: v for k, v in exceptions.items() if not isinstance(v, dict) or k not in small_fields}
    return type(config)(**small_fields)


QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

# Fields that the rules above would set wrongly.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "nemotron": {"num_key_value_heads": 2},
    "xlstm": {"qk_dim_factor": 1.0, "mode": "train"},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_head_dim": 32,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}


# The decoder types of transformers 5.17: all causal language models except encoders and parts of other models.
TYPES = (Path(__file__).parent / "decoder_types.txt").read_text().split()

# The types that are not built, and why.
WITHOUT = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "its config has no vocabulary: it is part of another model",
    "gemma4_unified_assistant": "its config has no vocabulary: it is part of another model",
    "zamba2": "its forward fails with so few layers",
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model in training mode whose parameters, those of norms too, are random and always the same.

    The test is skipped if the installed transformers does not have the type.
    """
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = tiny_config(AutoConfig.for_model(model_type), EXCEPTIONS.get(model_type, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).train()
