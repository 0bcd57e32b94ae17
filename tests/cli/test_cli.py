"""The command line prints its help, and refuses missing packages and bad options before a command starts its work."""

import errno
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.__main__ import app as benchmarks_app
from command_work import begin_work, run_tigon
from tigon import __version__
from tigon.cli import main as cli
from tigon.cli.environment import environment
from tigon.runtime.requirements import install_command

typer = pytest.importorskip("typer")


@pytest.fixture
def run():
    return run_tigon


def test_help_names_every_command_and_the_version_and_the_environment_are_printed(run):
    results = {words: run(*words.split()) for words in ("--help", "--version", "env", "env --json")}
    assert {result.exit_code for result in results.values()} == {0}
    assert all(name in results["--help"].output for name in ("inspect", "plan", "check", "env"))
    assert results["--version"].output == f"tigon {__version__}\n"
    lines = dict(line.split(maxsplit=1) for line in results["env"].output.splitlines())
    assert {"python", "torch", "triton", "tigon", "platform", "cpu"} <= set(lines)
    assert any(name.startswith("gpu") for name in lines)
    assert json.loads(results["env --json"].output).keys() == environment().keys()


@pytest.mark.parametrize("command", [c for c in cli._COMMANDS if c.needs], ids=lambda command: command.name)
def test_a_missing_extra_is_named(run, command, monkeypatch):
    absent = command.needs[0]
    monkeypatch.setitem(sys.modules, absent, None)  # The import fails as if the package were not installed.
    result = run(command.name, "llama")
    assert result.exit_code == 2
    assert result.output == f"tigon {command.name} needs {absent}: {install_command(command.name)}\n"


def test_without_typer_main_names_the_extra_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="^2$"):
        cli.main()
    assert capsys.readouterr().err == f"tigon: the command line needs typer: {install_command('cli')}\n"


MISTAKES = {
    "unknown command": (["nope"], "tigon: No such command"),
    "unknown option": (["check", "--nope"], "tigon check: No such option"),
    "no model": (["plan"], "tigon plan: Missing argument"),
    "unknown model": (["inspect", "lama"], "tigon inspect: Invalid value for MODEL: must be a preset"),
    "unknown preset": (["plan", "Lama-3-8B"], "tigon plan: Invalid value for MODEL: must be a preset (Llama-3-8B, "),
    "word for a number": (["plan", "llama", "--seq", "many"], "tigon plan: Invalid value for '--seq'"),
    "negative number": (["plan", "llama", "--seq", "-4"], "tigon plan: Invalid value for --seq: must be"),
    "no batch": (["plan", "llama", "--batch", "0"], "tigon plan: Invalid value for --batch: must be"),
    "unknown op": (["check", "--ops", "nope"], "tigon check: Invalid value for --ops: must be among"),
    "unknown device": (["check", "--device", "tpu"], "tigon check: Invalid value for --device: must be"),
    "unwritable path": (["plan", "llama", "--json", "/proc/x"], "tigon plan: Invalid value for --json: must be"),
}


