import importlib.util
import os
from pathlib import Path

import pytest
import torch

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
    "per op for that case",
    "interpreter": "the test runs kernels on CPU tensors, which only the interpreter does",
    "no_interpreter(reason)": "the run in the interpreter leaves the test out, because the test launches no kernel or "
    "because the interpreter cannot show what it checks (compiled code, bf16, memory, threads)",
    "gpu": "the test needs a GPU",
    "deepspeed": "the test needs DeepSpeed, which `make test-deepspeed` installs",
}

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ON_GPU = torch.cuda.is_available() and not INTERPRETED

# These cases of parametrised tests with many processes or graphs run only in `make test-thorough`.
THOROUGH = {
    "test_two_ranks": ("more ways", "sharded and lean", "Trainer", "FSDP2 by accelerate"),
    "test_no_type_breaks_the_graph": ("qwen2", "qwen3", "gemma2", "phi3"),
    "test_a_compiled_function_distinguishes_stock_and_patched_models": ("stock",),
    "test_compiled": ("checkpoint-0.8",),
    "test_compiled_code_agrees": ("jsd",),
    "test_the_kernels_train_as_stock_in_the_interpreter": ("qwen3", "phi3"),
    "test_the_page_is_up_to_date": (
        "cohere",
        "falcon_mamba",
        "gpt2",
        "gpt_neox",
        "mixtral",
        "olmo",
        "qwen3_moe",
        "zamba",
    ),
}


def _repair_the_interpreter() -> None:
    """Let Triton's interpreter compute what compiled kernels compute, in three places where it does not in 3.7.

    For the minimum or maximum of a number and NaN, the interpreter returns NaN. Compiled code returns the number, if
    the kernel does not request that NaN propagates. The interpreter truncates fp32 to bf16, where compiled code rounds.
    It stores bf16 values as 16-bit integers, and `dot` multiplies these integers.
    """
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounded_cast(self, x, dtype):
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        values = torch.from_numpy(numpy.ascontiguousarray(x.data)).to(torch.bfloat16)
        return TensorHandle(values.view(torch.int16).numpy().view(numpy.uint16).reshape(x.data.shape), tl.bfloat16)

    def dot_of_values(self, a, b, *rest):
        values = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *values, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounded_cast, dot_of_values

    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:
        _repair_the_interpreter()
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        case = getattr(getattr(item, "callspec", None), "id", None)
        if case in THOROUGH.get(getattr(item, "originalname", ""), ()):
            item.add_marker(pytest.mark.thorough)
    deselected = [item for item in items if not runs_here(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs_here(item)]


@pytest.fixture
def poisoned():
    """Fill the memory that an op allocates with NaN, or with the largest integer, until the op writes it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
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
