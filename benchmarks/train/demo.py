"""The demo as a preset of the training benchmark: stock and Tigon in a shape that fits the device."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from benchmarks.train.models import random_model
from benchmarks.train.plan import (
    DeviceOption,
    ProviderRun,
    TextOption,
    TrainOptions,
    TrainPlan,
    check_options,
    read_tokens,
)
from benchmarks.train.providers import select
from benchmarks.train.text import MIN_VOCAB
from tigon.cli.main import pick_device
from tigon.cli.presets import find_preset

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class DemoOptions:
    """The options of the demo. None stands for the value of the device's preset."""

    model_type: Annotated[
        str,
        typer.Option(
            help="Type of the decoder to train: llama, qwen3, gemma2, ..., or a preset (Llama-3-8B, ...), which stands "
            "for its type. The demo sets all sizes."
        ),
    ] = "llama"
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.", show_default="by device")] = None
    batch: Annotated[int | None, typer.Option(help="Sequences a step.", show_default="by device")] = None
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.", show_default="by device")] = None
    vocab: Annotated[int | None, typer.Option(help="Entries of the vocabulary.", show_default="by device")] = None
    memory: Annotated[str, typer.Option(help="Level of memory, as in tigon.patch(model, memory=...).")] = "default"
    text: TextOption = None
    device: DeviceOption = "auto"
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.", show_default="by device")] = None
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")] = 0
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="runs/<time>")] = None


@dataclass(frozen=True)
class DemoShape:
    """The shape of a model, by the field names that Hugging Face configs share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    head_dim: int = 64
    tie_word_embeddings: bool = True


# For each kind of device: the shape, and the options of the benchmark. The vocabulary of the CPU's model is as large as
# Llama-2's and its layers are small, so that the loss needs most of the memory, as in large models. The other shape is
# that of Llama 3.2 1B.
DEMO_PRESETS: dict[str, tuple[DemoShape, dict[str, Any]]] = {
    "cpu": (
        DemoShape(32_000, 256, 688, 2, 4, 2, 10_000.0),
        {"dtype": "float32", "batch": 4, "seq": 512, "steps": 24, "lr": 1e-3},
    ),
    "cuda": (
        DemoShape(128_256, 2048, 8192, 16, 32, 8, 500_000.0),
        {"dtype": "bfloat16", "batch": 4, "seq": 2048, "steps": 30, "lr": 3e-4},
    ),
}


def demo_config(model_type: str, shape: DemoShape, seq: int) -> "PretrainedConfig":
    """Return the config of `model_type` in a shape.

    Raises:
        ValueError: transformers has no causal language model of `model_type`, or the type refuses the shape.

    >>> demo_config("qwen3", DEMO_PRESETS["cpu"][0], 512).hidden_size
    256
    """
    from transformers import CONFIG_MAPPING

    from tigon.hf.transformers_private import causal_lm_types

    if model_type not in causal_lm_types() or model_type not in CONFIG_MAPPING:
        raise ValueError(
            "train: model-type must be a type that transformers has a causal language model for, such as llama, qwen3, "
            f"gemma2, mistral or phi3, got {model_type!r}"
        )
    config_class = CONFIG_MAPPING[model_type]
    values: dict[str, Any] = {field.name: getattr(shape, field.name) for field in fields(DemoShape)}
    # The ids of the original special tokens would lie outside of a smaller vocabulary.
    values |= {"max_position_embeddings": max(2048, seq), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    # Some configs compute a field and have no setter for it.
    has_setter = lambda name: not isinstance(getattr(config_class, name, None), property)
    try:
        return config_class(**{name: value for name, value in values.items() if has_setter(name)})
    except Exception as error:
        # Configs of transformers raise errors of many types.
        raise ValueError(f"train: model-type {model_type} refuses the sizes of the demo: {error}") from error


def _check_memory(config: "PretrainedConfig", dtype: str, device: str) -> None:
    """Refuse a model whose parameters, gradients and two moments of AdamW alone need more memory than is free."""
    import psutil

    parameters = sum(p.numel() for p in random_model(config, dtype, "meta").parameters())
    needed = parameters * 4 * getattr(torch, dtype).itemsize
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise ValueError(
            f"train: model-type must be a model that fits: {parameters / 1e6:,.0f}M parameters, gradients and states "
            f"need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )


def make_demo_plan(options: DemoOptions) -> TrainPlan:
    """Return the plan of the demo: stock, then Tigon, which train from the same weights."""
    device = pick_device(options.device)
    shape, preset = DEMO_PRESETS[torch.device(device).type]
    if options.vocab is not None:
        if options.vocab < MIN_VOCAB:
            raise ValueError(f"train: vocab must be at least {MIN_VOCAB}, got {options.vocab}")
        shape = replace(shape, vocab_size=options.vocab)
    named = {name: getattr(options, name) for name in ("dtype", "batch", "seq", "steps")}
    settings = preset | {name: value for name, value in named.items() if value is not None}
    model_type = (find_preset(options.model_type) or {"model_type": options.model_type})["model_type"]
    provider = "tigon" if options.memory == "default" else f"tigon-{options.memory}"
    full_options = TrainOptions(
        model=model_type, providers=f"stock,{provider}", text=options.text, device=device, seed=options.seed,
        out=options.out, **settings,
    )  # fmt: skip
    check_options(full_options, [])
    runs = [ProviderRun(provider.name, provider) for provider in select(full_options.providers)]
    config = demo_config(model_type, shape, full_options.seq)
    _check_memory(config, settings["dtype"], device)
    corpus, tokens = read_tokens(options.text, config, full_options.seq)
    warmup = min(3, settings["steps"] // 2)
    return TrainPlan(
        full_options, config, tokens, corpus, settings["dtype"], settings["steps"] - warmup, warmup, runs, demo=True,
    )  # fmt: skip
