"""`tigon bench`: speed and memory of every op beside its peers. What it needs is loaded when it is called."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["bench"]


def bench(
    ops: Annotated[str | None, typer.Option(help="Ops to measure, separated by commas; all by default.")] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="Tags (roofline, first-light, linear, more, host, sweep, small, all) or parts of case names, "
            "separated by commas. By default roofline and first-light on a GPU, small on a CPU; sweep varies one size "
            "an op."
        ),
    ] = None,
    providers: Annotated[
        str | None, typer.Option(help="Only these, separated by commas; or -NAME to drop one: --providers=-compile.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="GIT_REF",
            help="Compare this Tigon with that of a commit, branch or tag of its checkout, in turn; alone unless "
            "--providers names others.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over all providers; figures are medians.", show_default="3; 1 if --quick"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="One round of few calls: a first look.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/bench_<time>")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases that would run, and stop.")] = False,
) -> None:
    """Measure forward + backward of every op beside its peers, after checking that each is right.

    Whole training steps: `tigon bench train --help`.

    Writes bench.json, bench.md (a summary first) and one picture an op family. A peer that is not installed or raises
    is a line in the report. Exit code: 0; 1 if Tigon raised or was wrong, which is not timed; 2 for bad input; 130
    after Ctrl-C.
    """
    from tigon.tools.bench.session import session

    code = session(ops, cases, providers, against, rounds, device, quick, out, list_cases)
    if code:
        raise typer.Exit(code)
