"""The alias for Liger: hyper-connections, and names of Liger's modules that are not public."""

import pytest
import torch
from torch import nn

from tigon.integrations.liger import autograd_functions, hyper_connections, loss_bases

pytestmark = [
    pytest.mark.usefixtures("alias"),
    pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call."),
]


# --- hyper-connections ----------------------------------------------------------------------------


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
    pre, post, res = autograd_functions.LigerMHCCoeffsFunction.apply(
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


# --- names of Liger's modules ----------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "choices", "experts", "tile"), [(64, 2, 8, 16), (100, 3, 7, 64), (1, 1, 5, 4)])
def test_routing_has_the_rows_of_each_expert(tokens, choices, experts, tile):
    index = torch.rand(tokens, experts).topk(choices).indices.int()
    counts, starts, token, choice, row, tile_row, tile_expert = autograd_functions.compute_routing_metadata(
        index, experts, tile
    )
    assert torch.equal(counts, index.flatten().bincount(minlength=experts).int())
    assert torch.equal(choice[row.long()], torch.arange(tokens * choices).int())
    assert torch.equal(token, choice // choices)
    assert torch.equal(index.flatten()[choice.long()], torch.arange(experts).repeat_interleave(counts).int())
    tiles = [
        (start, expert)
        for expert in range(experts)
        for start in range(int(starts[expert]), int(starts[expert + 1]), tile)
    ]
    assert list(zip(tile_row.tolist(), tile_expert.tolist(), strict=True)) == tiles
    assert {t.dtype for t in (counts, starts, token, choice, row, tile_row, tile_expert)} == {torch.int32}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_log_probs_of_targets_compute_the_needed_gradients(monkeypatch, with_bias, is_frozen):
    import liger_kernel.chunked_loss.fused_linear_ppo as module

    calls, compute = [], module._selective_logprob_backward
    monkeypatch.setattr(
        module, "_selective_logprob_backward", lambda **options: calls.append(options) or compute(**options)
    )
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=not is_frozen)
    bias = torch.randn(11, requires_grad=True) if with_bias else None
    targets, upstream = torch.randint(11, (6,)), torch.randn(6)
    leaves = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    actual = loss_bases._ChunkedSelectiveLogProbFunction.apply(hidden, weight, targets, bias, 0.7, 4)
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / 0.7
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(actual, expected)
    for result, value in zip(
        torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(result, value)
    assert (calls[0]["compute_grad_weight"], calls[0]["compute_grad_bias"]) == (not is_frozen, with_bias)


def test_tiles_of_swiglu_depend_on_the_architecture(monkeypatch):
    import liger_kernel.ops.swiglu as module

    for arch, is_tiled in {"blackwell": True, "blackwell_ultra": True, "hopper": False}.items():
        monkeypatch.setattr(module, "infer_device_arch", lambda arch=arch: arch)
        assert [module._should_tile(columns) for columns in (8192, 8193, 16384)] == [False, is_tiled, is_tiled]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 100, "num_heads": 7}, "hidden_size 100 must be divisible by num_heads 7"),
        ({"kernel_size": 6}, "kernel_size 6 must be odd"),
        ({"kernel_size": 0}, "kernel_size 0 must be positive"),
        ({"dilation": 0}, "dilation 0 must be positive"),
    ],
)
def test_options_of_the_neighborhood_attention(options, message):
    from liger_kernel.transformers.fused_neighborhood_attention import LigerFusedNeighborhoodAttention

    with pytest.raises(ValueError, match=message):
        LigerFusedNeighborhoodAttention(**({"hidden_size": 64, "num_heads": 4} | options))
    attention = LigerFusedNeighborhoodAttention(hidden_size=64, num_heads=4)
    with pytest.raises(NotImplementedError, match="Attention mask is not yet supported"):
        attention(torch.randn(1, 4, 64), torch.ones(1, 4))
