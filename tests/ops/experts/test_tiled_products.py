"""Grouped products of experts on Hopper: where their kernels run, what `moe_mlp` launches, and the blocks of rows.

`tests/gpu/test_tiled_products.py` runs the kernels, which Triton's interpreter cannot.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tigon
from benchmarks.compile.targets import CHIPS, Launch, recorded, resources
from op_cases import DEVICE
from tigon.ops.experts import grouped_linear, tiled_products
from tigon.ops.experts.tiled_products import BLOCK_ROWS, SHARED_BYTES, tiles_gradient, tiles_product
from tigon.runtime import device
from tigon.runtime.compat.triton import hopper
from tigon.runtime.device import cdiv

BF16, FP16 = torch.bfloat16, torch.float16
(HOPPER,) = (chip for chip in CHIPS if chip.name == "sm_90")

needs_hopper = pytest.mark.skipif(hopper is None, reason="this Triton is neither 3.6 nor 3.7")
no_interpreter = pytest.mark.no_interpreter("The interpreter runs none of these kernels.")


SIZES = {
    "uneven": [0, 193, 1, 0, 192, 64, 400, 0], "all without rows": [0, 0, 0], "one": [385], "one without rows": [0],
    "many": [1] * 70,
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_blocks_hold_the_rows_of_each_expert(sizes, poisoned):
    """Rows after those of the last expert are in no block, and nothing is written behind the last block.

    Other numbers are before and after the ends in memory, which must not be read as ends.
    """
    ends = torch.tensor(sizes).cumsum(0).tolist()
    expected = []
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        expected += [[expert, start, end, len(expected)]] * cdiv(end - start, BLOCK_ROWS)
    memory = torch.tensor([999, *ends, 999], dtype=torch.int32, device=DEVICE)
    blocks = tiled_products._row_blocks(memory[1:-1], ends[-1] + 5)
    count = len(expected)
    assert blocks[0, 0] == count
    assert blocks[1 : 1 + count].tolist() == expected
    assert (blocks[1 + count :] == torch.iinfo(torch.int32).max).all()


def _factors(s: int = 100, n: int = 128, m: int = 256, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """Return factors of the products for three experts: x [S, N], weight [3, N, M] stored as [3, M, N], dy [S, M]."""
    zeros = lambda *shape: torch.zeros(shape, dtype=dtype)
    return {"x": zeros(s, n), "weight": zeros(3, m, n).mT, "dy": zeros(s, m)}


def _by_rows(n: int) -> dict[str, Tensor]:
    factors = _factors(n=n)
    return factors | {"weight": factors["weight"].contiguous()}


def _products(x: Tensor, weight: Tensor, dy: Tensor) -> set[str]:
    """Return which products run in kernels of tiles."""
    products = {"product": tiles_product(x, weight), "gradient": tiles_gradient(x, dy)}
    return {name for name, runs in products.items() if runs}


# For each change of the factors, the products that still run in kernels of tiles.
CHANGES: dict[str, tuple[Callable[[], dict], set[str]]] = {
    "bf16": (_factors, {"product", "gradient"}), "fp16": (lambda: _factors(dtype=FP16), {"product", "gradient"}),
    "one row": (lambda: _factors(s=1), {"product", "gradient"}), "fp32": (lambda: _factors(dtype=torch.float32), set()),
    "two dtypes": (lambda: _factors() | {"x": _factors(dtype=FP16)["x"]}, set()),
    "no rows": (lambda: _factors(s=0), set()),
    "a weight without experts": (lambda: _factors() | {"weight": _factors()["weight"][:0]}, {"gradient"}),
    "meta tensors": (lambda: {name: x.to("meta") for name, x in _factors().items()}, set()),
    "N = 72": (lambda: _factors(n=72), {"product", "gradient"}), "N = 76": (lambda: _factors(n=76), set()),
    "N = 56": (lambda: _factors(n=56), {"product"}), "M = 264": (lambda: _factors(m=264), {"product", "gradient"}),
    "M = 260": (lambda: _factors(m=260), set()), "M = 384": (lambda: _factors(m=384), {"product", "gradient"}),
    "M = 512": (lambda: _factors(m=512), {"product", "gradient"}),
    "one row with another stride": (
        lambda: _factors(s=1) | {"x": torch.zeros(128, dtype=BF16).as_strided((1, 128), (1, 1))}, set(),
    ),
    "M = 320": (lambda: _factors(m=320), {"product", "gradient"}),
    "weights by rows": (lambda: _by_rows(128), {"product", "gradient"}),
    "weights by rows, N = 72": (lambda: _by_rows(72), {"gradient"}),
    "rows of x with gaps": (lambda: _factors() | {"x": _factors(n=256)["x"][:, :128]}, set()),
    "rows of dy with gaps": (lambda: _factors() | {"dy": _factors(m=512)["dy"][:, :256]}, {"product"}),
    "weights with gaps": (lambda: _factors() | {"weight": _factors(m=512)["weight"][..., :256]}, {"gradient"}),
    "an odd address of x": (lambda: _factors() | {"x": torch.zeros(12801, dtype=BF16)[1:].view(100, 128)}, set()),
}  # fmt: skip


@needs_hopper
@no_interpreter
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_factors_decide_where_a_product_runs(monkeypatch, change):
    monkeypatch.setattr(device, "EMULATED", HOPPER.device)
    make_factors, expected = change
    assert _products(**make_factors()) == expected


DEVICES = {chip.name: chip.device for chip in CHIPS if chip is not HOPPER} | {
    "less shared memory": replace(HOPPER.device, shared_memory=216 * 1024), "CPU": device.EMULATED,
}  # fmt: skip


@no_interpreter
@pytest.mark.parametrize("chip", DEVICES.values(), ids=DEVICES)
def test_other_devices_run_no_kernels_of_tiles(monkeypatch, chip):
    monkeypatch.setattr(device, "EMULATED", chip)
    assert not _products(**_factors())


@no_interpreter
def test_a_graph_of_torch_compile_has_no_kernels_of_tiles(monkeypatch):
    monkeypatch.setattr(device, "EMULATED", HOPPER.device)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not _products(**_factors())


TILE_KERNELS = "product_kernel", "weight_gradient_kernel"


def _launches(backward: bool = True, biases: bool = False, **options) -> list[Launch]:
    """Return what a step of `moe_mlp` launches on Hopper."""
    hidden, inner, experts, tokens, choices = 64, 256, 4, 16, 2
    leaf = lambda *shape: torch.zeros(shape, dtype=BF16, requires_grad=backward)
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    if options.get("transposed"):
        shapes = [(e, n, m) for e, m, n in shapes]
    up, down = (leaf(*shape) for shape in shapes)
    if biases:
        options["up_bias"] = leaf(experts, 2 * inner)
    index = torch.arange(tokens * choices).view(tokens, choices) % experts
    with recorded(HOPPER) as launches:
        y = tigon.moe_mlp(leaf(tokens, hidden), up, down, index, torch.ones(tokens, choices), **options)
        if backward:
            y.backward(y.detach())
    return launches


def _products_of(launches: list[Launch]) -> list[str]:
    """Return the names of the kernels of tiles that are launched, and of the kernel of the activation in forward."""
    names = [each.kernel.__name__ for each in launches]
    return [name for name in names if name in (*TILE_KERNELS, "_forward_kernel")]


PRODUCT, GRADIENT = TILE_KERNELS
FORWARD = [PRODUCT, "_forward_kernel", PRODUCT]


@needs_hopper
@no_interpreter
@pytest.mark.parametrize("options", [{}, {"biases": True}, {"transposed": True}], ids=["plain", "a bias", "by rows"])
def test_moe_mlp_on_hopper_runs_all_products_in_kernels_of_tiles(monkeypatch, options):
    """Backward computes the gradients of the activation, of `down`, of `up` and of the rows."""
    # The gradient of a bias is a product with ones, which is too narrow for tiles.
    if "biases" not in options:
        monkeypatch.setattr(grouped_linear, "GROUPED_MM", None)
        monkeypatch.setattr(torch, "mm", None)
    assert _products_of(_launches(backward=False, **options)) == FORWARD
    assert _products_of(_launches(**options)) == [*FORWARD, PRODUCT, GRADIENT, GRADIENT, PRODUCT]


@no_interpreter
def test_without_the_instructions_of_hopper_the_products_run_in_torch(monkeypatch):
    calls = []

    def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        calls.append((a.dim(), b.dim()))
        return a.new_zeros(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_zeros(len(offs), a.shape[0], b.shape[1])

    monkeypatch.setattr(tiled_products, "hopper", None)
    monkeypatch.setattr(grouped_linear, "GROUPED_MM", grouped_mm)
    assert _products_of(_launches()) == ["_forward_kernel"]
    assert calls == [(2, 3), (2, 3), (2, 3), (2, 2), (2, 2), (2, 3)]


@needs_hopper
@no_interpreter
def test_the_kernels_fit_into_the_shared_memory_that_they_require():
    launches = {each.kernel.__name__: each for each in _launches()}
    for name in TILE_KERNELS:
        shared_bytes = resources(launches[name], HOPPER)["shared"]
        assert SHARED_BYTES - 1024 < shared_bytes <= SHARED_BYTES, name
