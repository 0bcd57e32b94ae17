r"""The products of `low_rank` for the experts of a mixture. Rows are sorted by expert, and each expert has its A and B.

    grouped_project     h[s] = z[s] A[e]^T                    [S, R]        reads z once
    grouped_expand      out[s] += h[s] B[e]^T                 [S, N]        reads and writes out once
    grouped_sums        G[e] = sum over its rows z[s]^T h[s]  [E, N, R]     reads z once

The rows of z are either in memory, sorted by expert, or those of the tokens: then the kernel reads the token of each
row, so that the tokens of a backward pass are never copied to [S, N] for these products.

A program finds its expert and its rows from the end of each expert, which it reads on the device. The host does not
know the number of tiles. It launches as many programs as any routing may need, and those without a tile return at once.

Factors A and B in fp32 are split into two bf16 terms, which keep 16 bits, and h is stored in fp32 and split when it is
read. This is more accurate than PEFT's code, which rounds A and B to the dtype of the experts. Each step of a sum
starts from zero, for the reason that `low_rank` explains.

Shapes: T tokens, K choices each, S = T K rows, E experts, N features, R ranks of all adapters of a projection together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank import TERMS, rank_block
from tigon.ops.adapters.low_rank_kernels import term
from tigon.ops.experts.routing import Routing
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.triton_private import tl, triton
from tigon.runtime.tuning import LaunchConfig

__all__ = ["GroupedLowRankConfig", "grouped_expand", "grouped_project", "grouped_sums", "split_experts"]

# --- configuration -------------------------------------------------------------------------------


class GroupedLowRankProblem(NamedTuple):
    """The sizes that the launch parameters of the three products depend on."""

    rank: int
    itemsize: int  # bytes of an element of the large operand


@dataclass(frozen=True)
class GroupedLowRankConfig(LaunchConfig):
    """Launch parameters of the three products. Each number of rows and of features is that of a tile."""

    project_rows: int
    project_features: int
    project_stages: int
    expand_rows: int
    expand_features: int
    sum_rows: int
    sum_features: int
    sum_stages: int
    # The warps of `grouped_project` and `grouped_expand`, and those of `grouped_sums`.
    num_warps: int
    sum_warps: int

    @staticmethod
    def heuristic(problem: GroupedLowRankProblem, device: Device) -> "GroupedLowRankConfig":
        # An expert has 512 rows on average at 8192 tokens, 8 choices and 128 experts, so a tile of 128 rows wastes
        # about one tile in eight. The tiles follow those of `low_rank`, and have not been measured for experts. On
        # sm_80 and sm_100 larger tiles for each warp would spill registers.
        is_small, is_large_chip = rank_block(problem.rank) <= 32, device.shared_memory >= 2**17 * 1.5
        fits = is_small or is_large_chip
        return GroupedLowRankConfig(
            project_rows=128 if fits else 64, project_features=64, project_stages=4 if device.async_copy else 1,
            expand_rows=64 if fits else 32, expand_features=128,
            sum_rows=64 if is_large_chip else 32, sum_features=128 if is_large_chip else 64,
            sum_stages=3 if device.async_copy else 1, num_warps=4 if is_small else 8, sum_warps=8,
        )  # fmt: skip


# --- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["E", "first"])
def _split_experts_kernel(
    a_ptr, out_ptr, E, N, first, stride_ae, stride_ar, stride_an, stride_rank, stride_expert, stride_term, factor,
    RANK: tl.constexpr, TERMS_: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the terms of factor * a [E, RANK, N] to the rows `first`, `first` + 1, ... of out [S, E, R, N].

    A program writes one rank of a block of experts, because the experts of PEFT's B are adjacent in memory.
    """
    e_blocks = tl.cdiv(E, BLOCK_E)
    n_blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rank = pid // n_blocks // e_blocks
    experts = ((pid // n_blocks % e_blocks) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)[:, None]
    cols = ((pid % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (experts < E) & (cols < N)
    a = tl.load(a_ptr + experts * stride_ae + rank * stride_ar + cols * stride_an, mask, 0.0).to(tl.float32) * factor
    out = out_ptr + experts * stride_expert + (first + rank).to(tl.int64) * stride_rank + cols
    for i in tl.static_range(TERMS_):
        tl.store(out + i * stride_term, term(a, i), mask)


@triton.jit
def _find_rows(ends_ptr, tile, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the expert of a tile, its first row, and the end of the expert's rows.

    The expert is BLOCK_E, which no expert has as its number, if there is no such tile.
    """
    index = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + index, index < E, 0)
    starts = tl.load(ends_ptr + index - 1, (index > 0) & (index < E), 0)
    tiles = (ends - starts + BLOCK_T - 1) // BLOCK_T
    tile_ends = tl.cumsum(tiles)
    expert = tl.sum((tile_ends <= tile).to(tl.int32))
    is_expert = index == expert
    start = tl.sum(tl.where(is_expert, starts, 0))
    end = tl.sum(tl.where(is_expert, ends, 0))
    earlier_tiles = tl.sum(tl.where(is_expert, tile_ends - tiles, 0))
    return expert, (start + (tile - earlier_tiles) * BLOCK_T).to(tl.int64), end


@triton.jit
def _sources(order_ptr, rows, end, choices):
    """Return the row of z for each row: its token if `order` is passed, and the row itself otherwise."""
    if order_ptr is not None:
        return tl.load(order_ptr + rows, rows < end, 0) // choices
    else:
        return rows


@triton.jit(do_not_specialize=["E", "choices"])
def _grouped_project_kernel(
    z_ptr, a_ptr, out_ptr, order_ptr, ends_ptr,  # [S, N] or [T, N], [S, E, R, N] bf16, [S, R] fp32, [S] or None, [E]
    E, N, choices, stride_z, stride_term,
    R: tl.constexpr, Z_TERMS: tl.constexpr, A_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute z A^T for a tile of the rows of one expert and a block of the columns of h."""
    r_blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    expert, first, end = _find_rows(ends_ptr, pid // r_blocks, E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    sources = _sources(order_ptr, rows, end, choices)
    ranks = (pid % r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    a_rows = (expert.to(tl.int64) * R + ranks[:, None]) * N
    steps = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + steps
        z = tl.load(z_ptr + sources * stride_z + cols, (rows < end) & (cols < N), 0.0)
        sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for j in tl.static_range(A_TERMS):
            a = tl.load(a_ptr + j * stride_term + a_rows + cols, (ranks[:, None] < R) & (cols < N), 0.0)
            for i in tl.static_range(Z_TERMS):
                if i + j < 2:
                    sums = tl.dot(z if Z_TERMS == 1 else term(z, i), tl.trans(a), sums)
        total += sums
    tl.store(out_ptr + rows * R + ranks[None, :], total, (rows < end) & (ranks[None, :] < R))


@triton.jit(do_not_specialize=["E"])
def _grouped_expand_kernel(
    h_ptr, b_ptr, out_ptr, ends_ptr,  # [S, R] fp32, [S, E, R, N] bf16, [S, N], [E]
    E, N, stride_out, stride_term,
    R: tl.constexpr, ORDER: tl.constexpr, B_TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add h B^T to a tile of the rows of one expert and a block of features.

    ORDER is the number of terms of h and of B that the precision of `out` needs.
    """
    n_blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    expert, first, end = _find_rows(ends_ptr, pid // n_blocks, E, BLOCK_T, BLOCK_E)
    if expert >= E:
        return
    rows = first + tl.arange(0, BLOCK_T)[:, None]
    cols = ((pid % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (rows < end) & (cols < N)
    out = out_ptr + rows * stride_out + cols
    # The old values are loaded first, so that they arrive while the products are computed.
    before = tl.load(out, inside, 0.0)
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in tl.static_range(0, R, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        h = tl.load(h_ptr + rows * R + ranks[None, :], (rows < end) & (ranks[None, :] < R), 0.0)
        b_rows = (expert.to(tl.int64) * R + ranks[:, None]) * N
        for j in tl.static_range(ORDER):
            if j < B_TERMS:
                b = tl.load(b_ptr + j * stride_term + b_rows + cols, (ranks[:, None] < R) & (cols < N), 0.0)
                for i in tl.static_range(ORDER - j):
                    total = tl.dot(term(h, i), b, total)
    tl.store(out, total + before.to(tl.float32), inside)


@triton.jit(do_not_specialize=["choices", "column", "columns"])
def _grouped_sum_kernel(
    # [S, N] or [T, N], [S, columns] fp32, [E, RANK, N] by strides, [S], [T, K] or None, [E]
    z_ptr, h_ptr, out_ptr, order_ptr, weights_ptr, ends_ptr,
    N, choices, column, columns, stride_z, stride_oe, stride_or, stride_on, factor,
    RANK: tl.constexpr, Z_TERMS: tl.constexpr, GATHERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute factor * z^T h over the rows of one expert, for a block of features and a block of the columns of h.

    If `weights` is passed, it scales each row by the weight of its choice.
    """
    n_blocks = tl.cdiv(N, BLOCK_N)
    r_blocks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    expert = (pid // r_blocks // n_blocks).to(tl.int64)
    block = pid // r_blocks % n_blocks
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    ranks = ((pid % r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R))[None, :]
    first = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    end = tl.load(ends_ptr + expert)
    steps = tl.arange(0, BLOCK_T).to(tl.int64)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in tl.range(first, end, BLOCK_T, num_stages=STAGES):
        rows = start + steps
        is_row = rows < end
        sources = _sources(order_ptr if GATHERS else None, rows, end, choices)
        z = tl.load(z_ptr + sources * stride_z + cols, is_row & (cols < N), 0.0)
        h = tl.load(h_ptr + rows * columns + column + ranks, is_row & (ranks < RANK), 0.0)
        if weights_ptr is not None:
            choice = tl.load(order_ptr + rows, is_row, 0)
            h *= tl.load(weights_ptr + choice, is_row, 0.0).to(tl.float32)
        sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for j in tl.static_range(2):
            for i in tl.static_range(Z_TERMS):
                if i + j < 2:
                    sums = tl.dot(tl.trans(z if Z_TERMS == 1 else term(z, i)), term(h, j), sums)
        total += sums
    features = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    out = out_ptr + expert * stride_oe + ranks.to(tl.int64) * stride_or + features.to(tl.int64) * stride_on
    tl.store(out, total * factor, (features < N) & (ranks < RANK))


# --- launchers (no autograd) ---------------------------------------------------------------------


def _config(rank: int, z: Tensor) -> GroupedLowRankConfig:
    return GroupedLowRankConfig.choose(GroupedLowRankProblem(rank, z.element_size()), device_of(z))


@on_device
def split_experts(first: Tensor, others: Sequence[Tensor] = (), factors: Sequence[float] | None = None) -> Tensor:
    """Return the bf16 terms [S, E, R, N] of factor_j a_j [E, r_j, N], stacked by ranks. The strides of a_j are any."""
    tensors = first, *others
    factors = factors or [1.0] * len(tensors)
    experts, _, n = first.shape
    is_exact = all(a.dtype == torch.bfloat16 and factor == 1.0 for a, factor in zip(tensors, factors, strict=True))
    terms = 1 if is_exact else 2
    out = first.new_empty((terms, experts, sum(a.shape[1] for a in tensors), n), dtype=torch.bfloat16)
    row, block_e, block_n = 0, 16, 128
    for a, factor in zip(tensors, factors, strict=True):
        rank = a.shape[1]
        launch(
            _split_experts_kernel, rank * cdiv(experts, block_e) * cdiv(n, block_n),
            *in_order(_split_experts_kernel)(
                a_ptr=a, out_ptr=out, E=experts, N=n, first=row,
                stride_ae=a.stride(0), stride_ar=a.stride(1), stride_an=a.stride(2),
                stride_rank=out.stride(2), stride_expert=out.stride(1), stride_term=out.stride(0), factor=factor,
            ),
            RANK=rank, TERMS_=terms, BLOCK_E=block_e, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
        row += rank
    return out


@on_device
def grouped_project(z: Tensor, a: Tensor, routing: Routing, gathers: bool) -> Tensor:
    """Return h = z A^T [S, R] in fp32, for the terms of A [S, E, R, N].

    z is [S, N], or [T, N] if `gathers` is True. Rows that belong to no expert are not written.
    """
    terms, experts, r, n = a.shape
    config, block_r = _config(r, z), rank_block(r)
    h = z.new_empty((len(routing.order), r), dtype=torch.float32)
    tiles = cdiv(len(h), config.project_rows) + experts
    launch(
        _grouped_project_kernel, tiles * cdiv(r, block_r),
        *in_order(_grouped_project_kernel)(
            z_ptr=z, a_ptr=a, out_ptr=h, order_ptr=routing.order if gathers else None, ends_ptr=routing.ends,
            E=experts, N=n, choices=routing.slot.shape[1], stride_z=z.stride(0), stride_term=a.stride(0),
        ),
        R=r, Z_TERMS=TERMS[z.dtype], A_TERMS=terms,
        BLOCK_T=config.project_rows, BLOCK_N=config.project_features, BLOCK_R=block_r,
        BLOCK_E=triton.next_power_of_2(experts), STAGES=config.project_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return h


@on_device
def grouped_expand(h: Tensor, b: Tensor, out: Tensor, routing: Routing) -> None:
    """Add h B^T to out [S, N], for h [S, R] in fp32 and the terms of B^T [S, E, R, N]. The rows of `out` are dense.

    `out` may be a result of `grouped_mm`, which puts unused elements between rows to align them.
    """
    terms, experts, r, n = b.shape
    config = _config(r, out)
    launch(
        _grouped_expand_kernel, (cdiv(len(h), config.expand_rows) + experts) * cdiv(n, config.expand_features),
        *in_order(_grouped_expand_kernel)(
            h_ptr=h, b_ptr=b, out_ptr=out, ends_ptr=routing.ends,
            E=experts, N=n, stride_out=out.stride(0), stride_term=b.stride(0),
        ),
        R=r, ORDER=TERMS[out.dtype], B_TERMS=terms,
        BLOCK_T=config.expand_rows, BLOCK_N=config.expand_features, BLOCK_R=rank_block(r),
        BLOCK_E=triton.next_power_of_2(experts), num_warps=config.num_warps,
    )  # fmt: skip


@on_device
def grouped_sums(
    z: Tensor, h: Tensor, column: int, out: Tensor, routing: Routing, gathers: bool,
    factor: float = 1.0, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write factor * (sum over the rows of each expert of z^T h) to out [E, r, N] of any strides, and return `out`.

    z is [S, N], or [T, N] if `gathers` is True. h is [S, R], of which the r columns from `column` on are used.
    `weights` [T, K] scale the rows if they are not None.
    """
    (experts, rank, n), config = out.shape, _config(out.shape[1], z)
    block_r = rank_block(rank)
    launch(
        _grouped_sum_kernel, experts * cdiv(n, config.sum_features) * cdiv(rank, block_r),
        *in_order(_grouped_sum_kernel)(
            z_ptr=z, h_ptr=h, out_ptr=out, order_ptr=routing.order, weights_ptr=weights, ends_ptr=routing.ends,
            N=n, choices=routing.slot.shape[1], column=column, columns=h.shape[1], stride_z=z.stride(0),
            stride_oe=out.stride(0), stride_or=out.stride(1), stride_on=out.stride(2), factor=factor,
        ),
        RANK=rank, Z_TERMS=TERMS[z.dtype], GATHERS=gathers,
        BLOCK_T=config.sum_rows, BLOCK_N=config.sum_features, BLOCK_R=block_r, STAGES=config.sum_stages,
        num_warps=config.sum_warps,
    )  # fmt: skip
    return out
