"""Every kernel compiles for every chip, without the chip: registers suffice and a workgroup holds its threads."""

import pytest
import torch

import tigon
from op_cases import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter replaces the compiler; the run without it compiles"
)

if not INTERPRETED:
    from tigon.aot import CHIPS, Chip, recorded, resources

BF16 = torch.bfloat16


def _leaf(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16, requires_grad=True)


def _norm(rows: int, n: int) -> None:
    y = tigon.rms_norm(_leaf(rows, n), _leaf(n))
    y.backward(y.detach())


def _rope(heads: tuple[int, int], d: int, r: int) -> None:
    q, k = (_leaf(1, 4, h, d).transpose(1, 2) for h in heads)
    tables = torch.zeros(1, 4, r, dtype=BF16)
    q, k = tigon.rope(q, k, tables, tables)
    torch.autograd.backward([q, k], [q.detach(), k.detach()])


def _glu(run) -> None:
    y = run(_leaf(2, 14336), _leaf(2, 14336))
    y.backward(y.detach())


def _cross_entropy(v: int, **options) -> None:
    result = tigon.cross_entropy(_leaf(2, v), torch.zeros(2, dtype=torch.int64), **options)
    getattr(result, "loss", result).backward()


EVERY_OPTION = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4, "return_predicted_tokens": True}

# The shapes that matter: the hidden sizes, heads, MLPs and vocabularies of current decoders.
WORKLOADS = {
    "rms_norm of heads 128": lambda: _norm(64, 128),
    "rms_norm 2048": lambda: _norm(2, 2048),
    "rms_norm 4096": lambda: _norm(2, 4096),
    "rms_norm 5120": lambda: _norm(2, 5120),
    "rms_norm 8192": lambda: _norm(2, 8192),
    "rms_norm 16384": lambda: _norm(2, 16384),
    "rope 32 + 8 x 128": lambda: _rope((32, 8), 128, 128),
    "rope 16 + 8 x 256, half of the head": lambda: _rope((16, 8), 256, 128),
    "swiglu 14336": lambda: _glu(tigon.swiglu),
    "geglu 14336": lambda: _glu(tigon.geglu),
    "geglu tanh 14336": lambda: _glu(lambda gate, up: tigon.geglu(gate, up, approximate="tanh")),
    "cross_entropy 32000 in place": lambda: _cross_entropy(32000, inplace=True),
    "cross_entropy of one class": lambda: _cross_entropy(1, inplace=True),
    "cross_entropy 32000": lambda: _cross_entropy(32000),
    "cross_entropy 128256 in place": lambda: _cross_entropy(128256, inplace=True),
    "cross_entropy 256000, every option": lambda: _cross_entropy(256000, weight=torch.ones(256000), **EVERY_OPTION),
}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("chip", [] if INTERPRETED else CHIPS, ids=lambda chip: chip.name)
def test_compiles_without_spilling(workload: str, chip: "Chip"):
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

    modules = [importlib.import_module(f"tigon.ops.{m.name}") for m in pkgutil.iter_modules(tigon.ops.__path__)]
    kernels = {(m.__name__, n) for m in modules for n, f in vars(m).items() if n.endswith("_kernel")}
    launched = set()
    for workload in WORKLOADS.values():
        with recorded(CHIPS[0]) as launches:
            workload()
        launched |= {(launch.kernel.fn.__module__, launch.kernel.__name__) for launch in launches}
    assert all(isinstance(getattr(importlib.import_module(m), n), JITFunction) for m, n in kernels)
    assert kernels == launched


def test_a_spill_is_seen():
    """The check can fail: a workgroup of one warp for a row of 16384 features cannot hold it."""
    chip = CHIPS[1]
    with recorded(chip) as launches:
        _norm(2, 16384)
    launches[0].options["num_warps"] = 1
    assert resources(launches[0], chip)["spilled"] > 0
