"""Without Triton, as on macOS and Windows, Tigon can be imported, and its ops, patch and tools run on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tigon
from tigon.runtime import no_triton

pytestmark = pytest.mark.no_interpreter("The processes have no Triton.")

PACKAGE = Path(tigon.__file__).parent

# No finder finds triton in these processes. Only Tigon should believe that it runs on macOS, so the platform has this
# name only while Tigon is imported.
PREPARE = """
import sys

class WithoutTriton:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *args)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [WithoutTriton(finder) for finder in sys.meta_path]
import torch
platform, sys.platform = sys.platform, "darwin"
import tigon
sys.platform = platform
from tigon.runtime.device import HAS_TRITON
assert not HAS_TRITON
"""

OPS = """
x = torch.randn(4, 16, requires_grad=True)
weight = torch.rand(16)
y = tigon.rms_norm(x, weight)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))
head = torch.randn(50, 16, requires_grad=True)
target = torch.arange(4)
loss = tigon.linear_cross_entropy(y, head, target)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(y @ head.T, target))
loss.backward()
assert x.grad.abs().sum() > 0 and head.grad.abs().sum() > 0
model = torch.nn.Sequential(torch.nn.RMSNorm(16), torch.nn.Linear(16, 16))
"""

MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).train()
tokens = torch.randint(0, 64, (2, 8))
expected = model(input_ids=tokens, labels=tokens).loss
report = tigon.patch(model, memory="lean")
assert {"rms_norm", "glu", "rope", "loss"} <= {entry.part for entry in report.entries if entry.replaced}
loss = model(input_ids=tokens, labels=tokens).loss
torch.testing.assert_close(loss, expected)
loss.backward()
x = torch.randn(4, 16)
compiled = torch.compile(lambda x: tigon.swiglu(x, x), fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(x), tigon.swiglu(x, x))
"""

TOOLS = """
from tigon.cli.main import main
for arguments in (["env"], ["check", "--device", "cpu", "--ops", "relu2", "--parts", "ops,fast-paths"]):
    sys.argv = ["tigon", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
"""


@pytest.mark.parametrize(
    ("code", "package"), [(OPS, "torch"), (MODEL, "transformers"), (TOOLS, "typer")], ids=["ops", "model", "tools"]
)
@pytest.mark.sampled(3)
def test_tigon_works_without_triton(code, package):
    pytest.importorskip(package)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREPARE + code], capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0, process.stderr


def test_only_one_file_imports_triton():
    """Any other file would fail to be imported on macOS and Windows."""
    importing = [
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"^(import triton|from triton)\b", file.read_text("utf-8"), re.MULTILINE)
    ]
    assert importing == []
    private = (PACKAGE / "runtime/compat/triton.py").read_text("utf-8")
    assert len(re.findall(r"^    (?:import|from) triton", private, re.MULTILINE)) == 3


def test_a_kernel_without_triton_refuses_to_run():
    @no_triton.triton.jit(do_not_specialize=["n"])
    def kernel(x_ptr, n, BLOCK: no_triton.tl.constexpr):
        pass

    assert kernel.arg_names == ["x_ptr", "n", "BLOCK"]
    with pytest.raises(RuntimeError, match="the kernel kernel needs triton, which is not installed"):
        kernel[(1,)](None, 1, BLOCK=2)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65])
def test_next_power_of_2_is_that_of_triton(n):
    triton = pytest.importorskip("triton")
    assert no_triton.triton.next_power_of_2(n) == triton.next_power_of_2(n)
