"""`benchmarks.train`: the order of the work, and its printed output."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from benchmarks.train.train_options import TrainOptions
from benchmarks.training.fp8_providers import read_fp8
from benchmarks.training.program import run_program, takes_options
from tigon.cli.main import INTERRUPTED, pick_device

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.train.train_plan import TrainPlan


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
        from benchmarks.train.train_plan import make_plan

        try:
            return make_plan(replace(options, device=pick_device(options.device)))
        except ValueError as problem:
            raise typer.BadParameter(str(problem)) from problem

    run_program(options.out, "train_", plan, _run)


def _title(options: TrainOptions, plan: "TrainPlan") -> str:
    """Return a line about the model and its training."""
    layers = f", {options.layers} layers" if options.layers else ""
    processes = f"{options.gpus} ranks, FSDP2" if options.gpus > 1 else "one process"
    sizes = {None: f"{options.batch} x {options.seq:,} tokens", "seq": f"batch {options.batch}"}
    size = sizes.get(options.sweep, f"{options.seq:,} tokens a sequence")
    checkpointing = ", checkpointing" if options.checkpointing else ""
    lora = "" if options.lora is None else f", {'QLoRA' if options.qlora else 'LoRA'} of rank {options.lora}"
    return f"{options.model}{layers}, {plan.dtype}, {processes}, {size}{lora}{checkpointing}"


def _run(console: "Console", plan: "TrainPlan", folder: Path) -> int:
    """Train, print each row when it is complete, and write the report after each row; return the exit code."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from benchmarks.ops.report import describe_machine
    from benchmarks.train import train_report as report
    from benchmarks.train.train_runs import BenchSession, train_rounds
    from benchmarks.training.measurement import Measurement, compare_with_stock

    start_time, options = time.perf_counter(), plan.options
    plan.config.to_json_file(folder / "config.json", use_diff=False)
    machine, title = describe_machine(torch.device(options.device)), _title(options, plan)
    settings = {
        **asdict(options), "title": title, "dtype": plan.dtype, "steps": plan.steps, "warmup": plan.warmup,
        "runs": [run.name for run in plan.runs], "text": plan.text, "text_tokens": plan.tokens.count,
        "bpe_entries": plan.tokens.entries, "interrupted": False,
        "optimizers": report.name_optimizers(run.provider for run in plan.runs),
    }  # fmt: skip
    del settings["out"]
    console.print(f"[bold]{escape(title)}[/], {escape(str(machine['name']))}")
    text = f"{escape(plan.text)}, {plan.tokens.count:,} tokens"
    console.print(f"Text: {text}. {settings['optimizers']} {report.legend(machine)}\n")
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
    settings |= {
        **session.facts,
        "applied": session.patch_reports,
        "seconds": round(time.perf_counter() - start_time, 1),
    }
    report.write_report(folder / "train.json", rows, machine, settings)
    (folder / "train.md").write_text(report.markdown(rows, machine, settings), encoding="utf-8")
    pictures = report.plot(rows, folder, options.sweep, f"{title}, {machine['name']}", machine)
    console.print()
    console.print(report.table(rows))
    if options.curves:
        console.print(report.curve_table(curves))
    # FP8 approximates, so its losses are compared but do not decide about the exit code.
    exact = {name: curve for name, curve in curves.items() if name.startswith("tigon") and read_fp8(name) is None}
    differ = any(curve.agrees is False for curve in exact.values())
    code = int(differ or any(row.failed for row in rows))
    if settings["interrupted"]:
        console.print("[bold yellow]Interrupted[/]: the report has the sizes that were done.")
        code = INTERRUPTED
    names = ", ".join(["train.json", "train.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in {escape(str(folder))}: {names}", soft_wrap=True)
    return code
