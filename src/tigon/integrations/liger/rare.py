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

from tigon.integrations.liger.mlps import LigerGEGLUMLP, LigerSwiGLUMLP


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


# --- norms -----------------------------------------------------------------------------------------


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
        # A row with NaN or infinity has a size of zero, and results of NaN.
        size = (1 + counts * ordered > sums).sum(self.dim, keepdim=True).clamp(min=1)
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


def neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int, dilation: int, scale: float | None
) -> Tensor:
    """Return attention [B, heads, L, D] to the kernel_size // 2 tokens on each side at multiples of the dilation."""
    if kernel_size < 1 or kernel_size % 2 == 0 or dilation < 1:
        raise ValueError(
            "liger_fused_neighborhood_attention: kernel_size must be odd and positive, and dilation positive, got "
            f"{kernel_size} and {dilation}"
        )
    positions = torch.arange(query.shape[2], device=query.device)
    distance = (positions[:, None] - positions).abs()
    mask = (distance <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class LigerFusedNeighborhoodAttention(nn.Module):
    """Attention of each token to its neighbours, with projections of queries, keys, values and the result."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if hidden_size % num_heads:
            raise ValueError(f"{name}: hidden_size {hidden_size} must be divisible by num_heads {num_heads}")
        if kernel_size <= 0:
            raise ValueError(f"{name}: kernel_size {kernel_size} must be positive")
        if kernel_size % 2 == 0:
            raise ValueError(f"{name}: kernel_size {kernel_size} must be odd")
        if dilation < 1:
            raise ValueError(f"{name}: dilation {dilation} must be positive")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the attention of x [B, L, H]. A mask is refused, as in Liger."""
        if attention_mask is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: Attention mask is not yet supported; attention_mask must be None"
            )
        split = lambda x: x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        q, k, v = (split(linear(hidden_states)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        y = neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale).transpose(1, 2).flatten(2)
        result: Tensor = self.out_proj(y if self.dropout is None else self.dropout(y))
        return result


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """A layer norm, `LigerFusedNeighborhoodAttention` and the residual connection around both."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return x + attention(layer_norm(x)) for x [B, L, H]."""
        y = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (y if self.dropout is None else self.dropout(y))


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
