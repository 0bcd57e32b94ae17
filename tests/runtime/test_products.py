"""Which products a ping-pong kernel of cuBLASLt computes. tests/gpu/test_linear_cross_entropy.py runs the kernels."""

import pytest
import torch

from benchmarks.compile.targets import CHIPS
from tigon.runtime import cublaslt, products
from tigon.runtime.products import ProductConfig, ProductProblem, multiply
from tigon.runtime.tuning import tuned

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_heuristic(chip):
    config = ProductConfig.heuristic(ProductProblem(itemsize=2), chip.device)
    if chip.name == "sm_90":
        tiles = tuple(
            cublaslt.PING_PONG_TILES[name] for name in ("176x128", "168x128", "128x160", "144x128", "128x128")
        )
        assert config == ProductConfig(min_side=512, tiles=tiles)
    else:
        assert config is None
    assert ProductConfig.heuristic(ProductProblem(itemsize=4), chip.device) is None


class _Plan:
    """A plan that adds the product in torch and counts its runs."""

    runs = 0

    def run(self, a, b, out) -> bool:
        type(self).runs += 1
        out += a @ b
        return True


@pytest.fixture
def plans(monkeypatch):
    """Return the problems for which cuBLASLt has been called. CPU tensors count as tensors of a Hopper GPU."""
    hopper = next(chip.device for chip in CHIPS if chip.name == "sm_90")
    problems = []
    find = lambda a: ProductConfig.find(ProductProblem(a.element_size()), hopper)
    monkeypatch.setattr(products, "_config", find)
    monkeypatch.setattr(cublaslt, "plan", lambda device, problem, tiles: problems.append((problem, tiles)) or _Plan())
    return problems


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bfloat16)


def test_layers_use_ping_pong_kernels_for_long_products_only(plans):
    a, b, total = _matrix(8, 4), _matrix(4, 6), _matrix(8, 6)
    with tuned(ProductConfig, min_side=4):
        assert (multiply(a, b) == 4).all()
        assert not plans, "192 multiplications are fewer than the limit"
        assert (multiply(a, b, total, min_multiplications=193) == 5).all()
        assert not plans
        assert multiply(a, b, total, min_multiplications=192) is total
        assert (total == 9).all()
        assert len(plans) == 1
    with tuned(ProductConfig, min_side=5):
        assert (multiply(a, b, min_multiplications=0) == 4).all()
        assert len(plans) == 1, "a side of 4 is shorter than the limit"


def test_plan_describes_the_layouts_of_the_factors(plans):
    out = torch.zeros(8, 16, dtype=torch.bfloat16)[:, :6]
    with tuned(ProductConfig, min_side=1, tiles=(7,)):
        products.product(_matrix(8, 4), _matrix(6, 4).t(), out, accumulate=True)
    ((problem, tiles),) = plans
    assert (problem.m, problem.k, problem.n, problem.accumulate) == (8, 4, 6, True)
    assert problem.a_layout == cublaslt.MatrixLayout(by_columns=False, stride=4)
    assert problem.b_layout == cublaslt.MatrixLayout(by_columns=True, stride=4)
    assert problem.out_stride == 16
    assert tiles == (7,)
    assert (out == 4).all()


def test_torch_computes_products_of_matrices_with_gaps(plans):
    out = torch.zeros(8, 6, dtype=torch.bfloat16)
    with tuned(ProductConfig, min_side=1):
        products.product(_matrix(8, 8)[:, ::2], _matrix(4, 6), out)
        products.product(_matrix(8, 4), _matrix(4, 6), torch.zeros(6, 8, dtype=torch.bfloat16).t())
    assert not plans
    assert (out == 4).all()


@pytest.mark.parametrize("min_multiplications", [0, 2**39], ids=["long", "short"])
def test_a_product_with_a_weight_is_no_view(plans, min_multiplications):
    """A view that a node returns cannot be modified in place."""
    weight = torch.ones(6, 4, dtype=torch.bfloat16)
    for x in (torch.ones(2, 3, 4), torch.ones(2, 4, 3).transpose(1, 2), torch.ones(3, 4)):
        y = products.multiply_by_weight(x.bfloat16(), weight, min_multiplications)
        assert y.shape == (*x.shape[:-1], 6)
        assert (y == 4).all()
        assert y._base is None
