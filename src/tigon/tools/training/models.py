"""A model of random weights."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["random_model"]


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
