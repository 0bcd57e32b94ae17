"""`benchmarks.compile` compiles every kernel for every chip and prints the resources that it needs. It needs no GPU.

The steps are those of the tests. The command fails if a kernel spills registers to memory or does not fit.
"""

import atexit
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.ops.cases import split_words
from tigon.cli import environment
from tigon.cli.main import INTERRUPTED, check_file, make_console, say_written, show_progress, write_file
from tigon.cli.output import console_table, markdown_table
from tigon.runtime.device import HAS_TRITON

# The limit of a workgroup, for both vendors.
MAX_THREADS = 1024
TITLES = ("kernel", "case", "chip", "threads", "registers", "spilled", "shared bytes", "problem")
LEFT = (*TITLES[:3], "problem")


@dataclass(frozen=True)
class Usage:
    """The resources that one kernel of one case needs on one chip.

    `threads` and `shared` bytes are those of a workgroup, and `registers` those of a thread. `spilled` counts bytes of
    stack per thread on NVIDIA and registers on AMD. `problem` is the reason why the kernel must not ship, or "".
    """

    kernel: str
    case: str
    chip: str
    threads: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    problem: str = ""

    def cells(self) -> list[str]:
        numbers = (self.threads, self.registers, self.spilled, self.shared)
        texts = [f"{number:,}" if self.threads else "-" for number in numbers]
        return [self.kernel, self.case, self.chip, *texts, " ".join(self.problem.split())]


def compile_case(case: str, chip_name: str) -> list[Usage]:
    """Compile each kernel of a case for a chip once."""
    from benchmarks.compile.steps import STEPS
    from benchmarks.compile.targets import CHIPS, recorded
    from benchmarks.compile.targets import resources as resources_of

    chip = next(chip for chip in CHIPS if chip.name == chip_name)
    # A dict keeps the order of the kernels and holds each kernel once.
    usages: dict[Usage, None] = {}
    with recorded(chip) as launches:
        try:
            STEPS[case]()
        except Exception as error:
            usages[Usage("-", case, chip.name, problem=f"does not run: {type(error).__name__}: {error}")] = None
    for launch in launches:
        kernel = f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
        try:
            numbers = resources_of(launch, chip)
        except Exception as error:
            usage = Usage(kernel, case, chip.name, problem=f"does not compile: {type(error).__name__}: {error}")
        else:
            problems = {
                "spills": numbers["spilled"] > chip.allowed_spills,
                f"more than {MAX_THREADS} threads": numbers["threads"] > MAX_THREADS,
                f"more than {chip.device.shared_memory} bytes of shared memory": (
                    numbers["shared"] > chip.device.shared_memory
                ),
            }
            usage = Usage(
                kernel, case, chip.name, numbers["threads"], numbers["registers"], numbers["spilled"],
                numbers["shared"], ", ".join(problem for problem, exists in problems.items() if exists),
            )  # fmt: skip
        usages[usage] = None
    return list(usages)


def resources(
    ops: Annotated[str | None, typer.Option(help="Ops to compile, separated by commas; all by default.")] = None,
    chip: Annotated[str | None, typer.Option(help="Chips, separated by commas; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table in Markdown to this file.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of compilers.", show_default="one per core")] = None,
) -> None:
    """Compile every kernel for every chip, and print the registers, spills and shared memory that it needs.

    The command needs no GPU. Exit code: 0; 1 if a kernel spills, does not fit or does not compile; 2 for bad input; 130
    after Ctrl-C.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise typer.BadParameter(
            "resources: TRITON_INTERPRET must not be set, because the interpreter compiles nothing"
        )
    if not HAS_TRITON:
        raise typer.BadParameter("resources: triton compiles the kernels, and is not installed")
    from benchmarks.compile.steps import STEPS, launches_kernels
    from benchmarks.compile.targets import CHIPS

    names = list(dict.fromkeys(step.split()[0] for step in STEPS))
    chosen_ops, chips = _select(ops, names, "--ops"), _select(chip, [chip.name for chip in CHIPS], "--chip")
    if out is not None:
        check_file(out, "--out")
    cases = [step for step in STEPS if step.split()[0] in chosen_ops]
    console = make_console()
    work = [(case, name) for name in chips for case in cases if launches_kernels(case, name)]
    for name in chips:
        emulated_ops = dict.fromkeys(case.split()[0] for case in cases if not launches_kernels(case, name))
        if emulated_ops:
            console.print(f"{name}: left out {', '.join(emulated_ops)}, which launches no kernel on this chip.")
    usages, interrupted = _compile_all(work, jobs)
    # The kernels of a case are in the order of their launches: forward before backward.
    kernels = list(dict.fromkeys(usage.kernel for usage in usages))
    usages.sort(key=lambda usage: (cases.index(usage.case), kernels.index(usage.kernel), chips.index(usage.chip)))
    console.print(console_table(TITLES[:-1], [usage.cells()[:-1] for usage in usages], LEFT, ""))
    problems = [usage for usage in usages if usage.problem]
    for usage in problems:
        text = f"{usage.kernel}, {usage.case}, {usage.chip}: {usage.problem}"
        console.print(text, style="bold red", markup=False, soft_wrap=True)
    console.print(f"{len(usages)} kernels compiled, {len(problems)} with a problem.")
    if out is not None:
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions().items())
        about = f"Compiled with {versions}. Spilled: bytes per thread on NVIDIA, registers on AMD."
        table = markdown_table(TITLES, [usage.cells() for usage in usages], LEFT)
        write_file(out, "\n".join(["# Resources of the kernels", "", about, "", *table]) + "\n", "--out")
        say_written(console, out)
    if interrupted or problems:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _select(text: str | None, names: list[str], option: str) -> list[str]:
    """Return the names that an option lists, or all if it lists none."""
    words = split_words(text)
    for word in words:
        if word not in names:
            raise typer.BadParameter(f"must be among {', '.join(names)}, got {word!r}", param_hint=option)
    return [name for name in names if name in words] if words else names


def _discard_errors_at_exit() -> None:
    """Discard the standard error of a compiling process at its end, where Triton's bindings list leaked objects."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def _compile_all(work: list[tuple[str, str]], jobs: int | None) -> tuple[list[Usage], bool]:
    """Compile the pairs of case and chip in other processes; return their usages and whether Ctrl-C interrupted it."""
    usages: list[Usage] = []
    workers = max(1, min(jobs or environment.cpu_count(), len(work)))
    # Each process is a fresh interpreter, because a fork of a process with torch's threads may hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_discard_errors_at_exit)
    with show_progress(f"Compiling {len(work)} cases") as show:
        try:
            results = pool.map(compile_case, *zip(*work, strict=True))
            for index, ((case, chip), case_usages) in enumerate(zip(work, results, strict=True), 1):
                usages += case_usages
                if index % 10 == 0:
                    show(f"Compiled {case} for {chip} [{index} of {len(work)}]")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return usages, True
    pool.shutdown()
    return usages, False
