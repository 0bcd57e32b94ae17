"""The norms, rotary embeddings, MLPs and rare modules of the alias for Liger, against their formulas in eager torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from integrations.comparison import assert_same
from tigon.integrations.liger import functional, hyper_connections, layers, mlps, rare, rotary, variants

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the ops that these modules call.")

HALF = [torch.bfloat16, torch.float16]
X, ROW = torch.randn(4, 8), torch.randn(8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_norms_keep_the_dtype_of_their_input(casting_mode):
    for dtype in HALF:
        x = torch.randn(2, 3, 16).to(dtype).requires_grad_()
        x_hat = F.rms_norm(x.detach().float(), (16,), eps=1e-6)
        y = layers.LigerRMSNorm(16, casting_mode=casting_mode)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), x_hat, rtol=torch.finfo(dtype).eps, atol=0)
        scale, shift = torch.randn(2, 2, 16, requires_grad=True)
        weight = torch.ones(16, dtype=dtype)
        y = functional.liger_modulated_rms_norm(x, weight, scale, shift, casting_mode=casting_mode)
        tolerance = 2 * torch.finfo(dtype).eps
        expected = x_hat * (1 + scale[:, None]) + shift[:, None]
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
        gradients = torch.autograd.grad(y.sum(), (x, scale, shift))
        assert [g.dtype for g in gradients] == [dtype, torch.float32, torch.float32]


def test_norms_of_models():
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    normalised = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    modulated = layers.LigerModulatedRMSNorm(8)
    modulated.weight.data = weight
    scale, shift = torch.randn(2, 8), torch.randn(2, 8)
    expected = normalised * weight * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(modulated(x, scale, shift), expected)
    with pytest.raises(ValueError, match=r"scale must have a divisor of the rows of x, got \(5, 8\)"):
        modulated(x, torch.randn(5, 8))
    total, y = x + expected, layers.LigerFusedAddRMSNorm(8)(x, expected)
    torch.testing.assert_close(y, (F.rms_norm(total, (8,), eps=1e-6), total))
    for key in layers._NORMS:
        norm = getattr(layers, f"LigerRMSNorm{key}")(8)
        # The fresh norm of each model multiplies by one, whether its weight starts at zero or not.
        torch.testing.assert_close(norm(x), normalised, msg=key)
        norm.weight.data = weight
        torch.testing.assert_close(norm(x), normalised * (weight + norm.offset), msg=key)
    for key in ("MuseGlimmer", "Gemma4"):
        norm = getattr(layers, f"LigerRMSNormFor{key}")(8, with_scale=False)
        assert norm.weight is None
        torch.testing.assert_close(norm(x), normalised)
    with pytest.raises(ValueError, match="LigerRMSNormForMuseGlimmer: dim must be the number of features"):
        layers.LigerRMSNormForMuseGlimmer()
    x = x.bfloat16()
    x_hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    # The norms of Gemma multiply before they round.
    torch.testing.assert_close(layers.LigerRMSNorm(8, offset=1.0, casting_mode="gemma")(x), (2 * x_hat).to(x.dtype))
    torch.testing.assert_close(rare.LigerPolyNorm()(X), rare.liger_poly_norm(X, torch.ones(3) / 3, torch.tensor(1.0)))
    torch.testing.assert_close(layers.LigerLayerNorm(8)(X), F.layer_norm(X, (8,), eps=1e-6))
    torch.testing.assert_close(layers.LigerGroupNorm(8, 2)(X[..., None]), F.group_norm(X[..., None], 2, eps=1e-6))
    with pytest.raises(ValueError, match="LigerGroupNorm: num_channels must be divisible by 3, got 8"):
        layers.LigerGroupNorm(8, 3)


@pytest.mark.parametrize("is_centered", [False, True])
def test_the_norm_of_megatron(is_centered):
    config = SimpleNamespace(normalization="RMSNorm", layernorm_zero_centered_gamma=is_centered, sequence_parallel=True)
    norm = layers.LigerMegatronRMSNorm(config, 8)
    assert norm.weight.sequence_parallel
    torch.testing.assert_close(norm(X), F.rms_norm(X, (8,), eps=1e-5))
    norm.weight.data = ROW
    torch.testing.assert_close(norm(X), F.rms_norm(X, (8,), ROW + is_centered, eps=1e-5))
    with pytest.raises(ValueError, match="config.normalization must be 'RMSNorm', got 'LayerNorm'"):
        layers.LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 8)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """Rotate pairs (i, i + half) of x [B, heads, L, D] by tables [B | 1, L, half]."""
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (2, 5, 8), (1, 1, 5, 8), (2, 1, 5, 8)], ids=str)
def test_tables_of_any_rank_rotate(shape):
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(*shape[:-1], 4)
    angles = torch.cat((angles, angles), -1)
    rows = angles.reshape(-1, 5, 8)[..., :4]
    for function in (rotary.liger_rotary_pos_emb, rotary.liger_rope, variants.rope, variants.LigerRopeFunction.apply):
        for y, x in zip(function(q, k, angles.cos(), angles.sin()), (q, k), strict=True):
            torch.testing.assert_close(y, rotate(x, rows.cos(), rows.sin(), 4))


@pytest.mark.parametrize(
    ("size", "columns", "rotary_dim", "half"),
    [(7, 7, None, 3), (7, 8, None, 3), (9, 5, None, 2), (8, 4, 8, 4), (8, 3, 6, 3), (8, 16, None, 4)],
    ids=["odd", "odd, even table", "partial odd", "table once", "partial table once", "wide table"],
)
def test_odd_head_sizes_and_rotary_dims_rotate_as_in_liger(size, columns, rotary_dim, half):
    q, k, angles = torch.randn(2, 3, 5, size), torch.randn(2, 1, 5, size), torch.randn(1, 5, columns)
    q.requires_grad_()
    results = rotary.liger_rotary_pos_emb(q, k, angles.cos(), angles.sin(), rotary_dim=rotary_dim)
    expected = [rotate(x, angles.cos()[..., :half], angles.sin()[..., :half], half) for x in (q, k)]
    torch.testing.assert_close(list(results), expected)
    assert_same(results[0], expected[0], (q,))
    if rotary_dim == size:
        torch.testing.assert_close(rotary.liger_rotary_pos_emb_gpt_oss(q, k, angles.cos(), angles.sin()), results)


@pytest.mark.parametrize("rotary_dim", [3, 0, 10])
def test_a_rotary_dim_that_does_not_fit_is_refused(rotary_dim):
    x, table = torch.randn(1, 1, 5, 8), torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match=f"rotary_dim must be even, positive and at most .* got {rotary_dim}"):
        rotary.liger_rotary_pos_emb(x, x, table, table, rotary_dim=rotary_dim)


@pytest.mark.parametrize("dtype", HALF)
def test_rotated_queries_keep_their_dtype_below_tables_in_fp32(dtype):
    x, angles = torch.randn(1, 2, 5, 8).to(dtype), torch.randn(5, 4)
    angles = torch.cat((angles, angles), -1)
    y, _ = rotary.liger_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    expected = rotate(x, angles[None, :, :4].cos(), angles[None, :, :4].sin(), 4).to(dtype)
    torch.testing.assert_close(y, expected)
    vision, _ = rotary.liger_rotary_pos_emb_vision(*[x[0].transpose(0, 1)] * 2, angles.cos(), angles.sin())
    torch.testing.assert_close(vision, expected[0].transpose(0, 1))


def test_mrope_takes_the_frequencies_of_three_axes():
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    angles = torch.randn(3, 2, 5, 8)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    # Frequency 0 and 1 belong to time, 2 to 4 to height, 5 to 7 to width.
    angle = torch.cat((angles[0, ..., :2], angles[1, ..., 2:5], angles[2, ..., 5:]), -1)
    for ours, x in zip(rotary.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 3]), (q, k), strict=True):
        torch.testing.assert_close(ours, rotate(x, angle.cos(), angle.sin(), 8))
    with pytest.raises(ValueError, match=r"mrope_section must be three sizes with the sum 8, got \[2, 3, 4\]"):
        rotary.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 4])


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_rope_of_llama4_multiplies_adjacent_pairs(tower):
    function = getattr(rotary, f"liger_llama4_{tower}_rotary_pos_emb")
    q, k, angles = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(5, 4)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    for x, y in zip((q, k), function(q, k, torch.polar(torch.ones(5, 4), angles)), strict=True):
        even, odd = x[..., ::2], x[..., 1::2]
        torch.testing.assert_close(y[..., ::2], even * cos - odd * sin)
        torch.testing.assert_close(y[..., 1::2], even * sin + odd * cos)


def gated(mlp: nn.Module, x: Tensor, activation: Any = F.silu) -> Tensor:
    return mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))


def test_mlps():
    gelu = lambda x: F.gelu(x, approximate="tanh")
    sizes = {"hidden_size": 8, "intermediate_size": 12}
    silu = SimpleNamespace(**sizes, hidden_act="silu", hidden_activation="silu", mlp_multipliers=(0.5, 3.0))
    for cls in (mlps.LigerSwiGLUMLP, mlps.LigerHunyuanV1SwiGLUMLP, mlps.LigerSwiGLUMLPForMuseGlimmer):
        mlp = cls(silu)
        torch.testing.assert_close(mlp(X), gated(mlp, X))
        with pytest.raises(ValueError, match=r"must be '?silu'? or '?swish'?, got 'gelu'"):
            cls(SimpleNamespace(**sizes, hidden_act="gelu"))
    mlp = mlps.LigerGEGLUMLP(silu)
    torch.testing.assert_close(mlp(X), gated(mlp, X, gelu))
    mlp = mlps.LigerFalconH1SwiGLUMLP(silu)
    torch.testing.assert_close(mlp(X), gated(mlp, X, lambda gate: F.silu(0.5 * gate)) * 3.0)
    mlp = mlps.LigerPhi3SwiGLUMLP(silu)
    gate, up = mlp.gate_up_proj(X).chunk(2, -1)
    torch.testing.assert_close(mlp(X), mlp.down_proj(F.silu(gate) * up))
    mlp = mlps.LigerBlockSparseTop2MLP(silu)
    torch.testing.assert_close(mlp(X), mlp.w2(F.silu(mlp.w1(X)) * mlp.w3(X)))


@pytest.mark.parametrize(
    ("cls", "name"), [(mlps.LigerTiledSwiGLUMLP, "silu"), (mlps.LigerTiledGEGLUMLP, "gelu_pytorch_tanh")]
)
def test_tiles_compute_the_whole_mlp(cls, name):
    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act=name)
    mlp, x = cls(config, num_shards=3), torch.randn(2, 20, 8, requires_grad=True)
    activation = F.silu if name == "silu" else lambda gate: F.gelu(gate, approximate="tanh")
    assert_same(mlp(x), gated(mlp, x, activation), (x, mlp.gate_proj.weight))
    with pytest.raises(ValueError, match="hidden_act must be .* got 'relu'"):
        cls(SimpleNamespace(hidden_act="relu"))


def test_the_mlp_of_gemma_4_is_wide_where_layers_share_keys():
    config = SimpleNamespace(
        hidden_size=4, intermediate_size=6, num_hidden_layers=5, num_kv_shared_layers=2, use_double_wide_mlp=True
    )
    assert [mlps.LigerGEGLUMLPForGemma4(config, i).gate_proj.out_features for i in range(5)] == [6, 6, 6, 12, 12]


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_compute_the_weighted_sum(name):
    sizes = {"hidden_size": 8, "moe_intermediate_size": 6, "intermediate_size": 99, name: 4}
    experts = mlps.LigerExperts(SimpleNamespace(hidden_act="silu", **sizes))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, index, weights = torch.randn(2, 5, 8), torch.randint(4, (2, 5, 2), dtype=torch.int32), torch.rand(2, 5, 2)
    expected = torch.zeros(2, 5, 8)
    for e in range(4):
        gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, -1)
        factor = (weights * (index == e)).sum(-1, keepdim=True)
        expected += factor * ((F.silu(gate) * up) @ experts.down_proj[e].T)
    torch.testing.assert_close(experts(x, index, weights), expected)
    rows = [value.flatten(0, 1) for value in (x, index, weights)]
    y = variants.LigerFusedMoEFunction.apply(rows[0], experts.gate_up_proj, experts.down_proj, *rows[1:])
    torch.testing.assert_close(y, expected.flatten(0, 1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dim", [0, 1])
def test_sparsemax_of_a_row_without_a_nearest_point_is_nan(value, dim):
    x = torch.tensor([[1.0, 0.5, -1.0], [0.0, value, 0.0]])
    y = layers.LigerSparsemax(dim)(x if dim else x.T)
    assert (y if dim else y.T).isnan().any(-1).tolist() == [False, True]


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention_mixes_earlier_weights(sparse):
    module = rare.LigerMultiTokenAttention(4, 4, 3, padding=1, groups=2, sparse=sparse)
    scores = torch.randn(2, 4, 6, 6)
    later = torch.ones(6, 6).triu(1).bool()
    masked = scores.masked_fill(later, -torch.inf)
    weights = rare.liger_sparsemax(masked.clamp(min=-1e9)) if sparse else masked.softmax(-1)
    expected = F.conv2d(weights, module.weight, module.bias, padding=1, groups=2).masked_fill(later, 0.0)
    torch.testing.assert_close(module(scores), expected)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (5, 2)])
def test_neighborhood_attention_sees_the_window(kernel_size, dilation):
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind(0)
    ours = rare.liger_fused_neighborhood_attention(q, k, v, kernel_size, dilation)
    for row in range(9):
        offsets = range(-(kernel_size // 2) * dilation, kernel_size // 2 * dilation + 1, dilation)
        columns = [row + offset for offset in offsets if 0 <= row + offset < 9]
        weights = (q[:, :, row : row + 1] @ k[:, :, columns].mT / 2).softmax(-1)
        torch.testing.assert_close(ours[:, :, row : row + 1], weights @ v[:, :, columns])
    with pytest.raises(ValueError, match="kernel_size must be odd and positive, and dilation positive, got 4 and 1"):
        rare.liger_fused_neighborhood_attention(q, k, v, 4)


def tensors_of(streams: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    count = streams * streams + 2 * streams
    x = torch.randn(2, 3, streams, features).to(dtype)
    alphas = [torch.tensor(1.5), torch.tensor([0.5]), torch.tensor(2.0)]
    return [x, torch.randn(streams * features, count).to(dtype) / 8, torch.randn(count), *alphas]


def coefficients(tensors: list[Tensor], iterations: int) -> list[Tensor]:
    """Return the coefficients of one token after the other, in fp64."""
    x, phi, b, alpha_pre, alpha_post, alpha_res = (t.double() for t in tensors)
    streams, results = x.shape[-2], []
    for row in x.flatten(0, -3).flatten(-2):
        mix = (row / (row.square().mean() + 1e-6).sqrt()) @ phi
        pre = torch.sigmoid(mix[:streams] * alpha_pre + b[:streams]) + 1e-3
        post = 2 * torch.sigmoid(mix[streams : 2 * streams] * alpha_post + b[streams : 2 * streams])
        res = (mix[2 * streams :] * alpha_res + b[2 * streams :]).view(streams, streams).softmax(-1) + 1e-6
        for step in range(2 * iterations - 1):
            res = res / (res.sum(step % 2, keepdim=True) + 1e-6)
        results.append((pre, post, res))
    return [torch.stack(column).unflatten(0, x.shape[:-2]) for column in zip(*results, strict=True)]


@pytest.mark.parametrize(("streams", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (5, torch.float32)])
def test_coefficients_and_their_gradients(streams, dtype):
    tensors = [t.requires_grad_() for t in tensors_of(streams, 7, dtype)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    outputs = hyper_connections.liger_mhc_coeffs(*tensors, allow_fp32=True, tmax=4, pre_eps=1e-3)
    expected = coefficients(exact, 4)
    for index, (actual, value) in enumerate(zip(outputs, expected, strict=True)):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), value, rtol=1e-5, atol=1e-6)
        # Every parameter has a gradient of every coefficient, which may be zero.
        assert all(g is not None for g in torch.autograd.grad(actual.sum(), tensors, retain_graph=True)), index
    gradients = torch.autograd.grad(sum(t.square().sum() for t in outputs), tensors)
    exact_gradients = torch.autograd.grad(sum(t.square().sum() for t in expected), exact)
    for actual, value in zip(gradients, exact_gradients, strict=True):
        tolerance = 1e-4 if actual.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual.double(), value.view(actual.shape), rtol=tolerance, atol=tolerance)
    with pytest.raises(AssertionError, match=r"fp32 with allow_fp32=True\), got torch.float32"):
        hyper_connections.liger_mhc_coeffs(*tensors_of(2, 8, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_reads_the_sum_of_the_streams(dtype):
    layer = nn.Linear(6, 6, bias=False, dtype=dtype)
    model = hyper_connections.LigerMHC(layer, hc=3, c=6, allow_fp32=True, phi_dtype=torch.float32)
    x = torch.randn(2, 5, 3, 6).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model(x)
    parameters = model.phi, model.b, model.alpha_pre, model.alpha_post, model.alpha_res
    pre, post, res = variants.LigerMHCCoeffsFunction.apply(x, *parameters, True, 20, 1e-6, 0.0, 1e-6, 2.0)
    u = torch.einsum("bts,btsh->bth", pre, x.float()).to(dtype)
    expected = torch.einsum("btos,btsh->btoh", res, x.float()) + post[..., None] * layer(u).float()[..., None, :]
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype))
    with pytest.raises(ValueError, match=r"x must have shape \[..., 3, 6\], got \(2, 6, 3\)"):
        model(torch.randn(2, 6, 3))
    streams, (returned, *_) = hyper_connections.liger_mhc_forward(
        x, layer, *parameters, allow_fp32=True, return_coeffs=True
    )
    torch.testing.assert_close([streams, returned], [y, pre])
    streams, inputs = hyper_connections.liger_mhc_apply(x, layer(u), pre, post, res, return_x_in=True)
    torch.testing.assert_close([streams, inputs], [y, u])
