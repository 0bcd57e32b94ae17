"""`tigon plan`: its options and its output. The modules that it needs are imported when it is called."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.runtime.requirements import unmet
from tigon.tools.cli import INTERRUPTED, check_file, make_console, say_written, write_file

__all__ = ["plan"]

H200_GIB = 139.8
# An exit code.
NOTHING_FITS = 1


def _gpu_memory() -> float:
    """Return the GiB of the GPU of this machine, or of an H200 if there is none."""
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

    Exit code: 0; 1 if no level fits; 2 for bad input; 130 after Ctrl-C.
    """
    from tigon.tools.inspect.build import find_preset
    from tigon.tools.plan.planner import Settings, TooLong, recommended
    from tigon.tools.plan.report import as_json, print_plan
    from tigon.tools.presets import PRESETS

    console = make_console()
    if plot is not None:
        _check_plot(plot)
    for path, option in ((json_file, "--json"), (plot, "--plot")):
        if path is not None:
            check_file(path, option)
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
        except TooLong as error:
            raise typer.BadParameter(str(error), param_hint="--seq") from error
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
        notes = _notes(config, settings)
        print_plan(console, model, rows, settings, batch is not None, notes)
        if plot is not None:
            from tigon.tools.plan.plot import draw

            write_file(plot, lambda path: draw(path, model, rows, settings), "--plot")
            say_written(console, plot)
        if json_file is not None:
            text = json.dumps(as_json(model, rows, settings, batch is not None, notes), indent=1) + "\n"
            write_file(json_file, text, "--json")
            say_written(console, json_file)
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None
    if recommended(rows, settings, batch is not None) is None:
        raise typer.Exit(NOTHING_FITS)


def _notes(config: Any, settings: Any) -> list[str]:
    """Return sentences that warn about these settings."""
    from tigon.tools.plan.positions import configured_positions

    positions = configured_positions(config)
    if positions is None or settings.seq <= positions:
        return []
    return [
        f"The config names {positions:,} positions. The model computes those beyond, for which it was not trained: "
        "see its scaling of the rotary embedding."
    ]


def _check_plot(path: Path) -> None:
    if message := unmet("matplotlib"):
        raise typer.BadParameter(message, param_hint="--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"must end in .png, .svg or .pdf, got {str(path)!r}", param_hint="--plot")


def _rows(config: Any, settings: Any, trust_remote_code: bool, plotted: bool, console: Any) -> list:
    from tigon.tools.plan.planner import plan as planned
    from tigon.tools.plan.plot import lengths

    rows, more = [], lengths(settings.seq) if plotted else ()
    with console.status("Building the model on meta") as status:
        for row in planned(config, settings, trust_remote_code=trust_remote_code, lengths=more):
            rows.append(row)
            status.update(f"Levels: {', '.join(row.level for row in rows)} ...")
    return rows
