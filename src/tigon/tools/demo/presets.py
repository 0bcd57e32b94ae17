"""What the demo trains: one preset a device, one mapping from a preset to any model type's config."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tigon.tools.training.models import random_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["PRESETS", "Preset", "build_model", "model_config", "warmup_steps"]


@dataclass(frozen=True)
class Preset:
    """A model shape and how it is trained. Field names of the shape are those that Hugging Face configs share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    batch: int
    seq: int
    steps: int
    lr: float
    # The two runs take turns, one step each, so that whatever else the machine does meets both alike. Not where both
    # models would have to share one accelerator's memory: there the second starts when the first is done.
    take_turns: bool

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.seq


PRESETS = {
    # A vocabulary as big as Llama-2's on a small trunk: the loss is most of the memory, as it is in large models with
    # large vocabularies.
    "cpu": Preset(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        dtype="float32",
        batch=4,
        seq=512,
        steps=24,
        lr=1e-3,
        take_turns=True,
    ),
    # The shape of Llama 3.2 1B.
    "cuda": Preset(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
        batch=4,
        seq=2048,
        steps=30,
        lr=3e-4,
        take_turns=False,
    ),
}

_CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "tie_word_embeddings",
)


def warmup_steps(steps: int) -> int:
    """Steps at the start that are left out of the median: caches fill, kernels compile.

    >>> warmup_steps(30), warmup_steps(4), warmup_steps(1)
    (3, 2, 0)
    """
    return min(3, steps // 2)


def model_config(model_type: str, preset: Preset) -> "PretrainedConfig":
    """The config of `model_type` in the preset's shape, by the field names that all Hugging Face configs share.

    Raises:
        ValueError: `model_type` is none that transformers can build a causal language model of, or refuses the shape.

    >>> model_config("qwen3", PRESETS["cpu"]).hidden_size
    256
    """
    from transformers import CONFIG_MAPPING

    from tigon.hf.transformers_private import causal_lm_types

    if model_type not in causal_lm_types() or model_type not in CONFIG_MAPPING:
        raise ValueError(
            "must be a model type that transformers has a causal language model of, as llama, qwen3, gemma2, mistral, "
            f"phi3, qwen2 or gemma, got {model_type!r}"
        )
    cls = CONFIG_MAPPING[model_type]
    fields: dict[str, Any] = {name: value for name, value in asdict(preset).items() if name in _CONFIG_FIELDS}
    fields["max_position_embeddings"] = max(2048, preset.seq)
    # Special tokens of the original vocabularies lie outside smaller ones.
    fields.update(bos_token_id=0, eos_token_id=0, pad_token_id=None)
    # Some configs derive a field and have no setter for it.
    fields = {name: value for name, value in fields.items() if not isinstance(getattr(cls, name, None), property)}
    return cls(**fields)


def build_model(model_type: str, preset: Preset, device: str) -> "PreTrainedModel":
    """A randomly initialised model in training mode on `device`; set the seed before."""
    return random_model(model_config(model_type, preset), preset.dtype, device)
