"""The preset of each kind of device, and the config of any model type in the shape of a preset."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from benchmarks.training.models import random_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """The shape of a model, by the field names that Hugging Face configs share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    tie_word_embeddings: bool


@dataclass(frozen=True)
class DemoPreset(Shape):
    """The shape of a model, and the settings of its training.

    `take_turns`: the two runs train one step each in turn, so that other work of the machine slows both down alike. Two
    models that would share the memory of one GPU are trained one after the other.
    """

    dtype: str
    batch: int
    seq: int
    steps: int
    lr: float
    take_turns: bool


DEMO_PRESETS = {
    # The vocabulary is as large as Llama-2's and the other layers are small, so that the loss needs most of the memory,
    # as in large models with large vocabularies.
    "cpu": DemoPreset(
        vocab_size=32_000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, rope_theta=10_000.0, tie_word_embeddings=True, dtype="float32", batch=4,
        seq=512, steps=24, lr=1e-3, take_turns=True,
    ),
    # This is the shape of Llama 3.2 1B.
    "cuda": DemoPreset(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True, dtype="bfloat16", batch=4,
        seq=2048, steps=30, lr=3e-4, take_turns=False,
    ),
}  # fmt: skip


def warmup_steps(steps: int) -> int:
    """Return the number of first steps that the median leaves out, because caches fill and kernels compile in them.

    >>> warmup_steps(30), warmup_steps(4), warmup_steps(1)
    (3, 2, 0)
    """
    return min(3, steps // 2)


def demo_config(model_type: str, preset: DemoPreset) -> "PretrainedConfig":
    """Return the config of `model_type` in the shape of the preset.

    Raises:
        ValueError: transformers has no causal language model of `model_type`, or the type refuses the shape.

    >>> demo_config("qwen3", DEMO_PRESETS["cpu"]).hidden_size
    256
    """
    from transformers import CONFIG_MAPPING

    from tigon.hf.transformers_private import causal_lm_types

    if model_type not in causal_lm_types() or model_type not in CONFIG_MAPPING:
        raise ValueError(
            "must be a model type that transformers has a causal language model for, such as llama, qwen3, gemma2, "
            f"mistral, phi3, qwen2 or gemma, got {model_type!r}"
        )
    config_class = CONFIG_MAPPING[model_type]
    values: dict[str, Any] = {field.name: getattr(preset, field.name) for field in fields(Shape)}
    values["max_position_embeddings"] = max(2048, preset.seq)
    # The ids of the original special tokens would lie outside of a smaller vocabulary.
    values.update(bos_token_id=0, eos_token_id=0, pad_token_id=None)
    # Some configs compute a field and have no setter for it.
    has_setter = lambda name: not isinstance(getattr(config_class, name, None), property)
    return config_class(**{name: value for name, value in values.items() if has_setter(name)})


def build_model(model_type: str, preset: DemoPreset, device: str) -> "PreTrainedModel":
    """Return a model of random weights in training mode on `device`. Set the seed before the call."""
    return random_model(demo_config(model_type, preset), preset.dtype, device)
