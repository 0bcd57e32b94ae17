"""Turn the options into two runs. All bad options are refused here, before anything runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import typer

from benchmarks.demo.demo_presets import DEMO_PRESETS, DemoPreset, build_model, demo_config
from benchmarks.demo.demo_report import TOLERANCE
from benchmarks.demo.demo_runs import DemoRun
from benchmarks.training.job import Job
from benchmarks.training.models import config_fields
from benchmarks.training.text import MIN_VOCAB, Corpus, Tokens, cache_folder, read_text, tokenise
from tigon.cli.main import pick_device
from tigon.cli.presets import find_preset

if TYPE_CHECKING:
    from benchmarks.demo.demo_options import DemoOptions
    from tigon.memory.levels import MemoryLevel


@dataclass(frozen=True)
class DemoPlan:
    """Two runs and their text. `model_class` and `parameters` describe their model."""

    first: DemoRun
    second: DemoRun
    corpus: Corpus
    tokens: Tokens
    model_class: str
    parameters: int


def _pick_preset(device: str, options: "DemoOptions") -> DemoPreset:
    """Return the preset of the device with the values that the options name."""
    if options.dtype is not None and options.dtype not in TOLERANCE:
        message = f"must be one of {', '.join(TOLERANCE)}, got {options.dtype!r}"
        raise typer.BadParameter(message, param_hint="--dtype")
    values = {
        "dtype": options.dtype, "vocab_size": options.vocab, "batch": options.batch, "seq": options.seq,
        "steps": options.steps,
    }  # fmt: skip
    named_values: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    preset = replace(DEMO_PRESETS[torch.device(device).type], **named_values)
    # The first token of a sequence is never a target, so a sequence of one token would have no loss.
    minima = (("steps", preset.steps, 1), ("batch", preset.batch, 1), ("seq", preset.seq, 2))
    for name, value, least in (*minima, ("vocab", preset.vocab_size, MIN_VOCAB)):
        if value < least:
            raise typer.BadParameter(f"must be at least {least}, got {value}", param_hint=f"--{name}")
    return preset


def _build_on_meta(model_type: str, preset: DemoPreset, memory: str) -> tuple[str, int]:
    """Build and patch the model on the meta device; return the name of its class and its number of parameters."""
    import tigon

    try:
        model = build_model(model_type, preset, "meta")
    except Exception as error:
        # Configs and models of transformers raise errors of many types.
        raise typer.BadParameter(str(error), param_hint="--model-type") from error
    try:
        # `tigon.patch` refuses a name that is no level.
        tigon.patch(model, memory=cast("MemoryLevel", memory))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from error
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


def _check_memory(parameters: int, preset: DemoPreset, device: str) -> None:
    """Refuse a model whose parameters, gradients and two moments of AdamW alone need more memory than is free."""
    import psutil

    required_bytes = parameters * 4 * getattr(torch, preset.dtype).itemsize * (2 if preset.take_turns else 1)
    on_gpu = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if required_bytes > free:
        raise typer.BadParameter(
            f"must be a model that fits: {parameters / 1e6:,.0f}M parameters, gradients and optimizer states need "
            f"{required_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free",
            param_hint="--model-type",
        )


def make_job(model_type: str, preset: DemoPreset, device: str, seed: int, tokens: Path) -> Job:
    """Return the job of the stock run."""
    config = config_fields(demo_config(model_type, preset))
    return Job("stock", config, str(tokens), preset.dtype, device, seed=seed, lr=preset.lr, continues=True)


def make_plan(options: "DemoOptions") -> DemoPlan:
    """Check the options, build the model without memory, and tokenise the text.

    Raises:
        typer.BadParameter: the message names the option, the rule and the value.
    """
    memory, seed = options.memory, options.seed
    model_type = (find_preset(options.model_type) or {"model_type": options.model_type})["model_type"]
    device = pick_device(options.device)
    preset = _pick_preset(device, options)
    if not 0 <= seed < 2**64:
        raise typer.BadParameter(f"must be at least 0 and below 2**64, got {seed}", param_hint="--seed")
    try:
        corpus = read_text(options.text)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
    model_class, parameters = _build_on_meta(model_type, preset, memory)
    _check_memory(parameters, preset, device)
    try:
        tokens = tokenise(corpus, preset.vocab_size)
    except OSError as error:
        raise typer.BadParameter(
            f"the cache must be a folder that can be written, got {str(cache_folder())!r} ({error.strerror}): set the "
            "environment variable XDG_CACHE_HOME to another folder"
        ) from error
    if tokens.count < preset.seq:
        raise typer.BadParameter(
            f"must hold at least one sequence of {preset.seq} tokens, got {tokens.count} tokens in {corpus.name!r}",
            param_hint="--text",
        )
    stock = make_job(model_type, preset, device, seed, tokens.path)
    first = DemoRun("stock", "stock", model_type, preset, stock)
    if options.noise:
        second = DemoRun("reordered", "reordered", model_type, preset, replace(stock, reverse=True))
    else:
        provider = "tigon" if memory == "default" else f"tigon-{memory}"
        second = DemoRun("tigon", "Tigon", model_type, preset, replace(stock, provider=provider))
    return DemoPlan(first, second, corpus, tokens, model_class, parameters)
