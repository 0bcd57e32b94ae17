"""Import another revision of Tigon into the same process: a copy of the package at a commit.

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
from typing import Any
from unittest.mock import patch

from torch import library

import tigon

PACKAGE = Path(tigon.__file__).resolve().parent


@dataclass(frozen=True)
class Revision:
    # `ref` is the name of the commit on the command line, and `commit` its 40 hex digits.
    ref: str
    commit: str
    title: str
    # `root` is the folder of the checkout. `folder` is the path of the package in it, as git writes paths.
    root: Path
    folder: str

    @property
    def short(self) -> str:
        """Return the name of the commit; a full hash is shortened."""
        return self.ref[:12] if self.ref == self.commit else self.ref

    @property
    def name(self) -> str:
        return f"tigon@{self.short}"

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Write the package as the commit has it, and yield its folder. The files exist as long as the block runs."""
        with tempfile.TemporaryDirectory(prefix="tigon_") as folder:
            archive = _git(self.root, "archive", "--format=tar", self.commit, self.folder)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            yield Path(folder, self.folder)

    @contextmanager
    def package(self) -> Iterator[ModuleType]:
        """Import the package as the commit has it."""
        with self.files() as folder:
            yield _import_copy(folder, f"tigon_{self.commit[:12]}")


def find_revision(ref: str) -> Revision:
    """Return the commit that `ref` names: a branch, a tag, a hash or a form such as HEAD~3.

    Raises:
        ValueError: this Tigon is not a git checkout, `ref` names no commit, or the commit has no Tigon.
    """
    rule = f"needs Tigon imported from a git checkout, got {str(PACKAGE)!r}"
    try:
        root = Path(_git(PACKAGE, "rev-parse", "--show-toplevel").decode().strip()).resolve()
        folder = PACKAGE.relative_to(root).as_posix()
        _git(root, "ls-files", "--error-unmatch", f"{folder}/__init__.py")
        rule = f"must name a commit of {str(root)!r}, got {ref!r}"
        commit = (
            _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}").decode().strip()
        )
        rule = f"must name a commit with Tigon in {folder!r}, got {ref!r}"
        _git(root, "cat-file", "-e", f"{commit}:{folder}/__init__.py")
    except (OSError, ValueError, subprocess.CalledProcessError) as problem:
        message = (getattr(problem, "stderr", None) or b"").decode(errors="replace").strip().partition("\n")[0]
        raise ValueError(f"bench: --against {rule}{f' ({message})' if message else ''}") from problem
    title = _git(root, "log", "-1", "--format=%s", commit).decode().strip()
    return Revision(ref, commit, title, root, folder)


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout


def _import_copy(folder: Path, namespace: str) -> ModuleType:
    """Import the package in `folder` as "tigon" while the modules of this Tigon are removed, then restore them. Each
    copy holds its own modules, so the functions of one never call those of the other. Both share only torch's registry
    of operators, where those of the copy are registered as `namespace::name`."""
    modules = _remove_modules()
    custom_op = library.custom_op

    def custom_op_in_namespace(name: str, *arguments: Any, **options: Any) -> object:
        return custom_op(name.replace("tigon::", f"{namespace}::"), *arguments, **options)

    try:
        with patch.object(library, "custom_op", custom_op_in_namespace):
            spec: Any = importlib.util.spec_from_file_location(
                "tigon", folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            package = sys.modules["tigon"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(package)
            # Tigon imports an op when its name is first used. The table of modules contains the copy only until then.
            for name, module in vars(package).get("_MODULES", {}).items():
                if module.startswith(("tigon.ops.", "tigon.memory.")):
                    getattr(package, name)
        return package
    finally:
        _remove_modules()
        sys.modules.update(modules)


def _remove_modules() -> dict[str, ModuleType]:
    """Remove all modules of the imported Tigon from Python's table of modules, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "tigon"}
