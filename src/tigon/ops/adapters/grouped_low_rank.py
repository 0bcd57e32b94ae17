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

import torch
from torch import Tensor

from tigon.ops.adapters.grouped_low_rank_kernels import (
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


@dataclass(frozen=True)
class GroupedLowRankConfig(LaunchConfig):
    """Launch parameters: a program computes `block_t` rows and `block_n` features at a time."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int

    @staticmethod
    def heuristic(problem: tuple[str, int, int], device: Device) -> "GroupedLowRankConfig":
        """Return the parameters for a product ("project", "expand", "sums", or "activation" for the kernels of
        `lora_expert_activation`), a rank, and the bf16 terms of an element of the large operand."""
        product, rank, terms = problem
        stages, block_r = 3 if device.async_copy else 1, rank_block(rank)
        is_large_chip = device.shared_memory >= 2**17 * 1.5
        # A large tile for all ranks of an adapter fits in the registers. On sm_80, rank 32 does not.
        has_room = block_r <= 16 or is_large_chip
        is_small = block_r <= 32 and terms == 1
        if product == "project":
            # An expert has 512 rows on average at 8192 tokens, 8 choices and 128 experts, so a tile of 128 rows wastes
            # about one tile in eight. In fp16, whose terms take registers, such a tile spills on sm_80.
            is_halved = terms > 1 and device.arch == "sm_80"
            block_t = (64 if is_halved else 128) if has_room else 32
            return GroupedLowRankConfig(block_t, 64, 4 if block_r <= 32 else 8, stages)
        if product == "expand":
            # On sm_90 with rank 16, a thread needs 92 registers with 64 features, and 184 with 128.
            return GroupedLowRankConfig(64 if has_room else 32, 64, 4 if is_small else 8, stages)
        if product == "sums":
            block_t, block_n = (64, 128) if is_large_chip else (32, 64)
            return GroupedLowRankConfig(block_t, block_n, 4 if is_small else 8, stages)
        # A program of the activation holds all ranks of B for the features of its tile in registers. Up to rank 16,
        # tiles of 32 rows and 64 features are the fastest on sm_90 (forward 98 us, backward 202 us at 65536 rows of 768
        # features; tiles of 64 rows and 32 features take 151 and 258 us). They would spill registers on sm_80, and so
        # would 64 rows with a larger rank.
        if block_r <= 16 and is_large_chip:
            return GroupedLowRankConfig(32, 64, 4, stages)
        return GroupedLowRankConfig(64 if has_room else 32, 32, 4, stages)


# A program of `grouped_expand` computes so many blocks of features.
EXPAND_BLOCKS = 8

# A program of `split_experts` takes one rank of so many experts and features. In PEFT's B the experts are adjacent, so
# 32 experts in fp32 are 128 bytes. On an H200 this takes 5.1 us where 16 experts and 128 features take 6.6 us.
SPLIT_BLOCK_E, SPLIT_BLOCK_N = 32, 64


def count_terms(a: Tensor) -> int:
    """Return the number of bf16 terms of a factor: values [E, R, N], or terms [terms, E, R, N]."""
    return len(a) if a.dim() == 4 else 1 if a.dtype == torch.bfloat16 else 2


@on_device
def split_experts(
    first: Tensor, others: Sequence[Tensor] = (), factors: Sequence[float] | None = None, terms: int = 2
) -> Tensor:
    """Return the factor of factor_j a_j [E, r_j, N] of any strides, stacked by ranks: `first` itself if kernels can
    read it directly, or at most `terms` bf16 terms [terms, E, R, N]."""
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
        _split(a, out, (out.stride(1), out.stride(2), 1, out.stride(0)), factor, row, terms)
        row += a.shape[1]
    return out


def empty_grouped_hidden(like: Tensor, rows: int, rank: int) -> Tensor:
    """Return memory for the two bf16 terms of h, [S, 2, R]."""
    return like.new_empty((rows, 2, rank), dtype=torch.bfloat16)


@on_device
def grouped_project(
    z: Tensor, a: Tensor, routing: Routing, gathers: bool, weights: Tensor | None = None, copy: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the terms of h = z A^T and of w h, [S, 2, R], for the factor A. Without `weights`, w h is None. z is [S,
    N], or [T, N] if `gathers` is True. w[s] is the weight of the row's choice in `weights` [T, K]. The sorted rows of z
    are also written to `copy` [S, N]. Rows that belong to no expert are not written."""
    experts, r, n = a.shape[-3:]
    config = GroupedLowRankConfig.choose(("project", r, TERMS[z.dtype]), device_of(z))
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
    """Add h B to out [S, N], for the terms of h [S, 2, R] and the factor B [E, R, N]. Rows of `out` may have gaps
    between them, by which `grouped_mm` aligns its results."""
    experts, r, n = b.shape[-3:]
    config = GroupedLowRankConfig.choose(("expand", r, TERMS[out.dtype]), device_of(out))
    part_length = config.block_n * EXPAND_BLOCKS
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
    """Write factor * (sum over the rows of each expert of z^T h) to out [E, r, N] of any strides, and return `out`. z
    is [S, N], or [T, N] if `gathers` is True. `h` holds the terms [S, 2, R], of which the r columns from `column` on
    are used."""
    experts, rank, n = out.shape
    # The experts of PEFT's B are adjacent in memory. A program holds the sums of one expert, so it would store each
    # value in a memory transaction of its own: 38 to 47 us of 85 and 109 us on an H200. A copy takes about 6 us.
    is_scattered = min(out.stride(1), out.stride(2)) > 1 and rank > 1 and n > 1
    sums = torch.empty_like(out, memory_format=torch.contiguous_format) if is_scattered else out
    config = GroupedLowRankConfig.choose(("sums", rank, TERMS[z.dtype]), device_of(z))
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
        _split(sums, out, (out.stride(0), out.stride(1), out.stride(2), 0), 1.0, 0, 0)
    return out


def _split(a: Tensor, out: Tensor, strides: tuple[int, int, int, int], factor: float, first: int, terms: int) -> None:
    """Write the terms of factor * a [E, r, N] to `out`, or `a` itself if `terms` is 0. The strides of `out` are those
    of experts, ranks, features and terms. The ranks begin at `first`."""
    experts, rank, n = a.shape
    launch(
        split_experts_kernel, rank * cdiv(experts, SPLIT_BLOCK_E) * cdiv(n, SPLIT_BLOCK_N),
        *in_order(split_experts_kernel)(
            a_ptr=a, out_ptr=out, E=experts, N=n, first=first, stride_ae=a.stride(0), stride_ar=a.stride(1),
            stride_an=a.stride(2), stride_oe=strides[0], stride_or=strides[1], stride_on=strides[2],
            stride_term=strides[3], factor=factor,
        ),
        TERMS_=terms, BLOCK_E=SPLIT_BLOCK_E, BLOCK_N=SPLIT_BLOCK_N, num_warps=4,
    )  # fmt: skip
