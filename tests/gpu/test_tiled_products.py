"""The kernels of grouped products on Hopper: accurate for every size, and no value of another expert reaches a result.

`tests/ops/experts/test_tiled_products.py` has the tests that need no GPU.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tigon.ops.experts import grouped_linear
from tigon.ops.experts.tiled_products import tiled_product, tiled_weight_gradient, tiles_gradient, tiles_product
from tigon.runtime.compat.triton import hopper
from tigon.testing import assert_accurate

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="Only Hopper (compute capability 9.0) runs these kernels.",
    ),
    pytest.mark.skipif(hopper is None, reason="this Triton is neither 3.6 nor 3.7"),
]

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)

# The rows of each expert. A block has 192 rows, which three groups of warps share, and a step of a gradient has 64.
UNEVEN = (0, 193, 1, 64, 0, 192, 300, 5, 0)
# More blocks than multiprocessors, if a product has several columns of tiles: a program computes several tiles.
MANY_TILES = (700, 0, 193, 64, 1900, 2000, 1, 1150)


class Factors(NamedTuple):
    """The factors of the products. After the rows of the last expert there are `EXTRA` rows of no expert."""

    x: Tensor  # [S, N]
    weight: Tensor  # [E, N, M], stored as [E, M, N]
    dy: Tensor  # [S, M]
    ends: Tensor  # [E]
    # The first row of each expert and the end of its rows.
    spans: list[tuple[int, int]]

    @property
    def count(self) -> int:
        """The number of rows that belong to an expert."""
        return self.spans[-1][1]


EXTRA = 40


def _factors(sizes: tuple[int, ...], n: int, m: int, dtype: torch.dtype, extra: float | None = None) -> Factors:
    """Return random factors. `extra` is the value of the rows that belong to no expert, which are random if it is None.

    Memory before and behind the ends of the experts has other numbers.
    """
    generator = torch.Generator(DEVICE).manual_seed(n + m)
    normal = lambda *shape: torch.randn(shape, device=DEVICE, generator=generator)
    rows = sum(sizes) + EXTRA
    x, dy = normal(rows, n).to(dtype), normal(rows, m).to(dtype)
    weight = (normal(len(sizes), m, n) * n**-0.5).to(dtype)
    if extra is not None:
        x[-EXTRA:] = dy[-EXTRA:] = extra
    ends = torch.tensor(sizes).cumsum(0).tolist()
    memory = torch.tensor([7, *ends, 7], dtype=torch.int32, device=DEVICE)
    return Factors(x, weight.mT, dy, memory[1:-1], list(pairwise([0, *ends])))


def _product(factors: Factors, dtype: torch.dtype) -> Tensor:
    """Return the products [S, M] by one product of torch for each expert, in another dtype."""
    x, weight = factors.x.to(dtype), factors.weight.to(dtype)
    return torch.cat([x[start:end] @ weight[expert] for expert, (start, end) in enumerate(factors.spans)])


def _gradient(factors: Factors, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the weights [E, N, M] by one product of torch for each expert, in another dtype."""
    x, dy = factors.x.to(dtype), factors.dy.to(dtype)
    return torch.stack([x[start:end].T @ dy[start:end] for start, end in factors.spans])


# Sizes of N and M, which fill no tile or several of them. A tile has 256 columns, and a step 64 features. Weights that
# are stored by rows need N to be a multiple of it.
SHAPES = {
    "no full tile": (UNEVEN, 72, 264), "small": (UNEVEN, 8, 8), "three columns": (UNEVEN, 200, 520),
    "full tiles, by rows": (UNEVEN, 192, 512), "several tiles of a program": (MANY_TILES, 520, 1288),
    "no rows": ((0, 0), 128, 256), "one step, by rows": (UNEVEN, 64, 264), "small, by rows": (UNEVEN, 128, 8),
    "three columns, by rows": (UNEVEN, 192, 520), "several tiles of a program, by rows": (MANY_TILES, 512, 1288),
}  # fmt: skip


@every_dtype
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_as_accurate_as_those_of_torch(name, dtype, poisoned):
    """Rows of no expert are NaN, and so is the memory of the results. Experts without rows get gradients of 0."""
    factors = _factors(*SHAPES[name], dtype, extra=torch.nan)
    x, weight, dy, ends, spans = factors
    assert tiles_product(x, weight)
    y = tiled_product(x, weight, ends)[: factors.count]
    assert_accurate(y, _product(factors, dtype), _product(factors, torch.float64))
    if "by rows" in name:
        assert tiles_product(x, weight.contiguous())
        # The kernel adds in the same order.
        assert torch.equal(y, tiled_product(x, weight.contiguous(), ends)[: factors.count])
    if "small" not in name:
        assert tiles_gradient(x, dy)
        dweight = tiled_weight_gradient(x, dy, ends)
        assert all(start < end or (dweight[expert] == 0).all() for expert, (start, end) in enumerate(spans))
        assert_accurate(dweight, _gradient(factors, dtype), _gradient(factors, torch.float64))


