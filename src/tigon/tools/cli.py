"""The command line: `tigon demo`, `inspect`, `plan`, `bench`, `bench train`, `resources` and `env`.

Commands with imports of their own are loaded when they are called, after a look at whether those are there.
"""

import contextlib
import importlib
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tigon.runtime.requirements import unmet

if TYPE_CHECKING:
    import typer
    from rich.console import Console

__all__ = [
    "INTERRUPTED",
    "app",
    "check_file",
    "main",
    "make_console",
    "make_folder",
    "pick_device",
    "pick_folder",
    "say_written",
    "write_file",
]

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


@dataclass(frozen=True)
class _Command:
    """A command that is the function `name` of a module: `tigon.tools.<name>.command`, or the one given.

    Of a name of two words the first is a command too; the second is its first argument, and names the function.
    """

    name: str
    help: str
    needs: tuple[str, ...] = ()  # modules beyond torch; the extra that installs them has the command's name
    module: str = ""
    extra: str = ""  # or this name


_TO_TRAIN = ("transformers", "tokenizers", "matplotlib", "psutil", "numpy")

_COMMANDS = (
    _Command("demo", "Train a Hugging Face decoder on real text, stock and with Tigon, and compare.", needs=_TO_TRAIN),
    _Command("inspect", "Show what tigon.patch replaces in a model, without its weights.", needs=("transformers",)),
    _Command("plan", "Say what each level of memory needs, and which batch fits.", needs=("transformers",)),
    _Command("bench", "Measure speed and memory of every op, or of training, beside peers.", needs=("matplotlib",)),
    _Command(
        "resources",
        "Compile every kernel for every chip and print what it takes.",
        module="tigon.tools.compile.command",
    ),
)
_TWO_WORDS = (
    _Command(
        "bench train",
        "Measure whole training steps.",
        needs=_TO_TRAIN,
        module="tigon.tools.bench.train.command",
        extra="demo",
    ),
)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """In the block a signal to terminate (`timeout`, a batch system) is what Ctrl-C is: KeyboardInterrupt, once.

    So children are ended and results kept. A thread other than the main one gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nor is what it begins to be interrupted
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _call(command: _Command, arguments: list[str]) -> None:
    import typer

    if message := unmet(*command.needs, extra=command.extra or command.name):
        sys.exit(f"tigon {command.name} {message}")
    module = importlib.import_module(command.module or f"tigon.tools.{command.name}.command")
    function = getattr(module, command.name.split()[-1])
    # As Markdown, the lines of a docstring's paragraph are joined, and wrapped at the terminal's width.
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    application.command()(function)
    with _terminated_as_interrupted():
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
            words = [command.name, *context.args[:1]]
            longer = next((other for other in _TWO_WORDS if other.name.split() == words), None)
            _call(longer or command, context.args[1:] if longer else context.args)

    for command in _COMMANDS:
        add(command)

    @application.command("env")
    def env() -> None:
        """Print versions and devices, for bug reports."""
        from tigon.tools.environment import environment

        facts = environment()
        width = max(map(len, facts))
        for name, value in facts.items():
            typer.echo(f"{name:<{width}}  {value}")

    return application


# --- what commands share ---------------------------------------------------------------------------


def make_console() -> "Console":
    """A console for standard output. A file or a pipe has no width: there it is wide enough for the tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def pick_device(name: str) -> str:
    """`name`, or for auto the best there is.

    Raises:
        typer.BadParameter: `name` is no device, or none that torch sees.
    """
    import torch
    import typer

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise typer.BadParameter(f"must be auto, cpu, cuda or cuda:N, got {name!r}", param_hint="--device")
    seen = torch.cuda.device_count()
    if name != "cpu" and int(name.partition(":")[2] or 0) >= seen:
        raise typer.BadParameter(
            f"must be a device that torch sees ({seen} of CUDA), got {name!r}", param_hint="--device"
        )
    return name


def pick_folder(out: Path | None, prefix: str = "") -> Path:
    """Where results go: `out`, or `runs/<prefix><time>`, which is not there yet. It is not made here.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    import typer

    if out is None:
        stem = prefix + time.strftime("%Y-%m-%d_%H-%M-%S")
        names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
        out = next(folder for name in names if not (folder := Path("runs") / name).exists())
    # Not Path.exists, which raises inside a folder that is closed to us.
    nearest = next(folder for folder in (out, *out.absolute().parents) if os.path.exists(folder))
    try:
        # A file without a name. os.access grants root everything, and knows no length of names.
        with tempfile.TemporaryFile(dir=nearest):
            pass
        with contextlib.suppress(FileNotFoundError):
            os.stat(out)
    except OSError as error:
        message = f"must be a folder that can be written, got {str(out)!r} ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--out") from error
    return out


def make_folder(folder: Path) -> None:
    """Make what `pick_folder` gave.

    Raises:
        typer.BadParameter: the file system refuses.
    """
    import typer

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"must be a folder that can be made, got {str(folder)!r} ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--out") from error


def check_file(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before there is anything to write. A new file is not left behind.

    Raises:
        typer.BadParameter: naming the option, the rule and the path.
    """
    import typer

    # Functions of os.path, because those of Path raise for a name that is too long.
    if not os.path.isdir(path.absolute().parent):
        raise typer.BadParameter(f"must be in a folder that exists, got {str(path)!r}", param_hint=option)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return  # a pipe or a terminal, which waits for whoever reads it
    is_new = not os.path.lexists(path)
    try:
        # Not os.access, which grants root everything.
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _not_written(path, option, error) from error


def write_file(path: Path, content: "str | Callable[[Path], None]", option: str) -> None:
    """Write a text, or let a function write its file.

    Raises:
        typer.BadParameter: naming the option, the rule and the path; a disk may have become full since `check_file`.
    """
    try:
        if callable(content):
            content(path)
        else:
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _not_written(path, option, error) from error


def _not_written(path: Path, option: str, error: OSError) -> "typer.BadParameter":
    import typer

    message = f"must be a file that can be written, got {str(path)!r} ({error.strerror})"
    return typer.BadParameter(message, param_hint=option)


def say_written(console: "Console", path: Path) -> None:
    """Name a file that was written, in one line of its own, which a terminal does not break."""
    console.print(f"Wrote {path}", markup=False, soft_wrap=True)


def main() -> None:
    """Entry point of `tigon`; says what to install where typer or rich is missing or too old."""
    if message := unmet("typer", "rich", extra="cli"):
        sys.exit(f"tigon: the command line {message}")
    app()(prog_name="tigon")


if __name__ == "__main__":
    main()
