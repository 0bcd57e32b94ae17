import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, outputs_and_gradients
from tigon.ops.norms.kernels import NormConfig, NormProblem
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference
from tigon.runtime.device import Device
from tigon.runtime.tuning import tuned

# Two features, rows that fill no tile, widths on both sides of a power of two.
SHAPES = [(6, 2), (3, 5), (2, 3, 64), (17, 127), (5, 129), (3, 2048), (2, 5000)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 3
    weight = torch.randn(shape[-1], generator=generator)
    return [t.to(DEVICE, d).requires_grad_() for t, d in ((x, dtype), (weight, weight_dtype or dtype))]


@pytest.mark.kernels
@one_in(2, shape=SHAPES, dtype=DTYPES, offset=[0.0, 1.0], rounding=["before_weight", "after_weight"])
def test_accuracy(shape, dtype, offset, rounding):
    options = {"offset": offset, "rounding": rounding, "eps": 1e-5}
    assert_as_accurate_as_eager(
        lambda x, w: tigon.rms_norm(x, w, **options),
        lambda x, w: rms_norm_reference(x, w, **options),
        _inputs(shape, dtype),
    )


@pytest.mark.kernels
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_a_wider_weight_widens_the_result_as_the_product_does(rounding):
    """Under autocast, hidden states are half precision and weights fp32: the dtype must be what eager code gives."""
    x, weight = _inputs((4, 32), torch.float16, torch.float32)
    y = tigon.rms_norm(x, weight, rounding=rounding)
    expected = rms_norm_reference(x, weight, rounding=rounding)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert (dx.dtype, dweight.dtype) == (torch.float16, torch.float32)


@pytest.mark.kernels
def test_rounding_is_where_it_is_said_to_be():
    """fp16 shows it: rounding before the weight and after it differ, and each equals its definition bit for bit."""
    x, weight = _inputs((8, 64), torch.float16)
    before, after = (tigon.rms_norm(x, weight, rounding=r) for r in ("before_weight", "after_weight"))
    assert not torch.equal(before, after)
    # rstd itself may differ by a unit in the last place of fp32, which moves few values of fp16.
    for y, rounding in ((before, "before_weight"), (after, "after_weight")):
        assert (y != rms_norm_reference(x, weight, rounding=rounding)).float().mean() < 0.01


@pytest.mark.kernels
def test_large_and_tiny_values():
    x = torch.tensor([[1e30, -1e30, 1e30, 0.0], [1e-30, 1e-30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    x.requires_grad_()
    (y,), (dx,) = outputs_and_gradients(lambda x: tigon.rms_norm(x, None, 1e-6), [x])
    expected = rms_norm_reference(x, None, 1e-6)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=0.0, equal_nan=True)
    assert dx[1:].isfinite().all()


def test_module_is_torchs_with_the_same_state():
    ours, theirs = tigon.RMSNorm(48, eps=1e-5).to(DEVICE), torch.nn.RMSNorm(48, eps=1e-5).to(DEVICE)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 48, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    assert isinstance(ours, torch.nn.RMSNorm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_default_epsilon_is_torchs(dtype):
    """Small values show it: an epsilon of half precision would swallow them."""
    x = (torch.randn(4, 48, device=DEVICE) * 0.01).to(dtype)
    y, expected = tigon.RMSNorm(48).to(DEVICE)(x), torch.nn.RMSNorm(48).to(DEVICE)(x.float())
    torch.testing.assert_close(y.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# --- the sum with a residual, normalised ----------------------------------------------------------


def _three(shape: tuple[int, ...], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    x, weight = _inputs(shape, dtypes[0], dtypes[2])
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtypes[1]).requires_grad_()
    return [x, residual, weight]


@pytest.mark.kernels
@pytest.mark.parametrize("options", [{}, {"offset": 1.0, "rounding": "after_weight", "eps": 1e-5}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_accuracy(shape, dtype, options):
    assert_as_accurate_as_eager(
        lambda *tensors: tigon.add_rms_norm(*tensors, **options),
        lambda *tensors: add_rms_norm_reference(*tensors, **options),
        _three(shape, [dtype] * 3),
    )


HALF, FULL = torch.float16, torch.float32


@pytest.mark.kernels
@pytest.mark.parametrize("dtypes", [(HALF, FULL, HALF), (FULL, HALF, HALF), (HALF, HALF, FULL), (HALF, FULL, FULL)])
def test_add_of_several_dtypes(dtypes):
    """A residual stream in fp32 under layers in half precision: sum and norm are as wide as in eager code."""
    tensors = _three((4, 96), list(dtypes))
    assert_as_accurate_as_eager(tigon.add_rms_norm, add_rms_norm_reference, tensors)
    gradients = torch.autograd.grad([y.sum() for y in tigon.add_rms_norm(*tensors)], tensors)
    assert tuple(g.dtype for g in gradients) == dtypes


def test_the_sum_is_rounded_before_it_is_normalised():
    """As eager code does: 2048 + 1 is 2048 in fp16, in the sum and in its norm."""
    x, residual = torch.full((1, 8), 2048.0, device=DEVICE, dtype=HALF), torch.ones(1, 8, device=DEVICE, dtype=HALF)
    x[0, 0] = 1.0
    y, total = tigon.add_rms_norm(x, residual, None)
    assert total[0].tolist() == [2.0] + [2048.0] * 7
    assert torch.equal(y, tigon.rms_norm(total, None))


@pytest.mark.kernels
@pytest.mark.parametrize("used", [0, 1], ids=["the norm alone", "the sum alone"])
def test_an_output_may_be_left_unused(used):
    tensors = _three((5, 33), [FULL] * 3)
    results = []
    for run in (tigon.add_rms_norm, add_rms_norm_reference):
        y = run(*tensors)[used]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        results.append(torch.autograd.grad(y, tensors, dy, allow_unused=True))
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
def test_a_tensor_may_be_its_own_residual():
    x, _, weight = _three((5, 33), [FULL] * 3)
    assert_as_accurate_as_eager(
        lambda x, w: tigon.add_rms_norm(x, x, w), lambda x, w: add_rms_norm_reference(x, x, w), [x, weight]
    )


@pytest.mark.kernels
def test_gradients_that_are_one_tensor_do_not_share_what_is_accumulated():
    x, residual, weight = _three((5, 33), [FULL] * 3)
    for _ in range(2):
        torch.autograd.backward([y.sum() for y in tigon.add_rms_norm(x, residual, weight)])
    kept = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, kept)


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_a_residual_of_another_shape_is_refused():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"add_rms_norm: residual must have shape \(3, 8\), got \(1, 8\)"):
        tigon.add_rms_norm(x, x[:1], weight)
    with pytest.raises(TypeError, match="add_rms_norm: residual must be a Tensor, got float"):
        tigon.add_rms_norm(x, 1.0, weight)
    with pytest.raises(TypeError, match="add_rms_norm: residual must be a Tensor, got NoneType"):
        tigon.add_rms_norm(x, None, weight)
    with pytest.raises(ValueError, match="add_rms_norm: x and residual must have the same device"):
        tigon.add_rms_norm(x, x.to("meta"), weight)
    with pytest.raises(ValueError, match=r"add_rms_norm: weight must have shape \(8,\), got \(7,\)"):
        tigon.add_rms_norm(x, x, weight[:7])


# --- launch parameters ---------------------------------------------------------------------------

DEVICES = [Device(132, 32, 232448), Device(304, 64, 65536), Device(4, 32, 49152)]


@pytest.mark.no_interpreter("It launches no kernel.")
@pytest.mark.parametrize("device", DEVICES, ids=["nvidia", "amd", "small"])
@pytest.mark.parametrize(("loads", "sums"), [(2, 0), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("n", [1, 100, 4096, 5120, 16384, 32768])
def test_heuristic(n, loads, sums, device):
    config = NormConfig.heuristic(NormProblem(n, 2, loads, sums), device)
    assert config.block_n >= n
    for warps in (config.num_warps, config.backward_warps):
        assert 1 <= warps <= device.max_warps
        assert warps * device.warp_size <= 1024
    stages = config.num_stages - 1
    assert stages * loads * config.block_m * config.block_n * 2 <= device.shared_memory


@pytest.mark.no_interpreter("It launches no kernel.")
def test_programs_of_the_backward_are_balanced_and_no_more_than_rows_ask_for():
    config = NormConfig.heuristic(NormProblem(4096, 2), DEVICES[0])
    assert (config.programs, config.block_m) == (132, 2)
    # 8192 pairs of rows are 63 for each of 131 programs, which 132 would not do sooner; 64 rows leave 16 partial sums.
    assert [config.balanced(m) for m in (0, 1, 4, 5, 64, 528, 529, 16384)] == [0, 1, 1, 2, 16, 132, 89, 131]
    assert config.balanced(16384, blocks=8) <= 132 // 8


@pytest.mark.kernels
@pytest.mark.parametrize("n", [64, 700])
def test_sums_over_rows_in_blocks_of_columns_are_the_same(n):
    """Rows too wide for the registers take two launches: dx, then dweight in blocks of columns."""
    tensors = _three((37, n), [FULL] * 3)
    expected = outputs_and_gradients(tigon.add_rms_norm, tensors)[1]
    with tuned(NormConfig, splits=True, keeps_row=False, columns=128):
        results = outputs_and_gradients(tigon.add_rms_norm, tensors)[1]
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("keeps_row", [False, True], ids=["row read again", "row kept"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_accuracy_of_wide_rows_that_are_read_again(offset, keeps_row):
    """From 16384 features on, the backward reads the weight again for every tile, and with some configs the row."""
    with tuned(NormConfig, keeps_w=False, keeps_row=keeps_row):
        assert_as_accurate_as_eager(
            lambda *tensors: tigon.add_rms_norm(*tensors, offset=offset),
            lambda *tensors: add_rms_norm_reference(*tensors, offset=offset),
            _three((9, 100), [FULL] * 3),
        )


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_bad_input():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(8,\), got \(7,\)"):
        tigon.rms_norm(x, weight[:7])
    with pytest.raises(TypeError, match="rms_norm: x must be a float32, bfloat16 or float16 tensor, got torch.int64"):
        tigon.rms_norm(x.long(), weight)
    with pytest.raises(TypeError, match="rms_norm: x must be a Tensor, got list"):
        tigon.rms_norm([1.0], weight)
    with pytest.raises(TypeError, match="rms_norm: x must be a Tensor, got NoneType"):
        tigon.rms_norm(None, weight)
    with pytest.raises(ValueError, match="rms_norm: x must have at least one dimension, got a scalar"):
        tigon.rms_norm(x[0, 0], None)
    with pytest.raises(ValueError, match="rms_norm: rounding must be one of 'before_weight', 'after_weight', got 'no'"):
        tigon.rms_norm(x, weight, rounding="no")
    with pytest.raises(ValueError, match="rms_norm: eps must be finite and not negative, got -1"):
        tigon.rms_norm(x, weight, -1)
    with pytest.raises(TypeError, match="rms_norm: eps must be a number, got NoneType"):
        tigon.rms_norm(x, weight, None)
    with pytest.raises(ValueError, match="rms_norm: x and weight must have the same device"):
        tigon.rms_norm(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"RMSNorm: x must end in \(8,\), got shape \(3, 9\)"):
        tigon.RMSNorm(8)(torch.randn(3, 9))
