"""`tigon bench train`: its options, the order of the work, and its printed output."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tigon.tools.cli import INTERRUPTED, pick_device
from tigon.tools.training.program import DeviceOption, SeedOption, TextOption, run_program, takes_options

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.tools.bench.train.train_plan import TrainPlan

__all__ = ["TrainOptions", "train"]


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command line. None stands for a default that depends on other options."""

    model: Annotated[
        str,
        typer.Option(
            help="A preset such as Llama-3-8B, tiny, a model type, a config.json or its folder, or a name on the hub."
        ),
    ] = "Llama-3.2-1B"
    providers: Annotated[
        str,
        typer.Option(
            help="stock, liger, compile, each with -checkpoint too, tigon, tigon-LEVEL; with --lora also frozen, which "
            "has no adapters; separated by commas."
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
    lora: Annotated[
        int | None, typer.Option(help="Train only low-rank adapters of this rank, on all linear layers but the head.")
    ] = None
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Hold the layers under the adapters in 4 bits (nf4, double quantisation).")
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
            help="Then search between the last size that fitted and the first that did not, to this accuracy."
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Number of the model's first layers to train.", show_default="all")
    ] = None
    curves: Annotated[
        bool,
        typer.Option(
            "--curves", help="Compare the losses with stock's, and with the noise of stock with reversed batches."
        ),
    ] = False
    text: TextOption = None
    device: DeviceOption = "auto"
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float32, of everything.", show_default="bfloat16; float32 on a CPU"),
    ] = None
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4
    seed: SeedOption = 0
    budget: Annotated[
        float | None, typer.Option(help="Seconds. After them no size begins; before, fewer steps may be timed.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/train_<time>")] = None


@takes_options
def train(options: TrainOptions) -> None:
    """Train one model on real text, stock and with each provider, and compare speed, memory and losses.

    Each provider has a process of its own, or a group of them, and the same random weights, data and optimizer. Writes
    train.json, train.md, throughput.png, memory.png and, without a sweep, loss.png. A provider that is not installed,
    refuses the model or runs out of memory is a line in the report.

    Exit code: 0; 1 if Tigon raised an error, or with --curves its losses differ by more than the noise; 2 for bad
    input; 130 after Ctrl-C (the report has the sizes that were done).
    """

    def plan() -> "TrainPlan":
        from tigon.tools.bench.train.train_plan import make_plan

        try:
            return make_plan(replace(options, device=pick_device(options.device)))
        except ValueError as problem:
            raise typer.BadParameter(str(problem)) from problem

    run_program(options.out, "train_", plan, _run)


def _title(options: TrainOptions, plan: "TrainPlan") -> str:
    """Return a line about the model and its training."""
    cut = f", {options.layers} layers" if options.layers else ""
    where = f"{options.gpus} ranks, FSDP2" if options.gpus > 1 else "one process"
    sizes = {None: f"{options.batch} x {options.seq:,} tokens", "seq": f"batch {options.batch}"}
    size = sizes.get(options.sweep, f"{options.seq:,} tokens a sequence")
    checkpointing = ", checkpointing" if options.checkpointing else ""
    lora = "" if options.lora is None else f", {'QLoRA' if options.qlora else 'LoRA'} of rank {options.lora}"
    return f"{options.model}{cut}, {plan.dtype}, {where}, {size}{lora}{checkpointing}"


def _run(console: "Console", plan: "TrainPlan", folder: Path) -> int:
    """Train, print each row when it is complete, and write the report after each row; return the exit code."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tigon.tools.bench.report import describe_machine
    from tigon.tools.bench.train import train_report as report
    from tigon.tools.bench.train.train_runs import BenchSession, train_rounds
    from tigon.tools.training.measurement import Measurement, compare_with_stock

    start_time, options = time.perf_counter(), plan.options
    plan.config.to_json_file(folder / "config.json", use_diff=False)
    machine, title = describe_machine(torch.device(options.device)), _title(options, plan)
    settings = {
        **asdict(options), "title": title, "dtype": plan.dtype, "steps": plan.steps, "warmup": plan.warmup,
        "runs": [run.name for run in plan.runs], "text": plan.text, "text_tokens": plan.tokens.count,
        "bpe_entries": plan.tokens.entries, "interrupted": False,
    }  # fmt: skip
    del settings["out"]
    console.print(f"[bold]{escape(title)}[/], {escape(str(machine['name']))}")
    console.print(f"Text: {escape(plan.text)}, {plan.tokens.count:,} tokens. AdamW, fused. {report.legend(machine)}\n")
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("starts", total=None)

        def show_row(row: Measurement) -> None:
            progress.console.print(escape(report.sentence(row)))
            report.write_report(folder / "train.json", session.rows, machine, settings)

        session = BenchSession(plan, folder, lambda state: progress.update(task, description=escape(state)), show_row)
        settings["interrupted"] = not train_rounds(session)
    rows, curves = session.rows, compare_with_stock(session.rows) if options.curves else {}
    settings |= {**session.facts, "applied": session.applied, "seconds": round(time.perf_counter() - start_time, 1)}
    report.write_report(folder / "train.json", rows, machine, settings)
    (folder / "train.md").write_text(report.markdown(rows, machine, settings), encoding="utf-8")
    pictures = report.plot(rows, folder, options.sweep, f"{title}, {machine['name']}", machine)
    console.print()
    console.print(report.table(rows))
    if options.curves:
        console.print(report.curve_table(curves))
    differ = any(curve.agrees is False for name, curve in curves.items() if name.startswith("tigon"))
    code = int(differ or any(row.failed for row in rows))
    if settings["interrupted"]:
        console.print("[bold yellow]Interrupted[/]: the report has the sizes that were done.")
        code = INTERRUPTED
    names = ", ".join(["train.json", "train.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in {escape(str(folder))}: {names}", soft_wrap=True)
    return code
