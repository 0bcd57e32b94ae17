"""`tigon plan`: its options and what is said. What it needs is loaded when it is called."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli import INTERRUPTED, make_console

__all__ = ["plan"]

H200_GIB = 139.8


def _gpu_memory() -> float:
    """GiB of the GPU here, or of an H200."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else H200_GIB


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset (Llama-3-8B, ...), or as tigon inspect has it: repository of the hub (owner/name), folder, "
            "config.json, or model type."
        ),
    ],
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of each GPU in a step.", show_default="1; each level's largest counts")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs, of one host.")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of a GPU.", show_default="of the GPU here, or 139.8: an H200")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(
            help="GiB of it that tensors do not get.", show_default="5 % and 1 GiB, or 2 GiB if there are several GPUs"
        ),
    ] = None,
    host_memory: Annotated[float, typer.Option(help="GiB of the host for each GPU, for level offload.")] = 128.0,
    optimizer: Annotated[str, typer.Option(help="adamw (fused), adamw-foreach, adamw-8bit, sgd or none.")] = "adamw",
    dtype: Annotated[
        str,
        typer.Option(help="bf16, fp16, fp32; mixed: arithmetic in bf16; shards, gradients, states in fp32 (fsdp)."),
    ] = "bf16",
    strategy: Annotated[
        str | None, typer.Option(help="single, ddp or fsdp (FSDP2).", show_default="single; fsdp of several GPUs")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it to this file too.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory by the length of a sequence to this file (needs matplotlib).")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that the repository brings run.")
    ] = False,
) -> None:
    """Say what a training step needs of a GPU at each level of memory, and the largest batch that fits.

    The model is built from its config alone, on the meta device. A step is run there at every level, and what is alive
    at each moment is counted: no GPU is needed, no weights are made. Speed is an estimate, from the arithmetic and the
    traffic that the step has.

    Exit code: 0; 2 for bad input; 130 after Ctrl-C.
    """
    from tigon.inspect.build import find_preset
    from tigon.plan.planner import Settings
    from tigon.plan.report import as_json, print_plan
    from tigon.presets import PRESETS

    console = make_console()
    for path, option in ((json_file, "--json"), (plot, "--plot")):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"must be in a folder that exists, got {str(path)!r}", param_hint=option)
    if plot is not None:
        _check_plot(plot)
    try:
        settings = Settings(
            seq, 1 if batch is None else batch, gpus, gpu_memory if gpu_memory is not None else _gpu_memory(),
            host_memory, reserve, optimizer, dtype, strategy,
        )  # fmt: skip
    except ValueError as error:
        name, _, said = str(error).partition(" ")
        raise typer.BadParameter(said, param_hint="--" + name.replace("_", "-")) from error
    try:
        try:
            config = find_preset(model, f"one of {', '.join(PRESETS)}", trust_remote_code=trust_remote_code)
            rows = _rows(config, settings, trust_remote_code, plot is not None, console)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
        print_plan(console, model, rows, settings, batch is not None)
        if json_file is not None:
            _write(json_file, json.dumps(as_json(model, rows, settings, batch is not None), indent=1) + "\n")
        if plot is not None:
            from tigon.plan.plot import draw

            draw(plot, model, rows, settings)
            console.print(f"Wrote {plot}")
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"must end in .png, .svg or .pdf, got {str(path)!r}", param_hint="--plot")


def _rows(config: Any, settings: Any, trust_remote_code: bool, plotted: bool, console: Any) -> list:
    from tigon.plan.planner import plan as planned
    from tigon.plan.plot import lengths

    rows, more = [], lengths(settings.seq) if plotted else ()
    with console.status("Building the model on meta") as status:
        for row in planned(config, settings, trust_remote_code=trust_remote_code, lengths=more):
            rows.append(row)
            status.update(f"Levels: {', '.join(row.level for row in rows)} ...")
    return rows


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"must be a file that can be written, got {str(path)!r} ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--json") from error
