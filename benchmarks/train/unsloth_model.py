"""A model with adapters that Unsloth loads and changes, with the weights and the adapters of the other providers.

Unsloth changes torch, transformers, PEFT and TRL when it is imported, so it must be imported before the last three, and
only in the process of its provider. Its users call `FastLanguageModel.from_pretrained` and then `get_peft_model`. The
same two functions run here. Only the reading of weights from files is replaced: transformers' `from_pretrained` returns
the model of random weights.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.train.providers import Missing, UnsupportedModel

# The model types that Unsloth trains with its fused kernels. It compiles all others with torch.compile.
MODEL_TYPES = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECIAL_TOKENS = ("bos", "eos", "pad", "unk")


def import_unsloth(device: str) -> None:
    """Import Unsloth, which then changes other libraries. Call it before transformers, PEFT or TRL are imported."""
    if not device.startswith("cuda"):
        raise Missing("needs a GPU")
    # Unsloth counts its users by downloads in `from_pretrained`.
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    # Unsloth writes the sources that it generates to a folder, by default in the current folder.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(tempfile.gettempdir(), "tigon_unsloth")))
    try:
        import unsloth  # noqa: F401
    except (ImportError, NotImplementedError) as reason:
        raise Missing(f"not installed, or cannot run here ({reason})") from reason


def load_with_adapters(
    build_model: Callable[[], Any], config: Any, dtype: str, rank: int, quantises: bool, checkpointing: bool
) -> tuple[Any, str]:
    """Return the model of `build_model` with adapters, as Unsloth changes it, and a description for the report.
    `build_model` returns a model of transformers on the device, with its linear layers in 4 bits if `quantises`. With
    `checkpointing`, Unsloth's own gradient checkpointing copies the inputs of layers to the host."""
    from transformers import AutoModelForCausalLM
    from unsloth import FastLanguageModel

    if config.model_type not in MODEL_TYPES:
        types = ", ".join(MODEL_TYPES)
        raise UnsupportedModel(f"Unsloth has no fused kernels for {config.model_type}, only for {types}")
    checkpoint: Any = {"use_gradient_checkpointing": "unsloth" if checkpointing else False}
    special_rows: list[torch.Tensor] = []

    def build_and_save_rows() -> Any:
        model = build_model()
        special_rows.append(model.get_input_embeddings().weight[: len(SPECIAL_TOKENS)].detach().clone())
        return model

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        _save_tokenizer(Path(folder), config.vocab_size)
        # Transformers loads this model whatever weights are requested.
        loader = lambda *_, **__: build_and_save_rows()
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", loader):
            model, _ = FastLanguageModel.from_pretrained(
                folder,
                # A longer sequence than the model's own would scale its rotary embedding.
                max_seq_length=config.max_position_embeddings,
                dtype=getattr(torch, dtype),
                load_in_4bit=quantises,
                use_exact_model_name=True,
                local_files_only=True,
                # By default Unsloth moves the embedding to the host if memory is scarce.
                offload_embedding=False,
                **checkpoint,
            )
        model = FastLanguageModel.get_peft_model(
            model, r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=TARGETS, **checkpoint
        )
    # Unsloth zeroes the embedding of the padding token of some types of models.
    with torch.no_grad():
        model.get_input_embeddings().weight[: len(SPECIAL_TOKENS)] = special_rows[0]
    FastLanguageModel.for_training(model)
    return model, _describe(model)


def allow_length(model: Any, seq: int) -> None:
    """Let the model train on sequences of `seq` tokens, which Unsloth otherwise cuts to the length at loading. The
    rotary embedding is not scaled, as in the other providers. It has as many rows as the config has positions."""
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, seq)
    for module in model.modules():
        if (longest := getattr(module, "max_seq_length", None)) is not None:
            module.max_seq_length = max(longest, seq)


def _save_tokenizer(folder: Path, entries: int) -> None:
    """Write a tokenizer of `entries` entries. Unsloth loads one, and would resize embeddings that it does not match."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {f"{name}_token": f"<{name}>" for name in SPECIAL_TOKENS}
    names = [*special.values(), *(f"token{index}" for index in range(len(special), entries))]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _describe(model: Any) -> str:
    """Return which kernels of Unsloth the model uses. Refuse a 16-bit model that lacks some, except QKV with biases."""
    from unsloth import __version__
    from unsloth.kernels import apply_lora_o, apply_lora_qkv
    from unsloth.utils.attention_dispatch import select_attention_backend

    layers = model.get_base_model().model.layers
    counts = {
        "QKV": sum(getattr(layer.self_attn, "apply_qkv", None) is apply_lora_qkv for layer in layers),
        "O": sum(getattr(layer.self_attn, "apply_o", None) is apply_lora_o for layer in layers),
        # The fused MLP is an attribute of the instance, which hides the method of the class.
        "MLP": sum("forward" in vars(layer.mlp) for layer in layers),
    }
    biases = any(getattr(layer.self_attn.q_proj, "bias", None) is not None for layer in layers)
    needed_counts = [counts["O"], counts["MLP"], *([] if biases else [counts["QKV"]])]
    if model.dtype != torch.float32 and min(needed_counts) < len(layers):
        raise UnsupportedModel(f"Unsloth installed its fused kernels in {counts} of {len(layers)} layers")
    compiled = any(hasattr(type(layer).forward, "_unsloth_block_compiled") for layer in layers)
    return (
        f"Unsloth {__version__}: fused adapters in {', '.join(f'{n} {name}' for name, n in counts.items())} of "
        f"{len(layers)} layers, attention by {select_attention_backend()}, "
        f"layers {'' if compiled else 'not '}compiled by torch.compile"
    )
