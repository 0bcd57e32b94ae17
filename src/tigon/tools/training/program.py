"""The command of every training program: options as a dataclass, and the way from the options to an exit code."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tigon.tools.cli import INTERRUPTED, make_console, make_folder, pick_folder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Device", "Seed", "Text", "run_program", "takes_options"]

Plan = TypeVar("Plan")
Text = Annotated[
    Path | None,
    typer.Option(help="File or folder to train on.", show_default="the Python standard library's sources"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")]


def takes_options(options_class: type) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Return a decorator for a command whose argument is a dataclass, so that typer reads its fields as options."""

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def expanded(**values: Any) -> None:
            command(options_class(**values))

        expanded.__annotations__ = {}
        expanded.__signature__ = inspect.signature(options_class)  # type: ignore[attr-defined]
        return expanded

    return decorate


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
