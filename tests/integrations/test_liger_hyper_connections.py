"""The hyper-connections of the alias for Liger, against their formulas in fp64."""

import pytest
import torch
from torch import nn

from tigon.integrations.liger import hyper_connections
from tigon.integrations.liger import variants as functions

pytestmark = [
    pytest.mark.usefixtures("alias"),
    pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call."),
]


def tensors_of(streams: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    count = streams * streams + 2 * streams
    x = torch.randn(2, 3, streams, features).to(dtype)
    alphas = [torch.tensor(1.5), torch.tensor([0.5]), torch.tensor(2.0)]
    return [x, torch.randn(streams * features, count).to(dtype) / 8, torch.randn(count), *alphas]


def reference(tensors: list[torch.Tensor], iterations: int) -> list[torch.Tensor]:
    """The coefficients of one token after the other, in fp64."""
    x, phi, b, alpha_pre, alpha_post, alpha_res = (t.double() for t in tensors)
    streams, rows = x.shape[-2], x.flatten(0, -3).flatten(-2)
    results = []
    for row in rows:
        mix = (row / (row.square().mean() + 1e-6).sqrt()) @ phi
        pre = torch.sigmoid(mix[:streams] * alpha_pre + b[:streams]) + 1e-3
        post = 2 * torch.sigmoid(mix[streams : 2 * streams] * alpha_post + b[streams : 2 * streams])
        res = (mix[2 * streams :] * alpha_res + b[2 * streams :]).view(streams, streams).softmax(-1) + 1e-6
        for step in range(2 * iterations - 1):
            res = res / (res.sum(step % 2, keepdim=True) + 1e-6)
        results.append((pre, post, res))
    return [torch.stack(column).unflatten(0, x.shape[:-2]) for column in zip(*results, strict=True)]


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coefficients_and_their_gradients(streams, dtype):
    tensors = [t.requires_grad_() for t in tensors_of(streams, 7, dtype)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    outputs = hyper_connections.liger_mhc_coeffs(*tensors, allow_fp32=True, tmax=4, pre_eps=1e-3)
    expected = reference(exact, 4)
    for actual, value in zip(outputs, expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), value, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(sum(t.square().sum() for t in outputs), tensors)
    exact_gradients = torch.autograd.grad(sum(t.square().sum() for t in expected), exact)
    for actual, value in zip(gradients, exact_gradients, strict=True):
        tolerance = 1e-4 if actual.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual.double(), value.view(actual.shape), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_every_parameter_has_a_gradient_of_every_coefficient(output):
    tensors = [t.requires_grad_() for t in tensors_of(2, 8, torch.float16)]
    hyper_connections.liger_mhc_coeffs(*tensors)[output].sum().backward()
    assert all(t.grad is not None for t in tensors)


def test_coefficients_of_fp32_need_permission():
    with pytest.raises(AssertionError, match=r"fp32 with allow_fp32=True\), got torch.float32"):
        hyper_connections.liger_mhc_coeffs(*tensors_of(2, 8, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_reads_the_sum_of_the_streams(dtype):
    layer = nn.Linear(6, 6, bias=False, dtype=dtype)
    model = hyper_connections.LigerMHC(layer, hc=3, c=6, allow_fp32=True, phi_dtype=torch.float32)
    x = torch.randn(2, 5, 3, 6).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model(x)
    pre, post, res = functions.LigerMHCCoeffsFunction.apply(
        x, model.phi, model.b, model.alpha_pre, model.alpha_post, model.alpha_res, True, 20, 1e-6, 0.0, 1e-6, 2.0
    )
    u = torch.einsum("bts,btsh->bth", pre, x.float()).to(dtype)
    expected = torch.einsum("btos,btsh->btoh", res, x.float()) + post[..., None] * layer(u).float()[..., None, :]
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype))
    with pytest.raises(ValueError, match=r"x must have shape \[..., 3, 6\], got \(2, 6, 3\)"):
        model(torch.randn(2, 6, 3))
    streams, (returned, *_) = hyper_connections.liger_mhc_forward(
        x, layer, model.phi, model.b, model.alpha_pre, model.alpha_post, model.alpha_res, allow_fp32=True,
        return_coeffs=True,
    )  # fmt: skip
    torch.testing.assert_close(streams, y)
    torch.testing.assert_close(returned, pre)
    streams, inputs = hyper_connections.liger_mhc_apply(x, layer(u), pre, post, res, return_x_in=True)
    torch.testing.assert_close(streams, y)
    torch.testing.assert_close(inputs, u)
