r"""Tokens to the experts of a mixture and back: rows sorted by expert, and weighted sums of what the experts made.

    spread    rows[slot[t, k]] = x[t]                       dx[t] = sum_k drows[slot[t, k]]
    combine   y[t] = sum_k w[t, k] * rows[slot[t, k]]       drows[slot[t, k]] = w[t, k] * dy[t]
                                                            dw[t, k] = sum_h dy[t, h] * rows[slot[t, k], h]

Each is one pass that reads a token once and takes its K rows in a fixed order, without atomics; sums in fp32, rounded
once. `slot` is where the sort by expert puts token t's k-th choice. Choices of an expert that is not here (an index of
E or more: of another rank) come last and count nothing: their rows and gradients are 0, whatever was there.

Shapes: T tokens, K choices each, S = T K rows, E experts, H features.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime.autograd import first_order
from tigon.runtime.device import Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.rows import block_of_row, dense_rows
from tigon.runtime.tuning import LaunchConfig, rung

__all__ = ["Routing", "combine", "combine_reference", "route", "spread", "spread_reference"]


class Routing(NamedTuple):
    """Where the rows of each token go; made by `route`."""

    slot: Tensor  # [T, K] int64: the row of a token's choice
    order: Tensor  # [S] int64: the choice (t K + k) of a row
    expert: Tensor  # [S]: of a row, ascending
    ends: Tensor  # [E] int32: one past the last row of each expert

    @property
    def absent(self) -> Tensor:
        """[S, 1] bool: rows of no expert."""
        return (self.expert >= self.ends.shape[0])[:, None]

    @property
    def group(self) -> Tensor:
        """[S] int64: the expert of a row, the last one for rows of none."""
        return self.expert.clamp(max=self.ends.shape[0] - 1).long()


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """top_k_index [T, K] of integers -> its rows sorted by expert; rows of one expert keep the order of the tokens."""
    # A radix sort takes a pass for each byte of its keys.
    small = top_k_index.reshape(-1).to(torch.int16 if num_experts < 2**15 else torch.int32)
    expert, order = small.sort(stable=True)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    experts = torch.arange(num_experts, dtype=expert.dtype, device=order.device)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return Routing(slot.view(top_k_index.shape), order, expert, ends)


# --- reference -----------------------------------------------------------------------------------


def spread_reference(x: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    """Eager definition of `spread`; the tests' ground truth and the CPU path."""
    rows = x[routing.order // max(1, routing.slot.shape[1])]
    return rows.masked_fill(routing.absent, 0.0).to(dtype or x.dtype)


def combine_reference(
    rows: Tensor, weights: Tensor | None, routing: Routing, dtype: torch.dtype | None = None
) -> Tensor:  # fmt: skip
    """Eager definition of `combine`; the tests' ground truth and the CPU path."""
    chosen = rows.masked_fill(routing.absent, 0.0)[routing.slot]
    chosen = chosen if weights is None else chosen * weights[..., None]
    return chosen.sum(1).to(dtype or rows.dtype)


# --- configuration -------------------------------------------------------------------------------


class RoutingProblem(NamedTuple):
    """What the launch parameters of `spread` and `combine` depend on."""

    features: int  # H


# Loads of 16 bytes a thread in bf16, K in flight in a sum: for blocks of up to so many features, the warps.
SUM_WARPS = ((256, 1), (512, 2), (1024, 4))
SPREAD_WARPS = ((512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16))


@dataclass(frozen=True)
class RoutingConfig(LaunchConfig):
    """Launch parameters: a program sums `sum_block` features of a token, or spreads a token, `block` at a time."""

    sum_block: int
    sum_warps: int
    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: RoutingProblem, device: Device) -> "RoutingConfig":
        h = problem.features
        block = triton.next_power_of_2(h) if h <= 8192 else 4096  # a token of up to 8192 features stays in registers
        sum_block = min(block, 1024)
        return RoutingConfig(sum_block, rung(SUM_WARPS, sum_block), block, rung(SPREAD_WARPS, block))


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["experts", "blocks"])
def _sum_kernel(
    rows_ptr, weights_ptr, slot_ptr, ends_ptr,  # [S, H], [T, K] if WEIGHTED, [T, K], [E]
    y_ptr,  # [T, H]
    width, experts, blocks,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, cols, mask = block_of_row(width, blocks, BLOCK)
    present = tl.load(ends_ptr + experts - 1)
    y = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + token * K + k)
        features = tl.where(slot < present, width, 0)
        row = tl.load(rows_ptr + slot * width + cols, mask=cols < features, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        y += row
    tl.store(y_ptr + token * width + cols, y, mask=mask)


@triton.jit(do_not_specialize=["experts"])
def _spread_kernel(
    x_ptr, rows_ptr, weights_ptr, slot_ptr, ends_ptr,  # [T, H], [S, H] if DOT, [T, K] if WEIGHTED, [T, K], [E]
    made_ptr, dot_ptr,  # [S, H] if MADE, [T, K] if DOT
    stride_x, width, experts,
    K: tl.constexpr, WEIGHTED: tl.constexpr, MADE: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    present = tl.load(ends_ptr + experts - 1)
    cols = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
    # Of more than two, too many addresses to keep; two alone spill on sm_80 in Triton 3.6.
    for k in tl.range(0, K, loop_unroll_factor=2 if K > 2 else 1):
        slot = tl.load(slot_ptr + token * K + k)
        here = slot < present
        features = tl.where(here, width, 0)
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
            if MADE:
                tl.store(made_ptr + slot * width + cols, tl.where(here, x * factor, 0.0), mask=mask)
        if DOT:
            tl.store(dot_ptr + token * K + k, dot)


# --- launchers (no autograd) ---------------------------------------------------------------------


def _fake_sum(rows, weights, slot, ends, dtype):
    return rows.new_empty((slot.shape[0], rows.shape[1]), dtype=dtype)


@launcher(fake=_fake_sum)
def sum_rows_of_tokens(rows: Tensor, weights: Tensor | None, slot: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [S, H], weights [T, K] or None (of 1) -> [T, H]."""
    y, h = _fake_sum(rows, weights, slot, ends, dtype), rows.shape[1]
    config = RoutingConfig.choose(RoutingProblem(h), device_of(rows))
    blocks = cdiv(h, config.sum_block)
    weights = weights if weights is None else weights.contiguous()
    launch(
        _sum_kernel, y.shape[0] * blocks, rows.contiguous(), weights, slot, ends, y, h, ends.shape[0], blocks,
        K=slot.shape[1], WEIGHTED=weights is not None, BLOCK=config.sum_block, num_warps=config.sum_warps,
    )  # fmt: skip
    return y


def _fake_spread(x, rows, weights, slot, ends, dtype, makes_rows, makes_dot):
    made = x.new_empty((slot.numel(), x.shape[1]), dtype=dtype) if makes_rows else None
    return made, torch.empty_like(weights, memory_format=torch.contiguous_format) if makes_dot else None


@launcher(fake=_fake_spread)
def spread_tokens(
    x: Tensor, rows: Tensor | None, weights: Tensor | None, slot: Tensor, ends: Tensor, dtype: torch.dtype,
    makes_rows: bool, makes_dot: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, H] -> weights[t, k] * x[t] [S, H], and x[t] . rows[slot[t, k]] [T, K] of rows [S, H]; None if not asked."""
    made, dot = _fake_spread(x, rows, weights, slot, ends, dtype, makes_rows, makes_dot)
    x, stride = dense_rows(x)
    config = RoutingConfig.choose(RoutingProblem(x.shape[-1]), device_of(x))
    contiguous = lambda y: None if y is None else y.contiguous()
    launch(
        _spread_kernel, slot.shape[0], x, contiguous(rows), contiguous(weights), slot, ends, made, dot,
        stride, x.shape[-1], ends.shape[0],
        K=slot.shape[1], WEIGHTED=weights is not None, MADE=makes_rows, DOT=makes_dot,
        WHOLE=x.shape[-1] <= config.block, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return made, dot


# --- autograd ------------------------------------------------------------------------------------


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slot, ends, dtype):
        ctx.save_for_backward(slot, ends)
        ctx.dtype = x.dtype
        return spread_tokens(x, None, None, slot, ends, dtype, True, False)[0]

    @staticmethod
    @first_order
    def backward(ctx, drows):
        slot, ends = ctx.saved_tensors
        return sum_rows_of_tokens(drows, None, slot, ends, ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slot, ends, dtype):
        needs_rows = ctx.needs_input_grad[1]  # only the gradient of the weights reads them
        ctx.save_for_backward(rows if needs_rows else None, weights, slot, ends)
        ctx.dtype = rows.dtype
        return sum_rows_of_tokens(rows, weights, slot, ends, dtype)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        rows, weights, slot, ends = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        drows, dweights = spread_tokens(dy, rows, weights, slot, ends, ctx.dtype, *needs)
        return drows if needs[0] else None, dweights if needs[1] else None, None, None, None


# --- public: their arguments are checked by the ops that they are parts of -------------------------


def spread(x: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, H] -> [S, H] in `dtype` (of `x`): each token once for each of its choices, sorted by expert."""
    if runs_kernels(x) and routing.slot.numel() and x.shape[1]:
        return _Spread.apply(x, routing.slot, routing.ends, dtype or x.dtype)
    return spread_reference(x, routing, dtype)


def combine(rows: Tensor, weights: Tensor | None, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
    """rows [S, H] sorted by expert, weights [T, K] or None (of 1) -> [T, H] in `dtype` (of `rows`): weighted sums over
    the choices.
    """
    if runs_kernels(rows, weights) and routing.slot.numel() and rows.shape[1]:
        return _Combine.apply(rows, weights, routing.slot, routing.ends, dtype or rows.dtype)
    return combine_reference(rows, weights, routing, dtype)
