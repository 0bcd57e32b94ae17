"""The options of `benchmarks.demo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.training.program import DeviceOption, SeedOption, TextOption


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line. None stands for the value of the device's preset."""

    model_type: Annotated[
        str,
        typer.Option(
            help="Type of the decoder to train: llama, qwen3, gemma2, mistral, phi3, qwen2, gemma, ..., or a preset "
            "(Llama-3-8B, ...), which stands for its type. The demo sets all sizes."
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
    seed: SeedOption = 0
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="runs/<time>")] = None
    noise: Annotated[
        bool,
        typer.Option(
            "--noise",
            help="Compare stock with stock that sums in another order. A tolerance must allow this difference.",
        ),
    ] = False
