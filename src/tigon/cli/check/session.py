"""One run of `tigon check`: the parts in their order, the progress, the file, and the exit code."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.ops.measure import Roofline
from tigon.cli.check import check_report, fast_path_checks, model_checks, op_checks, speed
from tigon.cli.check.check_report import CheckReport
from tigon.cli.check.outcome import CheckOutcome, Clock
from tigon.cli.check.speed import OpSpeed
from tigon.cli.environment import device_name, environment
from tigon.cli.main import INTERRUPTED as INTERRUPTED_CODE
from tigon.cli.main import make_console, say_written, write_file
from tigon.cli.output import write_json
from tigon.runtime.device import runs_kernels

if TYPE_CHECKING:
    from rich.console import Console

SOMETHING_FAILED = 1
# The parts in their order, and the share of the time after which a part skips the rest of its checks. Compiling the
# kernels of the ops takes most of the time.
PARTS = {"ops": 0.55, "models": 0.75, "fast paths": 1.0, "speed": 0.95}
NO_SPEED = "There is no table of speed, because times without kernels would be those of torch."
# The tables fit a terminal of this width. Longer notes are broken.
WIDTH = 80
NO_KERNELS = "No kernels run on this device. Tigon runs its references in torch here, and these are checked."


def run_checks(device: torch.device, ops: list[str] | None, parts: list[str], seconds: float, json: Path | None) -> int:
    """Run the parts, print their tables, write the file, and return the exit code."""
    console, clock = make_console(), Clock(seconds)
    report = CheckReport(_name(device), device.type)
    has_kernels = runs_kernels(torch.empty(1, device=device))

    def save() -> None:
        report.seconds = clock.seconds
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
            names, outcomes = _start(part, device, ops, has_kernels, clock, report)
            if not names:
                console.print(f"\n{part}: the chosen ops have no check here.", width=WIDTH)
                continue
            _run_part(console, part, names, outcomes, report, save)
    except KeyboardInterrupt:
        report.interrupted = True
    report.running = ""
    # After an illegal access to memory, every call of the driver fails. The first facts then stay in the file.
    with contextlib.suppress(Exception):
        # The self-checks of the fast paths have run in the meantime.
        report.environment = environment()
    save()
    console.print()
    check_report.print_failures(console, report.outcomes)
    failed = report.count("failed")
    if json is not None:
        say_written(console, json)
    elif failed or device.type == "cuda":
        console.print("With --json FILE the command writes a report to attach to an issue.", width=WIDTH)
    style = "bold yellow" if report.interrupted else "bold red" if failed else "bold green"
    console.print(check_report.last_line(report), style=style, markup=False, soft_wrap=True)
    return INTERRUPTED_CODE if report.interrupted else SOMETHING_FAILED if failed else 0


def _name(device: torch.device) -> str:
    return "the GPU of this Mac (MPS)" if device.type == "mps" else device_name(str(device))


def _start(
    part: str, device: torch.device, ops: list[str] | None, has_kernels: bool, clock: Clock, report: CheckReport
) -> tuple[list[str], Iterator[CheckOutcome | OpSpeed]]:
    """Return the names of the checks of a part, and the iterator that runs them."""
    share = PARTS[part]
    if part == "ops":
        checks = op_checks.op_checks(ops, runs_kernels=has_kernels)
        return [
            f"{check.case.workload.name} {check.name}" for check in checks
        ], op_checks.check_ops(checks, device, clock, share)  # fmt: skip
    if part == "models":
        names = [f"{name}, {level}" for name in model_checks.MODEL_TYPES for level in model_checks.LEVELS]
        return names, model_checks.check_models(device, clock, share)
    if part == "fast paths":
        return list(fast_path_checks.CHECKS), fast_path_checks.check_fast_paths(device)

    def set_roofline(roofline: Roofline) -> None:
        report.roofline = roofline

    cases = speed.speed_cases(ops)
    return [case.name for case in cases], speed.measure_speed(cases, device, clock, share, set_roofline)


def _run_part(
    console: "Console",
    part: str,
    names: list[str],
    results: Iterable[CheckOutcome | OpSpeed],
    report: CheckReport,
    save: Callable[[], None],
) -> None:
    """Run the checks of a part, show the progress, and print the table of the part."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, auto_refresh=part != "speed",
    ) as progress:  # fmt: skip
        task, iterator = progress.add_task(part, total=len(names)), iter(results)
        for name in names:
            # A kernel may crash the process. The file then names the check.
            report.running = f"{part}: {name}"
            save()
            progress.update(task, description=f"{part}: {name}"[:44], refresh=True)
            result = next(iterator)
            if isinstance(result, OpSpeed):
                report.speeds.append(result)
            report.outcomes.append(result.outcome if isinstance(result, OpSpeed) else result)
            progress.advance(task)
    console.print()
    if part != "speed":
        console.print(check_report.outcome_table(part, [x for x in report.outcomes if x.part == part]), width=WIDTH)
        return
    if (roofline := report.roofline) is not None:
        console.print(
            f"Forward and backward in bfloat16. This device copies {roofline.bytes_per_second / 1e9:,.0f} GB/s and\n"
            f"multiplies {roofline.flops_per_second / 1e12:.3g} TFLOP/s. The floor is the time of the least bytes or\n"
            "products at these speeds."
        )
    console.print(check_report.speed_table(report.speeds), width=WIDTH)
