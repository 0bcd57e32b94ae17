import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_refused, one_in, outputs_and_gradients
from tigon.ops.norms.kernels import NormConfig
from tigon.ops.norms.rms_norm import add_rms_norm_reference, rms_norm_reference
from tigon.runtime.tuning import tuned

# Two features, rows that fill no tile, widths on both sides of a power of two.
SHAPES = [(6, 2), (3, 5), (2, 3, 64), (17, 127), (5, 129), (3, 2048), (2, 5000)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 3
    weight = torch.randn(shape[-1], generator=generator)
    return [t.to(DEVICE, d).requires_grad_() for t, d in ((x, dtype), (weight, weight_dtype or dtype))]


@pytest.mark.kernels
@one_in(3, shape=SHAPES, dtype=DTYPES, offset=[0.0, 1.0], rounding=["before_weight", "after_weight"])
def test_rms_norm_accuracy(shape, dtype, offset, rounding):
    options = {"offset": offset, "rounding": rounding, "eps": 1e-5}
    assert_as_accurate_as_eager(
        lambda x, w: tigon.rms_norm(x, w, **options), lambda x, w: rms_norm_reference(x, w, **options),
        _inputs(shape, dtype),
    )  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
def test_rms_norm_promotes_to_the_dtype_of_a_wider_weight(rounding):
    """Under autocast, hidden states are half precision and weights fp32. Eager code gives the expected dtype."""
    x, weight = _inputs((4, 32), torch.float16, torch.float32)
    y = tigon.rms_norm(x, weight, rounding=rounding)
    expected = rms_norm_reference(x, weight, rounding=rounding)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert (dx.dtype, dweight.dtype) == (torch.float16, torch.float32)


@pytest.mark.kernels
def test_rms_norm_rounds_before_or_after_the_weight():
    """In fp16 rounding before the weight and after it give different values. Each agrees with its reference."""
    x, weight = _inputs((8, 64), torch.float16)
    before, after = (tigon.rms_norm(x, weight, rounding=r) for r in ("before_weight", "after_weight"))
    assert not torch.equal(before, after)
    # rstd may differ by a unit in the last place of fp32, which changes few values of fp16.
    for y, rounding in ((before, "before_weight"), (after, "after_weight")):
        assert (y != rms_norm_reference(x, weight, rounding=rounding)).float().mean() < 0.01


@pytest.mark.kernels
def test_rms_norm_accepts_large_and_tiny_values():
    x = torch.tensor([[1e30, -1e30, 1e30, 0.0], [1e-30, 1e-30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    x.requires_grad_()
    (y,), (dx,) = outputs_and_gradients(lambda x: tigon.rms_norm(x, None, 1e-6), [x])
    expected = rms_norm_reference(x, None, 1e-6)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=0.0, equal_nan=True)
    assert dx[1:].isfinite().all()


def test_rms_norm_module_agrees_with_torch_and_loads_its_state():
    ours, theirs = tigon.RMSNorm(48, eps=1e-5).to(DEVICE), torch.nn.RMSNorm(48, eps=1e-5).to(DEVICE)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 48, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    assert isinstance(ours, torch.nn.RMSNorm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_module_has_the_default_epsilon_of_torch(dtype):
    """The values are small, so an epsilon of half precision would change the result."""
    x = (torch.randn(4, 48, device=DEVICE) * 0.01).to(dtype)
    y, expected = tigon.RMSNorm(48).to(DEVICE)(x), torch.nn.RMSNorm(48).to(DEVICE)(x.float())
    torch.testing.assert_close(y.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def _inputs_with_residual(shape: tuple[int, ...], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    x, weight = _inputs(shape, dtypes[0], dtypes[2])
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtypes[1]).requires_grad_()
    return [x, residual, weight]


@pytest.mark.kernels
@one_in(2, shape=SHAPES, dtype=DTYPES, options=[{}, {"offset": 1.0, "rounding": "after_weight", "eps": 1e-5}])
def test_add_rms_norm_accuracy(shape, dtype, options):
    assert_as_accurate_as_eager(
        lambda *tensors: tigon.add_rms_norm(*tensors, **options),
        lambda *tensors: add_rms_norm_reference(*tensors, **options), _inputs_with_residual(shape, [dtype] * 3),
    )  # fmt: skip


HALF, FULL = torch.float16, torch.float32


@pytest.mark.kernels
@pytest.mark.parametrize("dtypes", [(HALF, FULL, HALF), (FULL, HALF, HALF), (HALF, HALF, FULL), (HALF, FULL, FULL)])
def test_add_rms_norm_accepts_several_dtypes(dtypes):
    """A residual in fp32 and layers in half precision give a sum and a norm with the dtypes of eager code."""
    tensors = _inputs_with_residual((4, 96), list(dtypes))
    assert_as_accurate_as_eager(tigon.add_rms_norm, add_rms_norm_reference, tensors)
    gradients = torch.autograd.grad([y.sum() for y in tigon.add_rms_norm(*tensors)], tensors)
    assert tuple(g.dtype for g in gradients) == dtypes


def test_add_rms_norm_rounds_the_sum_before_it_normalises():
    """In fp16 2048 + 1 is 2048. Eager code normalises this rounded sum."""
    x, residual = torch.full((1, 8), 2048.0, device=DEVICE, dtype=HALF), torch.ones(1, 8, device=DEVICE, dtype=HALF)
    x[0, 0] = 1.0
    y, total = tigon.add_rms_norm(x, residual, None)
    assert total[0].tolist() == [2.0] + [2048.0] * 7
    assert torch.equal(y, tigon.rms_norm(total, None))


@pytest.mark.kernels
@pytest.mark.parametrize("used", [0, 1], ids=["only the norm is used", "only the sum is used"])
def test_add_rms_norm_with_one_unused_output(used):
    tensors = _inputs_with_residual((5, 33), [FULL] * 3)
    results = []
    for run in (tigon.add_rms_norm, add_rms_norm_reference):
        y = run(*tensors)[used]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        results.append(torch.autograd.grad(y, tensors, dy, allow_unused=True))
    for gradient, expected in zip(*results, strict=True):
        assert (gradient is None) == (expected is None)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
def test_add_rms_norm_adds_a_tensor_to_itself():
    x, _, weight = _inputs_with_residual((5, 33), [FULL] * 3)
    assert_as_accurate_as_eager(
        lambda x, w: tigon.add_rms_norm(x, x, w), lambda x, w: add_rms_norm_reference(x, x, w), [x, weight]
    )


@pytest.mark.kernels
def test_add_rms_norm_accumulates_the_gradients_of_both_inputs_separately():
    x, residual, weight = _inputs_with_residual((5, 33), [FULL] * 3)
    for _ in range(2):
        torch.autograd.backward([y.sum() for y in tigon.add_rms_norm(x, residual, weight)])
    gradient = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, gradient)


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_add_rms_norm_refuses_bad_input():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    changes = {
        r"residual must have shape \(3, 8\), got \(1, 8\)": {"residual": x[:1]},
        "residual must be a Tensor, got float": {"residual": 1.0},
        "residual must be a Tensor, got NoneType": {"residual": None},
        "x and residual must have the same device": {"residual": x.to("meta")},
        r"weight must have shape \(8,\), got \(7,\)": {"weight": weight[:7]},
    }
    assert_refused(tigon.add_rms_norm, {"x": x, "residual": x, "weight": weight}, changes)


@pytest.mark.kernels
@pytest.mark.parametrize("n", [64, 700])
def test_sums_over_rows_in_blocks_of_columns_are_accurate(n):
    """Rows that are too wide for the registers take two launches: one for dx, and one for dweight in blocks."""
    tensors = _inputs_with_residual((37, n), [FULL] * 3)
    expected = outputs_and_gradients(tigon.add_rms_norm, tensors)[1]
    with tuned(NormConfig, splits=True, keeps_row=False, columns=128):
        results = outputs_and_gradients(tigon.add_rms_norm, tensors)[1]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@one_in(1, keeps_row={"row loaded twice": False, "row in registers": True}, offset=[0.0, 1.0])
def test_add_rms_norm_loads_the_weight_of_wide_rows_for_every_tile(offset, keeps_row):
    """From 16384 features on, the backward loads the weight for every tile, and with some configs the row twice."""
    with tuned(NormConfig, keeps_w=False, keeps_row=keeps_row):
        assert_as_accurate_as_eager(
            lambda *tensors: tigon.add_rms_norm(*tensors, offset=offset),
            lambda *tensors: add_rms_norm_reference(*tensors, offset=offset),
            _inputs_with_residual((9, 100), [FULL] * 3),
        )


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_rms_norm_refuses_bad_input():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    changes = {
        r"weight must have shape \(8,\), got \(7,\)": {"weight": weight[:7]},
        "x must be a float32, bfloat16 or float16 tensor, got torch.int64": {"x": x.long()},
        "x must be a Tensor, got list": {"x": [1.0]}, "x must be a Tensor, got NoneType": {"x": None},
        "x must have at least one dimension, got a scalar": {"x": x[0, 0], "weight": None},
        "rounding must be one of 'before_weight', 'after_weight', got 'no'": {"rounding": "no"},
        "eps must be finite and not negative, got -1": {"eps": -1}, "eps must be a number, got NoneType": {"eps": None},
        "x and weight must have the same device": {"weight": weight.to("meta")},
    }  # fmt: skip
    assert_refused(tigon.rms_norm, {"x": x, "weight": weight}, changes)
    with pytest.raises(ValueError, match=r"RMSNorm: the last dimension of x must have size 8, got shape \(3, 9\)"):
        tigon.RMSNorm(8)(torch.randn(3, 9))
