"""Functions and modules of Liger that few models use, as compositions of torch and of Tigon's ops, without kernels.

They compute what Liger's kernels compute, and autograd differentiates them. They are neither faster nor smaller than
eager code.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.norms.rms_norm import rms_norm


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Return gamma * tanh(alpha * x) + beta. Source: Zhu et al., arXiv:2503.10622."""
    y = gamma * torch.tanh(alpha * x)
    return y if beta is None else y + beta


class LigerDyT(nn.Module):
    """`liger_dyt` with its parameters."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.ones(1) * init_alpha)
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        return liger_dyt(x, self.alpha, self.gamma, self.beta)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """Return W0 n(X^3) + W1 n(X^2) + W2 n(X) + B with n(u) = u / rms(u), computed in fp32, in the dtype of X. Source:
    Zhuo et al., arXiv:2411.03884."""
    z, weights = X.float(), W.float()
    normalise = lambda u: u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    total = weights[0] * normalise(z**3) + weights[1] * normalise(z**2) + weights[2] * normalise(z)
    return (total + B.float()).to(X.dtype)


class LigerPolyNorm(nn.Module):
    """`liger_poly_norm` with its parameters."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Return max(x - tau, 0), whose sum over `dim` is one: the nearest point of the probability simplex. Source:
    Martins and Astudillo, arXiv:1602.02068."""
    z = input.float()
    ordered = z.sort(dim=dim, descending=True).values
    shape = [1] * z.dim()
    shape[dim] = -1
    counts = torch.arange(1, z.shape[dim] + 1, device=z.device, dtype=z.dtype).view(shape)
    sums = ordered.cumsum(dim)
    # A row with NaN or infinity has a size of zero, and results of NaN.
    size = (1 + counts * ordered > sums).sum(dim, keepdim=True).clamp(min=1)
    tau = (sums.gather(dim, size - 1) - 1) / size
    return (z - tau).clamp(min=0).to(input.dtype)


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Return the convolution of the causal softmax or sparsemax of scores [B, C, L, L], zero for later tokens. Source:
    arXiv:2504.00927."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = scores.masked_fill(later, -1e9)
    weights = liger_sparsemax(masked) if sparse else masked.float().softmax(-1).to(scores.dtype)
    mixed = F.conv2d(weights, weight, bias, stride, padding, dilation, groups)
    later = torch.ones(mixed.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return mixed.masked_fill(later, 0.0)


class LigerMultiTokenAttention(nn.Module):
    """`liger_multi_token_attention` with its parameters."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        size = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
        self.options = stride, padding, dilation, groups, sparse
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, scores: Tensor) -> Tensor:
        return liger_multi_token_attention(scores, self.weight, self.bias, *self.options)


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Return attention [B, heads, L, D] to the kernel_size // 2 tokens on each side at multiples of the dilation. The
    neighbourhood of a token near the ends is smaller, as in Liger. Source: arXiv:2504.16922, in one dimension."""
    if kernel_size < 1 or kernel_size % 2 == 0 or dilation < 1:
        raise ValueError(
            "liger_fused_neighborhood_attention: kernel_size must be odd and positive, and dilation positive, got "
            f"{kernel_size} and {dilation}"
        )
    positions = torch.arange(query.shape[2], device=query.device)
    distance = (positions[:, None] - positions).abs()
    mask = (distance <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the outputs V [N, B, T, D] of N blocks, summed with the weights of an attention over the blocks. The
    scores are `rms_norm(V, w_norm) @ w_query`, and the weights their softmax over N. Source: arXiv:2603.15031."""
    blocks = V if isinstance(V, Tensor) else torch.stack(list(V))
    scores = (rms_norm(blocks, w_norm, eps=eps).float() * w_query.float()).sum(-1)  # [N, B, T]
    return (scores.softmax(0)[..., None] * blocks.float()).sum(0).to(blocks.dtype)
