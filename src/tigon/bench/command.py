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
            help="Tags (first-light, more, host, small, all) or parts of case names, separated by commas. "
            "By default first-light on a GPU, small on a CPU."
        ),
    ] = None,
    providers: Annotated[
        str | None, typer.Option(help="Only these, separated by commas; or -NAME to drop one: --providers=-compile.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all providers; figures are medians.")] = 3,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round of few calls: a first look.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; runs/bench-<time> by default.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases that would run, and stop.")] = False,
) -> None:
    """Measure forward + backward of every op beside its peers, after checking that each is right.

    Writes bench.json, bench.md and one picture an op family. A Tigon kernel that is wrong is not timed: exit code 1.
    A peer that is not installed or raises is a line in the report.
    """
    try:
        from tigon.bench.session import session
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] in ("rich", "matplotlib"):
            typer.echo(f"tigon bench needs {missing.name}: pip install 'tigon[bench]'", err=True)
            raise typer.Exit(1) from None
        raise
    code = session(ops, cases, providers, rounds, device, quick, out, list_cases)
    if code:
        raise typer.Exit(code)
