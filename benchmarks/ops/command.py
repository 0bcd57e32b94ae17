"""`benchmarks.ops` compares speed and memory of every op with its peers. It imports what it needs when it is called."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    ops: Annotated[str | None, typer.Option(help="Ops to measure, separated by commas; all by default.")] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="Tags (roofline, first-light, linear, more, host, sweep, small, all) or parts of case names, "
            "separated by commas. By default roofline and first-light on a GPU, and small on a CPU. The cases of sweep "
            "vary one size of each op."
        ),
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(help="Providers to measure, separated by commas; -NAME excludes one: --providers=-compile."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="GIT_REF",
            help="Compare this Tigon with that of a commit, branch or tag of its checkout. Other providers are "
            "measured only if --providers names them.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over all providers; the results are medians.", show_default="3; 1 if --quick"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Run one round of few calls, for a first look.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/bench_<time>")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases that would run, and stop.")] = False,
) -> None:
    """Check every op and its peers, then measure their forward and backward passes.

    `python -m benchmarks train --help` describes the benchmark of whole training steps.

    The command writes bench.json, bench.md, which begins with a summary, and one picture for each family of ops. A peer
    that is not installed or raises is a line in the report. Exit code: 0; 1 if Tigon raises or is wrong, and then it is
    not timed; 2 for bad input; 130 after Ctrl-C.
    """
    from benchmarks.ops.session import session

    code = session(ops, cases, providers, against, rounds, device, quick, out, list_cases)
    if code:
        raise typer.Exit(code)
