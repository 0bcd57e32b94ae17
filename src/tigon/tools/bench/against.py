"""Another revision of Tigon beside this one, in the same process: the package as a commit has it, imported as a copy.

Both revisions then get the same inputs and are measured in turn, as any two providers are. The repository is only read.
"""

import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from torch import library

import tigon

__all__ = ["Revision", "find_revision"]

PACKAGE = Path(tigon.__file__).resolve().parent


@dataclass(frozen=True)
class Revision:
    """A commit of the checkout that this Tigon is imported from."""

    ref: str  # as it was asked for
    commit: str  # 40 hex digits
    title: str
    root: Path  # of the checkout
    folder: str  # of the package in it, as git writes paths

    @property
    def name(self) -> str:
        """Of the provider: `tigon@<ref>`; a commit given in full is shortened."""
        return f"tigon@{self.ref[:12] if self.ref == self.commit else self.ref}"

    @contextmanager
    def package(self) -> Iterator[ModuleType]:
        """The package as the commit has it, from files that are there as long as the block."""
        with tempfile.TemporaryDirectory(prefix="tigon_") as place:
            archive = _git(self.root, "archive", "--format=tar", self.commit, self.folder)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(place, filter="data")
            yield _import_copy(Path(place, self.folder), f"tigon_{self.commit[:12]}")


def find_revision(ref: str) -> Revision:
    """The commit that `ref` names: a branch, a tag, a hash, HEAD~3.

    Raises:
        ValueError: this Tigon is not a git checkout, `ref` names no commit, or the commit has no Tigon.
    """
    rule = f"bench: --against needs Tigon imported from a git checkout, got {str(PACKAGE)!r}"
    try:
        root = Path(_git(PACKAGE, "rev-parse", "--show-toplevel").decode().strip()).resolve()
        folder = PACKAGE.relative_to(root).as_posix()
        _git(root, "ls-files", "--error-unmatch", f"{folder}/__init__.py")
    except (OSError, ValueError, subprocess.CalledProcessError) as problem:
        raise ValueError(f"{rule}{_said(problem)}") from problem
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except subprocess.CalledProcessError as problem:
        raise ValueError(f"bench: --against must name a commit of {str(root)!r}, got {ref!r}") from problem
    commit = commit.decode().strip()
    try:
        _git(root, "cat-file", "-e", f"{commit}:{folder}/__init__.py")
    except subprocess.CalledProcessError as problem:
        raise ValueError(f"bench: --against must name a commit with Tigon in {folder!r}, got {ref!r}") from problem
    title = _git(root, "log", "-1", "--format=%s", commit).decode().strip()
    return Revision(ref, commit, title, root, folder)


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout


def _said(problem: Exception) -> str:
    said = getattr(problem, "stderr", b"") or b""
    return f" ({said.decode(errors='replace').strip().splitlines()[0]})" if said.strip() else ""


def _import_copy(folder: Path, namespace: str) -> ModuleType:
    """Import the package in `folder` under its own name while this one stands aside, and put this one back.

    Each copy holds its own modules, so their functions never meet. Only torch's registry of operators is shared: there
    the copy's are registered as `namespace::name`.
    """
    mine = _taken()
    custom_op = library.custom_op

    def registered(name: str, *arguments: object, **options: object) -> object:
        return custom_op(name.replace("tigon::", f"{namespace}::"), *arguments, **options)

    try:
        with patch.object(library, "custom_op", registered):
            spec = importlib.util.spec_from_file_location(
                "tigon", folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            package = sys.modules["tigon"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(package)
        return package
    finally:
        _taken()
        sys.modules.update(mine)


def _taken() -> dict[str, ModuleType]:
    """All modules of a Tigon, out of the table of imported ones."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "tigon"}
