"""`tigon bench train`: its options, the order of the work, and what is said."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tigon.tools.cli import INTERRUPTED, make_console, make_folder, pick_device, pick_folder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.tools.bench.train.plan import Options, Plan

__all__ = ["train"]


def train(
    model: Annotated[
        str,
        typer.Option(help="A preset as Llama-3-8B, tiny, a model type, a config.json or its folder, or a hub's name."),
    ] = "Llama-3.2-1B",
    providers: Annotated[
        str,
        typer.Option(help="stock, liger, compile, those with -checkpoint, tigon, tigon-LEVEL; separated by commas."),
    ] = "stock,liger,tigon",
    batch: Annotated[int, typer.Option(help="Sequences a GPU in each step; where a sweep over it starts.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens a sequence; where a sweep over it starts.")] = 2048,
    steps: Annotated[
        int | None, typer.Option(help="Timed steps.", show_default="10; 4 in a sweep; 50 with --curves")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps before them, trained but not timed.", show_default="3; 2 in a sweep")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over all providers, every other in reverse order.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing of every layer, on every side.")
    ] = False,
    gpus: Annotated[int, typer.Option(help="GPUs; several share the model by FSDP2. Ranks of a CPU with it.")] = 1,
    sweep: Annotated[
        str | None, typer.Option(help="seq or batch: twice as much each time, until memory runs out.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="The sizes of the sweep instead, separated by commas.", show_default="doublings")
    ] = None,
    resolution: Annotated[
        int | None,
        typer.Option(help="Then search between the last that fitted and the first that did not, to this accuracy."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only the model's first layers.", show_default="all")] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Compare the losses with stock's, beside stock with its batches reversed.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="File or folder to train on.", show_default="the Python standard library's sources"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float32, of everything.", show_default="bfloat16; float32 on a CPU"),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds: no size is begun after them, and fewer steps are timed before.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/train_<time>")] = None,
) -> None:
    """Train one model on real text, stock and with each provider, and compare speed, memory and losses.

    Each provider has a process of its own, or a group of them, and the same random weights, data and optimizer. Writes
    train.json, train.md, throughput.png, memory.png and, without a sweep, loss.png. A provider that is not installed,
    refuses the model or runs out of memory is a line in the report.

    Exit code: 0; 1 if Tigon raised, or with --curves its losses leave the noise; 2 for bad input; 130 after Ctrl-C
    (what was measured is kept).
    """
    console = make_console()
    try:
        from tigon.tools.bench.train.plan import Options, make_plan

        device = pick_device(device)
        folder = pick_folder(out, "train_")
        options = Options(
            model, providers, batch, seq, steps, warmup, rounds, checkpointing, gpus, sweep, sizes, resolution, layers,
            curves, device, dtype, lr, seed, text, budget,
        )  # fmt: skip
        try:
            with console.status("Reading and tokenising the text"):
                plan = make_plan(options)
        except ValueError as problem:
            raise typer.BadParameter(str(problem)) from problem
        make_folder(folder)
        code = _run(console, plan, folder)
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def _title(options: "Options", plan: "Plan") -> str:
    """The model and how it is trained, in a line."""
    cut = f", {options.layers} layers" if options.layers else ""
    where = f"{options.gpus} ranks, FSDP2" if options.gpus > 1 else "one process"
    sizes = {None: f"{options.batch} x {options.seq:,} tokens", "seq": f"batch {options.batch}"}
    size = sizes.get(options.sweep, f"{options.seq:,} tokens a sequence")
    checkpointing = ", checkpointing" if options.checkpointing else ""
    return f"{options.model}{cut}, {plan.dtype}, {where}, {size}{checkpointing}"


def _settings(plan: "Plan", title: str) -> dict[str, Any]:
    return {
        **asdict(plan.options), "title": title, "dtype": plan.dtype, "steps": plan.steps, "warmup": plan.warmup,
        "runs": [run.name for run in plan.runs], "text": plan.text, "text_tokens": plan.tokens.count,
        "bpe_entries": plan.tokens.entries, "interrupted": False,
    }  # fmt: skip


def _run(console: "Console", plan: "Plan", folder: Path) -> int:
    """Measure, print each row as it comes, and leave the report behind after each. Returns the exit code."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tigon.tools.bench.report import describe_machine
    from tigon.tools.bench.train import plots, report
    from tigon.tools.bench.train.runner import Runner

    started, options = time.perf_counter(), plan.options
    plan.config.to_json_file(folder / "config.json", use_diff=False)
    machine, title = describe_machine(torch.device(options.device)), _title(options, plan)
    settings = _settings(plan, title)
    console.print(f"[bold]{escape(title)}[/], {escape(machine['name'])}")
    console.print(f"Text: {escape(plan.text)}, {plan.tokens.count:,} tokens. AdamW, fused. {report.legend(machine)}\n")
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("starts", total=None)

        def done(row: report.Row) -> None:
            progress.console.print(escape(report.sentence(row)))
            report.write_json(folder / "train.json", runner.outcome.rows, machine, settings)

        runner = Runner(plan, folder, lambda text: progress.update(task, description=escape(text)), done)
        outcome = runner.run()
    settings |= {
        **outcome.facts,
        "applied": outcome.applied,
        "interrupted": outcome.interrupted,
        "seconds": round(time.perf_counter() - started, 1),
    }
    report.write_json(folder / "train.json", outcome.rows, machine, settings)
    (folder / "train.md").write_text(report.markdown(outcome.rows, machine, settings), encoding="utf-8")
    pictures = plots.draw(outcome.rows, folder, options.sweep, f"{title}, {machine['name']}", machine)
    console.print()
    console.print(report.table(outcome.rows))
    code = int(any(row.failed for row in outcome.rows))
    if options.curves:
        curves = report.compare_curves(outcome.rows)
        console.print(report.curve_table(curves))
        code = max(code, int(any(c.agrees is False for name, c in curves.items() if name.startswith("tigon"))))
    if outcome.interrupted:
        console.print("[bold yellow]Interrupted[/]: the report holds the sizes that were done.")
        code = INTERRUPTED
    names = ", ".join(["train.json", "train.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in {escape(str(folder))}: {names}", soft_wrap=True)
    return code
