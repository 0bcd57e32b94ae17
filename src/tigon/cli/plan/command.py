"""The command `tigon plan`: its options and its output. The modules that it needs are imported when it is called."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.main import check_file, make_console, say_written, show_progress, write_file
from tigon.cli.presets import MODEL_HELP
from tigon.runtime.requirements import unmet

# The exit code if no level fits.
NOTHING_FITS = 1


def _gpu_memory() -> float:
    """Return the GiB of the GPU of this machine, or of an H200 if there is none."""
    import torch

    from tigon.cli.plan.planner import PlanSettings

    has_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if has_gpu else PlanSettings.gpu_memory


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    seq: Annotated[int, typer.Option(help="The tokens in a sequence.")] = 4096,
    batch: Annotated[
        int | None,
        typer.Option(
            help="The sequences of each GPU in a step.", show_default="1; levels are judged at their largest batch"
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs, in one host.")] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="The memory of a GPU in GiB.", show_default="those of this GPU, or 139.8: an H200"),
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(
            help="The memory of a GPU in GiB that is not available to tensors.",
            show_default="5 % and 1 GiB, or 2 GiB with several GPUs",
        ),
    ] = None,
    host_memory: Annotated[
        float, typer.Option(help="The pinned host memory in GiB for each GPU, which the levels with offload use.")
    ] = 128.0,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw (fused), adamw-foreach, sgd, none, or a format of tigon.AdamW: adamw-8bit (moments of 8 bits), "
            "adamw-fp32, each also with master weights of 24 or 32 bits (adamw-8bit+24)."
        ),
    ] = "adamw",
    dtype: Annotated[
        str,
        typer.Option(
            help="bf16, fp16, fp32, or mixed: arithmetic in bf16; shards, gradients and states in fp32 (fsdp)."
        ),
    ] = "bf16",
    strategy: Annotated[
        str | None, typer.Option(help="single, ddp or fsdp (FSDP2).", show_default="single; fsdp with several GPUs")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            help="Train only adapters (LoRA) of this rank, on all linear layers but the head (needs peft).",
            show_default="train all parameters",
        ),
    ] = None,
    qlora: Annotated[
        bool, typer.Option("--qlora", help="With --lora: the layers with adapters have weights of 4 bits (nf4).")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the whole plan to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot memory by the length of a sequence to this file (needs matplotlib).")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code of the repository to run.")
    ] = False,
) -> None:
    """Show how much GPU memory a training step needs at each memory level, and the largest batch that fits.

    The model is built from its config alone, on the meta device. A step runs there at every level, and the bytes that
    are alive at each moment are counted, so neither a GPU nor weights are needed. The speed is an estimate from the
    arithmetic and the memory traffic of the step.

    The exit code is 0, or 1 if no level fits, 2 for bad input, and 130 after Ctrl-C.
    """
    if plot is not None:
        _check_plot(plot)
    if lora is not None and (message := unmet("peft")):
        raise typer.BadParameter(message, param_hint="--lora")
    for path, option in ((json_file, "--json"), (plot, "--plot")):
        if path is not None:
            check_file(path, option)
    settings = _make_settings(
        seq=seq, batch=1 if batch is None else batch, gpus=gpus, host_memory=host_memory, reserve=reserve,
        gpu_memory=_gpu_memory() if gpu_memory is None else gpu_memory, optimizer=optimizer, dtype=dtype,
        strategy=strategy, lora=lora, qlora=qlora,
    )  # fmt: skip
    if not _run(model, settings, batch is not None, trust_remote_code, json_file, plot):
        raise typer.Exit(NOTHING_FITS)


def _make_settings(**values: Any) -> Any:
    """Return the settings, or refuse the option that is wrong."""
    from tigon.cli.plan.planner import PlanSettings

    try:
        return PlanSettings(**values)
    except ValueError as error:
        # The message begins with the name of the setting.
        name, _, message = str(error).partition(" ")
        raise typer.BadParameter(message, param_hint="--" + name.replace("_", "-")) from error


def _run(
    model: str, settings: Any, has_batch: bool, trust_remote_code: bool, json_file: Path | None, plot: Path | None
) -> bool:
    """Plan all levels, print and write the results, and return whether a level fits."""
    from tigon.cli.inspect.build import find_config
    from tigon.cli.plan import planner
    from tigon.cli.plan.plan_table import as_json, draw, lengths, print_plan

    console, plot_lengths = make_console(), lengths(settings.seq) if plot is not None else ()
    try:
        config = find_config(model, trust_remote_code=trust_remote_code)
        with show_progress("Building the model on meta") as show:
            options: Any = {"trust_remote_code": trust_remote_code, "lengths": plot_lengths, "show": show}
            plans = list(planner.plan(config, settings, **options))
    except planner.TooLong as error:
        raise typer.BadParameter(str(error), param_hint="--seq") from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    notes = _notes(config, settings)
    print_plan(console, model, plans, settings, has_batch, notes)
    if plot is not None:
        write_file(plot, lambda path: draw(path, model, plans, settings), "--plot")
        say_written(console, plot)
    if json_file is not None:
        text = json.dumps(as_json(model, plans, settings, has_batch, notes), indent=1) + "\n"
        write_file(json_file, text, "--json")
        say_written(console, json_file)
    return planner.recommend(plans, settings, has_batch) is not None


def _notes(config: Any, settings: Any) -> list[str]:
    """Return sentences about these settings: what is trained, and what may be a mistake."""
    from tigon.cli.plan.plan_table import describe_adapters
    from tigon.cli.plan.positions import configured_positions

    notes, positions = describe_adapters(settings), configured_positions(config)
    if positions is not None and settings.seq > positions:
        notes.append(
            f"The config names {positions:,} positions. The model computes the positions beyond these too, but was not "
            "trained for them; see its scaling of the rotary embedding."
        )
    return notes


def _check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before anything is computed."""
    if message := unmet("matplotlib"):
        raise typer.BadParameter(message, param_hint="--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"must end in .png, .svg or .pdf, got {str(path)!r}", param_hint="--plot")
