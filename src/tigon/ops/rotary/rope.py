r"""Rotary position embedding of queries and keys in one launch (Su et al., arXiv:2104.09864).

Each pair (x1, x2) of the first R features turns by its angle; the others pass through:

    y1 = x1 * cos1 - x2 * sin1          dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2          dx2 = dy2 * cos2 - dy1 * sin1

    layout           pair i of x                pair i of y                cos1 and cos2 in a row of `cos`
    split_half       (x[i], x[i + R/2])         (y[i], y[i + R/2])         cos[i], cos[i + R/2]
    interleaved      (x[2 i], x[2 i + 1])       (y[2 i], y[2 i + 1])       both cos[i]
    deinterleaved    (x[2 i], x[2 i + 1])       (y[i], y[i + R/2])         both cos[i]

That is for the table "halves". Of a table "once" (R/2 wide) both are cos[i], of "pairs" they are cos[2 i] and
cos[2 i + 1]. Both are equal for every usual table, but nothing here needs it.

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.memory.lean import remade
from tigon.ops.rotary.heads import (
    PAIRED,
    alike,
    axis_bits,
    blocks,
    dense_features,
    empty_like,
    head_strides,
    load_angles,
    load_heads,
    store_heads,
    table_strides,
    turn,
)
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.tuning import LaunchConfig

__all__ = ["rope", "rope_reference"]

Layout = Literal["split_half", "interleaved", "deinterleaved"]
Table = Literal["halves", "once", "pairs"]

TABLES = ("halves", "once", "pairs")

WIDEST = 1024  # the widest head that the kernels take; the reference takes wider ones


# --- reference -----------------------------------------------------------------------------------


def rotary_size(table: Tensor, kind: Table) -> int:
    """R."""
    return table.shape[-1] * (2 if kind == "once" else 1)


def _pick_axes(table: Tensor, sections: Sequence[int]) -> Tensor:
    """[3, B, S, R] -> [B, S, R]: of each half, the sections from axes 0, 1, 2, 0, ... in turn."""
    parts = table.split((*sections, *sections), -1)
    return torch.cat([part[i % len(sections) % 3] for i, part in enumerate(parts)], -1)


def _both_angles(table: Tensor, layout: Layout, kind: Table) -> tuple[Tensor, Tensor]:
    """Of the first and of the second feature of each pair."""
    if kind == "pairs":
        return table[..., ::2], table[..., 1::2]
    first, second = (table, table) if kind == "once" else table.chunk(2, -1)
    return first, first if PAIRED[layout][0] else second


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, kind: Table) -> Tensor:
    x_paired, y_paired = PAIRED[layout]
    join = lambda first, second: (
        torch.stack((first, second), -1).flatten(-2) if y_paired else torch.cat((first, second), -1)
    )
    r = rotary_size(cos, kind)
    x, passed = x[..., :r], x[..., r:]
    x1, x2 = (x[..., ::2], x[..., 1::2]) if x_paired else x.chunk(2, -1)
    cos, sin = (join(*_both_angles(table, layout, kind)) for table in (cos, sin))
    if x_paired != y_paired:
        x = join(x1, x2)
    turned = x * cos + join(-x2, x1) * sin
    return torch.cat((turned, passed), -1) if passed.shape[-1] else turned


def rope_reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, layout: Layout = "split_half",
    sections: Sequence[int] | None = None, table: Table = "halves", dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Eager definition of `rope`; the tests' ground truth and the CPU path."""
    if sections is not None:
        cos, sin = _pick_axes(cos, sections), _pick_axes(sin, sections)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [x if x is None else _rotate(x, cos, sin, layout, table) for x in (q, k)]
    return tuple(x if x is None or dtype is None else x.to(dtype) for x in turned)


# --- configuration -------------------------------------------------------------------------------


class RopeProblem(NamedTuple):
    """What the launch parameters of `rope` depend on."""

    heads: int  # of q or of k, the more of the two
    head_size: int


