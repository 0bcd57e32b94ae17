"""Every kernel compiles for every chip, without the chip: registers suffice and a workgroup holds its threads."""

import pytest

import tigon
from op_cases import INTERPRETED
from tigon.tools.compile.workloads import WORKLOADS

pytestmark = pytest.mark.no_interpreter("The interpreter replaces the compiler.")

if not INTERPRETED:
    from tigon.tools.compile.targets import CHIPS, Chip, recorded, resources


# Two chips, one of each vendor, compile every workload in `make test`, and the others the one with the widest row.
# `make test-thorough` compiles the rest.
EVERY_WORKLOAD = ("sm_90", "gfx942")
WIDEST_ROW = "rms_norm 16384"


def _pairs() -> list:
    pairs = []
    for chip in [] if INTERPRETED else CHIPS:
        for workload in WORKLOADS:
            quick = chip.name in EVERY_WORKLOAD or workload == WIDEST_ROW
            marks = () if quick else pytest.mark.thorough
            pairs.append(pytest.param(chip, workload, id=f"{chip.name}-{workload}", marks=marks))
    return pairs


@pytest.mark.parametrize(("chip", "workload"), _pairs())
def test_compiles_without_spilling(chip: "Chip", workload: str):
    with recorded(chip) as launches:
        WORKLOADS[workload]()
    assert launches
    for launch in launches:
        found = resources(launch, chip)
        assert found["threads"] <= 1024, found
        assert found["spilled"] == 0, found
        assert found["shared"] <= chip.device.shared_memory, found


def test_every_kernel_of_the_package_is_among_the_workloads():
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(tigon.ops.__path__, "tigon.ops.")]
    kernels = {
        (m.__name__, n)
        for m in modules
        for n, f in vars(m).items()
        if isinstance(f, JITFunction) and n.endswith("_kernel")
    }
    launched = set()
    for workload in WORKLOADS.values():
        with recorded(CHIPS[0]) as launches:
            workload()
        launched |= {(launch.kernel.fn.__module__, launch.kernel.__name__) for launch in launches}
    assert all(isinstance(getattr(importlib.import_module(m), n), JITFunction) for m, n in kernels)
    assert kernels == launched


def test_a_workload_is_named_after_its_op():
    assert {name.split()[0] for name in WORKLOADS} <= set(tigon.__all__)


def test_a_spill_is_seen():
    """The check can fail: a workgroup of one warp for a row of 16384 features cannot hold it."""
    chip = CHIPS[1]
    with recorded(chip) as launches:
        WORKLOADS["rms_norm 16384"]()
    launches[0].options["num_warps"] = 1
    assert resources(launches[0], chip)["spilled"] > 0
