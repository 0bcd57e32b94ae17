"""The command line: `tigon demo`, `tigon bench`, `tigon env`.

Commands with imports of their own are loaded when they are called, after a look at whether those are there.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["app", "main"]


@dataclass(frozen=True)
class _Command:
    """A command that is the function `name` of the module `tigon.<name>.command`."""

    name: str
    help: str
    needs: tuple[str, ...]  # modules beyond torch; the extra that installs them has the command's name


_COMMANDS = (
    _Command(
        "demo",
        "Train a Hugging Face decoder on real text, stock and with Tigon, and compare.",
        needs=("transformers", "tokenizers", "matplotlib", "psutil", "numpy"),
    ),
    _Command("bench", "Measure speed and memory of every op beside its peers.", needs=("matplotlib",)),
)


def _call(command: _Command, arguments: list[str]) -> None:
    import typer

    missing = [name for name in command.needs if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tigon {command.name} needs {', '.join(missing)}: pip install 'tigon[{command.name}]'")
    function = getattr(importlib.import_module(f"tigon.{command.name}.command"), command.name)
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(function)
    application(arguments, prog_name=f"tigon {command.name}")


def app() -> "typer.Typer":
    """The command line as a typer application. Needs typer and rich."""
    import typer

    application = typer.Typer(
        help="Train Hugging Face and PyTorch models faster and in less memory, exactly.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def add(command: _Command) -> None:
        # Everything after the name goes to the command's own parser, --help included.
        settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

        @application.command(command.name, help=command.help, context_settings=settings)
        def _(context: typer.Context) -> None:
            _call(command, context.args)

    for command in _COMMANDS:
        add(command)

    @application.command("env")
    def env() -> None:
        """Print versions and devices, for bug reports."""
        from tigon.environment import environment

        facts = environment()
        width = max(map(len, facts))
        for name, value in facts.items():
            typer.echo(f"{name:<{width}}  {value}")

    return application


def main() -> None:
    """Entry point of `tigon`; says what to install where typer or rich is missing."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tigon: the command line needs {', '.join(missing)}: pip install 'tigon[cli]'")
    app()(prog_name="tigon")


if __name__ == "__main__":
    main()
