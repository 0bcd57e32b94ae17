"""A model with low-rank adapters (LoRA) of PEFT: its base is frozen, in the model's dtype or in 4 bits (QLoRA)."""

from typing import Any

import torch
from torch import nn

from tigon.runtime.requirements import unmet

__all__ = ["add_adapters", "freeze", "missing_packages", "quantise"]


def missing_packages(quantises: bool) -> str:
    """Return a message with the packages for adapters that are missing and how to install them; "" if none is."""
    return unmet("peft", *(["bitsandbytes"] if quantises else []))


def add_adapters(model: Any, rank: int) -> Any:
    """Return a model of transformers with adapters on all linear layers but the head.

    They have the defaults of PEFT: fp32 if the model is in half precision, a scaling of 2, and no dropout.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def freeze(model: Any) -> None:
    """Freeze all weights. Backward still computes the gradients of the embeddings' output and of each layer's input."""
    model.requires_grad_(False)
    model.enable_input_require_grads()


def quantise(model: Any) -> None:
    """Convert the linear layers of a model to 4 bits (nf4 with double quantisation), except the head."""
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            layer = bnb.nn.Linear4bit(
                child.in_features, child.out_features, child.bias is not None, compute_dtype=child.weight.dtype,
                quant_type="nf4", compress_statistics=True, device="meta",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
            )
            layer.weight, layer.bias = weight, child.bias
            # The move to the device quantises the weight.
            setattr(module, name, layer.to(child.weight.device))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
