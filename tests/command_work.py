"""Call a command of `tigon`, or of `python -m benchmarks`, as a shell does, up to the moment at which its work begins.

By then, the command has accepted all arguments, has found the model, the text, the cases and the providers, and has
checked that it can write its output. The work itself takes minutes. Other tests of each command run it with smaller
arguments.
"""

import contextlib
import importlib
import io
import shlex
from typing import NamedTuple

from benchmarks.__main__ import app as benchmarks_app
from tigon.cli.main import app as tigon_app
from tigon.cli.main import run_application

# The function with which the work of each command begins. `inspect MODEL` and `env` take seconds, so they run in full.
WORK = {
    "benchmarks demo": "benchmarks.train.plan.tokenise", "plan": "tigon.cli.plan.planner.plan",
    "benchmarks ops": "benchmarks.ops.session._run", "benchmarks train": "benchmarks.train.plan.tokenise",
    "check": "tigon.cli.check.command.run_checks", "benchmarks resources": "benchmarks.compile.command._compile_all",
}  # fmt: skip


class WorkBegins(BaseException):
    """The work of the command would begin now."""


def begin_work(command: str, monkeypatch, folder) -> int | None:
    """Call a command in a folder. Return None if its work begins, and otherwise its exit code."""
    from typer.testing import CliRunner

    def begin(*arguments, **options):
        raise WorkBegins

    program, *words = shlex.split(command.removeprefix("python -m "))
    app = {"tigon": tigon_app, "benchmarks": benchmarks_app}[program]()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for place in WORK.values():
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), name, begin)
    try:
        result = CliRunner().invoke(app, words)
    # The runner catches only subclasses of Exception.
    except WorkBegins:
        return None
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


class ProgramResult(NamedTuple):
    """The exit code of the program, and what it has printed."""

    exit_code: int
    output: str


def run_tigon(*arguments: object) -> ProgramResult:
    """Run the program `tigon` in this process, as a terminal does: a mistake of the user is one line."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            run_application(tigon_app(), [str(argument) for argument in arguments], "tigon")
        except SystemExit as end:
            code = int(end.code or 0)
    return ProgramResult(code, output.getvalue())
