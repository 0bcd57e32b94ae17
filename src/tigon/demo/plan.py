"""From options to a plan: whatever can be refused is refused here, before anything runs."""

import itertools
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

from tigon.demo.presets import PRESETS, Preset, build_model
from tigon.demo.report import TOLERANCE, Run
from tigon.demo.text import MIN_VOCAB, Corpus, Tokens, read_text, tokenise
from tigon.demo.train import Job

__all__ = ["Plan", "make_plan", "pick_device", "pick_folder", "pick_preset"]


@dataclass(frozen=True)
class Plan:
    """Two runs, and what they train on. `model_class` and `parameters` describe their model."""

    first: Run
    second: Run
    corpus: Corpus
    tokens: Tokens
    model_class: str
    parameters: int


def pick_device(name: str) -> str:
    """`name`, or for auto the best there is."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    rule = f"must be auto, cpu, cuda or cuda:N, got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(rule, param_hint="--device") from None
    if device.type not in PRESETS:
        raise typer.BadParameter(rule, param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise typer.BadParameter(
            f"must be a device that torch sees ({seen} of CUDA), got {name!r}", param_hint="--device"
        )
    return name


def _at_least(least: int, value: int, option: str) -> None:
    if value < least:
        raise typer.BadParameter(f"must be at least {least}, got {value}", param_hint=option)


def pick_preset(device: str, **given: Any) -> Preset:
    """The device's preset with the options that were given (not None) in place of its own."""
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("dtype", "float32") not in TOLERANCE:
        raise typer.BadParameter(f"must be one of {', '.join(TOLERANCE)}, got {given['dtype']!r}", param_hint="--dtype")
    preset = replace(PRESETS[torch.device(device).type], **given)
    _at_least(1, preset.steps, "--steps")
    _at_least(1, preset.batch, "--batch")
    _at_least(2, preset.seq, "--seq")  # the first token of a sequence is nobody's target
    _at_least(MIN_VOCAB, preset.vocab_size, "--vocab")
    return preset


def pick_folder(out: Path | None) -> Path:
    """`out`, or `runs/<time>`, which is not there yet."""
    if out is not None:
        nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise typer.BadParameter(f"must be a folder that can be written, got {str(out)!r}", param_hint="--out")
        return out
    stem = time.strftime("%Y-%m-%d_%H-%M-%S")
    names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
    return next(folder for name in names if not (folder := Path("runs") / name).exists())


def _rehearse(model_type: str, preset: Preset, patch: dict[str, Any]) -> tuple[str, int]:
    """Build and patch the model without its memory; return its class and number of parameters."""
    import tigon

    try:
        model = build_model(model_type, preset, "meta")
    except Exception as error:  # transformers refuses in many ways
        raise typer.BadParameter(str(error), param_hint="--model-type") from error
    try:
        tigon.patch(model, **patch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from error
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


def _check_room(parameters: int, preset: Preset, device: str) -> None:
    """Parameters, gradients and two moments must fit, whatever a step needs besides."""
    import psutil

    needed = parameters * 4 * getattr(torch, preset.dtype).itemsize * (2 if preset.take_turns else 1)
    on_gpu = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if needed > free:
        raise typer.BadParameter(
            f"must be a model that fits: {parameters / 1e6:,.0f}M parameters, gradients and optimizer states need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free",
            param_hint="--model-type",
        )


def make_plan(
    model_type: str, preset: Preset, *, device: str, seed: int, memory: str, text: Path | None, noise: bool
) -> Plan:
    """Check the options against each other and the machine, and tokenise the text.

    Raises:
        typer.BadParameter: naming the option, the rule and the value.
    """
    _at_least(0, seed, "--seed")
    try:
        corpus = read_text(text)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
    patch = {"memory": memory}
    model_class, parameters = _rehearse(model_type, preset, patch)
    _check_room(parameters, preset, device)
    tokens = tokenise(corpus, preset.vocab_size)
    if tokens.count < preset.seq:
        raise typer.BadParameter(
            f"must hold at least one sequence of {preset.seq} tokens, got {tokens.count} tokens in {corpus.name!r}",
            param_hint="--text",
        )
    stock = Job(model_type, preset, device, seed, str(tokens.path))
    if noise:
        second = Run("reordered", "reordered", replace(stock, reverse=True))
    else:
        second = Run("tigon", "Tigon", replace(stock, patch=patch))
    return Plan(Run("stock", "stock", stock), second, corpus, tokens, model_class, parameters)
