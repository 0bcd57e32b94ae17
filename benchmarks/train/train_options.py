"""The options of `benchmarks.train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.training.program import DeviceOption, SeedOption, TextOption
from tigon.cli.presets import MODEL_HELP


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command line. None stands for a default that depends on other options."""

    model: Annotated[
        str,
        typer.Option(help=MODEL_HELP),
    ] = "Llama-3.2-1B"
    providers: Annotated[
        str,
        typer.Option(
            help="Providers, separated by commas: stock, liger, compile (also with the suffix -checkpoint), tigon, "
            "tigon-LEVEL, tigon-fp8-RECIPE, tigon-LEVEL-fp8-RECIPE, torchao-float8-RECIPE; each of Tigon also with the "
            "suffix -adamw8bit, which keeps the moments in 8 bits; stock-fp32, whose losses are a reference; with "
            "--lora also unsloth, unsloth-checkpoint, and frozen, the frozen model without adapters."
        ),
    ] = "stock,liger,tigon"
    batch: Annotated[
        int, typer.Option(help="Sequences of each GPU in a step; the first size of a sweep over the batch.")
    ] = 1
    seq: Annotated[int, typer.Option(help="Tokens of a sequence; the first size of a sweep over the length.")] = 2048
    steps: Annotated[
        int | None, typer.Option(help="Timed steps.", show_default="10; 4 in a sweep; 50 with --curves")
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Steps before the timed ones, which are trained but not timed.", show_default="3; 2 in a sweep"
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Rounds over all providers, every second one in reverse order.")] = 1
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing of every layer, for every provider.")
    ] = False
    fp8: Annotated[
        str | None,
        typer.Option(
            help="Add the providers in FP8 beside those of Tigon, and torchao if it is installed: tensorwise, rowwise, "
            "or both, separated by a comma.",
            show_default="none",
        ),
    ] = None
    fp8_dw: Annotated[
        bool, typer.Option("--fp8-dw/--no-fp8-dw", help="Whether the gradients of weights are FP8 products too.")
    ] = True
    lora: Annotated[
        int | None, typer.Option(help="Train only low-rank adapters of this rank, on all linear layers but the head.")
    ] = None
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Hold the layers that have adapters in 4 bits (nf4, double quantisation).")
    ] = False
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs, or of ranks on a CPU. Several shard the model by FSDP2.")
    ] = 1
    sweep: Annotated[str | None, typer.Option(help="seq or batch: doubles the size until memory runs out.")] = None
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of the sweep, separated by commas.", show_default="doublings")
    ] = None
    resolution: Annotated[
        int | None,
        typer.Option(
            help="After the sweep, search between the largest size that fitted and the smallest that did not, until "
            "they are this close."
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Number of the model's first layers to train.", show_default="all")
    ] = None
    curves: Annotated[
        bool,
        typer.Option(
            "--curves",
            help="Compare the losses with those of stock, and of stock-fp32 if it is a provider. Their noise is the "
            "difference that reversed batches make.",
        ),
    ] = False
    text: TextOption = None
    device: DeviceOption = "auto"
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16 or float32, for parameters, gradients and states.", show_default="bfloat16; float32 on a CPU"
        ),
    ] = None
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4
    seed: SeedOption = 0
    budget: Annotated[
        float | None,
        typer.Option(help="Limit in seconds. After it no size begins; close to it, fewer steps may be timed."),
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/train_<time>")] = None
