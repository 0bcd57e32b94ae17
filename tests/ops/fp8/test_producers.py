"""Norms find the maxima of gradients that FP8 ops quantise: the bits are the same, and no maximum is outdated."""

import copy

import pytest
import torch
from torch import Tensor

from fp8_cases import randn
from op_cases import one_in
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_projections
from tigon.ops.norms.kernels import NeededNormGradients, NormOptions, norm_backward, norm_forward
from tigon.ops.norms.norm_config import NormConfig
from tigon.ops.norms.rms_norm import add_rms_norm_of_layer, rms_norm_of_layer, rms_norm_with_input
from tigon.runtime import maxima as module
from tigon.runtime.counters import zero_number
from tigon.runtime.maxima import attach_maximum, find_maximum
from tigon.runtime.tuning import tuned

pytestmark = pytest.mark.kernels

TOKENS, HIDDEN, INNER = 7, 32, 64


def _assert_maximum(maximum: Tensor, x: Tensor) -> None:
    """Check the maximum of x. NaN is larger than any number."""
    largest = x.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax()
    assert torch.equal(maximum.view(torch.float32)[0].nan_to_num(nan=torch.inf), largest)


# Rows that fill no tile, one row, a width that needs masks, and one that does not. Each program computes several tiles.
@one_in(
    2, case=[((37, 80), False), ((37, 80), True), ((1, 16), False)], dtype=[torch.float32, torch.float16],
    has_residual={"alone": False, "residual": True},
)  # fmt: skip
def test_kernels_find_the_maximum_of_stored_values_and_write_the_same_bits(case, dtype, has_residual):
    shape, splits = case
    x, residual, dy = (randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    residual, weight = residual if has_residual else None, randn(shape[1], dtype=dtype)
    # With an epsilon of zero, rstd is infinite in the rows of a tile that do not exist.
    options, needs = NormOptions(0.0, 0.0, True), NeededNormGradients(True, dtype, None)
    with tuned(NormConfig, block_m=2, programs=3, splits=splits, columns=64):
        z, total, statistics = norm_forward(x, residual, weight, None, options)
        z = x if total is None else total
        maximum = zero_number(x)
        dz, dw, _ = norm_backward(dy, residual, z, weight, statistics, 0.0, needs, maximum)
        expected = norm_backward(dy, residual, z, weight, statistics, 0.0, needs, None)
    assert torch.equal(dz, expected[0])
    assert torch.equal(dw, expected[1])
    _assert_maximum(maximum, dz)


# The interpreter multiplies by numpy, which warns of infinity times zero.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity_are_the_largest_values(value):
    x, dy, maximum = randn(7, 48), randn(7, 48, seed=1), zero_number(randn(1))
    dy[3, 5] = value
    statistics = norm_forward(x, None, None, None, NormOptions(1e-5, 0.0, True))[2]
    dx, *_ = norm_backward(dy, None, x, None, statistics, 0.0, NeededNormGradients(True, None, None), maximum)
    _assert_maximum(maximum, dx)


def _leaves() -> list[Tensor]:
    """Return x, a residual, the weights of two norms, and weights of q, gate, up and down."""
    shapes = (1, TOKENS, HIDDEN), (1, TOKENS, HIDDEN), (HIDDEN,), (HIDDEN,), (HIDDEN, HIDDEN)
    shapes += (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    return [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


class Layer:
    """A decoder layer without attention: a norm and a projection, the norm of a sum and an MLP, and a last norm."""

    def __init__(self, finds_maximum: bool, **options) -> None:
        self.options = options
        self.norm_options = {"offset": 0.0, "rounding": "before_weight", "finds_maximum": finds_maximum}

    def __call__(self, x, residual, weight, other_weight, q, gate, up, down) -> Tensor:
        y, x = rms_norm_with_input(x, weight, 1e-6, **self.norm_options)
        (attention,) = fp8_projections(y, [q], [None], **self.options)
        y, total = add_rms_norm_of_layer(attention, residual + x, other_weight, 1e-6, **self.norm_options)
        total = total + fp8_glu_mlp(y, gate, up, down, **self.options)
        return rms_norm_of_layer(total, weight, 1e-6, **self.norm_options)


def _assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("hook", [lambda dy: dy.mul_(3), lambda dy: dy * 3], ids=["in place", "another tensor"])
def test_a_gradient_that_a_hook_changes_is_read_again(hook):
    """The hook runs between the norm that writes the gradient of its input and the projection before it."""
    results = []
    for finds_maximum in (True, False):
        layer, leaves = Layer(finds_maximum), _leaves()
        (y,) = fp8_projections(leaves[0], leaves[4:5], [None])
        y.register_hook(hook)
        z = layer(y, *leaves[1:])
        results.append([z, *torch.autograd.grad(z, leaves, randn(*z.shape, seed=7))])
    _assert_equal(*results)


class _Producer(torch.autograd.Function):
    """The identity, whose gradient is 3 everywhere and has a maximum."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = torch.full_like(dy, 3)
        attach_maximum(dx, torch.ones(1, dtype=torch.int32))
        return dx


SUMS = {
    "first": lambda x: _Producer.apply(x) + 2 * x, "last": lambda x: 2 * x + _Producer.apply(x),
    "two producers": lambda x: _Producer.apply(x) + _Producer.apply(x),
    "scaled": lambda x: _Producer.apply(torch.add(torch.zeros_like(x), x, alpha=2)),
    "a part": lambda x: _Producer.apply(x[:1]), "unchanged": lambda x: _Producer.apply(x + torch.zeros_like(x)),
}  # fmt: skip


@pytest.mark.parametrize("run", SUMS.values(), ids=SUMS)
def test_gradients_that_autograd_changes_have_none(run):
    leaf, upstream = torch.ones(3, 4, requires_grad=True), []
    x = leaf * 1
    x.register_hook(lambda dy: upstream.append((find_maximum(dy) is not None, bool((dy == 3).all()))))
    run(x).sum().backward()
    assert upstream == [(run is SUMS["unchanged"],) * 2]


@pytest.fixture
def x() -> Tensor:
    """Return a tensor [2, 3, 4] whose maximum is known."""
    x = torch.ones(2, 3, 4)
    attach_maximum(x, torch.ones(1, dtype=torch.int32))
    return x


OTHERS = {
    "a view": lambda x: x.view(6, 4), "a part": lambda x: x[:1], "a copy": lambda x: x.clone(),
    "a deep copy": copy.deepcopy, "a cast": lambda x: x.half(), "an equal tensor": lambda x: torch.ones_like(x),
}  # fmt: skip


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_only_the_tensor_itself_has_it(x, make):
    assert find_maximum(make(x)) is None
    assert find_maximum(x) is not None


WRITES = {
    "in place": lambda x: x.mul_(2), "through a view": lambda x: x[0].zero_(),
    "through a detached tensor": lambda x: x.detach().mul_(2),
    "another memory": lambda x: setattr(x, "data", torch.zeros(2, 3, 4)),
    "in place, by a function": lambda x: torch.nn.functional.dropout(x, inplace=True),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_removes_it(x, write):
    write(x)
    assert find_maximum(x) is None


def test_jobs_of_several_ranks_have_none(monkeypatch):
    """A collective writes in place without a new version of the tensor."""
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    for ranks in (1, 2):
        monkeypatch.setattr(module.dist, "get_world_size", lambda ranks=ranks: ranks)
        y = torch.ones(3)
        attach_maximum(y, torch.ones(1, dtype=torch.int32))
        assert (find_maximum(y) is None) == (ranks == 2)


def test_captured_graphs_compiled_code_and_inference_have_none(x, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(module, "is_capturing", lambda x: True)
        assert find_maximum(x) is None
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        assert find_maximum(x) is None
    with torch.inference_mode():
        y = torch.ones(3, 4)
        attach_maximum(y, torch.ones(1, dtype=torch.int32))
        assert find_maximum(y) is None
