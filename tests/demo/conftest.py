"""A small text, and a cache of the tests' own."""

import os
from pathlib import Path

import pytest

for package in ("transformers", "tokenizers", "matplotlib", "psutil", "typer", "rich"):
    pytest.importorskip(package)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of two text files, one binary file and one hidden file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(300)))
    (folder / "b.txt").write_text("the quick brown fox jumps over the lazy dog, again and again\n" * 60)
    (folder / "c.bin").write_bytes(bytes(range(256)))
    (folder / ".hidden").write_text("not this")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tigon"


@pytest.fixture
def child_environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200"}
