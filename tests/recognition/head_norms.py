"""Attention layers that normalise queries and keys before the rotary embedding, in several forms of forwards."""

import torch
import torch.nn.functional as F
from torch import nn

HEADS, KEY_HEADS, SIZE, WIDTH = 4, 2, 16, 32


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rope_to_one(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin


def rope_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return apply_to_both(q, k, cos, -sin, unsqueeze_dim)


def rope_in_fp32(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.to(q.dtype) for x in apply_to_both(q.float(), k.float(), cos, sin, unsqueeze_dim))


def rope_on_a_part(q, k, cos, sin, unsqueeze_dim=1):
    size = cos.shape[-1]
    rotated = apply_to_both(q[..., :size], k[..., :size], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((x, rest[..., size:]), -1) for x, rest in zip(rotated, (q, k), strict=True))


def rope_interleaved(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    rotate = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


apply_to_both = apply_rope


class Norm(nn.Module):
    """The norm of Qwen3, which rounds before the weight."""

    def __init__(self, width: int = SIZE, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class OffsetNorm(Norm):
    """The norm of Gemma 3, which adds 1 to the weight and rounds after it."""

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Attention(nn.Module):
    """The forward of Qwen3. The subclasses have other forwards."""

    def __init__(self, norm: type[Norm] = Norm):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, KEY_HEADS * SIZE), nn.Linear(WIDTH, KEY_HEADS * SIZE)
        self.q_norm, self.k_norm = norm(), norm()
        self.has_norms = self.has_rope = True

    def attend(self, q, k, x):
        v = self.v_proj(x).view(*x.shape[:-1], -1, SIZE).transpose(1, 2)
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class NormAfterTranspose(Attention):
    """The forward of Gemma 3."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class NormInBranch(Attention):
    """The forward of GLM-4-MoE."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        if self.has_norms:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class RopeInBranch(Attention):
    """The forward of AFMoE and, but for the order, of EXAONE 4."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        if self.has_rope:
            cos, sin = tables
            q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class OneTensorAtATime(Attention):
    """The forward of Gemma 3n."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        cos, sin = tables
        q = self.q_proj(x).view(shape)
        q = self.q_norm(q)
        q = apply_rope_to_one(q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        k = self.k_proj(x).view(shape)
        k = self.k_norm(k)
        k = apply_rope_to_one(k, cos, sin, unsqueeze_dim=2)
        k = k.transpose(1, 2)
        return self.attend(q, k, x)


class WholeTokenNorm(Attention):
    """The forward of OLMo 2, which normalises all heads of a token together."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(HEADS * SIZE), Norm(KEY_HEADS * SIZE)

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x))
        k = self.k_norm(self.k_proj(x))
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class ReadBetween(Attention):
    """A statement reads the normalised queries before they are rotated."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        scale = 1.0 + q.mean()
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q * scale, k, x)


class WrittenBetween(Attention):
    """A statement writes to the input of the norm before the queries are rotated."""

    def forward(self, x, tables):
        shape = (*x.shape[:-1], -1, SIZE)
        raw = self.q_proj(x).view(shape)
        q = self.q_norm(raw).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        raw.detach().zero_()
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return self.attend(q, k, x)


class OnlyNorms(nn.Module):
    """An attention layer without another pattern than that of the norms."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, q, k, tables):
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = tables
        q, k = apply_rope(q, k, cos, sin)
        return q, k
