"""Each command in README and docs is right. A test runs it, or the page says that it needs a GPU or the network.

Every command has only options that exist, and names only files of the repository. A command without a remark such as
`# needs a GPU` must work on a machine without a GPU and without the network. A command of `tigon` is called up to the
moment at which its work begins; other tests run the work. CI runs each target of `make`, and a test runs each script.
"""

import contextlib
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from command_work import begin_work

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "examples/medusa/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
# Programs of other packages. Their options are not checked.
OTHER_PROGRAMS = {"accelerate", "axolotl", "cd", "deepspeed", "echo", "git", "swift", "torchrun", "trl"}
BENCHMARKS = ["python", "-m", "benchmarks"]
OTHER_MODULES = {"pytest", "verl.trainer.main_ppo"}
# In a block of commands, the remark is a comment. A comment alone on its line is about all commands below it.
NEEDS = re.compile(r"\bneeds (?:a GPU|the network)\b")
# A command inside a sentence: the paragraph or the row of a table says that it is about GPUs or the network.
NEEDS_IN_A_PARAGRAPH = re.compile(r"GPU|H100|H200|network|on the hub")


# The tests of commands that neither CI nor a test calls by name.
TESTS = {"make models": ("tests/cli/inspect/test_inspect.py", "models_page()")}


class Command(NamedTuple):
    page: str
    text: str
    # The page says that the command needs a GPU or the network.
    has_remark: bool


def _blocks(text: str) -> list[str]:
    return [body for _, body in re.findall(r"```(bash|sh|console)\n(.*?)```", text, re.DOTALL)]


def _commands() -> list[Command]:
    """Return each command in the bash blocks of all pages."""
    commands = []
    for page in PAGES:
        for block in _blocks(page.read_text("utf-8")):
            remark_above = False
            for line in filter(str.strip, block.replace("\\\n", " ").splitlines()):
                remark = bool(NEEDS.search(line.partition("#")[2]))
                if line.strip().startswith("#"):
                    remark_above |= remark
                # A line may consist of options that a trainer's command gets.
                elif not line.startswith("--"):
                    commands.append(Command(page.name, line.strip(), remark or remark_above))
    return commands


def _inline_commands() -> list[Command]:
    """Return each command inside a sentence that has arguments and no placeholders."""
    commands = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\n|\n(?=[|-] )|\n(?=\|)", text):
            found = re.findall(r"`((?:tigon|make|python|torchrun|accelerate launch) [^`]+)`", paragraph)
            remark = bool(NEEDS_IN_A_PARAGRAPH.search(paragraph))
            for command in (" ".join(command.split()) for command in found):
                is_name = re.fullmatch(r"(tigon|python -m benchmarks) [a-z]+", command)
                if not is_name and not re.search(r"\.\.\.|\b[A-Z]+\b(?![=/.])|<version>", command):
                    commands.append(Command(page.name, command, remark))
    return list(dict.fromkeys(commands))


def _words(command: str) -> list[str]:
    """Return the words of a command without its comment and without the environment variables before it."""
    words = shlex.split(command.replace("<op>", "rms_norm").replace(".venv/bin/", ""), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def _check_typer(module: str, words: list[str]) -> None:
    """Parse the arguments of a command of a program as its command line does, without running it."""
    typer = pytest.importorskip("typer")
    command = typer.main.get_command(importlib.import_module(module).app())
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


def _check(words: list[str]) -> None:
    """Check the options of a command, and the files that it names."""
    program, *arguments = words
    if words[:3] == BENCHMARKS:
        _check_typer("benchmarks.__main__", words[3:])
    elif program in ("python", "python3") and arguments[:1] == ["-m"]:
        file = ROOT / "src" / arguments[1].replace(".", "/")
        assert arguments[1] in OTHER_MODULES or file.with_suffix(".py").is_file()
    elif program in ("python", "python3"):
        _check_script(arguments)
    elif program == "tigon":
        _check_typer("tigon.cli.main", arguments)
    elif program == "make":
        _check_make(arguments)
    elif program == "pip":
        _check_pip(arguments)
    else:
        assert program in OTHER_PROGRAMS, f"{program} is not known to this test"
        files = [word for word in arguments if word.startswith("examples/")]
        assert [name for name in files if not (ROOT / name).exists()] == []


def _is_covered(words: list[str], monkeypatch, folder: Path) -> bool:
    """Return True if a test or CI runs a command on a machine without a GPU."""
    program, *arguments = words
    if shlex.join(words) in TESTS:
        test, name = TESTS[shlex.join(words)]
        return name in (ROOT / test).read_text("utf-8")
    if program == "tigon" or words[:3] == BENCHMARKS:
        (folder / "docs").mkdir()
        return begin_work(shlex.join(words), monkeypatch, folder) in (None, 0)
    if program == "make":
        workflows = [*ROOT.glob(".github/workflows/*.yml"), ROOT / ".ci" / "run"]
        text = "\n".join(path.read_text("utf-8") for path in workflows if path.name != "publish.yml")
        return all(re.search(rf"\b{word}(?![\w-])", text) for word in arguments if "=" not in word)
    if arguments[:2] == ["-m", "pytest"]:
        return all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
    scripts = [word for word in arguments if re.fullmatch(r"examples/.*\.py", word)]
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests" / "examples").glob("*.py"))
    return bool(scripts) and all(re.search(rf"\b{Path(script).stem}\b", tests) for script in scripts)


@pytest.mark.parametrize("command", _commands(), ids=lambda command: command.text[:60])
def test_the_command_is_right_and_is_covered_or_names_its_needs(command, monkeypatch, tmp_path):
    words = _words(command.text)
    _check(words)
    assert command.has_remark or _is_covered(words, monkeypatch, tmp_path), (
        f"{command.page}: no test runs {command.text!r}, and no comment says that it needs a GPU or the network"
    )


@pytest.mark.parametrize("command", _inline_commands(), ids=lambda command: command.text[:60])
def test_the_command_in_a_sentence_is_right_and_is_covered_or_names_its_needs(command, monkeypatch, tmp_path):
    words = _words(command.text)
    _check(words)
    assert command.has_remark or _is_covered(words, monkeypatch, tmp_path), (
        f"{command.page}: no test runs {command.text!r}, and its paragraph names neither a GPU nor the network"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_in_bash_blocks(page):
    """Only these are checked. The lines of other blocks are code or output."""
    others = re.sub(r"```(?:bash|sh|console|python)\n.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    blocks = re.findall(r"```\w*\n(.*?)```", others, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if re.match(r"\$? ?(?:tigon (?=[a-z])|pip install|make |python3? )", line)] == []


@pytest.mark.parametrize(("command", "covered"), [
    ("tigon inspect Llama-3-8B", True), ("tigon inspect no-such-model", False), ("tigon plan llama --seq 0", False),
    ("make test", True), ("make bench", False), ("python examples/trainer.py", True),
    ("python examples/time_fp8.py", False), ("pip install '.[hf]'", False),
])  # fmt: skip
def test_what_counts_as_covered(command, covered, monkeypatch, tmp_path):
    assert _is_covered(_words(command), monkeypatch, tmp_path) == covered
