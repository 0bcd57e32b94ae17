import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks for it
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# Of parametrised tests with many processes or graphs: these cases, by name, are left to `make test-thorough`.
THOROUGH = {
    "test_two_ranks": ("parallel", "head", "adapters", "Trainer", "FSDP2 by accelerate"),
    "test_no_type_breaks_the_graph": ("qwen2", "qwen3", "gemma2", "phi3"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        case = getattr(getattr(item, "callspec", None), "id", None)
        if case in THOROUGH.get(getattr(item, "originalname", ""), ()):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture
def poisoned():
    """Memory that an op allocates holds NaN (or the largest integer) until the op writes it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def one_thread():
    """On tensors this small more threads only wait for each other: tests take a third of the time with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
