"""`tigon resources`: what every kernel takes of every chip, compiled here without the chip.

The workloads are those of the tests. A kernel that spills registers to memory, or that does not fit, fails the command.
"""

import atexit
import json
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tigon.tools import environment
from tigon.tools.bench.cases import listed
from tigon.tools.bench.report import markdown_table
from tigon.tools.cli import INTERRUPTED, check_file, make_console, say_written, write_file

__all__ = ["Usage", "compiled", "resources"]

MAX_THREADS = 1024  # of a workgroup, on either vendor


@dataclass(frozen=True)
class Usage:
    """One kernel of one case on one chip. `problem` is "" or why it must not ship."""

    kernel: str
    case: str
    chip: str
    threads: int = 0  # a workgroup
    registers: int = 0  # a thread
    spilled: int = 0  # NVIDIA: bytes of stack a thread; AMD: registers
    shared: int = 0  # bytes a workgroup
    problem: str = ""


def compiled(case: str, chip_name: str) -> list[Usage]:
    """Compile the kernels of a workload for a chip, each once."""
    from tigon.tools.compile.targets import CHIPS, recorded
    from tigon.tools.compile.targets import resources as resources_of
    from tigon.tools.compile.workloads import WORKLOADS

    chip = next(chip for chip in CHIPS if chip.name == chip_name)
    found: dict[Usage, None] = {}
    with recorded(chip) as launches:
        try:
            WORKLOADS[case]()
        except Exception as problem:
            found[Usage("-", case, chip.name, problem=f"does not run: {type(problem).__name__}: {problem}")] = None
    for launch in launches:
        kernel = f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
        try:
            numbers = resources_of(launch, chip) | {"kernel": kernel}
        except Exception as problem:
            usage = Usage(kernel, case, chip.name, problem=f"does not compile: {type(problem).__name__}: {problem}")
        else:
            problem = _problem(numbers, chip.device.shared_memory)
            usage = Usage(case=case, chip=chip.name, problem=problem, **numbers)
        found[usage] = None
    return list(found)


def _problem(numbers: dict, shared_limit: int) -> str:
    problems = []
    if numbers["spilled"]:
        problems.append("spills")
    if numbers["threads"] > MAX_THREADS:
        problems.append(f"more than {MAX_THREADS} threads")
    if numbers["shared"] > shared_limit:
        problems.append(f"more than {shared_limit} bytes of shared memory")
    return ", ".join(problems)


# --- the command ---------------------------------------------------------------------------------


def resources(
    ops: Annotated[str | None, typer.Option(help="Ops to compile, separated by commas; all by default.")] = None,
    chip: Annotated[str | None, typer.Option(help="Chips, separated by commas; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table to this file, .md or .json.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time.", show_default="one a core")] = None,
) -> None:
    """Compile every kernel for every chip, here, and print the registers, spills and shared memory that it takes.

    Needs no GPU. Exit code: 0; 1 if a kernel spills, does not fit or does not compile; 2 for bad input; 130 after
    Ctrl-C.
    """
    cases, chips = _choose(ops, chip, out)
    console = make_console()
    usages, interrupted = _compile_all([(case, name) for name in chips for case in cases], jobs, console)
    launched = list(dict.fromkeys(usage.kernel for usage in usages))  # forward before backward
    usages.sort(key=lambda usage: (cases.index(usage.case), launched.index(usage.kernel), chips.index(usage.chip)))
    console.print(_table(usages))
    for usage in usages:
        if usage.problem:
            text = f"{usage.kernel}, {usage.case}, {usage.chip}: {usage.problem}"
            console.print(text, style="bold red", markup=False, soft_wrap=True)
    failed = sum(bool(usage.problem) for usage in usages)
    console.print(f"{len(usages)} kernels compiled, {failed} with a problem.")
    if out is not None:
        write_file(out, _json(usages) if out.suffix == ".json" else _markdown(usages), "--out")
        say_written(console, out)
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _choose(ops: str | None, chip: str | None, out: Path | None) -> tuple[list[str], list[str]]:
    """The workloads and chips that the options name.

    Raises:
        typer.BadParameter: naming the rule and the value.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise typer.BadParameter("resources: TRITON_INTERPRET must not be set, for the interpreter compiles nothing")
    from tigon.tools.compile.targets import CHIPS
    from tigon.tools.compile.workloads import WORKLOADS

    op_of = lambda case: case.split()[0]
    known_ops, known_chips = list(dict.fromkeys(map(op_of, WORKLOADS))), [chip.name for chip in CHIPS]
    wanted_ops, wanted_chips = _known(ops, known_ops, "--ops"), _known(chip, known_chips, "--chip")
    if out is not None and (out.suffix not in (".md", ".json") or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(
            f"must be a .md or .json file in a folder that is there, got {str(out)!r}", param_hint="--out"
        )
    if out is not None:
        check_file(out, "--out")
    return [case for case in WORKLOADS if op_of(case) in wanted_ops], wanted_chips


def _known(text: str | None, known: list[str], option: str) -> list[str]:
    words = listed(text)
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"must be among {', '.join(known)}, got {word!r}", param_hint=option)
    return [word for word in known if word in words] if words else known


def _leave_quietly() -> None:
    """Of a process that compiles: Triton's bindings list what they leak when it ends, on standard error."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def _compile_all(work: list[tuple[str, str]], jobs: int | None, console: Console) -> tuple[list[Usage], bool]:
    """All of `work`, in processes of their own; -> what was found, and whether Ctrl-C cut it short."""
    usages: list[Usage] = []
    workers = min(jobs or environment.cpu_count(), len(work))
    # A fresh interpreter each: a fork of a process with torch's threads may hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_leave_quietly)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("compiling", total=len(work))
        try:
            for (case, chip), found in zip(work, pool.map(compiled, *zip(*work, strict=True)), strict=True):
                usages += found
                progress.update(task, advance=1, description=f"{chip}: {case}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return usages, True
    pool.shutdown()
    return usages, False


# --- tables --------------------------------------------------------------------------------------

_TITLES = ("kernel", "case", "chip", "threads", "registers", "spilled", "shared bytes")


def _cells(usage: Usage) -> list[str]:
    numbers = (usage.threads, usage.registers, usage.spilled, usage.shared)
    return [usage.kernel, usage.case, usage.chip, *(f"{n:,}" if usage.threads else "-" for n in numbers)]


def _table(usages: Iterable[Usage]) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for i, title in enumerate(_TITLES):
        table.add_column(title, justify="right" if i > 2 else "left", overflow="fold")
    for usage in usages:
        table.add_row(*_cells(usage), style="bold red" if usage.problem else "")
    return table


def _markdown(usages: Iterable[Usage]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions().items())
    cells = [[*_cells(usage), " ".join(usage.problem.split())] for usage in usages]
    table = markdown_table((*_TITLES, "problem"), cells, left=(*_TITLES[:3], "problem"))
    about = f"Compiled with {versions}. Spilled: bytes a thread on NVIDIA, registers on AMD."
    return "\n".join(["# tigon resources", "", about, "", *table]) + "\n"


def _json(usages: Iterable[Usage]) -> str:
    document = {"schema": 1, "versions": environment.versions(), "rows": [asdict(usage) for usage in usages]}
    return json.dumps(document, indent=1) + "\n"
