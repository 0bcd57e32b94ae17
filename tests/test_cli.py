"""The command line without its commands' work: help, env, what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tigon import cli
from tigon.environment import environment

typer_testing = pytest.importorskip("typer.testing")


@pytest.fixture
def run():
    return lambda *arguments: typer_testing.CliRunner().invoke(cli.app(), list(arguments))


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("demo", "inspect", "bench", "resources", "env"))


def test_env_prints_versions_and_devices(run):
    result = run("env")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert {"python", "torch", "triton", "tigon", "platform", "cpu"} <= set(lines)
    assert any(name.startswith("gpu") for name in lines)


def test_environment_is_text():
    assert all(isinstance(name, str) and isinstance(value, str) and value for name, value in environment().items())


@pytest.mark.parametrize("command", ["demo", "inspect", "bench", "resources"])
def test_help_of_a_command_is_its_own(run, command, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"tigon {command}" in result.output
    assert "--out" in result.output


@pytest.mark.parametrize("command", [c for c in cli._COMMANDS if c.needs], ids=lambda command: command.name)
def test_missing_extra_is_named(run, command, monkeypatch):
    find_spec = cli.importlib.util.find_spec
    absent = command.needs[0]
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    result = run(command.name)
    assert result.exit_code == 1
    assert str(result.exception) == f"tigon {command.name} needs {absent}: pip install 'tigon[{command.name}]'" or (
        f"tigon {command.name} needs {absent}: pip install 'tigon[{command.name}]'" in result.output
    )


def test_main_without_typer_says_what_to_install(monkeypatch):
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'tigon\[cli\]'"):
        cli.main()


def test_default_folder_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.time, "strftime", lambda pattern: "now")
    assert cli.pick_folder(None) == Path("runs/now")
    Path("runs/now").mkdir(parents=True)
    assert cli.pick_folder(None) == Path("runs/now_2")
    assert cli.pick_folder(None, "bench_") == Path("runs/bench_now")


@pytest.mark.parametrize("out", [None, Path("new/er")], ids=["default", "given"])
def test_a_folder_that_cannot_be_written_is_refused(out, tmp_path, monkeypatch):
    import typer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    with pytest.raises(typer.BadParameter, match="must be a folder that can be written, got"):
        cli.pick_folder(out)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    import typer

    out = cli.pick_folder(tmp_path / "a" / ("x" * 1000))  # longer than a name may be
    with pytest.raises(typer.BadParameter, match=r"must be a folder that can be made, got .*\(File name too long\)"):
        cli.make_folder(out)
    cli.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["tpu", "mps", "cpu:0", "cuda:-1", "cuda:99999", ""])
def test_a_device_that_is_not_there_is_refused(name):
    import typer

    with pytest.raises(typer.BadParameter, match=f"got '{name}'"):
        cli.pick_device(name)


def test_importing_the_command_line_needs_no_extra():
    """A name in sys.modules that is None makes its import fail, as if it were not installed."""
    hidden = ("typer", "rich", "transformers", "matplotlib", "tokenizers", "psutil")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import tigon.cli, tigon.environment"
    subprocess.run([sys.executable, "-c", code], check=True)
