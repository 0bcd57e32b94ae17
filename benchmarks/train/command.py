"""The commands of the training benchmark and of the demo: the order of the work, and the printed output."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.report import describe_machine, make_folder, pick_folder, takes_options
from benchmarks.train import report
from benchmarks.train.demo import DemoOptions, make_demo_plan
from benchmarks.train.measurement import (
    TOLERANCE,
    DemoComparison,
    Measurement,
    compare_demo,
    compare_with_stock,
)
from benchmarks.train.plan import TrainOptions, TrainPlan, make_plan
from benchmarks.train.runs import TrainSession, train_rounds
from tigon.cli.main import INTERRUPTED, make_console, pick_device

# Exit codes. The exit code for bad input is 2.
DIFFERS, RUN_FAILED = 1, 3


@takes_options
def train(options: TrainOptions) -> None:
    """Train one model on real text, stock and with each provider, and compare speed, memory and losses.

    Each provider has a process of its own, or a group of them, and the same random weights, data and optimizer. Writes
    train.json, train.md, speed_memory.png and, without a sweep, loss.png. A provider that is not installed, refuses the
    model or runs out of memory is a line in the report.

    Exit code: 0; 1 if Tigon raised an error, or with --curves its losses differ by more than the noise; 2 for bad
    input; 130 after Ctrl-C (the report has the sizes that were done).
    """
    _run(options, lambda: make_plan(replace(options, device=pick_device(options.device))), "train_")


@takes_options
def demo(options: DemoOptions) -> None:
    """Train a Hugging Face decoder on real text twice from one seed, stock and with Tigon, and compare.

    Writes train.json, train.md, speed_memory.png and loss.png.

    Exit code: 0; 1 if the loss curves differ by more than the tolerance printed; 2 for bad input; 3 if a run failed;
    130 after Ctrl-C (the report has the runs that were done).
    """
    _run(options, lambda: make_demo_plan(options), "")


def _run(options: Any, plan_runs: Callable[[], TrainPlan], prefix: str) -> None:
    """Make the plan and the folder, train, write the report, and end with its exit code."""
    console = make_console()
    try:
        folder = pick_folder(options.out, prefix)
        with console.status("Reading and tokenising the text"):
            plan = plan_runs()
        make_folder(folder)
        code = _conclude(console, *_train(console, plan, folder))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        code = INTERRUPTED
    raise typer.Exit(code)


def _title(plan: TrainPlan) -> str:
    """Return a line about the model and its training."""
    options = plan.options
    layers = f", {options.layers} layers" if options.layers else ""
    processes = f"{options.gpus} ranks, FSDP2" if options.gpus > 1 else "one process"
    sizes = {None: f"{options.batch} x {options.seq:,} tokens", "seq": f"batch {options.batch}"}
    size = sizes.get(options.sweep, f"{options.seq:,} tokens a sequence")
    lora = "" if options.lora is None else f", {'QLoRA' if options.qlora else 'LoRA'} of rank {options.lora}"
    if options.trl:
        size, lora = f"{options.batch} texts of at most {options.seq:,} tokens", f"{lora}, TRL's SFTTrainer"
    lengths = f", then lengths of {options.lengths}" if options.lengths else ""
    return f"{options.model}{layers}, {plan.dtype}, {processes}, {size}{lora}{lengths}"


def _train(console: Console, plan: TrainPlan, folder: Path) -> tuple[TrainSession, dict[str, Any]]:
    """Train, print each row when it is complete, and write the numbers after each row."""
    start_time, options = time.perf_counter(), plan.options
    plan.config.to_json_file(folder / "config.json", use_diff=False)
    machine = describe_machine(torch.device(options.device))
    settings = {
        **asdict(options), "title": _title(plan), "dtype": plan.dtype, "steps": plan.steps, "warmup": plan.warmup,
        "runs": [run.name for run in plan.runs], "text": plan.corpus.name, "text_tokens": plan.tokens.count,
        "bpe_entries": plan.tokens.entries, "demo": plan.demo, "interrupted": False, "machine": machine,
    }  # fmt: skip
    del settings["out"]
    console.print(f"[bold]{escape(settings['title'])}[/], {escape(str(machine['name']))}")
    console.print(f"Text: {escape(plan.corpus.name)}, {plan.tokens.count:,} tokens. {report.legend(machine)}\n")
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starts", total=None)

        def show_row(row: Measurement) -> None:
            progress.console.print(escape(report.sentence(row)))
            report.write_report(folder / "train.json", session.rows, settings)

        show_state = lambda state: progress.update(task, description=escape(state))
        session = TrainSession(plan, folder, show_state, show_row)
        settings["interrupted"] = not train_rounds(session)
    seconds = round(time.perf_counter() - start_time, 1)
    settings |= {**session.facts, "applied": session.patch_reports, "seconds": seconds}
    console.print()
    return session, settings


def _conclude(console: Console, session: TrainSession, settings: dict[str, Any]) -> int:
    """Print the tables, write the numbers, the page and the pictures, and return the exit code."""
    rows, plan, folder = session.rows, session.plan, session.folder
    comparison = compare_demo(rows, plan.dtype) if plan.demo else None
    report.write_report(folder / "train.json", rows, settings, comparison)
    (folder / "train.md").write_text(report.markdown(rows, settings), encoding="utf-8")
    pictures = report.plot(rows, folder, settings, comparison)
    console.print(report.table(rows))
    if (uneven := report.uneven_table(rows)) is not None:
        console.print(uneven)
    code = _judge_demo(console, rows, comparison, plan.dtype) if plan.demo else _judge_training(console, session)
    if settings["interrupted"]:
        console.print("[bold yellow]Interrupted[/]: the report has what was done.")
        code = INTERRUPTED
    names = ", ".join(["train.json", "train.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in [bold]{escape(str(folder))}[/]: {names}", soft_wrap=True)
    return code


def _judge_training(console: Console, session: TrainSession) -> int:
    """Print the comparison of the losses with --curves, and return the exit code."""
    curves = compare_with_stock(session.rows) if session.plan.options.curves else {}
    if curves:
        console.print(report.curve_table(curves))
    # FP8 approximates, so its losses are compared but do not decide about the exit code.
    exact = [run.name for run in session.plan.runs if run.provider.is_tigon and run.provider.fp8 is None]
    differ = any(curve.agrees is False for name, curve in curves.items() if name in exact)
    return DIFFERS if differ or any(row.failed for row in session.rows) else 0


def _judge_demo(console: Console, rows: list[Measurement], comparison: DemoComparison | None, dtype: str) -> int:
    """Print whether the losses of the demo agree and which run failed, and return the exit code."""
    code = 0
    if comparison is not None and comparison.agree:
        console.print(
            f"[bold green]The curves agree[/]: at most {max(comparison.differences):.1e} of the loss apart. The "
            f"tolerance grows from {comparison.tolerances[0]:.0e} at the first step to {comparison.tolerances[-1]:.0e} "
            "at the last."
        )
    elif comparison is not None:
        worst = comparison.worst
        console.print(
            f"[bold red]The curves differ[/]: {comparison.differences[worst]:.1e} of the loss at step {worst + 1}, "
            f"where {comparison.tolerances[worst]:.0e} is allowed."
        )
        code = DIFFERS
    if comparison is not None:
        console.print(TOLERANCE[dtype].reason, style="dim")
    for row in rows:
        if row.status != "ok":
            reason = escape(f"{row.status}: {row.note}")
            console.print(f"[bold red]{row.provider} failed[/]: {reason}", soft_wrap=True)
            code = RUN_FAILED
    return code
