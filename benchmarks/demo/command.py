"""`benchmarks.demo`: the order of the work, and its printed output."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from benchmarks.demo.demo_options import DemoOptions
from benchmarks.training.program import run_program, takes_options
from tigon.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.demo.demo_plan import DemoPlan
    from benchmarks.demo.demo_report import DemoComparison

# These are exit codes. The exit code for bad input is 2.
CURVES_DIFFER, RUN_FAILED = 1, 3


@takes_options
def demo(options: DemoOptions) -> None:
    """Train a Hugging Face decoder on real text twice from one seed, stock and with Tigon, and compare.

    Exit code: 0; 1 if the loss curves differ by more than the tolerance printed; 2 for bad input; 3 if a run failed;
    130 after Ctrl-C (the report has the steps that were done).
    """

    def plan() -> "DemoPlan":
        from benchmarks.demo.demo_plan import make_plan

        return make_plan(options)

    run_program(options.out, "", plan, _run)


def _run(console: "Console", plan: "DemoPlan", folder: Path) -> int:
    """Train both runs, compare them, and write the report; return the exit code."""
    from benchmarks.demo.demo_report import compare, plot_loss, plot_speed_memory, write_report
    from benchmarks.demo.demo_runs import train_runs
    from tigon.cli.environment import device_name

    runs = first, second = plan.first, plan.second
    _introduce(console, plan)
    interrupted = not train_runs(runs, folder, console)
    comparison = compare(first, second)
    write_report(
        folder / "report.json", runs, comparison, corpus=plan.corpus, tokens=plan.tokens, interrupted=interrupted
    )
    preset = first.preset
    subtitle = (
        f"{plan.model_class} {plan.parameters / 1e6:,.0f}M, {preset.dtype}, {preset.batch} x {preset.seq} tokens, "
        f"{device_name(first.job.device)}"
    )
    plot_loss(folder / "loss.png", first, second, comparison, subtitle)
    plot_speed_memory(folder / "speed_memory.png", first, second, subtitle)
    return _conclude(console, plan, comparison, interrupted, folder)


def _introduce(console: "Console", plan: "DemoPlan") -> None:
    """Print the model, the text and the settings."""
    from tigon.cli.environment import device_name

    job, corpus, tokens = plan.first.job, plan.corpus, plan.tokens
    preset = plan.first.preset
    console.print(
        f"[bold]{plan.model_class}[/], {plan.parameters / 1e6:,.1f}M parameters (sizes of the demo), random weights, "
        f"{preset.dtype}, on {escape(device_name(job.device))}"
    )
    excerpt = f", its first {corpus.characters / 1e6:.0f} MB" if corpus.is_truncated else ""
    cache_note = ", cached" if tokens.is_cached else ""
    console.print(
        f"Text: {escape(corpus.name)}{excerpt}, {len(corpus.documents):,} files, {tokens.count:,} tokens "
        f"(BPE of {tokens.entries:,} entries trained on the text{cache_note})"
    )
    if tokens.entries < preset.vocab_size:
        console.print(
            f"The model's vocabulary has {preset.vocab_size:,} entries: those beyond the BPE's never occur in the "
            "text, and cost as much as the others."
        )
    console.print(f"{preset.steps} steps of {preset.batch} x {preset.seq} tokens with AdamW, from the same seed\n")


def _conclude(
    console: "Console", plan: "DemoPlan", comparison: "DemoComparison | None", interrupted: bool, folder: Path
) -> int:
    """Print the results; return the exit code."""
    from benchmarks.demo.demo_report import TOLERANCE, memory_sentence, print_table

    runs = (plan.first, plan.second)
    job, code = plan.first.job, 0
    console.print()
    print_table(console, *runs, comparison)
    console.print(memory_sentence(job), style="dim")
    if comparison is not None:
        tolerance = TOLERANCE[job.dtype]
        if comparison.agree:
            console.print(
                f"[bold green]The curves agree[/]: at most {comparison.loss_difference:.1e} of the loss apart (step "
                f"{comparison.largest + 1}). The tolerance grows from {comparison.tolerances[0]:.0e} at the first step "
                f"to {comparison.tolerances[-1]:.0e} at the last."
            )
        else:
            worst = comparison.worst
            console.print(
                f"[bold red]The curves differ[/]: {comparison.differences[worst]:.1e} of the loss at step {worst + 1}, "
                f"where {comparison.tolerances[worst]:.0e} is allowed."
            )
            code = CURVES_DIFFER
        console.print(tolerance.reason, style="dim")
    for run in runs:
        if run.failure:
            console.print(f"[bold red]{run.title} failed[/] after {len(run.losses)} steps: {escape(run.failure)}")
            code = RUN_FAILED
    if interrupted:
        step_counts = ", ".join(f"{run.title} {len(run.losses)}" for run in runs)
        console.print(
            f"[bold yellow]Interrupted[/] before all {plan.first.preset.steps} steps were done: {step_counts}. "
            "The report contains these steps."
        )
        code = INTERRUPTED
    console.print(f"Written to [bold]{escape(str(folder))}[/]: report.json, loss.png, speed_memory.png")
    return code
