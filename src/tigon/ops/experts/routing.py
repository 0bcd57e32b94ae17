r"""Two ops of a mixture of experts: `spread` copies tokens to rows sorted by expert, `combine` sums the experts' rows.

    spread    rows[slot[t, k]] = x[t]                       dx[t] = sum_k drows[slot[t, k]]
    combine   y[t] = sum_k w[t, k] * rows[slot[t, k]]       drows[slot[t, k]] = w[t, k] * dy[t]
                                                            dw[t, k] = sum_h dy[t, h] * rows[slot[t, k], h]

Each of these is one pass that reads a token once and its K rows in a fixed order, without atomics. Sums are in fp32 and
rounded once. `slot` is the row to which the sort by expert moves the k-th choice of token t. An index below 0, or of E
or more, is an expert of another rank. Such choices come last and add nothing: their rows and gradients count as 0.

Shapes: T tokens, K choices each, S = T K rows, E experts, H features.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.ops.experts.choice_order import Routing
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.op import Node
from tigon.runtime.rows import block_of_row, dense_rows
from tigon.runtime.tuning import rung


def spread_reference(x: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    rows = x[routing.order // max(1, routing.slot.shape[1])]
    return rows.masked_fill(routing.absent, 0.0).to(dtype or x.dtype)


def combine_reference(
    rows: Tensor, weights: Tensor | None, routing: Routing, dtype: torch.dtype | None = None
) -> Tensor:
    terms = rows.masked_fill(routing.absent, 0.0)[routing.slot]
    terms = terms if weights is None else terms * weights[..., None]
    return terms.sum(1).to(dtype or rows.dtype)


# In each pair, the first number is the largest number of features of a block, and the second one is its warps. In bf16
# a thread of a sum loads 16 bytes of each row, for K rows at a time.
SUM_WARPS = ((256, 1), (512, 2), (1024, 4))
SPREAD_WARPS = ((512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16))


@functools.cache
def _block_of_token(h: int) -> int:
    """Return how many features of a token a program copies at a time: all of up to 8192, which fit in registers."""
    return triton.next_power_of_2(h) if h <= 8192 else 4096


@triton.jit(do_not_specialize=["experts", "blocks"])
def _sum_kernel(
    rows_ptr, weights_ptr, slot_ptr, ends_ptr,  # [S, H], [T, K] if WEIGHTED, [T, K], [E]
    y_ptr,  # [T, H]
    width, experts, blocks,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a block of features over the K rows of one token."""
    token, cols, mask = block_of_row(width, blocks, BLOCK)
    present_rows = tl.load(ends_ptr + experts - 1, experts > 0, 0)
    y = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k)
        features = tl.where(slot < present_rows, width, 0)
        row = tl.load(rows_ptr + slot * width + cols, mask=cols < features, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        y += row
    tl.store(y_ptr + token * width + cols, y, mask=mask)


@triton.jit(do_not_specialize=["experts"])
def _spread_kernel(
    x_ptr, rows_ptr, weights_ptr, slot_ptr, ends_ptr,  # [T, H], [S, H] if DOT, [T, K] if WEIGHTED, [T, K], [E]
    y_ptr, dot_ptr,  # [S, H] if WRITES_ROWS, [T, K] if DOT
    stride_x, width, experts,
    K: tl.constexpr, WEIGHTED: tl.constexpr, WRITES_ROWS: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the K rows of one token, compute its K dot products, or both."""
    token = tl.program_id(0).to(tl.int64)
    present_rows = tl.load(ends_ptr + experts - 1, experts > 0, 0)
    cols = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
    # Unrolling more than two choices would need too many addresses. If K is 2, unrolling both spills registers on sm_80
    # in Triton 3.6.
    for k in tl.range(0, K, loop_unroll_factor=2 if K > 2 else 1):
        slot = tl.load(slot_ptr + token * K + k)
        is_present = slot < present_rows
        features = tl.where(is_present, width, 0)
        factor = tl.load(weights_ptr + token * K + k).to(tl.float32) if WEIGHTED else 1.0
        dot = 0.0
        for start in range(0, width, BLOCK):
            cols = start + tl.arange(0, BLOCK).to(tl.int64)
            mask = cols < width
            if not WHOLE:
                x = tl.load(x_ptr + token * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
            if DOT:
                row = tl.load(rows_ptr + slot * width + cols, mask=cols < features, other=0.0).to(tl.float32)
                dot += tl.sum(x * row)
            if WRITES_ROWS:
                tl.store(y_ptr + slot * width + cols, tl.where(is_present, x * factor, 0.0), mask=mask)
        if DOT:
            tl.store(dot_ptr + token * K + k, dot)


def _empty_sum(rows: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty((slot.shape[0], rows.shape[1]), dtype=dtype)


@launcher(fake=_empty_sum)
def sum_rows_of_tokens(rows: Tensor, weights: Tensor | None, slot: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, H], the sum of each token's K rows of [S, H]. If weights [T, K] is not None, they scale the rows."""
    y, h = _empty_sum(rows, slot, dtype), rows.shape[1]
    block = min(_block_of_token(h), 1024)
    blocks = cdiv(h, block)
    weights = weights if weights is None else weights.contiguous()
    launch(
        _sum_kernel, y.shape[0] * blocks, rows.contiguous(), weights, slot, ends, y, h, ends.shape[0], blocks,
        K=slot.shape[1], WEIGHTED=weights is not None, BLOCK=block, num_warps=rung(SUM_WARPS, block),
    )  # fmt: skip
    return y


def _empty_spread(
    x: Tensor, weights: Tensor | None, slot: Tensor, dtype: torch.dtype, needs_rows: bool, needs_dot: bool
) -> tuple[Tensor | None, Tensor | None]:
    y = x.new_empty((slot.numel(), x.shape[1]), dtype=dtype) if needs_rows else None
    if not needs_dot:
        return y, None
    assert weights is not None
    return y, torch.empty_like(weights, memory_format=torch.contiguous_format)


@launcher(fake=_empty_spread)
def spread_tokens(
    x: Tensor, rows: Tensor | None, weights: Tensor | None, slot: Tensor, ends: Tensor, dtype: torch.dtype,
    needs_rows: bool, needs_dot: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return weights[t, k] * x[t] [S, H] for each row of a token, without the factor if `weights` is None, and x[t] .
    rows[slot[t, k]] [T, K] for rows [S, H]. A result that is not needed is None."""
    y, dot = _empty_spread(x, weights, slot, dtype, needs_rows, needs_dot)
    x, stride = dense_rows(x)
    block = _block_of_token(x.shape[-1])
    contiguous = lambda tensor: None if tensor is None else tensor.contiguous()
    launch(
        _spread_kernel, slot.shape[0], x, contiguous(rows), contiguous(weights), slot, ends, y, dot,
        stride, x.shape[-1], ends.shape[0],
        K=slot.shape[1], WEIGHTED=weights is not None, WRITES_ROWS=needs_rows, DOT=needs_dot,
        WHOLE=x.shape[-1] <= block, BLOCK=block, num_warps=rung(SPREAD_WARPS, block),
    )  # fmt: skip
    return y, dot


class _Spread(Node):
    def forward(ctx: Any, x: Tensor, slot: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor | None:
        ctx.save_for_backward(slot, ends)
        ctx.dtype = x.dtype
        rows, _ = spread_tokens(x, None, None, slot, ends, dtype, True, False)
        return rows

    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor]:
        slot, ends = ctx.saved_tensors
        return (sum_rows_of_tokens(drows, None, slot, ends, ctx.dtype),)


class _Combine(Node):
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, slot: Tensor, ends: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # Only the gradient of the weights reads the rows.
        needs_dweights = ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if needs_dweights else None, weights, slot, ends)
        ctx.dtype = rows.dtype
        return sum_rows_of_tokens(rows, weights, slot, ends, dtype)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, slot, ends = ctx.saved_tensors
        return spread_tokens(dy, rows, weights, slot, ends, ctx.dtype, *ctx.needs_input_grad[:2])


def spread(x: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    """Return [S, H]: each token of x [T, H] once for each of its choices, sorted by expert. The result has the dtype of
    `x` if `dtype` is None."""
    if runs_kernels(x) and routing.slot.numel() and x.shape[1]:
        return _Spread.apply(x, routing.slot, routing.ends, dtype or x.dtype)
    return spread_reference(x, routing, dtype)


def spread_weighted(x: Tensor, weights: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Return [S, H] in `dtype`: weights[t, k] * x[t] for each choice, sorted by expert, without autograd."""
    if runs_kernels(x, weights) and routing.slot.numel() and x.shape[1]:
        rows, _ = spread_tokens(x, None, weights, routing.slot, routing.ends, dtype, True, False)
        assert rows is not None
        return rows
    rows = spread_reference(x, routing, torch.promote_types(x.dtype, weights.dtype))
    return rows.mul_(weights.flatten()[routing.order, None]).to(dtype)


def dot_products(x: Tensor, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Return x[t] . rows[slot[t, k]] [T, K] for x [T, H] and rows [S, H], without autograd. The result has the dtype
    and the shape of `weights`. It is 0 for the choices of experts of other ranks."""
    if runs_kernels(x, rows, weights) and routing.slot.numel() and x.shape[1]:
        _, dot = spread_tokens(x, rows, weights, routing.slot, routing.ends, x.dtype, False, True)
        assert dot is not None
        return dot
    wide_dtype = torch.promote_types(weights.dtype, torch.float32)
    present_rows = rows.masked_fill(routing.absent, 0.0)[routing.slot].to(wide_dtype)
    return (present_rows @ x.to(wide_dtype)[..., None])[..., 0].to(weights.dtype)


def combine(rows: Tensor, weights: Tensor | None, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    """Return [T, H]: the sum of the rows [S, H], sorted by expert, of each token's choices, scaled by weights [T, K] if
    there are some. The dtype is that of `rows` if `dtype` is None."""
    if runs_kernels(rows, weights) and routing.slot.numel() and rows.shape[1]:
        return _Combine.apply(rows, weights, routing.slot, routing.ends, dtype or rows.dtype)
    return combine_reference(rows, weights, routing, dtype)
