r"""Rotary position embedding of queries and keys in one launch (Su et al., arXiv:2104.09864).

Each pair (x1, x2) of the first R features is rotated by its angle. The other features are copied:

    y1 = x1 * cos1 - x2 * sin1          dx1 = dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2          dx2 = dy2 * cos2 - dy1 * sin1

    layout           pair i of x                pair i of y                cos1 and cos2 in a row of `cos`
    split_half       (x[i], x[i + R/2])         (y[i], y[i + R/2])         cos[i], cos[i + R/2]
    interleaved      (x[2 i], x[2 i + 1])       (y[2 i], y[2 i + 1])       both cos[i]
    deinterleaved    (x[2 i], x[2 i + 1])       (y[i], y[i + R/2])         both cos[i]

The last column of this list holds for `table="halves"`. With `table="once"`, a row is R/2 wide, and cos1 and cos2 are
both cos[i]. With `table="pairs"` they are cos[2 i] and cos[2 i + 1]. In every usual table cos1 equals cos2, but the
code does not rely on that.

Shapes: B batch, S sequence, Hq and Hk heads of queries and keys, D head size, R rotary features.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.rotary.heads import PAIRED, HeadOptions, rotary_size, with_equal_strides
from tigon.ops.rotary.kernels import rope_rotate
from tigon.runtime import checks
from tigon.runtime.autograd import halves, keep_none_gradients, without_autocast
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

Layout = Literal["split_half", "interleaved", "deinterleaved"]
Table = Literal["halves", "once", "pairs"]

TABLES = ("halves", "once", "pairs")

# Wider heads are rotated by the reference.
MAX_HEAD_SIZE = 1024


def _pick_axes(table: Tensor, sections: Sequence[int]) -> Tensor:
    """Pick [B, S, R] from a table [3, B, S, R]: the sections of each half come from axes 0, 1, 2, 0 and so on."""
    ends = itertools.accumulate((*sections, *sections), initial=0)
    parts = [table[..., start:end] for start, end in itertools.pairwise(ends)]
    return torch.cat([part[i % len(sections) % 3] for i, part in enumerate(parts)], -1)


def _both_angles(table: Tensor, layout: Layout, kind: Table) -> tuple[Tensor, Tensor]:
    """Return the part of a table for the first feature of each pair, and the part for the second feature."""
    if kind == "pairs":
        return table[..., ::2], table[..., 1::2]
    first, second = (table, table) if kind == "once" else halves(table)
    return first, first if PAIRED[layout][0] else second


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, kind: Table) -> Tensor:
    """Rotate the heads of x. The tables broadcast over the heads."""
    x_paired, y_paired = PAIRED[layout]
    join = lambda first, second: (
        torch.stack((first, second), -1).flatten(-2) if y_paired else torch.cat((first, second), -1)
    )
    r = rotary_size(cos, kind)
    x, unrotated = x[..., :r], x[..., r:]
    x1, x2 = (x[..., ::2], x[..., 1::2]) if x_paired else halves(x)
    cos, sin = (join(*_both_angles(table, layout, kind)) for table in (cos, sin))
    if x_paired != y_paired:
        x = join(x1, x2)
    rotated = x * cos + join(-x2, x1) * sin
    return torch.cat((rotated, unrotated), -1) if unrotated.shape[-1] else rotated


@without_autocast
def rope_reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, layout: Layout = "split_half",
    sections: Sequence[int] | None = None, table: Table = "halves", dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if sections is not None:
        cos, sin = _pick_axes(cos, sections), _pick_axes(sin, sections)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotate(x: Tensor) -> Tensor:
        y = _rotate(x, cos, sin, layout, table)
        return y if dtype is None else y.to(dtype)

    return rotate(q), None if k is None else rotate(k)


class _Rope(Node):
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, dtype: torch.dtype | None, options: HeadOptions
    ) -> tuple[Tensor, Tensor | None]:
        # The parts of complex numbers are read where they are.
        cos, sin = with_equal_strides(cos, sin, 2 if options.table == "once" else 1)
        ctx.save_for_backward(cos, sin)
        keep_none_gradients(ctx)
        ctx.options, ctx.dtypes = options, (q.dtype, None if k is None else k.dtype)
        q_dtype, k_dtype = ctx.dtypes
        if dtype is not None or cos.dtype != q_dtype or cos.dtype != k_dtype:
            q_dtype = dtype or torch.promote_types(q_dtype, cos.dtype)
            k_dtype = None if k is None else dtype or torch.promote_types(k.dtype, cos.dtype)
        q_out, k_out = rope_rotate(q, k, cos, sin, options, False, q_dtype, k_dtype)
        return q_out, None if k is None else k_out

    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_dq, needs_dk = ctx.needs_input_grad[:2]
        dq_out, dk_out = dq_out if needs_dq else None, dk_out if needs_dk else None
        cos, sin = ctx.saved_tensors
        q_dtype, k_dtype = ctx.dtypes
        dq = dk = None
        if dq_out is not None:
            dq, dk = rope_rotate(dq_out, dk_out, cos, sin, ctx.options, True, q_dtype, k_dtype)
            # Autograd takes None for zeros. The launcher returns an empty tensor.
            dk = None if dk_out is None else dk
        elif dk_out is not None:
            # The launcher's first input cannot be None, so dk takes the place of dq.
            dk, _ = rope_rotate(dk_out, None, cos, sin, ctx.options, True, k_dtype, None)
        return dq, dk


def check_rope(
    op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    unsqueeze_dim: int, layout: Layout, sections: Sequence[int] | None, *, table: Table = "halves",
) -> None:  # fmt: skip
    """Check the arguments of `rope`, and name `op` in the errors."""
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
    *leading, rows, columns, _ = cos.shape if cos.dim() == 3 + len(axes) else (None, None, None, 0)
    if tuple(leading) != axes or rows not in (1, batch) or columns != length:
        shape = ", ".join([*map(str, axes), f"1 or {batch}", str(length), "R / 2" if table == "once" else "R"])
        raise ValueError(f"{op}: cos must have shape ({shape}), got {tuple(cos.shape)}")
    r = rotary_size(cos, table)
    if r > size or r % 2:
        raise ValueError(f"{op}: R must be even and at most the head size {size}, got R={r}")
    if sections is not None and (not all(type(n) is int and n >= 0 for n in sections) or sum(sections) != r // 2):
        raise ValueError(
            f"{op}: sections must be lengths that sum up to R / 2 = {r // 2}, got {checks.format_value(sections)}"
        )


def axes_of(sections: Sequence[int] | None) -> str:
    """Return the axis of each frequency as one digit, or "" for tables of one axis."""
    return "" if sections is None else "".join(str(i % 3) * n for i, n in enumerate(sections))


def can_run_kernels(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernels can compute a rotation of tensors on one device, without gradients of the tables."""
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return False
    device = q.device
    if cos.device != device or sin.device != device or (k is not None and k.device != device):
        return False
    return runs_kernels(q, k, cos, sin) and q.shape[3] <= MAX_HEAD_SIZE and cos.shape[-1] > 0


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, layout: Layout = "split_half",
    sections: Sequence[int] | None = None, table: Table = "halves", dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate queries and keys by the angles of their positions. Both get gradients.

    Args:
        q: [B, Hq, S, D] with `unsqueeze_dim=1`, [B, S, Hq, D] with 2; fp32 | bf16 | fp16, any strides.
        k: The same shape with Hk heads. None rotates only `q`.
        cos: [B, S, R], or [1, S, R] for the whole batch. With `sections` it is [3, B | 1, S, R]. R <= D is even, and
            features from R on are copied. A row holds the R / 2 frequencies twice:
            `torch.cat((freqs, freqs), -1).cos()`.
        sin: The same shape as `cos`. The kernels compute no gradients of the tables. If one needs a gradient, eager
            code computes the result.
        unsqueeze_dim: The dimension of the heads.
        layout: Which features are a pair: "split_half", i and i + R / 2 (Llama); "interleaved", 2 i and 2 i + 1 (GLM);
            "deinterleaved", 2 i and 2 i + 1 of the input, i and i + R / 2 of the output (DeepSeek V3).
        sections: Positions have three axes, time, height and width, each with its own row of the tables. The sections
            are numbers of frequencies that sum up to R / 2. The first section takes its angles from axis 0, the next
            ones from axes 1, 2, 0, 1, 2 and so on. `(16, 24, 24)` is Qwen2-VL, `(1,) * 60 + (4,)` the alternating axes
            of Qwen3-VL.
        table: How a row of the tables holds the R / 2 frequencies: "halves", all of them and then all of them again;
            "once", R / 2 wide (GPT-OSS; for the complex table of Llama 4, `cos` is its real part and `sin` its
            imaginary part, which are read without a copy); "pairs", each frequency twice in turn (Cohere).
            `sections` need "halves".
        dtype: The dtype of the result. The default is the common dtype of the input and the tables.

    Returns:
        The rotated q and k with the strides of their inputs. The second result is None if `k` is None.

    Raises:
        TypeError: A tensor argument is not a floating-point tensor, `dtype` is not a floating-point dtype, or
            `sections` is not a sequence.
        ValueError: Shapes or devices do not fit together, the tables differ in dtype, `layout`, `table` or
            `unsqueeze_dim` is unknown, or `sections` do not sum up to R / 2.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864; split into
    halves as in GPT-NeoX; sections: Wang et al., "Qwen2-VL", arXiv:2409.12191.

    Example:
        >>> q, k, angles = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(1, 5, 64)
        >>> [tuple(x.shape) for x in tigon.rope(q, k, angles.cos(), angles.sin())]
        [(2, 8, 5, 64), (2, 2, 5, 64)]
    """
    check_rope("rope", q, k, cos, sin, unsqueeze_dim, layout, sections, table=table)
    checks.floating_dtype("rope", "dtype", dtype)
    return rope_of_layer(
        q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=layout, sections=sections, table=table, dtype=dtype
    )


def rope_of_layer(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return `rope` of tensors that fit together, with all options. Torch refuses tensors of several devices."""
    return _rope(q, k, cos, sin, options)


# `lean` recomputes the results only if q and k are recomputed themselves, as the outputs of norms are.
@recomputed_by_call(inputs=2)
def _rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    if not can_run_kernels(q, k, cos, sin):
        return rope_reference(q, k, cos, sin, **options)
    head_options = HeadOptions(
        options["unsqueeze_dim"], options["layout"], axes_of(options["sections"]), options["table"]
    )
    return _Rope.apply(q, k, cos, sin, options["dtype"], head_options)
