import collections
import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from interpreter import repair_the_interpreter, speed_up_the_interpreter

# torch's deterministic mode requires this setting.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# `make test` runs the suite twice: on the CPU, where an op runs its reference or other PyTorch code, and in
# Triton's interpreter, which runs the kernels on CPU tensors. `make test-gpu` runs the kernels on a GPU. A test that
# would show nothing in a run is deselected there by one of the markers below. It is not skipped, because a skipped test
# is easily taken for one that passed. Tests are skipped only where a library of the extra `dev`, a program or a device
# is absent.
MARKERS = {
    "kernels": "the test shows something only where kernels run: in the interpreter or on a GPU. On a CPU many ops run "
    "their reference, and the test would compare a reference with itself; tests/ops/test_references.py has one test "
    "per op for that case", "interpreter": "the test runs kernels on CPU tensors, which only the interpreter does",
    "no_interpreter(reason)": "the run in the interpreter leaves the test out, because the test launches no kernel or "
    "because the interpreter cannot show what it checks (compiled code, bf16, memory, threads)",
    "gpu": "the test needs a GPU",
    # `make test` leaves out the tests and the cases with the mark `thorough`, because each takes many seconds.
    # `make test-thorough` runs them. If the step of a sample and the number of values of a parameter have a common
    # divisor, one of these values may never run in `make test`.
    "sampled(step, in_interpreter)": "`make test` runs the first case and then one in `step`; the other cases are "
    "thorough. The run in the interpreter uses the step `in_interpreter`, if that is given",
    "thorough_in_interpreter": "the test is thorough in the run in the interpreter, where it takes many seconds",
    "probes": "the test patches models whose modules must be recognised anew, see tests/remembered.py",
    "deepspeed": "the test needs DeepSpeed, which `make test-deepspeed` installs",
}  # fmt: skip

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ON_GPU = torch.cuda.is_available() and not INTERPRETED


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:
        repair_the_interpreter()
        speed_up_the_interpreter()
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def runs_here(item: pytest.Item) -> bool:
    """Return True if the markers of a test allow it in this run."""
    if INTERPRETED and item.get_closest_marker("no_interpreter"):
        return False
    if item.get_closest_marker("interpreter") and not INTERPRETED:
        return False
    if item.get_closest_marker("gpu") and not ON_GPU:
        return False
    if item.get_closest_marker("deepspeed") and not HAS_DEEPSPEED:
        return False
    return not item.get_closest_marker("kernels") or INTERPRETED or ON_GPU


def is_outside_of_the_sample(item: pytest.Item, counts: collections.Counter[str]) -> bool:
    """Return True if `make test` leaves out this case because of the mark `sampled` of its test.

    Args:
        item: A case of any test.
        counts: The number of sampled cases so far, by the test; this function counts the case.
    """
    if item.get_closest_marker("thorough") or not (mark := item.get_closest_marker("sampled")):
        return False
    step = mark.args[0] if mark.args else 1
    if INTERPRETED:
        step = mark.kwargs.get("in_interpreter", step)
    test = item.nodeid.partition("[")[0]
    counts[test] += 1
    return (counts[test] - 1) % step != 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for item in items:
        is_left_out = INTERPRETED and item.get_closest_marker("thorough_in_interpreter")
        if is_left_out or is_outside_of_the_sample(item, counts):
            item.add_marker(pytest.mark.thorough)
    deselected = [item for item in items if not runs_here(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs_here(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt everything that the collection has created from garbage collection.

    These objects stay until the process ends. With them, each `gc.collect()` of a test or of Tigon takes 0.5 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """Give every test the same random numbers of torch, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Fill the memory that an op allocates with NaN, or with the largest integer, until the op writes it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    # `torch.use_deterministic_algorithms` would import the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def one_thread():
    """Use one thread. With small tensors, several threads wait for each other and take three times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a folder with two text files, one binary file and one hidden file."""
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
