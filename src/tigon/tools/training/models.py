"""A model of random weights."""

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["config_fields", "random_model", "read_config"]


def config_fields(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the fields of a config as values that JSON has."""
    return json.loads(json.dumps(config.to_dict()))


def read_config(fields: dict[str, Any]) -> "PretrainedConfig":
    """Return the config of `config_fields`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def random_model(config: "PretrainedConfig", dtype: str, device: str | torch.device) -> "PreTrainedModel":
    """A randomly initialised model of `config` in training mode on `device`; set the seed before.

    Attention is `sdpa`, or `eager` for a type that has no such path; the model is not compiled.
    """
    from transformers import AutoModelForCausalLM

    # Made where it will live: drawing 1.2 billion random numbers takes a CPU half a minute.
    make = lambda attention: AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    with torch.device(device):
        try:
            model = make("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = make("eager")
    return model.to(device).train()
