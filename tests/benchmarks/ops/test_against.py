"""`--against` imports the Tigon of another commit into this process, and only reads the git repository."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from typer.testing import CliRunner

import benchmarks
import tigon
from benchmarks.__main__ import app
from benchmarks.ops import against
from benchmarks.ops.against import find_revision

SOURCES = Path(tigon.__file__).parent
REPOSITORY = Path(benchmarks.__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments):
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def commit(folder, title):
    git(folder, "add", "--all")
    git(folder, "commit", "--message", title)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a repository of Tigon in which the tag `before` has no softmax and the next commit is the working tree."""
    root = tmp_path_factory.mktemp("checkout")
    git(root, "init", "--quiet")
    (root / "README").write_text("nothing yet")
    commit(root, "Empty")
    git(root, "tag", "empty")
    package = root / "src" / "tigon"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    now = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(now + "\ndel _MODULES['softmax']\nREVISION = 'before'\n")
    commit(root, "Before | softmax")
    git(root, "tag", "before")
    (package / "__init__.py").write_text(now)
    commit(root, "Now")
    (package / "__init__.py").write_text(now + "\nREVISION = 'changed, not committed'\n")
    return root


@pytest.fixture
def imported_checkout(checkout, monkeypatch):
    """Let this Tigon appear to be imported from the checkout."""
    monkeypatch.setattr(against, "PACKAGE", checkout / "src" / "tigon")
    return checkout


def shape_of_result(namespace):
    with FakeTensorMode():
        return getattr(torch.ops, namespace).activation_forward(torch.empty(2, 8), "relu2").shape


def test_a_revision_is_a_separate_copy_with_its_own_operators(imported_checkout):
    revision = find_revision("before")
    assert revision.commit == git(imported_checkout, "rev-parse", "before")
    assert (revision.name, revision.title) == ("tigon@before", "Before | softmax")
    # The first use of a name imports its module.
    assert tigon.rms_norm
    assert tigon.relu2
    modules = {name: module for name, module in sys.modules.items() if name.startswith("tigon")}
    x, weight = torch.randn(4, 64), torch.ones(64)
    with revision.package() as package:
        folder = Path(package.__file__).parent
        assert package.REVISION == "before"
        assert not hasattr(package, "softmax")
        assert package.rms_norm is not tigon.rms_norm
        assert package.rms_norm.__globals__ is not tigon.rms_norm.__globals__
        assert torch.equal(package.rms_norm(x, weight), tigon.rms_norm(x, weight))
        assert shape_of_result(f"tigon_{revision.commit[:12]}") == (2, 8)
        assert sys.modules["tigon"] is tigon
        assert {name: module for name, module in sys.modules.items() if name.startswith("tigon")} == modules
    assert shape_of_result("tigon") == (2, 8)
    assert not folder.exists()
    assert git(imported_checkout, "status", "--short") == "M src/tigon/__init__.py"
    assert not (imported_checkout / ".git" / "worktrees").exists()


@pytest.mark.parametrize("ref", ["nowhere", "--all", "", "before:README"])
def test_an_unknown_ref_is_refused(imported_checkout, ref):
    with pytest.raises(ValueError, match=f"bench: --against must name a commit of .*, got '{ref}'"):
        find_revision(ref)


def test_a_commit_without_tigon_is_refused(imported_checkout):
    with pytest.raises(ValueError, match="must name a commit with Tigon in 'src/tigon', got 'empty'"):
        find_revision("empty")


def test_outside_a_checkout_of_tigon_it_is_refused(checkout, tmp_path, monkeypatch):
    """The last folder is in a repository that does not contain it."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    installed, inside = tmp_path / "site-packages" / "tigon", checkout / ".venv" / "tigon"
    for folder in (installed, inside):
        folder.mkdir(parents=True)
    try:
        for folder in (installed, tmp_path / "not there", inside):
            monkeypatch.setattr(against, "PACKAGE", folder)
            with pytest.raises(ValueError, match="needs Tigon imported from a git checkout, got '.*(tigon|there)'"):
                find_revision("HEAD")
    finally:
        shutil.rmtree(checkout / ".venv")


def bench(checkout, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") and k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{REPOSITORY}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "benchmarks", "ops", "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout.parent)


@pytest.mark.thorough
def test_two_revisions_are_measured_in_turn(checkout, tmp_path):
    out = tmp_path / "out"
    result = bench(checkout, "--ops", "rms_norm,softmax", "--against", "before", "--out", str(out))
    assert result.returncode == 0, result.stderr + result.stdout
    report = json.loads((out / "bench.json").read_text())
    assert report["settings"]["against"] == {
        "ref": "before", "commit": git(checkout, "rev-parse", "before"), "title": "Before | softmax",
        "provider": "tigon@before",
    }  # fmt: skip
    status = {(row["op"], row["provider"]): (row["status"], row["note"]) for row in report["rows"]}
    assert status == {
        ("rms_norm", "tigon"): ("ok", ""), ("rms_norm", "tigon@before"): ("ok", ""), ("softmax", "tigon"): ("ok", ""),
        ("softmax", "tigon@before"): ("unsupported", "no softmax in this revision"),
    }  # fmt: skip
    assert all(row["accurate"] for row in report["rows"] if row["status"] == "ok")
    markdown = (out / "bench.md").read_text()
    assert "tigon@before is" in markdown
    assert "speed-up over tigon@before" in markdown
    assert "speed-up over tigon@before" in result.stdout


def test_a_revision_that_cannot_be_imported_is_refused_before_anything_runs(imported_checkout, tmp_path):
    checkout = imported_checkout
    git(checkout, "stash", "--quiet")
    try:
        source = checkout / "src" / "tigon" / "__init__.py"
        source.write_text(source.read_text() + "\nimport tigon.no_such_module\n")
        commit(checkout, "Broken")
        options = ["--device", "cpu", "--ops", "rms_norm", "--against", "HEAD", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app(), ["ops", *options])
    finally:
        git(checkout, "reset", "--quiet", "--hard", "HEAD~1")
        git(checkout, "stash", "pop", "--quiet")
    assert result.exit_code == 2
    assert "bench: --against HEAD cannot be imported" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
