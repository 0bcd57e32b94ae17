"""A model of random weights, and its config as JSON."""

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["config_fields", "random_model", "read_config"]


def config_fields(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the fields of a config as JSON values."""
    return json.loads(json.dumps(config.to_dict()))


def read_config(fields: dict[str, Any]) -> "PretrainedConfig":
    """Return the config that has the fields."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def random_model(config: "PretrainedConfig", dtype: str, device: str | torch.device) -> "PreTrainedModel":
    """Return a model of random weights in training mode on `device`. Set the seed before the call.

    Attention is `sdpa`, or `eager` for a model type without `sdpa`.
    """
    from transformers import AutoModelForCausalLM

    build = lambda attention: AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    # Build on the device: a CPU needs half a minute to draw 1.2 billion random numbers.
    with torch.device(device):
        try:
            model = build("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = build("eager")
    return model.to(device).train()
