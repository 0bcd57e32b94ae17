"""Linear layers in FP8: agreement with eager code, error bounds, gradients that are needed, and bad input."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8_eager
import tigon
from fp8_cases import DTYPE, MODES, RECIPES, assert_same, leaf, modes, randn, recipes
from op_cases import one_in, saved_tensors
from tigon.ops.fp8.fp8_linear import fp8_projections

WIDTHS = 64, 32, 48


def _layers(hidden: int = 64) -> tuple[list[Tensor], list[Tensor | None]]:
    weights = [leaf(width, hidden, scale=hidden**-0.5) for width in WIDTHS]
    return weights, [None, leaf(WIDTHS[1]), None]


def _upstream(outputs) -> list[Tensor]:
    return [randn(*y.shape, seed=5 + i) for i, y in enumerate(outputs)]


def _results(outputs, leaves) -> list[Tensor]:
    return [*outputs, *torch.autograd.grad(outputs, leaves, _upstream(outputs))]


@one_in(2, shape=[(16, 64), (7, 64), (2, 9, 64), (64,)], recipe=RECIPES, fp8_dw=MODES)
def test_fp8_linear_is_the_eager_code(shape, recipe, fp8_dw):
    x, weight, bias = leaf(*shape), leaf(48, 64, scale=0.125), leaf(48)
    y = tigon.fp8_linear(x, weight, bias, recipe=recipe, fp8_dw=fp8_dw)
    expected = fp8_eager.linear(x, weight, bias, recipe, fp8_dw)
    assert y.shape == expected.shape == (*shape[:-1], 48)
    assert_same(_results([y], [x, weight, bias]), _results([expected], [x, weight, bias]))


@recipes
@modes
def test_projections_are_one_layer_with_all_outputs(recipe, fp8_dw):
    x, (weights, biases) = leaf(3, 7, 64), _layers()
    leaves = [x, *weights, biases[1]]
    actual = _results(fp8_projections(x, weights, biases, recipe=recipe, fp8_dw=fp8_dw), leaves)
    both = fp8_eager.linear(x, torch.cat(weights), None, recipe, fp8_dw)
    outputs = [y if b is None else y + b for y, b in zip(both.split(WIDTHS, -1), biases, strict=True)]
    assert_same(actual, _results(outputs, leaves))


@recipes
def test_the_error_is_bounded_by_the_formats(recipe):
    """A value is rounded by at most u times itself, so a product errs by at most (u_a + u_b + u_a u_b) |a| |b|.

    A value below the smallest normal one errs by less than that of a value at it.
    """
    x, weight, dy = randn(48, 64).double(), randn(32, 64, scale=0.1).double(), randn(48, 32).double()
    leaves = [t.to(DTYPE).requires_grad_() for t in (x, weight)]
    y = tigon.fp8_linear(*leaves, recipe=recipe)
    gradients = torch.autograd.grad(y, leaves, dy.to(DTYPE))
    # The largest relative error of a value in e4m3.
    u = 2.0**-4
    for actual, a, b in ((y, x, weight.t()), (gradients[0], dy, weight), (gradients[1], dy.t(), x)):
        error, exact = (actual.double() - a @ b).abs(), a @ b
        # The smallest normal values are 2^-14.8 of the largest ones.
        tiny = 2.0**-14 * (a.abs().max() * b.abs().sum(0, keepdim=True) + b.abs().max() * a.abs().sum(1, keepdim=True))
        rounding = exact.abs() * torch.finfo(DTYPE).eps
        assert (error <= (2 * u + u**2) * (a.abs() @ b.abs()) + tiny * u + rounding).all()
        # The errors of single values are independent, and on average half of the bound of a format.
        assert error.norm() <= 0.5 * 2**0.5 * u * exact.norm() + rounding.norm()


def test_rowwise_scales_keep_small_rows_apart_from_large_ones():
    x, weight = randn(16, 64), randn(32, 64)
    x[3] *= 1e6
    errors = {}
    for recipe in RECIPES:
        y = tigon.fp8_linear(x, weight, recipe=recipe)
        errors[recipe] = ((y - F.linear(x, weight)).norm(dim=1) / F.linear(x, weight).norm(dim=1))[4:].max()
    assert errors["rowwise"] < 0.06
    assert errors["tensorwise"] > 0.3


# The interpreter multiplies by numpy, which warns of infinity times zero.
@pytest.mark.filterwarnings("ignore:invalid value")
@recipes
def test_nan_and_infinity_reach_the_result(recipe):
    for value in (float("nan"), float("inf")):
        x, weight = randn(16, 64), leaf(32, 64)
        x[5, 1] = value
        assert not tigon.fp8_linear(x, weight, recipe=recipe)[5].isfinite().any()
        dy = randn(16, 32)
        dy[2, 7] = value
        (dw,) = torch.autograd.grad(tigon.fp8_linear(randn(16, 64), weight, recipe=recipe), weight, dy)
        assert not dw[7].isfinite().any()


@recipes
def test_the_saved_input_takes_one_byte_for_each_value(recipe):
    x, weight = leaf(16, 64), leaf(32, 64)
    values = lambda tensors: sorted((t.dtype, t.numel()) for t in tensors if t.numel() == x.numel())
    key = lambda tensors: {(t.dtype, tuple(t.shape)) for t in tensors}
    assert (torch.float8_e4m3fn, (64, 16)) in key(saved_tensors(lambda: tigon.fp8_linear(x, weight, recipe=recipe)))
    in_dtype = saved_tensors(lambda: tigon.fp8_linear(x, weight, recipe=recipe, fp8_dw=False))
    assert {t.dtype for t in in_dtype} == {DTYPE}
    assert values(in_dtype) == [(DTYPE, x.numel())]
    # A frozen weight saves nothing of x.
    frozen = saved_tensors(lambda: tigon.fp8_linear(x, weight.detach(), recipe=recipe))
    assert [t.data_ptr() for t in frozen] == [weight.data_ptr()]


@recipes
def test_without_gradients_nothing_is_saved_and_the_result_is_the_same(recipe):
    x, weight = leaf(7, 64), leaf(32, 64)
    expected = tigon.fp8_linear(x, weight, recipe=recipe)
    with torch.no_grad():
        saved = saved_tensors(lambda: tigon.fp8_linear(x, weight, recipe=recipe))
        y = tigon.fp8_linear(x, weight, recipe=recipe)
    assert not saved
    assert not y.requires_grad
    assert torch.equal(y, expected)


@one_in(2, used=[(0,), (2,), (0, 2)], recipe=RECIPES)
def test_weights_of_unused_outputs_get_no_gradient(used, recipe):
    x, (weights, biases) = leaf(7, 64), _layers()
    outputs = [fp8_projections(x, weights, biases, recipe=recipe)[i] for i in used]
    gradients = torch.autograd.grad(outputs, [x, *weights, biases[1]], _upstream(outputs), allow_unused=True)
    assert [g is not None for g in gradients] == [True, *(i in used for i in range(3)), False]
    exact = torch.autograd.grad([F.linear(x, weights[i]) for i in used], x, _upstream(outputs))[0]
    assert (gradients[0] - exact).norm() < 0.1 * exact.norm()


def test_outputs_may_be_written_in_place():
    x, (weights, biases) = leaf(7, 64), _layers()
    outputs = [y.view(7, -1, 16).mul_(2.0) for y in fp8_projections(x, weights, biases)]
    torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])
