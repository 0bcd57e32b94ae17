"""`benchmarks.compile` compiles every kernel for every chip and prints the resources that it needs. It needs no GPU.

The steps are those of the tests. The command fails if a kernel spills registers to memory or does not fit.
"""

import atexit
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import typer

from benchmarks.ops.cases import split_words
from tigon.cli import environment
from tigon.cli.main import INTERRUPTED, make_console, show_progress
from tigon.cli.output import console_table
from tigon.runtime.device import HAS_TRITON

# The limit of a workgroup, for both vendors.
MAX_THREADS = 1024
# The resources of one kernel of one case on one chip: those of `targets.KernelResources` by name, and "case", "chip"
# and "problem", the reason why the kernel must not ship, or "". A kernel that does not compile has no numbers.
Usage = dict[str, Any]


def compile_case(case: str, chip_name: str) -> list[Usage]:
    from benchmarks.compile import steps, targets

    chip = next(chip for chip in targets.CHIPS if chip.name == chip_name)
    place, usages = {"case": case, "chip": chip_name}, []
    with targets.recorded(chip) as launches:
        try:
            steps.STEPS[case]()
        except Exception as error:
            usages.append({"kernel": "-", "problem": f"does not run: {type(error).__name__}: {error}"})
    for launch in launches:
        numbers: Usage = {}
        try:
            numbers = {**targets.resources(launch, chip)}
            shared_memory = chip.device.shared_memory
            problems = {
                "spills": numbers["spilled"] > chip.allowed_spills,
                f"more than {MAX_THREADS} threads": numbers["threads"] > MAX_THREADS,
                f"more than {shared_memory} bytes of shared memory": numbers["shared"] > shared_memory,
            }
            problem = ", ".join(problem for problem, exists in problems.items() if exists)
        except Exception as error:
            problem = f"does not compile: {type(error).__name__}: {error}"
        kernel = f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
        usages.append({**numbers, "kernel": kernel, "problem": problem})
    return [place | usage for i, usage in enumerate(usages) if usage not in usages[:i]]


def resources(
    ops: Annotated[str | None, typer.Option(help="Ops to compile, separated by commas; all by default.")] = None,
) -> None:
    """Compile every kernel for every chip, and print the registers, spills and shared bytes that it needs.

    The command needs no GPU. Spilled: bytes per thread on NVIDIA, registers on AMD. Exit code: 0; 1 if a kernel spills,
    does not fit or does not compile; 2 for bad input; 130 after Ctrl-C.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise typer.BadParameter(
            "resources: TRITON_INTERPRET must not be set, because the interpreter compiles nothing"
        )
    if not HAS_TRITON:
        raise typer.BadParameter("resources: triton compiles the kernels, and is not installed")
    from benchmarks.compile.steps import STEPS, launches_kernels
    from benchmarks.compile.targets import CHIPS

    known_ops, words = dict.fromkeys(step.split()[0] for step in STEPS), split_words(ops)
    for word in words:
        if word not in known_ops:
            raise typer.BadParameter(f"must be among {', '.join(known_ops)}, got {word!r}", param_hint="--ops")
    cases = [step for step in STEPS if not words or step.split()[0] in words]
    console, chips = make_console(), [chip.name for chip in CHIPS]
    work = [(case, name) for name in chips for case in cases if launches_kernels(case, name)]
    for name in chips:
        emulated_ops = dict.fromkeys(case.split()[0] for case in cases if not launches_kernels(case, name))
        if emulated_ops:
            console.print(f"{name}: left out {', '.join(emulated_ops)}, which launches no kernel on this chip.")
    usages, interrupted = _compile_all(work)
    # The kernels of a case are in the order of their launches: forward before backward.
    kernels = list(dict.fromkeys(usage["kernel"] for usage in usages))
    place = lambda usage: (cases.index(usage["case"]), kernels.index(usage["kernel"]), chips.index(usage["chip"]))
    usages.sort(key=place)
    names, numbers = ("kernel", "case", "chip"), ("threads", "registers", "spilled", "shared")
    number = lambda usage, name: f"{usage[name]:,}" if name in usage else "-"
    lines = [[*(usage[name] for name in names), *(number(usage, name) for name in numbers)] for usage in usages]
    console.print(console_table((*names, *numbers), lines, names, ""))
    problems = [usage for usage in usages if usage["problem"]]
    for usage in problems:
        text = "{kernel}, {case}, {chip}: {problem}".format(**usage)
        console.print(text, style="bold red", markup=False, soft_wrap=True)
    console.print(f"{len(usages)} kernels compiled, {len(problems)} with a problem.")
    if interrupted or problems:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _discard_errors_at_exit() -> None:
    """Discard the standard error of a compiling process at its end, where Triton's bindings list leaked objects."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def _compile_all(work: list[tuple[str, str]]) -> tuple[list[Usage], bool]:
    """Compile the pairs of case and chip in other processes; return their usages and whether Ctrl-C interrupted it."""
    usages: list[Usage] = []
    workers = max(1, min(environment.cpu_count(), len(work)))
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
