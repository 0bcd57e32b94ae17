"""The command `tigon check`: its options. The modules that it needs are imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.main import check_file, pick_device


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

    The command compares every op with eager code and an exact result, trains patched tiny models of five types beside
    the stock models, checks the faster ways of launching and multiplying, and measures the speed of every op on a GPU.

    If you have a chip that is not listed in docs/amd.md or in the README, please attach the file of --json to an issue.

    The exit code is 0, or 1 if a check failed, 2 for bad input, and 130 after Ctrl-C.
    """
    import torch

    from tigon.runtime.device import INTERPRETED

    if INTERPRETED:
        raise typer.BadParameter("TRITON_INTERPRET must not be set, because the interpreter rounds in another way")
    target = torch.device(pick_device(device, others=("mps",)))
    if json_file is not None:
        check_file(json_file, "--json")
    from benchmarks.workloads import WORKLOADS
    from tigon.cli.check.session import PARTS, run_checks

    part_names = [part.replace(" ", "-") for part in PARTS]
    chosen_parts = _choose(parts, part_names, "--parts")
    chosen_ops = _choose(ops, list(WORKLOADS), "--ops") if ops is not None else None
    if target.type == "cuda":
        # A device without an index is the first one.
        target = torch.device("cuda", target.index or 0)
        torch.cuda.set_device(target)
    code = run_checks(target, chosen_ops, [part.replace("-", " ") for part in chosen_parts], seconds, json_file)
    if code:
        raise typer.Exit(code)


def _choose(text: str | None, names: list[str], option: str) -> list[str]:
    """Return the names that an option lists, in the order of `names`; all of them without the option."""
    from benchmarks.ops.cases import split_words

    if text is None:
        return names
    words = split_words(text)
    unknown = [word for word in words if word not in names]
    if unknown or not words:
        got = unknown[0] if unknown else text
        raise typer.BadParameter(f"must be among {', '.join(names)}, got {got!r}", param_hint=option)
    return [name for name in names if name in words]
