"""Named cases of the training benchmark: the defaults that `--case` gives to other options.

The case `demo` compares the losses, too, in a shape that fits the device.

The cases of small batches train at a fixed length and then at uneven lengths. Their steps are so short that the host
sets their time, unless it replays graphs.
"""

from typing import Any

import torch
import typer

# Graphs are captured at the third call, so they exist before the timed steps.
_SMALL: dict[str, Any] = {"warmup": 6, "steps": 10}
_PROVIDERS = "stock,liger,{0},{0}-graphs,compile-reduce-overhead"

CASES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model": "Llama-3.2-1B", "batch": 1, "seq": 512, "lengths": "128-512",
        "providers": _PROVIDERS.format("tigon"), **_SMALL,
    },
    "llama-8b-lora": {
        "model": "Llama-3-8B", "lora": 16, "batch": 1, "seq": 1024, "lengths": "256-1024",
        "providers": _PROVIDERS.format("tigon-lean"), **_SMALL,
    },
    "qwen-4b-lora": {
        "model": "Qwen3-4B", "lora": 16, "batch": 2, "seq": 1024, "lengths": "256-1024",
        "providers": _PROVIDERS.format("tigon-lean"), **_SMALL,
    },
    # Captures are a part of the timed steps, because no signature has been used three times before.
    "trl": {
        "model": "Llama-3.2-1B", "lora": 16, "batch": 2, "seq": 1024, "trl": True, "curves": True,
        "providers": "stock,tigon-graphs", "warmup": 2, "steps": 200, "lr": 1e-3,
    },
}  # fmt: skip


# A CPU trains a small model, whose loss needs most of the memory, as in large models.
_DEMO: dict[str, dict[str, Any]] = {
    "cpu": {"model": "small", "seq": 512, "steps": 14, "lr": 1e-3},
    "cuda": {"model": "Llama-3.2-1B", "seq": 2048, "steps": 27, "lr": 3e-4},
}
NAMES = ("demo", *CASES)


def use_case(context: typer.Context, name: str | None) -> str | None:
    """Let the options of a case be the defaults of the command's other options, which the user can still set."""
    if name is not None and name not in NAMES:
        raise typer.BadParameter(f"must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "demo":
        # The device comes first, because it is eager as the case is.
        device = context.params.get("device", "auto")
        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        shape = _DEMO["cpu" if on_cpu else "cuda"]
        context.default_map = {"providers": "stock,tigon", "batch": 4, "curves": True, **shape}
    elif name is not None:
        context.default_map = CASES[name]
    return name