@dataclass(frozen=True)
class RopeConfig(LaunchConfig):
    """Launch parameters: a program turns all heads of one token, `block_h` at a time."""

    block_h: int
    num_warps: int

    @staticmethod
    def heuristic(problem: RopeProblem, device: Device) -> "RopeConfig":
        heads, head_size = map(triton.next_power_of_2, problem)
        # 8 heads of 128 at a time; all 32 in one tile take 2 % longer (H200) and more registers.
        return RopeConfig(block_h=max(1, min(heads, 1024 // head_size)), num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _turn_heads(
    x_ptr, y_ptr, stride_xh, stride_yh, cos1, cos2, sin1, sin2,  # one token: [H, D]; cos, sin [1, R / 2]
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    for start in range(0, H, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        inside = (heads < H) | (H % BLOCK_H == 0)
        x1, x2, rest = load_heads(x_ptr + heads * stride_xh, inside, D, R, X_PAIRED, BLOCK_R, BLOCK_P)
        y1, y2 = turn(x1, x2, cos1, cos2, sin1, sin2, BACKWARD)
        store_heads(y_ptr + heads * stride_yh, inside, y1, y2, rest, D, R, Y_PAIRED, BLOCK_R, BLOCK_P)


@triton.jit(do_not_specialize=["stride_ca", "S"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,  # [B, H, S, D] by strides; cos, sin [3, B, S, R] by strides
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_qob, stride_qoh, stride_qos, stride_kob, stride_koh, stride_kos,
    stride_ca, stride_cb, stride_cs, S,  # sin has the strides of cos
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    X_PAIRED: tl.constexpr, Y_PAIRED: tl.constexpr, AXES: tl.constexpr, TABLE: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)

    row, PAIRED = b * stride_cb + s * stride_cs, X_PAIRED or Y_PAIRED
    cos1, cos2 = load_angles(cos_ptr + row, stride_ca, R, PAIRED, AXES, BLOCK_R, TABLE)
    sin1, sin2 = load_angles(sin_ptr + row, stride_ca, R, PAIRED, AXES, BLOCK_R, TABLE)
    _turn_heads(
        q_ptr + b * stride_qb + s * stride_qs, q_out_ptr + b * stride_qob + s * stride_qos, stride_qh, stride_qoh,
        cos1, cos2, sin1, sin2, HQ, D, R, X_PAIRED, Y_PAIRED, BACKWARD, BLOCK_H, BLOCK_R, BLOCK_P,
    )  # fmt: skip
    if HK:
        _turn_heads(
            k_ptr + b * stride_kb + s * stride_ks, k_out_ptr + b * stride_kob + s * stride_kos, stride_kh, stride_koh,
            cos1, cos2, sin1, sin2, HK, D, R, X_PAIRED, Y_PAIRED, BACKWARD, BLOCK_H, BLOCK_R, BLOCK_P,
        )  # fmt: skip


# --- launcher ------------------------------------------------------------------------------------


def _fake(q, k, cos, sin, backward, heads, layout, axes, table, q_dtype, k_dtype):
    return empty_like(q, q, q_dtype), empty_like(k, q, k_dtype)


@launcher(fake=_fake)
def rope_turn(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    heads: int,
    layout: str,
    axes: str,
    table: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """q, k with heads in dimension `heads`; cos, sin [B | 1, S, R], or [3, B | 1, S, R] with the axis of each frequency
    in `axes` -> q and k (empty if None) turned, or turned back.
    """
    q_out, k_out = _fake(q, k, cos, sin, backward, heads, layout, axes, table, q_dtype, k_dtype)
    q, k = dense_features(q), dense_features(k)
    b, s, d, hq, hk = q.shape[0], q.shape[3 - heads], q.shape[3], q.shape[heads], 0 if k is None else k.shape[heads]
    config = RopeConfig.choose(RopeProblem(max(hq, hk), d), device_of(q))
    x_paired, y_paired = PAIRED[layout]
    launch(
        _rope_kernel, b * s,
        q, k, cos, sin, q_out, k_out, *head_strides(q, heads), *head_strides(k, heads),
        *head_strides(q_out, heads), *head_strides(None if k is None else k_out, heads),
        *table_strides(cos), s,
        HQ=hq, HK=hk, X_PAIRED=y_paired if backward else x_paired, Y_PAIRED=x_paired if backward else y_paired,
        AXES=axis_bits(axes), TABLE=table, BACKWARD=backward, BLOCK_H=config.block_h,
        **blocks(d, rotary_size(cos, table)), num_warps=config.num_warps,
    )  # fmt: skip
    return q_out, k_out


# --- autograd ------------------------------------------------------------------------------------


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, dtype, *options):
        cos, sin = alike(cos, sin)
        ctx.save_for_backward(cos, sin)
        keep_none_gradients(ctx)
        ctx.options, ctx.dtypes = options, (q.dtype, None if k is None else k.dtype)
        dtypes = [x if x is None else dtype or torch.promote_types(x, cos.dtype) for x in ctx.dtypes]
        q, turned = rope_turn(q, k, cos, sin, False, *ctx.options, *dtypes)
        return q, None if k is None else turned

    @staticmethod
    @first_order
    def backward(ctx, *upstream):
        gradients: list[Tensor | None] = [None] * 9
        wanted = [i for i, dy in enumerate(upstream) if dy is not None and ctx.needs_input_grad[i]]
        if wanted:
            dys, dtypes = [[x[i] for i in wanted] + [None] * (2 - len(wanted)) for x in (upstream, ctx.dtypes)]
            turned = rope_turn(*dys, *ctx.saved_tensors, True, *ctx.options, *dtypes)
            for i, dx in zip(wanted, turned, strict=False):
                gradients[i] = dx
        return tuple(gradients)


# --- public --------------------------------------------------------------------------------------


def check_rope(
    op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    unsqueeze_dim: int, layout: Layout, sections: Sequence[int] | None, table: Table = "halves",
) -> None:  # fmt: skip
    """Refuse what `rope` does not take, in the name of `op`."""
    checks.tensor(op, q=q, cos=cos, sin=sin)
    checks.floating(op, q=q, k=k, cos=cos, sin=sin)
    checks.choice(op, "unsqueeze_dim", unsqueeze_dim, (1, 2))
    checks.choice(op, "layout", layout, tuple(PAIRED))
    checks.choice(op, "table", table, TABLES)
    if sections is not None and table != "halves":
        raise ValueError(f"{op}: sections need table 'halves', got {table!r}")
    heads = unsqueeze_dim
    for name, x in (("q", q), ("k", k)):
        if x is not None and x.dim() != 4:
            raise ValueError(f"{op}: {name} must have 4 dimensions, got shape {tuple(x.shape)}")
    if k is not None:
        expected = list(q.shape)
        expected[heads] = k.shape[heads]
        checks.shape(op, "k", k, expected)
    checks.same(op, "device", q=q, k=k, cos=cos, sin=sin)
    checks.same(op, "dtype", cos=cos, sin=sin)
    batch, length, size = q.shape[0], q.shape[3 - heads], q.shape[3]
    checks.shape(op, "sin", sin, cos.shape)
    if sections is not None and not isinstance(sections, Sequence):
        raise TypeError(f"{op}: sections must be a sequence of ints, got {type(sections).__name__}")
    axes = () if sections is None else (3,)
    *found, rows, columns, _ = cos.shape if cos.dim() == 3 + len(axes) else (None, None, None, 0)
    if tuple(found) != axes or rows not in (1, batch) or columns != length:
        wanted = ", ".join([*map(str, axes), f"1 or {batch}", str(length), "R / 2" if table == "once" else "R"])
        raise ValueError(f"{op}: cos must have shape ({wanted}), got {tuple(cos.shape)}")
    r = rotary_size(cos, table)
    if r > size or r % 2:
        raise ValueError(f"{op}: R must be even and at most the head size {size}, got R={r}")
    if sections is not None and (not all(type(n) is int and n >= 0 for n in sections) or sum(sections) != r // 2):
        raise ValueError(
            f"{op}: sections must be lengths that sum up to R / 2 = {r // 2}, got {checks.shown(sections)}"
        )


def axes_of(sections: Sequence[int] | None) -> str:
    """The axis of each frequency, one digit each."""
    return "" if sections is None else "".join(str(i % 3) * n for i, n in enumerate(sections))


def takes_kernels(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernels do all that is asked of a rotation."""
    differentiable_tables = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    return runs_kernels(q, k, cos, sin) and not differentiable_tables and q.shape[3] <= WIDEST and cos.shape[-1] > 0


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, layout: Layout = "split_half",
    sections: Sequence[int] | None = None, table: Table = "halves", dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Turn queries and keys by their positions' angles, with gradients for both.

    Args:
        q: [B, Hq, S, D] with `unsqueeze_dim=1`, [B, S, Hq, D] with 2; fp32 | bf16 | fp16, any strides.
        k: The same with Hk heads; None turns `q` alone.
        cos: [B, S, R], or [1, S, R] for all of the batch; with `sections` [3, B | 1, S, R]. R <= D is even, features
            from R on pass through. A row is the R / 2 frequencies twice: `torch.cat((freqs, freqs), -1).cos()`.
        sin: As `cos`. No gradient flows to either from the kernels; tables that need one are computed eagerly.
        unsqueeze_dim: The dimension of the heads.
        layout: Which features are a pair: "split_half", i and i + R / 2 (Llama); "interleaved", 2 i and 2 i + 1 (GLM);
            "deinterleaved", 2 i and 2 i + 1 of the input, i and i + R / 2 of the output (DeepSeek V3).
        sections: Positions have three axes, time, height and width, each with its own row of the tables. Lengths that
            sum up to R / 2: so many frequencies take their angle from axis 0, 1, 2, then again from 0, 1, 2, and so on.
            `(16, 24, 24)` is Qwen2-VL, `(1,) * 60 + (4,)` the alternating axes of Qwen3-VL.
        table: How a row of the tables holds the R / 2 frequencies: "halves", all of them, then again; "once", R / 2
            wide (GPT-OSS); "pairs", each twice in turn (Cohere). Not with `sections`.
        dtype: Of the result; by default the common dtype of each and the tables.

    Returns:
        The turned q and k with the strides of their inputs. A `k` of None comes back as None.

    Raises:
        TypeError: A tensor or `dtype` is not of floating point, or `sections` no sequence.
        ValueError: Shapes or devices do not fit together, the tables differ in dtype, `layout`, `table` or
            `unsqueeze_dim` is unknown, or `sections` do not sum up to R / 2.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864; split into
    halves as in GPT-NeoX; sections: Wang et al., "Qwen2-VL", arXiv:2409.12191.

    Example:
        >>> q, k, angles = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(1, 5, 64)
        >>> [tuple(x.shape) for x in tigon.rope(q, k, angles.cos(), angles.sin())]
        [(2, 8, 5, 64), (2, 2, 5, 64)]
    """
    check_rope("rope", q, k, cos, sin, unsqueeze_dim, layout, sections, table)
    checks.floating_dtype("rope", "dtype", dtype)
    if not takes_kernels(q, k, cos, sin):
        return _by_reference(q, k, cos, sin, unsqueeze_dim, layout, sections, table, dtype)
    return _by_kernels(q, k, cos, sin, dtype, unsqueeze_dim, layout, axes_of(sections), table)


# Where queries and keys were normalised before, they can be made again from what the norms keep.


@remade(inputs=2)
def _by_kernels(*args: object) -> tuple[Tensor, Tensor | None]:
    return _Rope.apply(*args)


@remade(inputs=2)
def _by_reference(q, k, cos, sin, unsqueeze_dim, layout, sections, table, dtype) -> tuple[Tensor, Tensor | None]:
    return rope_reference(
        q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=layout, sections=sections, table=table, dtype=dtype
    )
