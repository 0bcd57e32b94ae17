"""The commands of the training benchmark and of the demo: the order of the work, and the printed output."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.report import describe_machine, make_folder, pick_folder, takes_options
from benchmarks.train import report
from benchmarks.train.demo import DemoOptions, make_demo_plan
from benchmarks.train.measurement import TOLERANCE, Measurement, compare_with_stock
from benchmarks.train.plan import TrainOptions, TrainPlan, make_plan
from benchmarks.train.runs import TrainSession, train_rounds
from tigon.cli.main import INTERRUPTED, make_console, pick_device

Options = TypeVar("Options")
# Exit codes. The exit code for bad input is 2.
DIFFERS, RUN_FAILED = 1, 3


@takes_options
def train(options: TrainOptions) -> None:
    """Train one model on real text, stock and with each provider, and compare speed, memory and losses.

    Each provider has a process of its own, or a group of them, and the same random weights, data and optimizer. Writes
    train.json, train.md, throughput.png, memory.png and, without a sweep, loss.png. A provider that is not installed,
    refuses the model or runs out of memory is a line in the report.

    Exit code: 0; 1 if Tigon raised an error, or with --curves its losses differ by more than the noise; 2 for bad
    input; 130 after Ctrl-C (the report has the sizes that were done).
    """
    _run(options, lambda: make_plan(replace(options, device=pick_device(options.device))), "train_", _conclude_training)


@takes_options
def demo(options: DemoOptions) -> None:
    """Train a Hugging Face decoder on real text twice from one seed, stock and with Tigon, and compare.

    Exit code: 0; 1 if the loss curves differ by more than the tolerance printed; 2 for bad input; 3 if a run failed;
    130 after Ctrl-C (the report has the steps that were done).
    """
    _run(options, lambda: make_demo_plan(options), "", _conclude_demo)


def _run(
    options: Any,
    plan_runs: Callable[[], TrainPlan],
    prefix: str,
    conclude: Callable[[Console, TrainSession, dict], int],
) -> None:
    """Make the plan and the folder, train, conclude, and end with the exit code of the conclusion."""
    console = make_console()
    try:
        folder = pick_folder(options.out, prefix)
        with console.status("Reading and tokenising the text"):
            plan = plan_runs()
        make_folder(folder)
        code = conclude(console, *_train(console, plan, folder))
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
    checkpointing = ", checkpointing" if options.checkpointing else ""
    lora = "" if options.lora is None else f", {'QLoRA' if options.qlora else 'LoRA'} of rank {options.lora}"
    return f"{options.model}{layers}, {plan.dtype}, {processes}, {size}{lora}{checkpointing}"


def _train(console: Console, plan: TrainPlan, folder: Path) -> tuple[TrainSession, dict[str, Any]]:
    """Train, print each row when it is complete, and write the numbers after each row."""
    start_time, options = time.perf_counter(), plan.options
    plan.config.to_json_file(folder / "config.json", use_diff=False)
    machine = describe_machine(torch.device(options.device))
    settings = {
        **asdict(options), "title": _title(plan), "dtype": plan.dtype, "steps": plan.steps, "warmup": plan.warmup,
        "runs": [run.name for run in plan.runs], "text": plan.corpus.name, "text_tokens": plan.tokens.count,
        "bpe_entries": plan.tokens.entries, "interrupted": False, "machine": machine,
    }  # fmt: skip
    del settings["out"]
    console.print(f"[bold]{escape(settings['title'])}[/], {escape(str(machine['name']))}")
    excerpt = f", its first {plan.corpus.characters / 1e6:.0f} MB" if plan.corpus.is_truncated else ""
    console.print(
        f"Text: {escape(plan.corpus.name)}{excerpt}, {plan.tokens.count:,} tokens. {report.legend(machine)}\n"
    )
    name = "report.json" if plan.continues else "train.json"
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starts", total=None)

        def show_row(row: Measurement) -> None:
            progress.console.print(escape(report.sentence(row)))
            report.write_report(folder / name, session.rows, settings)

        show_state = lambda state: progress.update(task, description=escape(state))
        session = TrainSession(plan, folder, show_state, show_row)
        settings["interrupted"] = not train_rounds(session)
    seconds = round(time.perf_counter() - start_time, 1)
    settings |= {**session.facts, "applied": session.patch_reports, "seconds": seconds}
    report.write_report(folder / name, session.rows, settings)
    console.print()
    return session, settings


def _finish(console: Console, session: TrainSession, settings: dict[str, Any], code: int, files: list[str]) -> int:
    if settings["interrupted"]:
        console.print("[bold yellow]Interrupted[/]: the report has what was done.")
        code = INTERRUPTED
    names, folder = ", ".join(files), escape(str(session.folder))
    console.print(f"{settings['seconds']:.0f} s. Report in [bold]{folder}[/]: {names}", soft_wrap=True)
    return code


def _conclude_training(console: Console, session: TrainSession, settings: dict[str, Any]) -> int:
    """Print the tables, write the page and the pictures, and return the exit code."""
    rows, options, folder = session.rows, session.plan.options, session.folder
    (folder / "train.md").write_text(report.markdown(rows, settings), encoding="utf-8")
    pictures = report.plot(rows, folder, options.sweep, settings)
    console.print(report.table(rows))
    curves = compare_with_stock(rows) if options.curves else {}
    if curves:
        console.print(report.curve_table(curves))
    # FP8 approximates, so its losses are compared but do not decide about the exit code.
    exact = [run.name for run in session.plan.runs if run.provider.is_tigon and run.provider.fp8 is None]
    differ = any(curve.agrees is False for name, curve in curves.items() if name in exact)
    code = DIFFERS if differ or any(row.failed for row in rows) else 0
    return _finish(console, session, settings, code, ["train.json", "train.md", *(p.name for p in pictures)])


def _conclude_demo(console: Console, session: TrainSession, settings: dict[str, Any]) -> int:
    """Print the comparison, write the pictures, and return the exit code."""
    rows, state_bytes, code = session.rows, session.facts.get("state_bytes", 0), 0
    comparison = report.compare_demo(rows, session.plan.dtype)
    console.print(report.demo_table(rows, state_bytes, comparison))
    console.print(report.memory_sentence(settings["machine"]), style="dim")
    if comparison is not None:
        if comparison.agree:
            console.print(
                f"[bold green]The curves agree[/]: at most {max(comparison.differences):.1e} of the loss apart. The "
                f"tolerance grows from {comparison.tolerances[0]:.0e} at the first step to "
                f"{comparison.tolerances[-1]:.0e} at the last."
            )
        else:
            worst = comparison.worst
            console.print(
                f"[bold red]The curves differ[/]: {comparison.differences[worst]:.1e} of the loss at step {worst + 1}, "
                f"where {comparison.tolerances[worst]:.0e} is allowed."
            )
            code = DIFFERS
        console.print(TOLERANCE[session.plan.dtype].reason, style="dim")
    for row in rows:
        if row.status != "ok":
            reason = escape(f"{row.status}: {row.note}")
            console.print(f"[bold red]{row.provider} failed[/] after {len(row.losses)} steps: {reason}", soft_wrap=True)
            code = RUN_FAILED
    report.plot_demo(session.folder, rows, state_bytes, comparison, settings)
    report.write_report(session.folder / "report.json", rows, settings, comparison)
    return _finish(console, session, settings, code, ["report.json", "loss.png", "speed_memory.png"])
