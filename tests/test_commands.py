"""Each command in README and docs exists: its options are known, and the files that it names are in the repository.

Most of these commands need a GPU or the network, so they are not run here. `make demo`, `make test`, the examples and
the commands of `tigon` have tests of their own.
"""

import contextlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# Programs of other packages. Their options are not checked.
OTHER_PROGRAMS = {"accelerate", "axolotl", "cd", "deepspeed", "echo", "git", "swift", "torchrun", "trl"}
OTHER_MODULES = {"pytest", "verl.trainer.main_ppo"}


def _commands() -> list[tuple[str, str]]:
    """Return the page and the text of each command in the bash blocks of all pages."""
    commands = []
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            commands += [(page.name, line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return commands


def _words(command: str) -> list[str]:
    """Return the words of a command without its comment and without the environment variables before it."""
    words = shlex.split(command.replace("<op>", "rms_norm").replace(".venv/bin/", ""), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def _check_tigon(words: list[str]) -> None:
    """Parse the arguments of a command of `tigon` as the command line does, without running it."""
    typer = pytest.importorskip("typer")
    from tigon.tools.cli import app

    command = typer.main.get_command(app())
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    # `--help` and the like end the command.
    with contextlib.suppress(typer.Exit):
        command.make_context(command.name, words)


def _check_script(words: list[str]) -> None:
    script = ROOT / words[0]
    assert script.is_file(), f"{words[0]} does not exist"
    # A script may read some of its options in a module beside it.
    source = script.read_text("utf-8") + "".join(path.read_text("utf-8") for path in script.parent.glob("*.py"))
    for option in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{option}"' in source, f"{words[0]} has no option {option}"


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert [word for word in words if "=" not in word and word not in targets] == []


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for word in words:
        if match := re.fullmatch(r"(?:\.|tigon.*?)\[([\w,-]+)\].*", word):
            assert set(match[1].split(",")) <= extras.keys()


@pytest.mark.parametrize(("page", "command"), _commands(), ids=lambda text: text.strip()[:60])
def test_the_command_exists(page, command):
    words = _words(command)
    # A line may consist of a comment, or of options that a trainer's command gets.
    if not words or words[0].startswith("--"):
        return
    program, *arguments = words
    if program in ("python", "python3") and arguments[:1] == ["-m"]:
        file = ROOT / "src" / arguments[1].replace(".", "/")
        assert arguments[1] in OTHER_MODULES or file.with_suffix(".py").is_file()
    elif program in ("python", "python3"):
        _check_script(arguments)
    elif program == "tigon":
        _check_tigon(arguments)
    elif program == "make":
        _check_make(arguments)
    elif program == "pip":
        _check_pip(arguments)
    else:
        assert program in OTHER_PROGRAMS, f"{program} is not known to this test"
        files = [word for word in arguments if word.startswith("examples/")]
        assert [name for name in files if not (ROOT / name).exists()] == []
