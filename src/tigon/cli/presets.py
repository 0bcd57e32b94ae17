"""Configs of well-known decoders with their public sizes, and of two small decoders, by name. They need no network."""

from typing import Any

# The help of every option that takes a model.
MODEL_HELP = (
    "A preset (Llama-3-8B, ..., tiny), a model type (its defaults), a repository of the hub (owner/name), a folder, or "
    "a config.json."
)


def _decoder(
    model_type: str, vocab_size: int, hidden_size: int, intermediate_size: int, layers: int, heads: tuple[int, int],
    *, positions: int, theta: float, ids: tuple[int, int], epsilon: float = 1e-6, is_tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a config; `heads` are those of queries and of keys, `ids` the tokens of begin and end."""
    rope = {"rope_type": "default", **more.pop("scaling", {}), "rope_theta": theta}
    return {
        "model_type": model_type, "vocab_size": vocab_size, "hidden_size": hidden_size,
        "intermediate_size": intermediate_size, "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "max_position_embeddings": positions, "rms_norm_eps": epsilon,
        "rope_parameters": rope, "tie_word_embeddings": is_tied, "bos_token_id": ids[0], "eos_token_id": ids[1], **more,
    }  # fmt: skip


_LLAMA_3: dict[str, Any] = {"theta": 5e5, "ids": (128000, 128001), "epsilon": 1e-5}
_LLAMA_3_2: dict[str, Any] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_QWEN_3: dict[str, Any] = {"positions": 40960, "theta": 1e6, "ids": (151643, 151645), "head_dim": 128}
_GEMMA: dict[str, Any] = {
    "positions": 8192, "theta": 1e4, "ids": (2, 1), "is_tied": True, "head_dim": 256, "pad_token_id": 0,
}  # fmt: skip
_GEMMA_2: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "sliding_window": 4096,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _decoder("llama", 128256, 4096, 14336, 32, (32, 8), positions=8192, **_LLAMA_3),
    "Llama-3.2-1B": _decoder(
        "llama", 128256, 2048, 8192, 16, (32, 8), positions=131072, is_tied=True, head_dim=64, scaling=_LLAMA_3_2,
        **_LLAMA_3,
    ),
    "Qwen2-7B": _decoder(
        "qwen2", 152064, 3584, 18944, 28, (28, 4), positions=131072, theta=1e6, ids=(151643, 151643)
    ),
    "Qwen3-4B": _decoder("qwen3", 151936, 2560, 9728, 36, (32, 8), is_tied=True, **_QWEN_3),
    "Qwen3-30B-A3B": _decoder(
        "qwen3_moe", 151936, 2048, 6144, 48, (32, 4), moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, **_QWEN_3,
    ),
    # This is v0.1. Later versions have the same layers, but no window and other vocabularies.
    "Mistral-7B": _decoder(
        "mistral", 32000, 4096, 14336, 32, (32, 8), positions=32768, theta=1e4, ids=(1, 2), epsilon=1e-5,
        sliding_window=4096,
    ),
    "Gemma-7B": _decoder("gemma", 256000, 3072, 24576, 28, (16, 16), hidden_act="gelu_pytorch_tanh", **_GEMMA),
    "Gemma-2-2B": _decoder("gemma2", 256000, 2304, 9216, 26, (8, 4), **_GEMMA, **_GEMMA_2),
    "small": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


def find_preset(name: str) -> dict[str, Any] | None:
    """Return the fields of the config of a preset, or None if there is no such preset. Case does not matter.

    `tigon.cli.inspect.build.find_config` creates a config from these fields.

    >>> find_preset("llama-3-8b")["hidden_size"], find_preset("llama")
    (4096, None)
    """
    return next((fields for preset, fields in PRESETS.items() if preset.lower() == name.lower()), None)
