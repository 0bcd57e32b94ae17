"""Commands of training programs have a dataclass of options, make a plan from it, and end with an exit code."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tigon.cli.main import INTERRUPTED, make_console, make_folder, pick_folder

if TYPE_CHECKING:
    from rich.console import Console

Plan = TypeVar("Plan")
TextOption = Annotated[
    Path | None,
    typer.Option(help="File or folder to train on.", show_default="the Python standard library's sources"),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")]


def takes_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Let typer read the options of a command from the fields of its only argument, a dataclass."""
    (argument,) = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        command(argument.annotation(**values))

    expanded.__annotations__ = {}
    expanded.__signature__ = inspect.signature(argument.annotation)  # type: ignore[attr-defined]
    return expanded


def run_program(
    out: Path | None, prefix: str, make_plan: Callable[[], Plan], train: Callable[["Console", Plan, Path], int]
) -> None:
    """Make the plan and the folder for the results, call `train`, and end with its exit code; 130 after Ctrl-C."""
    console = make_console()
    try:
        folder = pick_folder(out, prefix)
        with console.status("Reading and tokenising the text"):
            plan = make_plan()
        make_folder(folder)
        code = train(console, plan, folder)
    except KeyboardInterrupt:
        console.print("[bold yellow]Interrupted[/]")
        code = INTERRUPTED
    raise typer.Exit(code)
