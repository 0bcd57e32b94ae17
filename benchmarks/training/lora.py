"""A model with low-rank adapters (LoRA) of PEFT: its base is frozen, in the model's dtype or in 4 bits (QLoRA)."""

import math
from typing import Any

import torch
from torch import nn

from tigon.recognition.parts.experts import is_experts, parameter_names
from tigon.runtime.requirements import unmet


def missing_packages(quantises: bool) -> str:
    """Return a message with the packages for adapters that are missing and how to install them; "" if none is."""
    return unmet("peft", *(["bitsandbytes"] if quantises else []))


def add_adapters(model: Any, rank: int) -> Any:
    """Return a model of transformers with adapters on all linear layers but the head, and on the weights of experts.

    They have the defaults of PEFT: fp32 if the model is in half precision, a scaling of 2, and no dropout.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", target_parameters=expert_parameters(model) or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config).train()


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the weights [E, out, in] or [E, in, out] of all experts in a model."""
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if is_experts(module)
        for parameter in parameter_names(module)[:2]
    ]


def draw_adapters(model: Any, seed: int) -> None:
    """Draw the matrix A of every adapter from `seed`, with the distribution of PEFT; B is zero.

    The libraries that make adapters draw them in different orders, and some of them on the GPU.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                parameter.copy_(values)


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
