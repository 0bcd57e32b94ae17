import pytest
import torch
from torch import nn

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.logits.softmax import MAX_FEATURES, SoftmaxConfig, softmax_reference
from tigon.runtime.device import EMULATED, simulated
from tigon.runtime.tuning import tuned

# One feature, rows that fill no tile, widths on both sides of a power of two, and one more than the kernels take.
SHAPES = [(6, 1), (3, 5), (2, 3, 64), (17, 127), (5, 129), (3, 2048), (2, 5000), (2, 32768), (2, 32769)]


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # The values have size one. With peaked rows the error of dx is the rounding of y times dy, which for eager code too
    # may be small by chance.
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_is_as_accurate_as_eager_code(shape, dtype):
    assert_as_accurate_as_eager(tigon.softmax, softmax_reference, [_input(*shape, dtype=dtype)])


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("block_m", "keeps_y"), [(1, True), (4, True), (4, False)])
def test_tiles_of_several_rows_are_accurate(block_m, keeps_y):
    with tuned(SoftmaxConfig, block_m=block_m, block_n=128, num_warps=1, keeps_y=keeps_y):
        assert_as_accurate_as_eager(tigon.softmax, softmax_reference, [_input(11, 100)])


@pytest.mark.kernels
def test_peaked_rows_are_accurate():
    x = (_input(8, 200) * 8).detach().requires_grad_()
    actual, expected = outputs_and_gradients(tigon.softmax, [x]), outputs_and_gradients(softmax_reference, [x])
    torch.testing.assert_close([*actual[0], *actual[1]], [*expected[0], *expected[1]], rtol=3e-6, atol=5e-7)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_softmax_sums_over_any_dimension(dim):
    x = _input(4, 5, 6)
    assert_as_accurate_as_eager(lambda x: tigon.softmax(x, dim), lambda x: softmax_reference(x, dim), [x])
    torch.testing.assert_close(tigon.softmax(x, dim=dim), torch.softmax(x, dim))


@pytest.mark.kernels
def test_values_that_are_not_finite_give_the_results_of_torch():
    """One row has one finite value, some rows are all -inf (NaN), and others come from a diverged model."""
    x = torch.randn(7, 200, device=DEVICE)
    x[1, :150], x[2, 50:] = float("-inf"), float("-inf")
    x[3], x[4, 64:128] = float("-inf"), float("-inf")
    x[5, 70], x[6, 199] = float("nan"), float("inf")
    y = tigon.softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-5, atol=1e-9, equal_nan=True)
    assert y.isnan().all(-1).tolist() == [False, False, False, True, False, True, True]


@pytest.mark.kernels
def test_values_far_from_zero_are_accurate():
    """A shift of all values changes nothing, and the largest values of fp32 do not overflow."""
    x = _input(2, 200)
    top = torch.finfo(torch.float32).max
    x.data[1, ::7], x.data[1, 1::7] = top, -top
    assert_as_accurate_as_eager(tigon.softmax, softmax_reference, [x])
    lowest = torch.full((1, 200), -top, device=DEVICE)
    torch.testing.assert_close(tigon.softmax(lowest), torch.full_like(lowest, 1 / 200))
    whole = torch.arange(200.0, device=DEVICE)[None] % 5
    assert torch.equal(tigon.softmax(whole), tigon.softmax(whole + 2.0**20))


@pytest.mark.kernels
def test_dimension_of_size_one_may_have_any_stride():
    x = torch.randn(120, device=DEVICE).as_strided((3, 1, 40), (40, 7, 1))
    assert x.is_contiguous()
    torch.testing.assert_close(tigon.softmax(x), torch.softmax(x, -1))


@pytest.mark.kernels
def test_autograd_notices_a_change_of_the_result():
    """Dropout on attention weights changes them in place. Backward needs the result, so autograd must notice."""
    x = _input(4, 64)
    y = tigon.softmax(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_scalars_and_empty_rows_are_accepted():
    assert tigon.softmax(torch.tensor(3.0, device=DEVICE)).item() == 1.0
    assert tigon.softmax(torch.tensor(3.0, device=DEVICE), 0).item() == 1.0
    assert tigon.softmax(torch.randn(3, 0, device=DEVICE)).shape == (3, 0)


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("features", [MAX_FEATURES, MAX_FEATURES + 1])
def test_rows_that_do_not_fit_in_registers_launch_no_kernel(features):
    """Meta tensors count as tensors of a GPU in the block, and launches are counted."""

    class Counter:
        device = EMULATED
        launches = 0

        def count_launch(self, arguments):
            self.launches += 1

    counter = Counter()
    with simulated(counter):
        tigon.softmax(torch.empty(1, features, device="meta"))
    assert counter.launches == (features <= MAX_FEATURES)


def test_module_equals_that_of_torch():
    x = torch.randn(3, 4, 48, device=DEVICE)
    assert isinstance(tigon.Softmax(), nn.Softmax)
    assert not tigon.Softmax().state_dict()
    for dim in (-1, 2, 1):
        torch.testing.assert_close(tigon.Softmax(dim)(x), nn.Softmax(dim)(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tigon.Softmax()(x), nn.Softmax(dim=-1)(x), rtol=1e-6, atol=1e-6)
    assert repr(tigon.Softmax()) == "Softmax(dim=-1)"