@pytest.mark.parametrize("sizes", [UNEVEN, (*UNEVEN, 192), (300, 64)], ids=["5 rows", "192 rows", "64 rows"])
def test_rows_of_no_expert_are_not_written(sizes, poisoned):
    """The memory of the results is NaN, and all factors are finite. The last expert with rows has so many."""
    factors = _factors(sizes, 128, 512, BF16)
    x, weight, ends = factors.x, factors.weight, factors.ends
    results = {"product": tiled_product(x, weight, ends), "by rows": tiled_product(x, weight.contiguous(), ends)}
    for name, result in results.items():
        assert result[: factors.count].isfinite().all(), name
        assert result[factors.count :].isnan().all(), name


@pytest.mark.parametrize("shape", [(UNEVEN, 128, 512), (MANY_TILES, 576, 1536)], ids=["few tiles", "many tiles"])
def test_values_of_one_expert_do_not_reach_the_others(shape):
    """Its rows and its weight are NaN. The results of the others have the same bits as without them."""
    factors = _factors(*shape, BF16)

    def results(f: Factors) -> dict[str, Tensor]:
        y = tiled_product(f.x, f.weight, f.ends)
        by_rows = tiled_product(f.x, f.weight.contiguous(), f.ends)
        return {"product": y, "by rows": by_rows, "dw": tiled_weight_gradient(f.x, f.dy, f.ends)}

    expected = results(factors)
    for expert, (start, end) in enumerate(factors.spans):
        x, weight, dy = factors.x.clone(), factors.weight.mT.clone().mT, factors.dy.clone()
        x[start:end] = dy[start:end] = weight[expert] = torch.nan
        for name, result in results(factors._replace(x=x, weight=weight, dy=dy)).items():
            others = torch.ones(len(result), dtype=torch.bool, device=DEVICE)
            if name == "dw":
                others[expert] = False
                assert start == end or result[expert].isnan().all(), name
            else:
                others[start:end] = others[factors.count :] = False
                assert result[start:end].isnan().all(), name
            assert torch.equal(result[others], expected[name][others]), (name, expert)


@every_dtype
def test_every_repetition_has_the_same_bits(dtype):
    """The second run starts when the multiprocessors still run the first one."""
    factors = _factors(MANY_TILES, 512, 1536, dtype)

    def run() -> list[Tensor]:
        x, weight, dy, ends, _ = factors
        y, by_rows = (tiled_product(x, w, ends) for w in (weight, weight.contiguous()))
        return [*(t[: factors.count] for t in (y, by_rows)), tiled_weight_gradient(x, dy, ends)]

    runs = [run() for _ in range(20)]
    for results in runs[1:]:
        assert all(map(torch.equal, results, runs[0]))


@pytest.mark.skipif(grouped_linear.GROUPED_MM is None, reason="torch has grouped_mm since version 2.10")
@pytest.mark.parametrize("shape", [(512, 1536), (2048, 768)], ids=str)
def test_results_have_the_bits_of_grouped_mm(shape):
    """In bf16, for which torch has a kernel too. Which of two kernels runs therefore changes no result."""
    factors = _factors((1000, 257, 1, 64, 2000, 193), *shape, BF16)
    x, weight, dy, ends, _ = factors
    grouped_mm = grouped_linear.GROUPED_MM
    for w in (weight, weight.contiguous()):
        y, expected = tiled_product(x, w, ends), grouped_mm(x, w, offs=ends)
        assert torch.equal(y[: factors.count], expected[: factors.count])
    assert torch.equal(tiled_weight_gradient(x, dy, ends), grouped_mm(x.mT, dy, offs=ends))


def _normal(*shape: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, dtype=BF16, generator=generator)


def _assert_accurate_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    assert_accurate(actual, a @ b, a.double() @ b.double())


def test_products_of_more_than_two_gibibytes():
    """The rows of the second expert lie behind 2^31 bytes. They fill some tiles, and a part of the last one."""
    x = _normal(65836, 64)
    weight = _normal(2, 16384, 64).mT
    y = tiled_product(x, weight, torch.tensor([65536, 65836], dtype=torch.int32, device=DEVICE))
    assert y.nbytes > 2**31
    for expert, rows in enumerate((slice(65000, 65536), slice(65536, 65836))):
        _assert_accurate_product(y[rows], x[rows], weight[expert])


def test_gradients_of_more_than_two_gibibytes():
    """Of 65 experts, only the last two have rows. The gradient of the last one lies behind 2^31 bytes."""
    x, dy = _normal(300, 1024), _normal(300, 16384)
    dweight = tiled_weight_gradient(x, dy, torch.tensor([0] * 63 + [100, 300], dtype=torch.int32, device=DEVICE))
    assert dweight[:64].nbytes == 2**31
    for expert, rows in ((63, slice(0, 100)), (64, slice(100, 300))):
        _assert_accurate_product(dweight[expert], x[rows].T, dy[rows])
    assert not dweight[:63].any()
