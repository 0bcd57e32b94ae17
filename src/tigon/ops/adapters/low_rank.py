r"""The three products of a low-rank adapter. Each one takes about as long as the traffic of its one large operand.

    project      h   = x A^T       [T, R] = [T, N] [N, R]     reads x once
    expand       out = h B^T       [T, N] = [T, R] [R, N]     writes out once
    token_sums   G   = z^T h       [N, R] = [N, T] [T, R]     reads z once

The adapters of a bf16 model are usually in fp32. Tensor cores multiply bf16 and add in fp32, and an fp32 value is the
sum of three bf16 values of 8 bits each. So the kernels split an fp32 factor into such terms, and add the products of
the terms. Products of two terms whose indices add up to three or more are below the precision of fp32, and are omitted.
h is stored as terms. `project` splits a single A of a small rank when it reads it. Several A, or a large one, are split
once by `split_terms`, because their terms would not fit in the registers. h and the sums over tokens are then as
accurate as products in fp32. `expand` rounds its result to the dtype of the model, so it needs fewer terms: one in
bf16, two in fp16. In bf16 its error is therefore relative to the sum of |h| |B|, which is much larger than the result
if the parts of different ranks cancel.

Tensor cores do not round the sums that they carry from one instruction to the next. The products of each step of a loop
therefore start from zero, and the kernels add the results of the steps with rounding.

The long dimension of `project` and `token_sums` is divided into parts, because one program for each tile of the result
would leave most of the chip idle. Each program writes the sum of its part to memory and counts itself. The last one to
finish a tile adds the sums of all parts in their order, so the result is the same in every run.

Dropout multiplies x by a mask. `dropout_mask` holds the mask as bits: bit i % 8 of byte [t, i // 8] is 1 if dropout
keeps x[t, i].

Shapes: T tokens, N features, R rank (the sum of the ranks if several adapters share a product), S terms.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank_kernels import (
    dropout_bits_kernel,
    expand_kernel,
    project_kernel,
    split_kernel,
    token_sum_kernel,
)
from tigon.ops.fp8.formats import FusedPass
from tigon.runtime.counters import zero_counters
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import in_order, launch, on_device

# The number of bf16 terms that represent a value exactly: 8, 11 and 24 bits of mantissa, 8 bits a term.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# The largest rank of an A that `project` splits when it reads it. On an H200, with tiles of 128 tokens (now 64), 8192
# tokens of 4096 features took 27 us with rank 16, and 25 us with terms that were split before, which took 3 us more.
# With rank 48 they took 49 and 37 us.
LARGEST_RANK_TO_SPLIT = 16

# A program of `expand` writes a tile of so many tokens and features. Milliseconds for 8192 tokens in bf16 on an H200:
# 0.022 (rank 16) and 0.032 (48) with 4096 features, and 0.062 with 14336 features.
EXPAND_BLOCK_T, EXPAND_BLOCK_N = 64, 128


# --- configuration -------------------------------------------------------------------------------


def rank_block(rank: int) -> int:
    """Return how many of the columns of h one program computes: a power of two from 16 to 64."""
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


@dataclass(frozen=True)
class PartTiles:
    """The tiles of a product whose long dimension is divided into parts. A program loops over the tiles of one part.

    A tile has `block_t` tokens and `block_n` features.
    """

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int

    def divide(self, length: int, step: int, blocks: int, device: Device) -> tuple[int, int]:
        """Return the length of a part, which is a multiple of `step`, and the number of parts.

        `length` is that of the long dimension. Each part takes `blocks` programs, and has at least about four steps.
        """
        programs = device.multiprocessors * self.programs_per_multiprocessor
        count = max(1, min(programs // max(blocks, 1), cdiv(length, 4 * step)))
        part_length = cdiv(cdiv(length, count), step) * step
        return part_length, max(1, cdiv(length, part_length))


@functools.cache
def _project_tiles(rank: int, itemsize: int, device: Device) -> PartTiles:
    """Return the tiles of `project`, whose programs compute `block_t` tokens over a part of the features."""
    # A tile has 64 features in bf16, because tensor cores lose accuracy compared with fp32 if they sum more of them in
    # one step. Microseconds for 8192 tokens in bf16 on an H200, all in one run: 29 for rank 16 with 4096 features and
    # 71 with 14336; with tiles of 128 tokens, 31 and 72. If the kernel writes an FP8 copy of x too: 35 and 103; with
    # tiles of 128 tokens, 37 and 109. A pass that only writes the copy takes 30 and 87.
    stages = 4 if rank_block(rank) <= 32 else 3
    return PartTiles(64, 128 // itemsize, 4, stages if device.async_copy else 1, programs_per_multiprocessor=2)


@functools.cache
def _sum_tiles(itemsize: int, device: Device) -> PartTiles:
    """Return the tiles of `token_sums`, whose programs sum `block_n` features over a part of the tokens."""
    # Microseconds for 8192 tokens in bf16 on an H200: 25 (rank 16) and 39 (rank 48) with 4096 features, and 64 with
    # 14336 features (rank 16).
    return PartTiles(128 // itemsize, 128, 8, 3 if device.async_copy else 1, programs_per_multiprocessor=2)


# --- launchers (no autograd) ---------------------------------------------------------------------


@on_device
def dropout_bits(seeds: Tensor, position: int, tokens: int, features: int, p: float) -> Tensor:
    """Return the mask of a dropout with probability p as bits [T, ceil(N / 8)], from one of the `seeds` [n] int64.

    Backward calls this again with the same seed, so that the mask is never saved.
    """
    dropout_mask = seeds.new_empty((tokens, cdiv(features, 8)), dtype=torch.uint8)
    launch(
        dropout_bits_kernel, tokens * cdiv(dropout_mask.shape[1], 256), seeds, dropout_mask, tokens, features,
        position, dropout_mask.stride(0), p, BLOCK=256, num_warps=2,
    )  # fmt: skip
    return dropout_mask


@on_device
def split_terms(first: Tensor, *others: Tensor) -> Tensor:
    """Return the bf16 terms [S, R, N] of one or several tensors [r, N] of any strides, stacked by rows.

    S is 1 for bf16, 2 for fp16 and 3 for fp32.
    """
    if not others and first.dtype == torch.bfloat16 and first.is_contiguous():
        return first.unsqueeze(0)
    tensors, strides = (first, *others), first.stride()
    if len(tensors) > 3 or any(each.stride() != strides or each.dtype != first.dtype for each in others):
        tensors = (torch.cat(tensors),)
        strides = tensors[0].stride()
    first, second, third = (*tensors, *(tensors[-1],) * (3 - len(tensors)))
    n, terms, block = first.shape[1], TERMS[first.dtype], 512
    ends = list(itertools.accumulate(each.shape[0] for each in tensors))
    rows, blocks = ends[-1], cdiv(n, block)
    out = first.new_empty((terms, rows, n), dtype=torch.bfloat16)
    first_end, second_end = (*ends, rows)[:2]
    launch(
        split_kernel, rows * blocks,
        *in_order(split_kernel)(
            first_ptr=first, second_ptr=second, third_ptr=third, out_ptr=out, N=n, first_end=first_end,
            second_end=second_end, rows=rows, blocks=blocks, stride_r=strides[0], stride_n=strides[1],
        ),
        NUM_TERMS=terms, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def empty_hidden(x: Tensor, tokens: int, rank: int) -> Tensor:
    """Allocate memory for the three bf16 terms of h [3, T, R].

    The stride of the terms is a multiple of 16 for every T. Triton compiles one variant of a kernel for such strides
    and another one for all others, so another number of tokens would otherwise compile the kernels again.
    """
    return x.new_empty((3, cdiv(tokens, 16) * 16, rank), dtype=torch.bfloat16)[:, :tokens]


@on_device
def project(
    x: Tensor, tensors: Sequence[Tensor], out: Tensor, factor: float = 1.0, dropout_mask: Tensor | None = None,
    fused_pass: FusedPass | None = None,
) -> Tensor:  # fmt: skip
    """Write the terms of h = factor * x A^T to `out` [3, T, R], and return `out`.

    `out` may be some columns of a wider tensor. The rows of x [T, N] are dense, and `dropout_mask` [T, N / 8] masks x.
    A [R, N] is the stack of `tensors` [r, N] of any strides. `fused_pass` is a pass of the quantisation of x that
    this kernel also does.
    """
    t, n = x.shape
    is_split = len(tensors) > 1 or tensors[0].shape[0] > LARGEST_RANK_TO_SPLIT or tensors[0].dtype == torch.bfloat16
    a = split_terms(*tensors) if is_split else tensors[0]
    r = a.shape[-2]
    device = device_of(x)
    config = _project_tiles(r, x.element_size(), device)
    block_r = rank_block(r)
    blocks = cdiv(t, config.block_t) * cdiv(r, block_r)
    part_length, parts = config.divide(n, config.block_n, blocks, device)
    maximum, copy = (None, None) if fused_pass is None else fused_pass
    values, scale = (None, None) if copy is None else copy
    launch(
        project_kernel, blocks * parts,
        *in_order(project_kernel)(
            x_ptr=x, a_ptr=a, sum_ptr=x.new_empty((parts, t, r), dtype=torch.float32),
            counter_ptr=zero_counters(x, blocks), out_ptr=out, mask_ptr=dropout_mask, maximum_ptr=maximum,
            copy_ptr=values, scale_ptr=scale,
            T=t, N=n, part_length=part_length, parts=parts, stride_x=x.stride(0),
            stride_ar=a.stride(-2), stride_an=a.stride(-1), stride_part=t * r,
            stride_mask=0 if dropout_mask is None else dropout_mask.stride(0),
            stride_out=out.stride(1), stride_term=out.stride(0), stride_copy=0 if values is None else values.stride(0),
            factor=factor,
        ),
        R=r, X_TERMS=TERMS[x.dtype], A_TERMS=a.shape[0] if is_split else TERMS[a.dtype], IS_SPLIT=is_split,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_R=block_r, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


@on_device
def expand(
    h: Tensor, b: Tensor, out: Tensor, factor: float = 1.0, bias: Tensor | None = None,
    dropout_mask: Tensor | None = None, adds: bool = False,
) -> Tensor:  # fmt: skip
    """Write factor * h B^T + bias to `out` [T, N], or add it to `out` if `adds` is True, and return `out`.

    h is [3, T, R], and B is [N, R]. `dropout_mask` [T, N / 8] masks the product, but not the bias.
    """
    (_, t, r), n = h.shape, b.shape[0]
    launch(
        expand_kernel, cdiv(t, EXPAND_BLOCK_T) * cdiv(n, EXPAND_BLOCK_N),
        *in_order(expand_kernel)(
            h_ptr=h, b_ptr=b, bias_ptr=bias, out_ptr=out, mask_ptr=dropout_mask, T=t, N=n,
            stride_h=h.stride(1), stride_term=h.stride(0), stride_bn=b.stride(0), stride_br=b.stride(1),
            stride_out=out.stride(0), stride_mask=0 if dropout_mask is None else dropout_mask.stride(0), factor=factor,
        ),
        R=r, ORDER=TERMS[out.dtype], ADDS=adds,
        BLOCK_T=EXPAND_BLOCK_T, BLOCK_N=EXPAND_BLOCK_N, BLOCK_R=rank_block(r), num_warps=4,
    )  # fmt: skip
    return out


@on_device
def token_sums(
    z: Tensor, h: Tensor, factor: float = 1.0, dropout_mask: Tensor | None = None, transposed: bool = False
) -> Tensor:  # fmt: skip
    """Return factor * z^T h [N, R] in fp32, or its transpose [R, N] if `transposed` is True.

    z is [T, N], h is [3, T, R], and `dropout_mask` [T, N / 8] masks z.
    """
    (t, n), r = z.shape, h.shape[2]
    device = device_of(z)
    config = _sum_tiles(z.element_size(), device)
    block_r = rank_block(r)
    blocks = cdiv(n, config.block_n) * cdiv(r, block_r)
    part_length, parts = config.divide(t, config.block_t, blocks, device)
    stride_on, stride_or = (1, n) if transposed else (r, 1)
    # With rank 48, adding the parts in the kernel takes 48 us, and a further kernel for it 39 us.
    are_added_later = block_r > 16
    shape = (r, n) if transposed else (n, r)
    sums = z.new_empty((parts, *shape), dtype=torch.float32)
    out = sums if are_added_later else z.new_empty(shape, dtype=torch.float32)
    launch(
        token_sum_kernel, blocks * parts,
        *in_order(token_sum_kernel)(
            z_ptr=z, h_ptr=h, sum_ptr=sums, counter_ptr=None if are_added_later else zero_counters(z, blocks),
            out_ptr=out, mask_ptr=dropout_mask,
            T=t, N=n, part_length=part_length, parts=parts,
            stride_z=z.stride(0), stride_mask=0 if dropout_mask is None else dropout_mask.stride(0),
            stride_h=h.stride(1), stride_term=h.stride(0),
            stride_part=n * r, stride_on=stride_on, stride_or=stride_or, factor=factor,
        ),
        R=r, Z_TERMS=TERMS[z.dtype],
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_R=block_r, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out.sum(0) if are_added_later else out
