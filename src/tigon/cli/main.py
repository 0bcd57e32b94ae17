"""The command line: `tigon inspect`, `plan`, `check` and `env`.

The modules of a command import the packages that it needs when it is called. If one is missing, the command says so.
"""

import contextlib
import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

from tigon.runtime.requirements import unmet

if TYPE_CHECKING:
    import typer
    from rich.console import Console

# The exit code after Ctrl-C is the one that shells use, and so is that for a mistake of the user.
INTERRUPTED, USER_MISTAKE = 130, 2


class _Command(NamedTuple):
    """A command: the function of its name in `tigon.cli.<name>.command`. The extra that it needs has its name too.
    `needs` are the packages that it needs besides torch, and its own `--help` shows the `examples`."""

    name: str
    help: str
    needs: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


_COMMANDS = (
    _Command(
        "inspect",
        "Show what tigon.patch replaces in a model, without its weights.",
        needs=("transformers",),
        examples=("tigon inspect Llama-3-8B", "tigon inspect llama --json llama.json"),
    ),
    _Command(
        "plan",
        "Show how much memory each memory level needs, and which batch fits.",
        needs=("transformers",),
        examples=("tigon plan Llama-3-8B --seq 4096 --gpus 4", "tigon plan Qwen3-4B --gpu-memory 24 --lora 16"),
    ),
    _Command(
        "check",
        "Check that everything holds on this machine, in three minutes.",
        examples=("tigon check", "tigon check --json check.json", "tigon check --parts ops --ops rms_norm,rope"),
    ),
)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt, as Ctrl-C does, at the first signal to terminate in a block. `timeout` and batch systems
    send this signal. Commands then end their children and keep their results. A thread other than the main one gets no
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        # A second signal must not interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str) -> NoReturn:
    """Print a message in one line, and end with the exit code for mistakes of the user."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(USER_MISTAKE)


def run_application(application: "typer.Typer", arguments: list[str] | None, name: str) -> NoReturn:
    """Parse the arguments, run the application, and end with its exit code. A mistake of the user is one line."""
    try:
        code = application(arguments, prog_name=name, standalone_mode=False)
    except Exception as error:
        # All errors of the parser have this method. typer may hold its own copy of click, so their class has two names.
        if not hasattr(error, "format_message"):
            raise
        message, context = error.format_message(), getattr(error, "ctx", None)
        # Without a command, the parser raises an error whose message is the help.
        if not message or "\n" in message.strip():
            print(message)
            sys.exit(USER_MISTAKE)
        path = name if context is None else context.command_path
        _fail(f"{path}: {message} (see {path} --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _function(command: _Command) -> Callable[..., Any]:
    """Return the function of a command, from which typer reads the options. Its call refuses missing packages."""
    function = getattr(importlib.import_module(f"tigon.cli.{command.name}.command"), command.name)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> None:
        if message := unmet(*command.needs, extra=command.name):
            _fail(f"tigon {command.name} {message}")
        try:
            with sigterm_interrupts():
                function(*arguments, **options)
        except KeyboardInterrupt:
            make_console().print("[bold yellow]Interrupted[/]")
            sys.exit(INTERRUPTED)

    return call


def app() -> "typer.Typer":
    """Return the command line as a typer application. This needs typer and rich."""
    import typer

    application = typer.Typer(
        help="Train Hugging Face and PyTorch models faster and in less memory, exactly.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # In Markdown mode, typer joins the lines of a paragraph and wraps them at the width of the terminal.
        rich_markup_mode="markdown",
    )

    def print_version(requested: bool) -> None:
        if requested:
            from tigon import __version__

            typer.echo(f"tigon {__version__}")
            raise typer.Exit

    @application.callback()
    def _(
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for command in _COMMANDS:
        examples = "\n\n".join(["Examples:", "", *(f"- `{example}`" for example in command.examples)])
        application.command(command.name, short_help=command.help, epilog=examples)(_function(command))

    @application.command("env", epilog="Example: tigon env --json > env.json")
    def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """Print versions and devices, for bug reports."""
        from tigon.cli.environment import environment

        facts = environment()
        if as_json:
            typer.echo(json.dumps(facts, indent=1))
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            typer.echo(f"{name:<{width}}  {value}")

    return application


# --- functions for all commands --------------------------------------------------------------------


def make_console() -> "Console":
    """Return a console for standard output. A file or a pipe has no width, so a width that fits the tables is used."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of a block on standard error, and yield a function that shows the text of the next stage."""
    if not sys.stderr.isatty():
        say = lambda stage: print(f"{stage} ...", file=sys.stderr, flush=True)
        say(text)
        yield say
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(text) as status:
        yield lambda stage: status.update(escape(stage))


def pick_device(name: str, others: tuple[str, ...] = ()) -> str:
    """Return the device `name`. "auto" stands for CUDA if torch sees a GPU, and else for the CPU. If `others` holds
    "mps", the GPU of a Mac, "auto" prefers it to the CPU."""
    import torch
    import typer

    has_mps = "mps" in others and torch.backends.mps.is_available()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if name == "mps" and has_mps:
        return name
    choices = ", ".join(["auto", "cpu", *others, "cuda"])
    if name not in others and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise typer.BadParameter(f"must be {choices} or cuda:N, got {name!r}", param_hint="--device")
    count = torch.cuda.device_count()
    if name in others or (name != "cpu" and int(name.partition(":")[2] or 0) >= count):
        mps = ", MPS: no" if "mps" in others else ""
        raise typer.BadParameter(
            f"must be a device that torch sees (CUDA devices: {count}{mps}), got {name!r}", param_hint="--device"
        )
    return name


def check_file(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before its content is computed. The check leaves no new file."""
    import typer

    # The check calls functions of os.path, because those of Path raise for a name that is too long.
    if not os.path.isdir(path.absolute().parent):
        raise typer.BadParameter(f"must be in a folder that exists, got {str(path)!r}", param_hint=option)
    # Opening a pipe would wait for its reader. A terminal needs no check.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return
    is_new = not os.path.lexists(path)
    try:
        # os.access allows root everything, so the file is opened.
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _file_error(path, option, error) from error


def write_file(path: Path, content: "str | Callable[[Path], None]", option: str) -> None:
    """Write a text to a file, or call a function that writes the file. The disk may be full since `check_file`."""
    try:
        if callable(content):
            content(path)
        else:
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _file_error(path, option, error) from error


def _file_error(path: Path, option: str, error: OSError) -> "typer.BadParameter":
    """Return the error about a file that cannot be written."""
    import typer

    message = f"must be a file that can be written, got {str(path)!r} ({error.strerror})"
    return typer.BadParameter(message, param_hint=option)


def say_written(console: "Console", path: Path) -> None:
    """Print the name of a file that was written, in one line that the terminal does not break."""
    console.print(f"Wrote {path}", markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line. If typer or rich is missing or too old, print what to install."""
    if message := unmet("typer", "rich", extra="cli"):
        _fail(f"tigon: the command line {message}")
    run_application(app(), None, "tigon")


if __name__ == "__main__":
    main()
