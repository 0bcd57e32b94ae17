import pytest
import torch

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, outputs_and_gradients
from tigon.ops.dispatch import Device
from tigon.ops.rms_norm import Config, rms_norm_reference

# Two features, rows that fill no tile, widths on both sides of a power of two.
SHAPES = [(6, 2), (3, 5), (2, 3, 64), (17, 127), (5, 129), (3, 2048), (2, 5000)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 3
    weight = torch.randn(shape[-1], generator=generator)
    return [t.to(DEVICE, d).requires_grad_() for t, d in ((x, dtype), (weight, weight_dtype or dtype))]


@pytest.mark.parametrize("rounding", ["before_weight", "after_weight"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape, dtype, offset, rounding):
    options = {"offset": offset, "rounding": rounding, "eps": 1e-5}
    assert_as_accurate_as_eager(
        lambda x, w: tigon.rms_norm(x, w, **options),
        lambda x, w: rms_norm_reference(x, w, **options),
        _inputs(shape, dtype),
    )


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


def test_rounding_is_where_it_is_said_to_be():
    """fp16 shows it: rounding before the weight and after it differ, and each equals its definition bit for bit."""
    x, weight = _inputs((8, 64), torch.float16)
    before, after = (tigon.rms_norm(x, weight, rounding=r) for r in ("before_weight", "after_weight"))
    assert not torch.equal(before, after)
    # rstd itself may differ by a unit in the last place of fp32, which moves few values of fp16.
    for y, rounding in ((before, "before_weight"), (after, "after_weight")):
        assert (y != rms_norm_reference(x, weight, rounding=rounding)).float().mean() < 0.01


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


DEVICES = [Device(132, 32, 232448), Device(304, 64, 65536), Device(4, 32, 49152)]


@pytest.mark.parametrize("device", DEVICES, ids=["nvidia", "amd", "small"])
@pytest.mark.parametrize("n", [1, 100, 4096, 5120, 16384, 32768])
def test_heuristic(n, device):
    config = Config.heuristic(n, 2, device)
    assert config.block_n >= n
    assert 1 <= config.num_warps <= device.max_warps
    assert config.num_warps * device.warp_size <= 1024
    stages = config.num_stages - 1
    assert stages * 2 * config.block_m * config.block_n * 2 <= device.shared_memory


def test_bad_input():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(8,\), got \(7,\)"):
        tigon.rms_norm(x, weight[:7])
    with pytest.raises(TypeError, match="rms_norm: x must be a float32, bfloat16 or float16 tensor, got torch.int64"):
        tigon.rms_norm(x.long(), weight)
    with pytest.raises(TypeError, match="rms_norm: x must be a Tensor, got list"):
        tigon.rms_norm([1.0], weight)
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
