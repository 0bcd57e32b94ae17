"""One run of `benchmarks.ops`: options select cases, cases give rows, and rows are written to the report."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.ops import cases as case_table
from benchmarks.ops import providers, report
from benchmarks.ops.against import Revision, find_revision
from benchmarks.ops.measure import make_meter
from benchmarks.ops.runner import BenchRow, run_case
from benchmarks.report import describe_machine, make_folder, takes_options
from benchmarks.workloads import Case
from tigon.cli.main import INTERRUPTED, make_console, pick_device


@dataclass(frozen=True)
class BenchOptions:
    ops: Annotated[str | None, typer.Option(help="Ops to measure, separated by commas; all by default.")] = None
    cases: Annotated[
        str | None,
        typer.Option(
            help="Tags (roofline, first-light, linear, more, host, sweep, small, all) or parts of case names, "
            "separated by commas. By default roofline and first-light on a GPU, and small on a CPU. The cases of sweep "
            "vary one size of each op."
        ),
    ] = None
    providers: Annotated[
        str | None,
        typer.Option(help="Providers to measure, separated by commas; -NAME excludes one: --providers=-compile."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="GIT_REF",
            help="Compare this Tigon with that of a commit, branch or tag of its checkout. Other providers are "
            "measured only if --providers names them.",
        ),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over all providers; the results are medians.", show_default="3; 1 if --quick"),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    quick: Annotated[bool, typer.Option("--quick", help="Run one round of few calls, for a first look.")] = False
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/bench_<time>")] = None


@takes_options
def bench(options: BenchOptions) -> None:
    """Check every op and its peers, then measure their forward and backward passes.

    `python -m benchmarks train --help` describes the benchmark of whole training steps.

    The command writes bench.json, bench.md, which begins with a summary, and a picture of each family that has a sweep.
    A peer that is not installed or raises is a line in the report. Exit code: 0; 1 if Tigon raises or is wrong, and
    then it is not timed; 2 for bad input; 130 after Ctrl-C.
    """
    console, device = make_console(), _select_device(pick_device(options.device))
    try:
        revision = None if options.against is None else find_revision(options.against)
        cases = case_table.select(
            options.ops, options.cases or ("first-light,roofline" if device.type == "cuda" else "small")
        )
        # With --against, other providers run only if --providers names them.
        names = options.providers or ("tigon" if revision else None)
        providers_of = {case.op: providers.select(case.op, names) for case in cases}
        cases = [case for case in cases if providers_of[case.op]]
        if not cases:
            raise ValueError(f"bench: none of the ops chosen has a provider among {options.providers!r}")
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    settings: dict[str, Any] = {
        "rounds": options.rounds or (1 if options.quick else 3), "quick": options.quick, "interrupted": False,
        "cases": [case.name for case in cases],
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        if revision:
            settings["against"] = _add_revision(revision, providers_of, stack)
        rows = _run(cases, providers_of, device, settings, make_folder(options.out, "bench_"), console)
    failed_rows = [row for row in rows if row.failed]
    for row in failed_rows:
        console.print(f"{row.case}: tigon: {row.status}: {row.note}", style="bold red", markup=False, soft_wrap=True)
    if settings["interrupted"] or failed_rows:
        raise typer.Exit(INTERRUPTED if settings["interrupted"] else 1)


def _add_revision(
    revision: Revision, providers_of: dict[str, list[providers.Provider]], stack: contextlib.ExitStack
) -> dict[str, str]:
    """Import the revision until `stack` closes, add it as a provider, and return its entry of the report. The provider
    stands after Tigon, or first if Tigon is not measured."""
    try:
        package = stack.enter_context(revision.package())
    except Exception as problem:
        raise typer.BadParameter(f"bench: --against {revision.ref} cannot be imported: {problem!r}") from problem
    for op, row in providers_of.items():
        row.insert(1 if row[0].name == "tigon" else 0, providers.tigon_provider(op, package, revision.name))
    return {"ref": revision.ref, "commit": revision.commit, "title": revision.title, "provider": revision.name}


def _select_device(name: str) -> torch.device:
    """Return the device of that name. A GPU becomes the current one, which peers use."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _run(
    cases: list[Case], providers_of: dict[str, list[providers.Provider]], device: torch.device,
    settings: dict[str, Any], folder: Path, console: Console,
) -> list[BenchRow]:  # fmt: skip
    """Measure and print case by case, and write the report. After Ctrl-C the report has the cases that are done."""
    start, meter, machine = time.perf_counter(), make_meter(device), describe_machine(device)
    rows: list[BenchRow] = []
    if settings["quick"]:
        meter.busy_ms /= 10
    roofline = meter.roofline()
    legend = report.legend(any(case_table.OPS[case.op].flops for case in cases))
    console.print(f"{machine['name']}: {report.describe_roofline(roofline)}\n{legend}\n", markup=False)
    try:
        for case in cases:
            case_rows = run_case(case, providers_of[case.op], meter, roofline, settings["rounds"])
            rows += case_rows
            console.print(report.case_table(case_rows), "")
            report.write_json(folder / "bench.json", rows, roofline, machine, settings)
    except KeyboardInterrupt:
        settings["interrupted"] = True
        console.print("[bold yellow]Interrupted[/]: the report has the cases that were completed.")
    settings["seconds"] = round(time.perf_counter() - start, 1)
    report.write_json(folder / "bench.json", rows, roofline, machine, settings)
    (folder / "bench.md").write_text(report.markdown(rows, roofline, machine, settings))
    pictures = report.plot(rows, folder, str(machine["name"]))
    if len(settings["cases"]) > 1 or "against" in settings:
        console.print(report.summary_table(rows))
    names = ", ".join(["bench.json", "bench.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in {folder}: {names}", soft_wrap=True)
    return rows
