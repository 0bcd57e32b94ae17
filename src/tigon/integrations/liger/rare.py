"""Modules of Liger that few models use, as compositions of torch and of Tigon's ops. They have no kernels of their own.

They compute what Liger's kernels compute, and autograd differentiates them. They are neither faster nor smaller than
eager code.
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.integrations.liger.layers import LigerRMSNorm
from tigon.integrations.liger.mlps import LigerGEGLUMLP, LigerSwiGLUMLP

__all__ = [
    "LigerModulatedRMSNorm", "LigerMultiTokenAttention", "LigerPolyNorm", "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered", "LigerSparsemax", "LigerSwiGLUMLPForMuseGlimmer", "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP", "is_transformers_available", "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb", "modulate", "poly_norm",
]  # fmt: skip


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


# --- norms -----------------------------------------------------------------------------------------


class LigerModulatedRMSNorm(LigerRMSNorm):
    """(1 + scale) * norm(x) + shift, as in diffusion transformers (Peebles and Xie, arXiv:2212.09748)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the modulated norm. `scale` and `shift` are [H], one row for each sequence [B, H], or [..., H]."""
        return modulate(super().forward(hidden_states), scale, shift)


def modulate(y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Return (1 + scale) * y + shift."""
    y = y * (1 + _broadcast("scale", scale, y))
    return y if shift is None else y + _broadcast("shift", shift, y)


def _broadcast(name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return `value` in a shape that broadcasts to `like`: each of its rows serves as many adjacent rows as needed."""
    rows, width = like.numel() // like.shape[-1], like.shape[-1]
    count = value.numel() // width
    if value.shape[-1] != width or count == 0 or rows % count:
        shapes = f"{tuple(value.shape)} and {tuple(like.shape)}"
        raise ValueError(f"LigerModulatedRMSNorm: {name} must have a divisor of the rows of x, got {shapes}")
    return value.reshape(count, 1, width).expand(count, rows // count, width).reshape(like.shape)


class LigerPolyNorm(nn.Module):
    """w0 n(x^3) + w1 n(x^2) + w2 n(x) + b with n(u) = u / rms(u). Source: Zhuo et al., arXiv:2411.03884."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm over the last dimension, computed in fp32, in the dtype of the input."""
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


def poly_norm(x: Tensor, weights: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return w0 n(x^3) + w1 n(x^2) + w2 n(x) + b, computed in fp32, in the dtype of x."""
    z, weights = x.float(), weights.float()
    normalise = lambda u: u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    total = weights[0] * normalise(z**3) + weights[1] * normalise(z**2) + weights[2] * normalise(z)
    return (total + bias.float()).to(x.dtype)


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    """The norm of Muse Glimmer, which may have no weight."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        if dim is None and with_scale:
            raise ValueError(f"{type(self).__name__}: dim must be the number of features if with_scale is True")
        super().__init__(dim or 1, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNorm):
    """The norm of Muse Glimmer whose weight is an offset from one."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


# --- attention -------------------------------------------------------------------------------------


class LigerSparsemax(nn.Module):
    """Sparsemax: the nearest point of the probability simplex. Source: Martins and Astudillo, arXiv:1602.02068."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x - tau, 0), whose sum over `dim` is one."""
        z = x.float()
        ordered = z.sort(dim=self.dim, descending=True).values
        shape = [1] * z.dim()
        shape[self.dim] = -1
        counts = torch.arange(1, z.shape[self.dim] + 1, device=z.device, dtype=z.dtype).view(shape)
        sums = ordered.cumsum(self.dim)
        size = (1 + counts * ordered > sums).sum(self.dim, keepdim=True)
        tau = (sums.gather(self.dim, size - 1) - 1) / size
        return (z - tau).clamp(min=0).to(x.dtype)


class LigerMultiTokenAttention(nn.Module):
    """A convolution over the causal attention weights of neighbouring tokens. Source: arXiv:2504.00927."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        size = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
        self.stride, self.padding, self.dilation, self.groups, self.sparse = stride, padding, dilation, groups, sparse
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, scores: Tensor) -> Tensor:
        """Return the mixed weights for scores [B, C, L, L]. Later tokens get the weight zero before and after."""
        return multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )


def multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    sparse: bool,
) -> Tensor:  # fmt: skip
    """Return the convolution of the causal softmax or sparsemax of scores [B, C, L, L], zero for later tokens."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = scores.masked_fill(later, -1e9)
    weights = LigerSparsemax()(masked) if sparse else masked.float().softmax(-1).to(scores.dtype)
    mixed = F.conv2d(weights, weight, bias, stride, padding, dilation, groups)
    later = torch.ones(mixed.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return mixed.masked_fill(later, 0.0)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k [B, L, heads, D], whose adjacent pairs are multiplied by the complex numbers [..., L, D / 2]."""
    factors = freqs_cis.reshape(-1, freqs_cis.shape[-1])[: xq.shape[1]]
    return _multiply_pairs(xq, factors), _multiply_pairs(xk, factors)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [B, L, heads, D], multiplied like those of `liger_llama4_text_rotary_pos_emb`."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci)


def _multiply_pairs(x: Tensor, factors: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors[:, None]).flatten(-2).to(x.dtype)


# --- MLPs ------------------------------------------------------------------------------------------


class LigerSwiGLUMLPForMuseGlimmer(LigerGEGLUMLP):
    """The gated MLP of Muse Glimmer, whose config calls the activation `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        if activation not in ("silu", "swish"):
            raise ValueError(f"{type(self).__name__}: hidden_activation must be silu or swish, got {activation!r}")
        super().__init__(config)

    forward = LigerSwiGLUMLP.forward


def _in_tiles(mlp: nn.Module, forward: Any, x: Tensor, tiles: int | None) -> Tensor:
    """Return the MLP of x [..., L, H], tile by tile along L. Backward computes each tile again."""
    count = max(1, math.ceil(x.shape[-2] / x.shape[-1]) if tiles is None else tiles)
    parts = [checkpoint(forward, mlp, part, use_reentrant=False) for part in x.chunk(count, -2)]
    return torch.cat([part for part in parts if part is not None], -2)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """The gated MLP with GELU on tiles of the sequence, each of which backward computes again."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        activation = getattr(config, "hidden_act", "gelu")
        if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"{type(self).__name__}: hidden_act must be a GELU, got {activation!r}")
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x [B, L, H] or [L, H]."""
        return _in_tiles(self, LigerGEGLUMLP.forward, x, self.num_shards)


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """The gated MLP with SiLU on tiles of the sequence, each of which backward computes again."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x [B, L, H] or [L, H]."""
        return _in_tiles(self, LigerSwiGLUMLP.forward, x, self.num_shards)