@pytest.mark.parametrize(("arguments", "beginning"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, beginning, monkeypatch, capsys):
    """The whole program runs as in a terminal: no usage, no box and no traceback surround the message."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["tigon", *arguments])
    with pytest.raises(SystemExit, match="^2$"):
        cli.main()
    captured = capsys.readouterr()
    assert captured.err.startswith(beginning)
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.out


@pytest.mark.parametrize(
    ("command", "work"),
    [("inspect", "tigon.cli.inspect.inspection.inspect_config"), ("plan", "tigon.cli.plan.planner.plan")],
)
def test_ctrl_c_ends_a_command_with_its_exit_code(run, command, work, monkeypatch):
    pytest.importorskip("transformers")

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    module, _, name = work.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, interrupt)
    result = run(command, "tiny")
    assert result.exit_code == 130
    assert result.output.endswith("Interrupted\n")


def test_a_file_gets_a_line_for_each_stage_on_standard_error_and_a_terminal_sees_the_current_one(capsys, monkeypatch):
    with cli.show_progress("Building") as show:
        show("Counting [1 of 2]")
    assert capsys.readouterr() == ("", "Building ...\nCounting [1 of 2] ...\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with cli.show_progress("Building") as show:
        show("Counting [1 of 2]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Counting [1 of 2]" in captured.err


@pytest.mark.parametrize("command", cli._COMMANDS, ids=lambda command: command.name)
def test_help_has_examples_that_parse(run, command, monkeypatch):
    """Every option of an example is an option of the command, and every example is in the help."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "100")
    output = run(command.name, "--help").output
    assert f"tigon {command.name}" in output
    assert "--json" in output
    assert command.examples
    for example in command.examples:
        assert example in output
        assert all(word in output for word in example.split() if word.startswith("--"))


EXAMPLES = [example for command in cli._COMMANDS for example in command.examples]


@pytest.mark.parametrize("example", [*EXAMPLES, "tigon env --json"])
def test_an_example_begins_its_work(example, monkeypatch, tmp_path):
    """A machine without a GPU and without the network accepts its arguments. Some examples end within seconds."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    pytest.importorskip("peft")
    assert begin_work(example, monkeypatch, tmp_path) in (None, 0)


def test_a_folder_in_the_current_one_is_not_a_preset_of_its_name(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tigon.cli.inspect.build import find_config

    monkeypatch.chdir(tmp_path)
    assert find_config("Tiny").vocab_size == 1024
    transformers.LlamaConfig(vocab_size=77).save_pretrained("Tiny")
    assert find_config("Tiny").vocab_size == 77


@pytest.mark.parametrize(("words", "candidate"), [("tigon ch", "check"), ("tigon check --js", "--json")])
def test_the_shell_completes_commands_and_options(words, candidate):
    variables = {"_TIGON_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "from tigon.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert candidate in result.stdout.split(), result.stderr


def test_the_default_folder_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.time, "strftime", lambda pattern: "now")
    names = [report.make_folder(None, prefix) for prefix in ("train_", "train_", "bench_")]
    assert names == [Path("runs", name) for name in ("train_now", "train_now_2", "bench_now")]
    assert all(name.is_dir() and not [*name.iterdir()] for name in names)


@pytest.mark.parametrize("out", [None, Path("new/er")], ids=["default", "given"])
def test_a_folder_that_cannot_be_written_is_refused(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(report.tempfile, "TemporaryFile", refuse)
    with pytest.raises(typer.BadParameter, match="must be a folder that can be written, got"):
        report.make_folder(out, "")


UNWRITABLE = {
    "in /proc": lambda folder: Path("/proc/x"),
    "below a file": lambda folder: folder / "file" / "x",
    "a name that is too long": lambda folder: folder / ("x" * 1000),
    "below a name that is too long": lambda folder: folder / ("x" * 1000) / "x",
}


@pytest.mark.parametrize("make_path", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(make_path, tmp_path):
    """Root is refused too, although `os.access` grants root every path."""
    (tmp_path / "file").write_text("here")
    path = make_path(tmp_path)
    with pytest.raises(typer.BadParameter, match="must be a folder that can be written, got"):
        report.make_folder(path, "")
    with pytest.raises(typer.BadParameter, match="must be (a file that can be written|in a folder that exists), got"):
        cli.check_file(path, "--json")
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_a_file_that_can_be_written_stays_as_it_was(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("before")
    os.mkfifo(tmp_path / "pipe")
    for path in (new, old, Path(os.devnull), tmp_path / "pipe"):  # Nothing reads the pipe yet.
        cli.check_file(path, "--json")
    assert not new.exists()
    assert old.read_text() == "before"
    with pytest.raises(typer.BadParameter, match=r"must be a file that can be written, got .*\(Is a directory\)"):
        cli.check_file(tmp_path, "--json")


@pytest.mark.parametrize("content", ["text", lambda path: path.write_bytes(b"plot")], ids=["text", "function"])
def test_a_full_disk_gives_an_error_of_one_line(content):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with pytest.raises(typer.BadParameter, match=r"must be a file that can be written, got '/dev/full' \(No space"):
        cli.write_file(Path("/dev/full"), content, "--plot")


# For each command: the arguments and the option whose path must be refused before anything is built.
COMMANDS = {
    "plan --json": (["plan", "llama"], "--json", "x.json"),
    "plan --plot": (["plan", "llama"], "--plot", "x.png"),
    "inspect --json": (["inspect", "llama"], "--json", "x.json"),
    "check --json": (["check"], "--json", "x.json"),
}
BENCHMARK_COMMANDS = {
    "demo --out": (["demo", "--device", "cpu"], "--out", "x"),
    "ops --out": (["ops", "--device", "cpu", "--ops", "rms_norm"], "--out", "x"),
    "train --out": (["train", "--device", "cpu"], "--out", "x"),
}


@pytest.mark.parametrize(
    ("arguments", "option", "name"),
    [*COMMANDS.values(), *BENCHMARK_COMMANDS.values()],
    ids=[*COMMANDS, *BENCHMARK_COMMANDS],
)
def test_every_command_refuses_its_output_before_the_work(arguments, option, name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = f"/proc/{name}"
    runner = pytest.importorskip("typer.testing").CliRunner()
    app = benchmarks_app() if (arguments, option, name) in BENCHMARK_COMMANDS.values() else cli.app()
    result = runner.invoke(app, [*arguments, option, path], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    output = " ".join(result.output.split())
    assert f"Invalid value for {option}: must be a f" in output
    assert f"that can be written, got '{path}'" in output
    assert "memory=" not in result.output  # No table of results was printed before.


@pytest.mark.parametrize("name", ["tpu", "mps", "cpu:0", "cuda:-1", "cuda:99999", ""])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(typer.BadParameter, match=f"got '{name}'"):
        cli.pick_device(name)
