"""Every kernel compiles for every chip without spilling registers, and fits into a workgroup."""

import inspect
import itertools
import sys

import pytest

import tigon
from benchmarks.compile.steps import STEPS, launches_kernels
from op_cases import INTERPRETED
from tigon.ops.logits import softmax

pytestmark = pytest.mark.no_interpreter("The interpreter replaces the compiler.")

if not INTERPRETED:
    from benchmarks.compile.targets import CHIPS, Chip, compiler_tools, gluon, recorded, resources


# `make test` compiles the kernels of every fifth op for an H100, at the last of their recorded sizes, and those of
# the widest row for every chip. `make test-thorough` compiles each step for one chip, so every chip gets a sixth of the
# steps. `python -m benchmarks resources` compiles every step for every chip.
WIDEST_ROW = "rms_norm 16384"
OPS = tuple(dict.fromkeys(step.split()[0] for step in STEPS))


def _chip(name: str) -> "Chip":
    return next(chip for chip in CHIPS if chip.name == name)


def _compile(launch, chip: "Chip") -> None:
    numbers = resources(launch, chip)
    assert numbers["threads"] <= 1024, numbers
    assert numbers["spilled"] <= chip.allowed_spills, numbers
    assert numbers["shared"] <= chip.device.shared_memory, numbers


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sampled(5)
def test_each_kernel_of_an_op_compiles_without_spilling(op: str):
    chip, last_launches = _chip("sm_90"), {}
    for step in (step for step in STEPS if step.split()[0] == op and launches_kernels(step, chip.name)):
        with recorded(chip) as launches:
            STEPS[step]()
        assert launches, step
        last_launches |= {(launch.kernel.fn.__module__, launch.kernel.__name__): launch for launch in launches}
    for launch in last_launches.values():
        _compile(launch, chip)


def _pairs() -> list:
    pairs = []
    for i, step in enumerate(() if INTERPRETED else STEPS):
        for j, chip in enumerate(CHIPS):
            if launches_kernels(step, chip.name) and (step == WIDEST_ROW or (i + j) % len(CHIPS) == 0):
                marks = () if step == WIDEST_ROW else pytest.mark.thorough
                pairs.append(pytest.param(chip, step, id=f"{chip.name}-{step}", marks=marks))
    return pairs


@pytest.mark.parametrize(("chip", "step"), _pairs())
def test_a_step_compiles_without_spilling(chip: "Chip", step: str):
    with recorded(chip) as launches:
        STEPS[step]()
    assert launches
    for launch in launches:
        _compile(launch, chip)


@pytest.mark.parametrize("chip", ["sm_80", "gfx942"])
def test_a_chip_without_fp8_units_gets_no_fp8_kernel(chip: str):
    """Triton refuses e4m3 for sm_80, and gfx942 has another format of 8 bits."""
    with recorded(_chip(chip)) as launches:
        STEPS["fp8_linear 4096"]()
        STEPS["fp8_linear GLU 4096"]()
    assert not launches
    assert not launches_kernels("fp8_linear 4096", chip)


@pytest.mark.thorough
def test_every_kernel_of_the_package_is_launched_by_a_step():
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(tigon.ops.__path__, "tigon.ops.")]
    kernels = {
        # Another module may import a kernel from the file that defines it.
        (f.fn.__module__, n)
        for m in modules
        for n, f in vars(m).items()
        if isinstance(f, JITFunction) and n.endswith("_kernel")
    }
    launched_kernels = set()
    a100, h100, *_ = CHIPS
    # An A100 has no tensor memory accelerator, so a few steps launch other kernels there than on an H100.
    for chip, step in itertools.product((h100, a100), STEPS.values()):
        if chip is a100 and launched_kernels == kernels:
            break
        with recorded(chip) as launches:
            step()
        launched_kernels |= {(launch.kernel.fn.__module__, launch.kernel.__name__) for launch in launches}
    assert all(isinstance(getattr(importlib.import_module(m), n), JITFunction) for m, n in kernels)
    assert kernels == launched_kernels


def test_the_name_of_a_step_begins_with_its_op():
    assert {name.split()[0] for name in STEPS} <= set(tigon.__all__)


def test_a_spill_is_found():
    """The registers of one warp cannot hold a row of 4096 features."""
    chip = CHIPS[1]
    with recorded(chip) as launches:
        STEPS["rms_norm 4096"]()
    launches[0].options["num_warps"] = 1
    assert resources(launches[0], chip)["spilled"] > 0


def test_the_compiler_has_the_sources_and_targets_that_resources_are_read_with():
    tools = compiler_tools()
    target = tools.GPUTarget("hip", "gfx942", 64)
    assert (target.backend, target.arch, target.warp_size) == ("hip", "gfx942", 64)
    assert {"fn", "signature", "constexprs", "attrs"} <= inspect.signature(tools.ASTSource).parameters.keys()
    assert (tools.GluonASTSource is None) == (gluon is None)
    assert softmax._forward_kernel.is_gluon() is False


@pytest.mark.parametrize(
    ("module", "name"), [("triton.backends.compiler", "GPUTarget"), ("triton.compiler", "ASTSource")]
)
def test_resources_are_refused_by_name_if_the_compiler_differs(monkeypatch, module, name):
    monkeypatch.delattr(sys.modules[module], name)
    with pytest.raises(RuntimeError, match=f"triton .* has another compiler than Tigon needs here .*{name}"):
        compiler_tools()
