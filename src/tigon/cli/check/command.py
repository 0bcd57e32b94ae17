"""The command `tigon check`: its options, the parts in their order, the progress, the file, and the exit code."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tigon.cli.main import INTERRUPTED, check_file, make_console, pick_device, say_written, show_progress, write_file

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tigon.cli.check.report import Check, CheckReport

SOMETHING_FAILED = 1
# The parts in their order, and the share of the time after which a part skips the rest of its checks. Compiling the
# kernels of the ops takes most of the time.
PARTS = {"ops": 0.55, "models": 0.75, "fast-paths": 1.0, "speed": 0.95}
NO_SPEED = "There is no table of speed, because times without kernels would be those of torch."
NO_KERNELS = "No kernels run on this device. Tigon runs its references in torch here, and these are checked."
# The tables fit a terminal of this width. Longer notes are broken.
WIDTH = 80


def check(
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N or mps (the GPU of a Mac). ROCm's devices are called cuda too.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all results to this file, to attach to an issue.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts to run, separated by commas: ops, models, fast-paths, speed.", show_default="all"),
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Ops to check, separated by commas.", show_default="all")] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="The time that the run should take. What does not fit is skipped.")
    ] = 170,
) -> None:
    """Check that everything holds on this machine, in three minutes.

    The command compares every op with eager code and an exact result, compares the training of patched tiny models of
    five types with that of stock models, checks the faster ways of launching and multiplying, and measures the speed of
    every op on a GPU.

    If you have a chip that is not listed in docs/compatibility.md or in the README, please attach the file of --json to
    an issue.

    The exit code is 0, or 1 if a check failed, 2 for bad input, and 130 after Ctrl-C.
    """
    import torch

    from tigon.runtime.device import INTERPRETED

    if INTERPRETED:
        raise typer.BadParameter("TRITON_INTERPRET must not be set, because the interpreter rounds in another way")
    target = torch.device(pick_device(device, others=("mps",)))
    if json_file is not None:
        check_file(json_file, "--json")
    from tigon.cli.check.calls import CALLS

    chosen_parts = _choose(parts, list(PARTS), "--parts")
    chosen_ops = _choose(ops, [call.op for call in CALLS], "--ops") if ops is not None else None
    if target.type == "cuda":
        # A device without an index is the first one.
        target = torch.device("cuda", target.index or 0)
        torch.cuda.set_device(target)
    code = run_checks(target, chosen_ops, chosen_parts, seconds, json_file)
    if code:
        raise typer.Exit(code)


def _choose(text: str | None, names: list[str], option: str) -> list[str]:
    """Return the names that an option lists, in the order of `names`; all of them without the option."""
    if text is None:
        return names
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in names]
    if unknown or not words:
        got = unknown[0] if unknown else text
        raise typer.BadParameter(f"must be among {', '.join(names)}, got {got!r}", param_hint=option)
    return [name for name in names if name in words]


def run_checks(
    device: "torch.device", ops: list[str] | None, parts: list[str], seconds: float, json: Path | None
) -> int:
    """Run the parts, print their tables, write the file, and return the exit code."""
    import torch

    from tigon.cli.check.report import CheckReport
    from tigon.cli.environment import environment
    from tigon.cli.output import write_json
    from tigon.runtime.device import runs_kernels

    console, start = make_console(), time.perf_counter()
    facts = environment()
    names = {"cpu": facts["cpu"], "mps": "the GPU of this Mac (MPS)"}
    name = names.get(device.type) or torch.cuda.get_device_name(device)
    report = CheckReport(name, device.type, environment=facts)
    has_kernels = runs_kernels(torch.empty(1, device=device))

    def save(running: str = "") -> None:
        report.running, report.seconds = running, time.perf_counter() - start
        if json is not None:
            write_file(json, lambda path: write_json(path, report.as_json()), "--json")

    console.print(f"{report.device}; torch {torch.__version__}", markup=False, soft_wrap=True)
    if not has_kernels:
        console.print(NO_KERNELS, width=WIDTH)
    try:
        for part in parts:
            if part == "speed" and not has_kernels:
                console.print(f"\n{NO_SPEED}", width=WIDTH)
                continue
            with show_progress(f"Checking {part}") as show:
                for check in _checks(part, ops, device, has_kernels):
                    # A file or a pipe gets no line for each check.
                    if sys.stderr.isatty():
                        show(f"{part}: {check[1]} {check[2]}"[:60])
                    # A kernel may crash the process. The file then names the check.
                    save(f"{check[0]}: {check[1]} {check[2]}")
                    is_over = report.seconds > PARTS[part] * seconds
                    report.skip(check) if is_over else report.run(check)
            _print_part(console, part, report, device)
    except KeyboardInterrupt:
        report.interrupted = True
    # After an illegal access to memory, every call of the driver fails. The first facts then stay in the file.
    with contextlib.suppress(Exception):
        # The self-checks of the fast paths have run in the meantime.
        report.environment = environment()
    save()
    return _conclude(console, report, json)


def _conclude(console: "Console", report: "CheckReport", json: Path | None) -> int:
    """Print the failures and the last line, and return the exit code."""
    from tigon.cli.check.report import last_line

    console.print()
    for outcome in report.outcomes:
        if outcome.status == "failed":
            text = f"FAILED {outcome.part}: {outcome.group}: {outcome.name}: {outcome.note}"
            console.print(text, style="bold red", markup=False, soft_wrap=True)
    failed = report.count("failed")
    if json is not None:
        say_written(console, json)
    elif failed or report.device_type == "cuda":
        console.print("With --json FILE the command writes a report to attach to an issue.", width=WIDTH)
    style = "bold yellow" if report.interrupted else "bold red" if failed else "bold green"
    console.print(last_line(report), style=style, markup=False, soft_wrap=True)
    return INTERRUPTED if report.interrupted else SOMETHING_FAILED if failed else 0


def _checks(part: str, ops: list[str] | None, device: "torch.device", has_kernels: bool) -> "list[Check]":
    from tigon.cli.check import fast_path_checks, model_checks, op_checks

    if part == "ops":
        return op_checks.op_checks(ops, device, has_kernels)
    if part == "models":
        return model_checks.model_checks(device)
    return fast_path_checks.fast_path_checks(device) if part == "fast-paths" else op_checks.speed_checks(ops, device)


def _print_part(console: "Console", part: str, report: "CheckReport", device: "torch.device") -> None:
    from tigon.cli.check.op_checks import roofline
    from tigon.cli.check.report import outcome_table, speed_table

    console.print()
    if part == "speed" and report.speeds:
        report.roofline = roofline(device)
        console.print(
            f"Forward and backward in bfloat16. This device copies {report.roofline['bytes_per_second'] / 1e9:,.0f} "
            f"GB/s and multiplies {report.roofline['flops_per_second'] / 1e12:.3g} TFLOP/s. GB/s: the bytes of all "
            "tensors and gradients of a call, divided by its time.",
            width=WIDTH,
        )
        console.print(speed_table(report.speeds), width=WIDTH)
    else:
        console.print(outcome_table(part, [x for x in report.outcomes if x.part == part]), width=WIDTH)
