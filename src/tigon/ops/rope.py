r"""Rotary position embedding of queries and keys in one launch (Su et al., arXiv:2104.09864).

Each pair (x1, x2) = (x[i], x[i + R/2]) of the first R features turns by its angle; the others pass through:

    y1 = x1 * cos1 - x2 * sin1          dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2          dx2 = dy2 * cos2 - dy1 * sin1

cos1 and cos2 are the two halves of a row of `cos`; they are equal for every usual table, but nothing here needs it.

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.ops import check
from tigon.ops.dispatch import first_order, launch, launcher, runs_kernels

__all__ = ["rope", "rope_reference"]


# --- reference -----------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = x.chunk(2, -1)
    turned = x * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, passed), -1) if passed.shape[-1] else turned


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Eager definition of `rope`; the tests' ground truth and the CPU path."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


# --- configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Launch parameters: a program turns all heads of one token, `block_h` at a time."""

    block_h: int
    num_warps: int

    @staticmethod
    def heuristic(heads: int, head_size: int) -> "Config":
        # 8 heads of 128 at a time; all 32 in one tile take 2 % longer (H200) and more registers.
        block_h = max(1, min(triton.next_power_of_2(heads), 1024 // triton.next_power_of_2(head_size)))
        return Config(block_h=block_h, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _turn_heads(
    x_ptr, y_ptr, stride_xh, stride_yh, cos1, cos2, sin1, sin2,  # one token: [H, D]; cos, sin [R / 2]
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_R)
    for start in range(0, H, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        mask = (heads < H) & (cols[None, :] < R // 2)
        x1_ptrs, y1_ptrs = x_ptr + heads * stride_xh + cols, y_ptr + heads * stride_yh + cols
        x1 = tl.load(x1_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, R / 2]
        x2 = tl.load(x1_ptrs + R // 2, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
        tl.store(y1_ptrs, y1, mask=mask)
        tl.store(y1_ptrs + R // 2, y2, mask=mask)
        if R < D:
            rest = R + tl.arange(0, BLOCK_P)
            mask = (heads < H) & (rest[None, :] < D)
            tl.store(y_ptr + heads * stride_yh + rest, tl.load(x_ptr + heads * stride_xh + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,  # [B, H, S, D] by strides; cos, sin [B, S, R] by strides
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos,
    stride_cb, stride_cs, stride_sb, stride_ss,
    S,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, s = token // S, token % S

    cols = tl.arange(0, BLOCK_R)
    mask = cols < R // 2
    cos_ptr += b * stride_cb + s * stride_cs
    sin_ptr += b * stride_sb + s * stride_ss
    cos1 = tl.load(cos_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + R // 2 + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + R // 2 + cols, mask=mask, other=0.0).to(tl.float32)[None, :]

    _turn_heads(
        q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos, stride_qh, stride_qoh,
        cos1, cos2, sin1, sin2, HQ, D, R, BACKWARD, BLOCK_H, BLOCK_R, BLOCK_P,
    )  # fmt: skip
    _turn_heads(
        k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos, stride_kh, stride_koh,
        cos1, cos2, sin1, sin2, HK, D, R, BACKWARD, BLOCK_H, BLOCK_R, BLOCK_P,
    )  # fmt: skip


# --- launcher ------------------------------------------------------------------------------------


def _empty_like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """With the strides of `x`, if its features are dense then; empty for no dtype."""
    if dtype is None:
        return x.new_empty(0)
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def _fake(q, k, cos, sin, backward, q_dtype, k_dtype):
    return _empty_like(q, q_dtype), _empty_like(k, k_dtype)


@launcher(fake=_fake)
def rope_turn(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    q_dtype: torch.dtype | None,
    k_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D], k [B, Hk, S, D], cos, sin [B | 1, S, R] -> q and k turned (back); a dtype of None: not made."""
    (b, hq, s, d), hk, r = q.shape, k.shape[1], cos.shape[-1]
    q_out, k_out = _fake(q, k, cos, sin, backward, q_dtype, k_dtype)
    config = Config.heuristic(max(hq, hk), d)
    launch(
        _rope_kernel, b * s,
        q, k, cos, sin, q_out, k_out, *q.stride()[:3], *k.stride()[:3],
        *(q_out.stride()[:3] if q_dtype else (0, 0, 0)), *(k_out.stride()[:3] if k_dtype else (0, 0, 0)),
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        sin.stride(0) if sin.shape[0] > 1 else 0, sin.stride(1),
        s, HQ=hq if q_dtype else 0, HK=hk if k_dtype else 0, D=d, R=r, BACKWARD=backward, BLOCK_H=config.block_h,
        BLOCK_R=triton.next_power_of_2(r // 2), BLOCK_P=triton.next_power_of_2(max(d - r, 1)),
        num_warps=config.num_warps,
    )  # fmt: skip
    return q_out, k_out


def _dense_features(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# --- autograd ------------------------------------------------------------------------------------


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype
        widened = torch.promote_types(q.dtype, cos.dtype), torch.promote_types(k.dtype, cos.dtype)
        return rope_turn(_dense_features(q), _dense_features(k), cos, sin, False, *widened)

    @staticmethod
    @first_order
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        needs_dq, needs_dk = ctx.needs_input_grad[:2]
        q_dtype, k_dtype = ctx.dtypes[0] if needs_dq else None, ctx.dtypes[1] if needs_dk else None
        dq, dk = rope_turn(_dense_features(dq), _dense_features(dk), cos, sin, True, q_dtype, k_dtype)
        return dq if needs_dq else None, dk if needs_dk else None, None, None


# --- public --------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    check.floating("rope", q=q, k=k, cos=cos, sin=sin)
    check.choice("rope", "unsqueeze_dim", unsqueeze_dim, (1, 2))
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"rope: {name} must have 4 dimensions, got shape {tuple(x.shape)}")
    heads = unsqueeze_dim
    expected = list(q.shape)
    expected[heads] = k.shape[heads]
    check.shape("rope", "k", k, expected)
    check.same("rope", "device", q=q, k=k, cos=cos, sin=sin)
    check.same("rope", "dtype", cos=cos, sin=sin)
    batch, length = q.shape[0], q.shape[3 - heads]
    check.shape("rope", "sin", sin, cos.shape)
    if cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise ValueError(f"rope: cos must have shape (1 or {batch}, {length}, R), got {tuple(cos.shape)}")
    if cos.shape[-1] > q.shape[-1] or cos.shape[-1] % 2:
        raise ValueError(f"rope: R must be even and at most the head size {q.shape[-1]}, got R={cos.shape[-1]}")


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles, in the split-half layout, with gradients for both.

    Args:
        q: [B, Hq, S, D] with `unsqueeze_dim=1`, [B, S, Hq, D] with 2; fp32 | bf16 | fp16, any strides.
        k: The same with Hk heads.
        cos: [B, S, R], or [1, S, R] for all of the batch; R <= D is even, features from R on pass through.
        sin: As `cos`. No gradient flows to either.
        unsqueeze_dim: The dimension of the heads.

    Returns:
        The turned q and k, in the common dtype of each and the tables, with the strides of their inputs.

    Raises:
        TypeError: An argument is no floating-point tensor.
        ValueError: Shapes or devices do not fit together.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864; split into
    halves as in GPT-NeoX.

    Example:
        >>> q, k, angles = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(1, 5, 64)
        >>> [tuple(x.shape) for x in tigon.rope(q, k, angles.cos(), angles.sin())]
        [(2, 8, 5, 64), (2, 2, 5, 64)]
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    differentiable_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if not runs_kernels(q, k, cos, sin) or differentiable_tables or q.shape[-1] > 1024 or not cos.shape[-1]:
        return rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = _Rope.apply(q, k, _dense_features(cos), _dense_features(sin))
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
