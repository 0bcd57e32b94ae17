"""The FP8 copies of matrices: their values, their scales, and which copies share a scale."""

import math

import pytest
import torch

from op_cases import DEVICE, one_in
from tigon.ops.fp8.formats import LARGEST, SMALLEST_AMAX, Factor
from tigon.ops.fp8.gated_gradients import GatedNeeds, gated_gradients, gated_gradients_reference
from tigon.ops.fp8.quantisation import Layout, activate, quantise, quantise_gated, quantise_reference

# The largest relative rounding error of a normal value.
LARGEST_ERROR = 2.0**-4
RECIPES = {"tensorwise": False, "rowwise": True}
recipes = pytest.mark.parametrize("is_rowwise", RECIPES.values(), ids=RECIPES)
# Either copy, or both.
COPIES = {"rows": (True, False), "transposed": (False, True), "both": (True, True)}


def _matrix(m: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values whose sizes differ by many binary orders, in a matrix whose columns differ too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.randn(m, k, generator=generator).mul(2).exp()
    return (x * torch.randn(k, generator=generator).exp()).to(DEVICE, dtype)


def _round_to_fp8(x: float) -> float:
    """Round a number to e4m3 in plain Python, to nearest with ties to even."""
    if x == 0:
        return 0.0
    unit = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
    return round(x / unit) * unit


def _assert_same(actual: Factor | None, values: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    """Check that a factor has exactly these values and this scale; bytes are compared, so NaN equals itself."""
    assert (actual is None) == (values is None)
    if actual is None:
        return
    assert actual.values.is_contiguous()
    assert actual.scale.is_contiguous()
    assert torch.equal(actual.values.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(actual.scale, scale, rtol=0, atol=0, equal_nan=True)


@recipes
def test_values_and_scales_are_those_of_plain_python(is_rowwise):
    x = _matrix(5, 33)
    rows, transposed = quantise([x], Layout(is_rowwise, True, True))
    table = x.tolist()

    def check(factor: Factor, vectors: list[list[float]]) -> None:
        peaks = [max(map(abs, vector)) for vector in vectors]
        peaks = peaks if is_rowwise else [max(peaks)] * len(peaks)
        for i, (vector, peak) in enumerate(zip(vectors, peaks, strict=True)):
            fp32 = lambda value: torch.tensor(value, dtype=torch.float32).item()
            inverse = fp32(LARGEST / peak)
            expected = [_round_to_fp8(fp32(fp32(value) * inverse)) for value in vector]
            assert factor.values[i, : len(vector)].float().tolist() == expected
            scale = factor.scale.flatten()[i if is_rowwise else 0].item()
            assert scale == fp32(peak / LARGEST)

    check(rows, table)
    check(transposed, [list(column) for column in zip(*table, strict=True)])


@recipes
def test_zeros_and_tiny_values_have_a_finite_scale(is_rowwise):
    x = torch.zeros(3, 16, device=DEVICE)
    x[1] = 1e-38
    for factor in quantise([x], Layout(is_rowwise, True, True)):
        assert (factor.values.float() == 0).all()
        assert (factor.scale == SMALLEST_AMAX / 448).all()


@pytest.mark.kernels
def test_values_are_rounded_up_to_a_power_of_two_and_ties_to_even():
    """The interpreter itself loses the carry to the next power of two, and rounds ties away from zero.

    `interpreter.py` repairs this. A script that runs kernels in the interpreter without this repair sees other bytes
    than torch for a few percent of the values, and only in the interpreter.
    """
    step = 2.0 * LARGEST_ERROR
    mantissas = [2 - step / 4, 2 - step / 2, 1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20]
    values = [sign * mantissa * 2.0**exponent for mantissa in mantissas for exponent in range(4) for sign in (1, -1)]
    # The largest value of the format makes the scale one.
    x = torch.tensor([[LARGEST, *values] + [0.0] * 7], device=DEVICE)
    rows, _ = quantise([x], Layout(True, True, False))
    expected = [_round_to_fp8(value) for value in x[0].tolist()]
    assert rows.scale.item() == 1
    assert rows.values[0].float().tolist() == expected
    assert sum(abs(math.frexp(value)[0]) == 0.5 for value in expected) >= 16


# The interpreter multiplies by numpy, which warns of infinity times zero.
@pytest.mark.filterwarnings("ignore:invalid value")
@recipes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinity_are_not_hidden(is_rowwise, value):
    x = _matrix(4, 32)
    x[1, 3] = value
    rows, transposed = quantise([x], Layout(is_rowwise, True, True))
    for factor, index in ((rows, 1), (transposed, 3)):
        scale = factor.scale.flatten()[index if is_rowwise else 0]
        assert scale.isnan() if math.isnan(value) else scale.isinf()
        # Whatever the values are, the product with the scale is NaN or infinite.
        assert not (factor.values[index].float() * scale).isfinite().any()
    if is_rowwise:
        assert rows.scale[[0, 2, 3]].isfinite().all()


# Sizes around the tiles of 128 x 64, and rows that the transposed copy pads.
SHAPES = [(1, 16), (7, 48), (129, 80), (130, 64)]


@pytest.mark.kernels
@one_in(3, is_rowwise=RECIPES, shape=SHAPES, copies=COPIES)
def test_kernels_write_what_the_reference_writes(is_rowwise, shape, copies):
    layout, x = Layout(is_rowwise, *copies), _matrix(*shape)
    rows, transposed = quantise([x], layout)
    expected = quantise_reference(x, layout)
    _assert_same(rows, *expected[:2])
    _assert_same(transposed, *expected[2:])


@pytest.mark.kernels
@recipes
@one_in(1, copies=COPIES, by_columns={"below": False, "beside": True})
def test_parts_of_a_matrix_share_scales(by_columns, copies, is_rowwise):
    x = _matrix(64, 96)
    layout = Layout(is_rowwise, *copies, by_columns)
    parts = x.split([48, 16, 32], 1) if by_columns else x.split([16, 48], 0)
    rows, transposed = quantise(parts, layout)
    expected = quantise_reference(x, layout)
    _assert_same(rows, *expected[:2])
    _assert_same(transposed, *expected[2:])


@pytest.mark.kernels
@recipes
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_may_have_gaps(is_rowwise, dtype):
    wide = _matrix(20, 100, dtype=dtype)
    for x in (wide[:, 3:51], wide.t()[:48].t(), wide[::2, ::2][:, :48]):
        layout = Layout(is_rowwise, True, True)
        actual, expected = quantise([x], layout), quantise_reference(x.contiguous(), layout)
        _assert_same(actual.rows, *expected[:2])
        _assert_same(actual.transposed, *expected[2:])


def _assert_close_in_fp8(actual: Factor | None, expected: torch.Tensor, scale: torch.Tensor) -> None:
    """Check values that were computed before they were rounded: a few may round to the neighbour."""
    torch.testing.assert_close(actual.scale, scale, rtol=1e-5, atol=0)
    a, b = actual.values.float(), expected.float()
    differs = (a - b).abs() > 0
    assert differs.float().mean() < 1e-3
    assert ((a - b).abs() <= 2 * LARGEST_ERROR * b.abs() + 2.0**-9).all()


KINDS = ["silu", "gelu", "gelu_tanh"]


@pytest.mark.kernels
@one_in(3, is_rowwise=RECIPES, kind=KINDS, copies=COPIES)
def test_gated_values_are_quantised_without_another_rounding(is_rowwise, kind, copies):
    gate, up = _matrix(130, 80).clamp(-2, 8), _matrix(130, 80, 1)
    layout = Layout(is_rowwise, *copies)
    actual = quantise_gated(gate, up, kind, layout)
    expected = quantise_reference(activate(gate, up, kind), layout)
    if actual.rows is not None:
        _assert_close_in_fp8(actual.rows, expected.rows, expected.row_scale)
    if actual.transposed is not None:
        _assert_close_in_fp8(actual.transposed, expected.transposed, expected.column_scale)


NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.kernels
@one_in(3, is_rowwise=RECIPES, kind=KINDS, needs=NEEDS)
def test_gradients_of_gates_are_quantised_without_another_rounding(is_rowwise, kind, needs):
    da, gate, up = _matrix(130, 48, 2), _matrix(130, 48).clamp(-2, 8), _matrix(130, 48, 1)
    actual = gated_gradients(da, gate, up, kind, GatedNeeds(is_rowwise, *needs))
    dgate, dup, a = gated_gradients_reference(da, gate, up, kind)
    both = quantise_reference(torch.cat((dgate, dup), 1), Layout(is_rowwise, True, True))
    of_a = quantise_reference(a, Layout(is_rowwise, False, True))
    for factor, expected, is_needed in zip(actual, (both[:2], both[2:], of_a[2:]), needs, strict=True):
        assert (factor is not None) == is_needed
        if factor is not None:
            _assert_close_in_fp8(factor, *expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_gradients_is_the_derivative(kind):
    da, gate, up = (_matrix(3, 16, seed).double().clamp(-4, 4) for seed in range(3))
    leaves = gate.requires_grad_(), up.requires_grad_()
    a = activate(*leaves, kind)
    expected = *torch.autograd.grad(a, leaves, da), a
    for x, y in zip(gated_gradients_reference(da, gate.detach(), up.detach(), kind), expected, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-5, atol=1e-5)
