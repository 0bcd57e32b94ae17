r"""The products of `low_rank` for the experts of a mixture. Rows are sorted by expert, and each expert has its A and B.

    grouped_project     h[s] = z[s] A[e]^T                    [S, R]        reads z once
    grouped_expand      out[s] += h[s] B[e]                   [S, N]        reads and writes out once
    grouped_sums        G[e] = sum over its rows z[s]^T h[s]  [E, N, R]     reads z once

The rows of z are either in memory, sorted by expert, or those of the tokens: then the kernel reads the token of each
row, so that the tokens of a backward pass are never copied to [S, N] for these products.

A program finds its expert and its rows from the end of each expert, which it reads on the device. The host does not
know the number of tiles. It launches as many programs as any routing may need, and those without a tile return at once.

Factors A and B in fp32 are used as two bf16 terms, which keep 16 bits, and h is stored as two terms. This is more
accurate than PEFT's code, which rounds A and B to the dtype of the experts. Each step of a sum starts from zero, for
the reason that `low_rank` explains. The kernels split a single A of a small rank whenever they read it. `split_experts`
splits other factors once: several A, because their terms would not fit in the registers, and PEFT's B, because its
experts are adjacent in memory.

Shapes: T tokens, K choices each, S = T K rows, E experts, N features, R ranks of all adapters of a projection together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank_kernels import (
    copy_experts_kernel,
    grouped_expand_kernel,
    grouped_project_kernel,
    grouped_sum_kernel,
    split_experts_kernel,
)
from tigon.ops.adapters.low_rank import LARGEST_RANK_TO_SPLIT, TERMS, rank_block
from tigon.ops.experts.choice_order import Routing
from tigon.runtime.compat.triton import triton
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------


class GroupedLowRankProblem(NamedTuple):
    """The sizes that the launch parameters of the three products depend on."""

    rank: int
    # The number of bf16 terms of an element of the large operand: 1 in bf16, and 2 in fp16.
    terms: int


def _has_room(problem: GroupedLowRankProblem, device: Device) -> bool:
    """Return whether a large tile for all ranks of an adapter fits in the registers. On sm_80, rank 32 does not."""
    return rank_block(problem.rank) <= 16 or device.shared_memory >= 2**17 * 1.5


@dataclass(frozen=True)
class GroupedProjectConfig(LaunchConfig):
    """Launch parameters of `grouped_project`: a program computes `block_t` rows over all features."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int

    @staticmethod
    def heuristic(problem: GroupedLowRankProblem, device: Device) -> "GroupedProjectConfig":
        # An expert has 512 rows on average at 8192 tokens, 8 choices and 128 experts, so a tile of 128 rows wastes
        # about one tile in eight. In fp16, whose terms take registers, such a tile spills on sm_80.
        is_large = _has_room(problem, device)
        is_halved = problem.terms > 1 and device.arch == "sm_80"
        return GroupedProjectConfig(
            block_t=(64 if is_halved else 128) if is_large else 32, block_n=64,
            num_warps=4 if rank_block(problem.rank) <= 32 else 8, num_stages=3 if device.async_copy else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class GroupedExpandConfig(LaunchConfig):
    """Launch parameters of `grouped_expand`: a program computes `block_t` rows of `blocks` blocks of features."""

    block_t: int
    block_n: int
    blocks: int
    num_warps: int
    num_stages: int

    @staticmethod
    def heuristic(problem: GroupedLowRankProblem, device: Device) -> "GroupedExpandConfig":
        # On sm_90 with rank 16, a thread needs 92 registers with 64 features, and 184 with 128.
        is_small = rank_block(problem.rank) <= 32 and problem.terms == 1
        return GroupedExpandConfig(
            block_t=64 if _has_room(problem, device) else 32, block_n=64, blocks=8,
            num_warps=4 if is_small else 8, num_stages=3 if device.async_copy else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class GroupedSumConfig(LaunchConfig):
    """Launch parameters of `grouped_sums`: a program computes `block_n` features, `block_t` rows at a time."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int

    @staticmethod
    def heuristic(problem: GroupedLowRankProblem, device: Device) -> "GroupedSumConfig":
        is_small = rank_block(problem.rank) <= 32 and problem.terms == 1
        is_large_chip = device.shared_memory >= 2**17 * 1.5
        return GroupedSumConfig(
            block_t=64 if is_large_chip else 32, block_n=128 if is_large_chip else 64,
            num_warps=4 if is_small else 8, num_stages=3 if device.async_copy else 1,
        )  # fmt: skip


# A program of `split_experts` takes one rank of so many experts and features. In PEFT's B the experts are adjacent, so
# 32 experts in fp32 are 128 bytes. On an H200 this takes 5.1 us where 16 experts and 128 features take 6.6 us.
SPLIT_BLOCK_E, SPLIT_BLOCK_N = 32, 64


# --- factors -------------------------------------------------------------------------------------


def count_terms(a: Tensor) -> int:
    """Return the number of bf16 terms of a factor: values [E, R, N], or terms [terms, E, R, N]."""
    return len(a) if a.dim() == 4 else 1 if a.dtype == torch.bfloat16 else 2


@on_device
def split_experts(
    first: Tensor, others: Sequence[Tensor] = (), factors: Sequence[float] | None = None, terms: int = 2
) -> Tensor:
    """Return the factor of factor_j a_j [E, r_j, N], stacked by ranks. The strides of a_j are any.

    The result has at most `terms` bf16 terms, [terms, E, R, N]. It is `first` itself if kernels can read it directly.
    """
    tensors = first, *others
    factors = factors or [1.0] * len(tensors)
    experts, rank, n = first.shape
    is_exact = all(a.dtype == torch.bfloat16 and factor == 1.0 for a, factor in zip(tensors, factors, strict=True))
    if len(tensors) == 1 and first.is_contiguous() and factors[0] == 1.0:  # noqa: SIM102
        if is_exact or rank <= LARGEST_RANK_TO_SPLIT:
            return first
    terms = 1 if is_exact else terms
    out = first.new_empty((terms, experts, sum(a.shape[1] for a in tensors), n), dtype=torch.bfloat16)
    row = 0
    for a, factor in zip(tensors, factors, strict=True):
        rank = a.shape[1]
        launch(
            split_experts_kernel, rank * cdiv(experts, SPLIT_BLOCK_E) * cdiv(n, SPLIT_BLOCK_N),
            *in_order(split_experts_kernel)(
                a_ptr=a, out_ptr=out, E=experts, N=n, first=row,
                stride_ae=a.stride(0), stride_ar=a.stride(1), stride_an=a.stride(2),
                stride_rank=out.stride(2), stride_expert=out.stride(1), stride_term=out.stride(0), factor=factor,
            ),
            RANK=rank, TERMS_=terms, BLOCK_E=SPLIT_BLOCK_E, BLOCK_N=SPLIT_BLOCK_N, num_warps=4,
        )  # fmt: skip
        row += rank
    return out


# --- launchers (no autograd) ---------------------------------------------------------------------


def empty_grouped_hidden(like: Tensor, rows: int, rank: int) -> Tensor:
    """Return memory for the two bf16 terms of h, [S, 2, R]."""
    return like.new_empty((rows, 2, rank), dtype=torch.bfloat16)


@on_device
def grouped_project(
    z: Tensor, a: Tensor, routing: Routing, gathers: bool, weights: Tensor | None = None, copy: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the terms of h = z A^T and of w h, [S, 2, R], for the factor A. Without `weights`, w h is None.

    z is [S, N], or [T, N] if `gathers` is True. w[s] is the weight of the row's choice in `weights` [T, K]. The sorted
    rows of z are also written to `copy` [S, N]. Rows that belong to no expert are not written.
    """
    experts, r, n = a.shape[-3:]
    config = GroupedProjectConfig.choose(GroupedLowRankProblem(r, TERMS[z.dtype]), device_of(z))
    block_r = rank_block(r)
    h = empty_grouped_hidden(z, len(routing.order), r)
    weighted = None if weights is None else torch.empty_like(h)
    tiles = cdiv(len(h), config.block_t) + experts
    launch(
        grouped_project_kernel, tiles * cdiv(r, block_r),
        *in_order(grouped_project_kernel)(
            z_ptr=z, a_ptr=a, out_ptr=h, weighted_ptr=weighted, copy_ptr=copy, order_ptr=routing.order,
            weights_ptr=weights, ends_ptr=routing.ends, E=experts, N=n, stride_z=z.stride(0), stride_term=a.stride(0),
        ),
        R=r, CHOICES=routing.slot.shape[1], GATHERS=gathers,
        Z_TERMS=TERMS[z.dtype], A_TERMS=count_terms(a), IS_SPLIT=a.dim() == 4,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_R=block_r,
        BLOCK_E=triton.next_power_of_2(experts), STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return h, weighted


def spread_and_project(x: Tensor, a: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the rows of x [T, N], sorted by expert, [S, N], and the terms of their products with A^T, [S, 2, R]."""
    rows = x.new_empty((len(routing.order), x.shape[1]))
    h, _ = grouped_project(x, a, routing, gathers=True, copy=rows)
    return rows, h


@on_device
def grouped_expand(h: Tensor, b: Tensor, out: Tensor, routing: Routing) -> None:
    """Add h B to out [S, N], for the terms of h [S, 2, R] and the factor B [E, R, N]. The rows of `out` are dense.

    `out` may be a result of `grouped_mm`, which puts unused elements between rows to align them.
    """
    experts, r, n = b.shape[-3:]
    config = GroupedExpandConfig.choose(GroupedLowRankProblem(r, TERMS[out.dtype]), device_of(out))
    part_length = config.block_n * config.blocks
    parts, order = cdiv(n, part_length), TERMS[out.dtype]
    launch(
        grouped_expand_kernel, (cdiv(len(h), config.block_t) + experts) * parts,
        *in_order(grouped_expand_kernel)(
            h_ptr=h, b_ptr=b, out_ptr=out, ends_ptr=routing.ends, E=experts, N=n, part_length=part_length, parts=parts,
            stride_out=out.stride(0), stride_term=b.stride(0),
        ),
        R=r, ORDER=order, B_TERMS=min(order, count_terms(b)), IS_SPLIT=b.dim() == 4,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_R=rank_block(r),
        BLOCK_E=triton.next_power_of_2(experts), STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


@on_device
def grouped_sums(
    z: Tensor, h: Tensor, column: int, out: Tensor, routing: Routing, gathers: bool, factor: float = 1.0
) -> Tensor:
    """Write factor * (sum over the rows of each expert of z^T h) to out [E, r, N] of any strides, and return `out`.

    z is [S, N], or [T, N] if `gathers` is True. `h` holds the terms [S, 2, R], of which the r columns from `column` on
    are used.
    """
    experts, rank, n = out.shape
    # The experts of PEFT's B are adjacent in memory. A program holds the sums of one expert, so it would store each
    # value in a memory transaction of its own: 38 to 47 us of 85 and 109 us on an H200. A copy takes about 6 us.
    is_scattered = min(out.stride(1), out.stride(2)) > 1 and rank > 1 and n > 1
    sums = torch.empty_like(out, memory_format=torch.contiguous_format) if is_scattered else out
    config = GroupedSumConfig.choose(GroupedLowRankProblem(rank, TERMS[z.dtype]), device_of(z))
    block_r = rank_block(rank)
    launch(
        grouped_sum_kernel, experts * cdiv(n, config.block_n) * cdiv(rank, block_r),
        *in_order(grouped_sum_kernel)(
            z_ptr=z, h_ptr=h, out_ptr=sums, order_ptr=routing.order, ends_ptr=routing.ends,
            N=n, stride_z=z.stride(0),
            stride_oe=sums.stride(0), stride_or=sums.stride(1), stride_on=sums.stride(2), factor=factor,
        ),
        R=h.shape[2], COLUMN=column, RANK=rank, CHOICES=routing.slot.shape[1], GATHERS=gathers,
        Z_TERMS=TERMS[z.dtype],
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_R=block_r,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    if sums is not out:
        _copy_experts(sums, out)
    return out


def _copy_experts(a: Tensor, out: Tensor) -> None:
    """Copy a [E, R, N], which is contiguous, to `out`, which has other strides."""
    experts, rank, n = out.shape
    launch(
        copy_experts_kernel, rank * cdiv(experts, SPLIT_BLOCK_E) * cdiv(n, SPLIT_BLOCK_N),
        *in_order(copy_experts_kernel)(
            a_ptr=a, out_ptr=out, E=experts, N=n,
            stride_oe=out.stride(0), stride_or=out.stride(1), stride_on=out.stride(2),
        ),
        RANK=rank, BLOCK_E=SPLIT_BLOCK_E, BLOCK_N=SPLIT_BLOCK_N, num_warps=4,
    )  # fmt: skip
