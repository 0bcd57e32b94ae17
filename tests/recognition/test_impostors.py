"""A module that equals an op on usual values, but differs on other values or in its gradients, keeps its forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.recognition.parts.mlp_recipes import ActivationRecipe
from tigon.recognition.parts.mlps import recognise_glu, recognise_relu2
from tigon.recognition.parts.norm_recipes import LayerNormRecipe, RMSNormRecipe
from tigon.recognition.parts.norms import recognise_norm
from tigon.recognition.parts.rope import recognise_rope


class MLP(nn.Module):
    def __init__(self, gated, size: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(size, inner), nn.Linear(size, inner), nn.Linear(inner, size)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(self.w1(x), self.w3(x), x))


def clamped(limit: float):
    return lambda g, u, x: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def without_gradients(g, u, x):
    with torch.no_grad():
        return F.silu(g) * u


@pytest.mark.parametrize(
    "gated",
    [
        clamped(12.0),
        clamped(1e4),
        lambda g, u, x: F.silu(g).detach() * u,
        lambda g, u, x: F.silu(g) * u.detach(),
        without_gradients,
        lambda g, u, x: F.silu(g) * u * (2.0 if x.dtype == torch.float16 else 1.0),
        lambda g, u, x: F.silu(g) * u * 1.001,
    ],
    ids=["clamped", "clamped late", "gate detached", "up detached", "no_grad", "fp16", "nearly"],
)
def test_mlps_that_resemble_a_gated_mlp_keep_their_forward(gated):
    assert isinstance(recognise_glu(MLP(lambda g, u, x: F.silu(g) * u)).kind, str)
    assert recognise_glu(MLP(gated)) == "computes something else than silu, gelu or gelu-tanh gates"


def test_an_attention_is_no_mlp():
    """The sizes of query, key and value would fit a gated MLP."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, mask=None):
            return self.query(x).view(*x.shape[:2], 4, 4) @ mask

    assert recognise_glu(Attention()) is None


class Activation(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


@pytest.mark.parametrize(
    "act",
    [
        lambda m, x: F.relu(x).square() * 1.001,
        lambda m, x: F.relu(x).clamp(max=1e5).square(),
        lambda m, x: F.relu(x).square() * (1.0 if m.training else 2.0),
        lambda m, x: F.relu(x).detach() * F.relu(x),
    ],
    ids=["nearly", "clamped", "evaluating", "half detached"],
)
def test_activations_that_resemble_a_squared_relu_keep_their_forward(act):
    assert recognise_relu2(Activation(lambda m, x: F.relu(x).square())) == ActivationRecipe("relu2")
    assert not isinstance(recognise_relu2(Activation(act)), ActivationRecipe)


class Norm(nn.Module):
    def __init__(self, compute, size: int = 48, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if size else None
        self.eps, self.compute, self.head_dim = eps, compute, 48

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.eps)


def rms(x, w, eps):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if w is None else w * y.to(x.dtype)


def detached(x, w, eps):
    return w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).detach()).to(x.dtype)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w, eps: rms(x.clamp(-5e4, 5e4), w, eps),
        detached,
        lambda x, w, eps: (
            rms(x.transpose(-2, -3), w, eps).transpose(-2, -3) if x.dim() == 3 else rms(x.flip(-2), w, eps)
        ),
        lambda x, w, eps: rms(x, w, eps) if x.dim() < 4 else rms(x, w, eps).flip(1),
        lambda x, w, eps: rms(x, w, eps) * (2.0 if x.dtype == torch.float16 else 1.0),
        lambda x, w, eps: rms(x, w.detach(), eps),
    ],
    ids=["clamped late", "rstd detached", "rows swapped", "four dimensions", "fp16", "weight detached"],
)
def test_norms_that_resemble_an_rms_norm_keep_their_forward(compute):
    assert isinstance(recognise_norm(Norm(rms)), RMSNormRecipe)
    assert recognise_norm(Norm(compute)) == "computes something else than rms_norm or layer_norm"


def test_a_norm_of_each_head_is_no_norm_of_the_whole_width():
    norm = Norm(lambda x, w, eps: rms(x.unflatten(-1, (-1, 48)), w, eps).flatten(-2), size=0)
    assert recognise_norm(norm) == "computes something else than rms_norm or layer_norm"


def test_a_norm_of_each_head_with_one_weight_runs_its_own_forward_for_many_heads():
    """If the input is as wide as the weight, this module computes a plain norm."""
    norm = Norm(lambda x, w, eps: rms(x.unflatten(-1, (-1, 48)), w, eps).flatten(-2))
    x = torch.randn(3, 4 * 48)
    expected = norm(x)
    with tigon.patched(norm):
        assert torch.equal(norm(x), expected)


def test_a_norm_with_a_weight_of_one_element_is_refused():
    assert recognise_norm(Norm(rms, size=1)) == "has a weight of one element"


@pytest.mark.parametrize("width", [768, 4096], ids=str)
def test_wide_layer_norms_with_weights_in_fp32_are_recognised(width):
    """For an input of another dtype, torch's kernel rounds a few values in thousands differently."""
    assert isinstance(recognise_norm(nn.LayerNorm(width)), LayerNormRecipe)


# --- rope ----------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    return x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin


def rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def frozen_keys(q, k, cos, sin, unsqueeze_dim=1):
    return rope(q, k.detach(), cos, sin, unsqueeze_dim)


class Attention(nn.Module):
    def forward(self, *args, **kwargs):
        return rope(*args, **kwargs)


class Frozen(nn.Module):
    def forward(self, *args):
        return frozen_keys(*args)


def test_a_rope_without_gradients_of_its_keys_keeps_its_function():
    assert recognise_rope(Frozen()) == "frozen_keys: computes another rotary embedding than the op"


@pytest.mark.parametrize(
    ("q", "k", "cos", "sin"),
    [
        ((2, 4, 5, 8), (2, 2, 5, 8), (1, 1, 8), (1, 1, 8)),
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 1, 8), (2, 1, 8)),
        ((1, 4, 5, 8), (1, 2, 5, 8), (2, 5, 8), (2, 5, 8)),
        ((2, 4, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)),
        ((2, 4, 5, 8), (2, 2, 1, 8), (1, 1, 8), (1, 1, 8)),
        ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 8), (1, 1, 8)),
    ],
    ids=["one angle", "one angle each", "more tables", "one batch of keys", "one key", "sin of another shape"],
)
def test_arguments_that_broadcast_go_to_the_stock_function(q, k, cos, sin):
    model, inputs = Attention(), [torch.randn(shape) for shape in (q, k, cos, sin)]
    expected = model(*inputs)
    with tigon.patched(model) as report:
        assert [entry.part for entry in report.replaced] == ["rope"]
        assert all(torch.equal(a, b) for a, b in zip(model(*inputs), expected, strict=True))


def test_tables_of_another_dtype_go_to_the_stock_function():
    model, (q, k, cos) = Attention(), (torch.randn(shape) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 8)))
    expected = model(q, k, cos, cos.double())
    with tigon.patched(model):
        assert all(torch.equal(a, b) for a, b in zip(model(q, k, cos, cos.double()), expected, strict=True))
