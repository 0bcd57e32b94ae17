"""One run of `tigon bench`: options to cases, cases to rows, rows to the files that are left behind."""

import contextlib
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tigon.tools.bench import cases as case_table
from tigon.tools.bench import plots, providers, report
from tigon.tools.bench.against import Revision, find_revision
from tigon.tools.bench.cases import Case
from tigon.tools.bench.measure import make_meter
from tigon.tools.bench.runner import Row, run_case
from tigon.tools.cli import INTERRUPTED, make_console, make_folder, pick_device, pick_folder

__all__ = ["session"]


def session(
    ops: str | None, cases: str | None, provider_names: str | None, against: str | None, rounds: int | None,
    device: str, quick: bool, out: Path | None, list_cases: bool,
) -> int:  # fmt: skip
    """Run with the options of the command line; -> the exit code.

    Raises:
        typer.BadParameter: before anything runs, naming the rule and the value.
    """
    console = make_console()
    target = _device(pick_device(device))
    try:
        revision = None if against is None else find_revision(against)
        chosen = case_table.select(ops, cases or ("first-light,roofline" if target.type == "cuda" else "small"))
        # Two revisions are compared with each other, and with others where these are named.
        names = provider_names or ("tigon" if revision else None)
        selected = {case.op: providers.select(case.op, names) for case in chosen}
        chosen = [case for case in chosen if selected[case.op]]
        if not chosen:
            raise ValueError(f"bench: none of the ops chosen has a provider among {provider_names!r}")
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    if list_cases:
        for case in chosen:
            console.print(f"{case.name}  [dim]{', '.join(case.tags)}[/dim]", soft_wrap=True)
        return 0
    settings = {
        "rounds": rounds or (1 if quick else 3),
        "quick": quick,
        "interrupted": False,
        "cases": [case.name for case in chosen],
    }
    folder = pick_folder(out, "bench_")
    with contextlib.ExitStack() as stack:
        if revision:
            settings["against"] = _add_revision(revision, selected, stack)
        make_folder(folder)
        rows = _run(chosen, selected, target, settings, folder, console)
    failed = [row for row in rows if row.failed]
    for row in failed:
        console.print(f"{row.case}: tigon: {row.status}: {row.note}", style="bold red", markup=False, soft_wrap=True)
    return INTERRUPTED if settings["interrupted"] else int(bool(failed))


def _add_revision(
    revision: Revision, selected: dict[str, list[providers.Provider]], stack: contextlib.ExitStack
) -> dict[str, str]:
    """Load the revision for as long as `stack` and put it first or behind Tigon; -> what the report says of it."""
    try:
        package = stack.enter_context(revision.package())
    except Exception as problem:
        raise typer.BadParameter(f"bench: --against {revision.ref} cannot be imported: {problem!r}") from problem
    for op, row in selected.items():
        row.insert(1 if row[0].name == "tigon" else 0, providers.tigon_provider(op, package, revision.name))
    return {"ref": revision.ref, "commit": revision.commit, "title": revision.title, "provider": revision.name}


def _device(name: str) -> torch.device:
    """The device of that name; a GPU becomes the current one, which profiler, markers and peers all use."""
    if name == "cpu":
        return torch.device(name)
    device = torch.device("cuda", torch.device(name).index or 0)
    torch.cuda.set_device(device)
    return device


def _run(
    chosen: list[Case],
    selected: dict[str, list[providers.Provider]],
    device: torch.device,
    settings: dict[str, object],
    folder: Path,
    console: Console,
) -> list[Row]:
    """Measure, print each case as it is done, and write the report: also after Ctrl-C, with what there is."""
    started = time.perf_counter()
    meter, machine, rows = make_meter(device), report.describe_machine(device), []
    if settings["quick"]:
        meter.busy_ms /= 10
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, auto_refresh=False,  # a thread that draws would disturb host times
    ) as progress:  # fmt: skip
        task = progress.add_task("roofline", total=len(chosen))
        roofline = meter.roofline()
        progress.console.print(
            f"{machine['name']}: {roofline.bytes_per_second / 1e9:,.0f} GB/s copied, "
            f"{roofline.flops_per_second / 1e12:.3g} TFLOP/s in bf16 products\n"
            f"{report.legend(any(case.flops for case in chosen))}\n"
        )
        try:
            for case in chosen:
                tell = lambda text, case=case: progress.update(task, description=f"{case.name}: {text}", refresh=True)
                done = run_case(case, selected[case.op], meter, roofline, settings["rounds"], tell)
                rows += done
                progress.advance(task)
                if done:
                    progress.console.print(report.terminal_table(done))
                report.write_json(folder / "bench.json", rows, roofline, machine, settings)
        except KeyboardInterrupt:
            settings["interrupted"] = True
            progress.console.print("[bold yellow]Interrupted[/]: the report holds the cases that were done.")
    settings["seconds"] = round(time.perf_counter() - started, 1)
    report.write_json(folder / "bench.json", rows, roofline, machine, settings)
    (folder / "bench.md").write_text(report.markdown(rows, roofline, machine, settings))
    pictures = plots.draw(rows, folder, str(machine["name"]))
    if len(settings["cases"]) > 1 or "against" in settings:
        console.print(report.summary_table(rows))
    names = ", ".join(["bench.json", "bench.md", *(picture.name for picture in pictures)])
    console.print(f"{settings['seconds']:.0f} s. Report in {folder}: {names}", soft_wrap=True)
    return rows
