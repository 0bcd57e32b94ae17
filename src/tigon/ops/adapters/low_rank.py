r"""The three products of a low-rank adapter. Each one takes about as long as the traffic of its one large operand.

    project      h   = x A^T       [T, R] = [T, N] [N, R]     reads x once
    expand       out = h B^T       [T, N] = [T, R] [R, N]     writes out once
    token_sums   G   = z^T h       [N, R] = [N, T] [T, R]     reads z once

The adapters of a bf16 model are usually in fp32. Tensor cores multiply bf16 and add in fp32, and an fp32 value is the
sum of three bf16 values of 8 bits each. So the kernels split an fp32 factor into such terms, and add the products of
the terms. Products of two terms whose indices add up to three or more are below the precision of fp32, and are omitted.
h is stored as terms. `project` splits a single A of a small rank when it reads it. Others are split once by
`split_terms`, because their terms would not fit in the registers. h and the sums over tokens are then as accurate as
products in fp32. `expand` rounds its result to the dtype of the model, so it needs fewer terms: one in
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
from typing import Any, NamedTuple

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
from tigon.runtime.counters import scratch
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import launch

# The number of bf16 terms that represent a value exactly: 8, 11 and 24 bits of mantissa, 8 bits a term.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# The largest rank of a single A that `project` splits when it reads it. On an H200, with tiles of 128 tokens (now 64),
# 8192 tokens of 4096 features took 27 us with rank 16, and 25 us with terms that were split before, which took 3 us
# more. With rank 48 they took 49 and 37 us. Three A of rank 16 in one pass took 71 us if the kernel split them, and 36
# us with `split_terms` and its launch.
LARGEST_RANK_TO_SPLIT = 16

# A program of `expand` writes a tile of so many tokens and features. Milliseconds for 8192 tokens in bf16 on an H200:
# 0.022 (rank 16) and 0.032 (48) with 4096 features, and 0.062 with 14336 features.
EXPAND_BLOCK_T, EXPAND_BLOCK_N = 64, 128


def rank_block(rank: int) -> int:
    """Return how many of the columns of h one program computes: a power of two from 16 to 64."""
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


@dataclass(frozen=True)
class PartTiles:
    """The tiles of a product whose long dimension is divided into parts. A program loops over the tiles of one part. A
    tile has `block_t` tokens and `block_n` features."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int

    def divide(self, length: int, step: int, blocks: int, device: Device) -> tuple[int, int]:
        """Return the length of a part of a long dimension, a multiple of `step`, and the number of parts, of `blocks`
        programs each. A part has at least about four steps."""
        programs = device.multiprocessors * self.programs_per_multiprocessor
        count = max(1, min(programs // max(blocks, 1), cdiv(length, 4 * step)))
        part_length = cdiv(cdiv(length, count), step) * step
        return part_length, max(1, cdiv(length, part_length))


class LaunchPlan(NamedTuple):
    """The arguments of a launch that are no tensors, computed once for the same shapes, strides and factors."""

    programs: int
    # How many counters and how many fp32 numbers the launch needs (`scratch`).
    counters: int
    floats: int
    # The arguments of the kernel that are numbers, and its constexprs.
    numbers: tuple[Any, ...]
    constants: dict[str, Any]


def dropout_bits(seeds: Tensor, position: int, tokens: int, features: int, p: float) -> Tensor:
    """Return the mask of a dropout with probability p as bits [T, ceil(N / 8)], from one of the `seeds` [n] int64.
    Backward calls this again with the same seed, so that the mask is never saved."""
    dropout_mask = seeds.new_empty((tokens, cdiv(features, 8)), dtype=torch.uint8)
    launch(
        dropout_bits_kernel, tokens * cdiv(dropout_mask.shape[1], 256), seeds, dropout_mask, features, position,
        dropout_mask.stride(0), p, BLOCK=256, num_warps=2,
    )  # fmt: skip
    return dropout_mask


def split_terms(first: Tensor, *others: Tensor) -> Tensor:
    """Return the bf16 terms [S, R, N] of one or several tensors [r, N] of any strides, stacked by rows. S is 1 for
    bf16, 2 for fp16 and 3 for fp32."""
    if not others and first.dtype == torch.bfloat16 and first.is_contiguous():
        return first.unsqueeze(0)
    tensors, strides = [first, *others], first.stride()
    if len(tensors) > 3 or any(each.stride() != strides or each.dtype != first.dtype for each in others):
        first = torch.cat(tensors)
        tensors, strides = [first], first.stride()
    plan = _plan_split(tuple([each.shape for each in tensors]), strides, first.dtype)
    out = first.new_empty((plan.constants["NUM_TERMS"], plan.numbers[3], plan.numbers[0]), dtype=torch.bfloat16)
    launch(split_kernel, plan.programs, *(*tensors, first, first)[:3], out, *plan.numbers, **plan.constants)
    return out


@functools.lru_cache(1024)
def _plan_split(shapes: tuple[torch.Size, ...], strides: tuple[int, ...], dtype: torch.dtype) -> LaunchPlan:
    """Return the plan of a launch that splits up to three tensors of these shapes."""
    n, block = shapes[0][1], 512
    ends = list(itertools.accumulate(shape[0] for shape in shapes))
    rows, blocks = ends[-1], cdiv(n, block)
    numbers = n, *(*ends, rows)[:2], rows, blocks, *strides
    return LaunchPlan(rows * blocks, 0, 0, numbers, {"NUM_TERMS": TERMS[dtype], "BLOCK": block, "num_warps": 4})


def empty_hidden(x: Tensor, tokens: int, rank: int) -> Tensor:
    """Allocate the three bf16 terms of h [3, T, R]. Their stride is a multiple of 16 for every T, because Triton would
    compile the kernels again for other strides."""
    rows = cdiv(tokens, 16) * 16
    h = x.new_empty((3, rows, rank), dtype=torch.bfloat16)
    return h if rows == tokens else h[:, :tokens]


def hidden_strides(h: Tensor | None) -> tuple[int, int]:
    """Return the strides of the rows and of the terms of h [3, T, R], or zeros without h."""
    if h is None:
        return 0, 0
    term, row, _ = h.stride()
    return row, term


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def project(
    x: Tensor, tensors: Sequence[Tensor], out: Tensor, factor: float = 1.0, dropout_mask: Tensor | None = None,
    fused_pass: FusedPass | None = None,
) -> Tensor:  # fmt: skip
    """Write the terms of h = factor * x A^T to `out` [3, T, R], and return `out`. `out` may be some columns of a wider
    tensor. The rows of x [T, N] are dense, and `dropout_mask` [T, N / 8] masks x. A [R, N] is the stack of `tensors`
    [r, N] of any strides. `fused_pass` is a pass of the quantisation of x that this kernel also does."""
    a = tensors[0]
    if len(tensors) > 1 or _is_split_before(a.shape[0], a.dtype):
        a = split_terms(*tensors)
    return _launch_project([x], [a], out, (factor,), dropout_mask, fused_pass)


def _is_split_before(rank: int, dtype: torch.dtype) -> bool:
    """Return whether `split_terms` splits a factor before `project_kernel` reads it."""
    return rank > LARGEST_RANK_TO_SPLIT or dtype == torch.bfloat16


def project_each(
    out: Tensor, xs: Sequence[Tensor], bs: Sequence[Tensor], factors: tuple[float, ...],
    fused_pass: FusedPass | None = None,
) -> Tensor:  # fmt: skip
    """Write the terms of h_i = factor_i * x_i B_i to columns i * r to (i + 1) * r of `out` [3, T, count * r]. There are
    at most three x_i [T, N_i]. The B_i [N_i, r] have equal dtypes and strides. A single x may have a `fused_pass`."""
    b = bs[0]
    if _is_split_before(b.shape[1], b.dtype):
        return _launch_project(xs, [split_terms(b.t()) for b in bs], out, factors, None, fused_pass)
    return _launch_project(xs, bs, out, factors, None, fused_pass, transposed=True)


def _launch_project(
    xs: Sequence[Tensor], tensors: Sequence[Tensor], out: Tensor, factors: tuple[float, ...],
    dropout_mask: Tensor | None, fused_pass: FusedPass | None, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Launch `project_kernel` for up to three x. The tensors are the terms of A [S, r, N], A itself, or with
    `transposed` its transpose."""
    x, a = xs[0], tensors[0]
    maximum, copy = (None, None) if fused_pass is None else fused_pass
    values, scale = (None, None) if copy is None else copy
    a_strides = a.stride()[::-1] if transposed else a.stride()[-2:]
    plan = _plan_project(
        tuple([each.shape for each in xs]), tuple([each.stride(0) for each in xs]), out.shape[2],
        (*a_strides, *out.stride(), _row_stride(dropout_mask), _row_stride(values)), factors,
        (x.dtype, a.shape[0] if a.dim() == 3 else TERMS[a.dtype], a.dim() == 3), device_of(x),
    )  # fmt: skip
    counters, sums = scratch(x, plan.counters, plan.floats)
    launch(
        project_kernel, plan.programs, *(*xs, None, None)[:3], *(*tensors, None, None)[:3], sums, counters, out,
        dropout_mask, maximum, values, scale, *plan.numbers, **plan.constants,
    )  # fmt: skip
    return out


@functools.lru_cache(1024)
def _plan_project(
    shapes: tuple[torch.Size, ...], x_strides: tuple[int, ...], columns: int, strides: tuple[int, ...],
    factors: tuple[float, ...], terms: tuple[torch.dtype, int, bool], device: Device,
) -> LaunchPlan:  # fmt: skip
    """Return the plan of a launch for x of these shapes. `strides` are those of A, of `out`, of the mask and of the
    copy. `terms` holds the dtype of x, the number of terms of A, and whether A is split."""
    stride_ar, stride_an, stride_term, stride_out, _, stride_mask, stride_copy = strides
    dtype, a_terms, is_split = terms
    widths, t, count = [shape[1] for shape in shapes], shapes[0][0], len(shapes)
    r = columns // count
    # A tile has 64 features in bf16, because tensor cores lose accuracy compared with fp32 if they sum more of them in
    # one step. Microseconds for 8192 tokens in bf16 on an H200, all in one run: 29 for rank 16 with 4096 features and
    # 71 with 14336; with tiles of 128 tokens, 31 and 72. If the kernel writes an FP8 copy of x too: 35 and 103; with
    # tiles of 128 tokens, 37 and 109. A pass that only writes the copy takes 30 and 87.
    stages = 4 if rank_block(r) <= 32 else 3
    tiles = PartTiles(64, 128 // dtype.itemsize, 4, stages if device.async_copy else 1, programs_per_multiprocessor=2)
    blocks = cdiv(t, tiles.block_t) * cdiv(r, rank_block(r))
    part_length, _ = tiles.divide(sum(widths), tiles.block_n, blocks, device)
    ends = list(itertools.accumulate(cdiv(width, part_length) for width in widths))
    parts = ends[-1]
    numbers = (
        t, *(*widths, 0, 0)[:3], part_length, *(*ends, parts)[:2], parts, *(*x_strides, 0, 0)[:3],
        stride_ar, stride_an, t * r, stride_mask, stride_out, stride_term, stride_copy,
        *(*factors, 1.0, 1.0)[:3],
    )  # fmt: skip
    constants = {
        "R": r, "X_TERMS": TERMS[dtype], "A_TERMS": a_terms, "IS_SPLIT": is_split, "BLOCK_T": tiles.block_t,
        "BLOCK_N": tiles.block_n, "BLOCK_R": rank_block(r), "STAGES": tiles.num_stages, "num_warps": tiles.num_warps,
    }  # fmt: skip
    return LaunchPlan(blocks * parts, blocks * count, parts * t * r, numbers, constants)


def expand(
    h: Tensor, bs: Sequence[Tensor], outs: Sequence[Tensor], factors: tuple[float, ...],
    biases: Sequence[Tensor | None], dropout_mask: Tensor | None = None, adds: bool = False, transposed: bool = False,
) -> Sequence[Tensor]:  # fmt: skip
    """Write factor_i * h_i B_i^T + bias_i to each out_i [T, N_i], or the sum of all these products to a single `out`.
    h_i are columns i * r to (i + 1) * r of h [3, T, count * r]. There are at most three B_i [N_i, r], of equal dtypes
    and strides; if `transposed` is True, `bs` holds their transposes [r, N_i]. Either all outputs have a bias or none
    has. `dropout_mask` [T, N / 8] masks the product for a single output, but not the bias. With `adds`, the results are
    added to the outputs."""
    b = bs[0]
    plan = _plan_expand(
        tuple([out.shape for out in outs]), tuple([out.stride(0) for out in outs]),
        b.shape[0 if transposed else 1], (*h.stride(), *(b.stride()[::-1] if transposed else b.stride())),
        _row_stride(dropout_mask), factors, outs[0].dtype, adds,
    )  # fmt: skip
    launch(
        expand_kernel, plan.programs, h, *(*bs, None, None)[:3], *(*biases, None, None, None)[:3],
        *(*outs, None, None)[:3], dropout_mask, *plan.numbers, **plan.constants,
    )  # fmt: skip
    return outs


@functools.lru_cache(1024)
def _plan_expand(
    shapes: tuple[torch.Size, ...], out_strides: tuple[int, ...], rank: int, strides: tuple[int, ...],
    mask_stride: int, factors: tuple[float, ...], dtype: torch.dtype, adds: bool,
) -> LaunchPlan:  # fmt: skip
    """Return the plan of a launch for outputs of these shapes. `strides` are those of h and of B."""
    stride_term, stride_h, _, stride_bn, stride_br = strides
    t, widths = shapes[0][0], [shape[1] for shape in shapes]
    columns = sum(cdiv(width, EXPAND_BLOCK_N) for width in widths)
    numbers = (
        t, *(*widths, 0, 0)[:3], stride_h, stride_term, stride_bn, stride_br, *(*out_strides, 0, 0)[:3], mask_stride,
        *(*factors, 1.0, 1.0)[:3],
    )  # fmt: skip
    constants = {
        "R": rank, "ORDER": TERMS[dtype], "ADDS": adds,
        "BLOCK_T": EXPAND_BLOCK_T, "BLOCK_N": EXPAND_BLOCK_N, "BLOCK_R": rank_block(rank), "num_warps": 4,
    }  # fmt: skip
    return LaunchPlan(cdiv(t, EXPAND_BLOCK_T) * columns, 0, 0, numbers, constants)


class TokenSums(NamedTuple):
    """Factors of sums over tokens: G_i = factor_i * z_i^T h_i, where h_i are columns i * r to (i + 1) * r of h."""

    zs: Sequence[Tensor]
    # [3, T, count * r]
    h: Tensor | None
    rank: int
    factors: tuple[float, ...]
    dtypes: Sequence[torch.dtype]  # The dtypes of the G_i


def token_sums(
    z: Tensor, h: Tensor, factor: float = 1.0, dropout_mask: Tensor | None = None, transposed: bool = False,
    dtype: torch.dtype = torch.float32, others: TokenSums | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return G = factor * z^T h [N, R], or its transpose [R, N] if `transposed` is True, and G_i of up to three others.
    z is [T, N], h is [3, T, R], and `dropout_mask` [T, N / 8] masks z. The other z_i [T, N_i] have the dtype of z."""
    (_, n), r = z.shape, h.shape[2]
    zs, g, r1, factors, dtypes = others or ((), None, 0, (), ())
    plan = _plan_sums(
        (z.shape, *[each.shape for each in zs]), (z.stride(0), *[each.stride(0) for each in zs]), (r, r1),
        (*hidden_strides(h), *hidden_strides(g), _row_stride(dropout_mask)), (factor, *factors), transposed, z.dtype,
        device_of(z),
    )  # fmt: skip
    outs = [z.new_empty((r, n) if transposed else (n, r), dtype=dtype)]
    outs += [z.new_empty((each.shape[1], r1), dtype=db_dtype) for each, db_dtype in zip(zs, dtypes, strict=True)]
    counters, sums = scratch(z, plan.counters, plan.floats)
    launch(
        token_sum_kernel, plan.programs, z, *(*zs, None, None, None)[:3], h, g, sums, counters,
        *(*outs, None, None, None)[:4], dropout_mask, *plan.numbers, **plan.constants,
    )  # fmt: skip
    return outs


@functools.lru_cache(1024)
def _plan_sums(
    shapes: tuple[torch.Size, ...], z_strides: tuple[int, ...], ranks: tuple[int, int], strides: tuple[int, ...],
    factors: tuple[float, ...], transposed: bool, dtype: torch.dtype, device: Device,
) -> LaunchPlan:  # fmt: skip
    """Return the plan of a launch for z and the other z_i of these shapes. `strides` are those of the rows and the
    terms of h and of the other h, and that of the mask."""
    (t, n), (r, r1), others = shapes[0], ranks, [shape[1] for shape in shapes[1:]]
    # Microseconds for 8192 tokens in bf16 on an H200: 25 (rank 16) and 39 (rank 48) with 4096 features, and 64 with
    # 14336 features (rank 16).
    stages = 3 if device.async_copy else 1
    tiles = PartTiles(128 // dtype.itemsize, 128, 8, stages, programs_per_multiprocessor=2)
    blocks = cdiv(n, tiles.block_n) * cdiv(r, rank_block(r))
    blocks += sum(cdiv(each, tiles.block_n) for each in others) * cdiv(r1, rank_block(r1))
    part_length, parts = tiles.divide(t, tiles.block_t, blocks, device)
    *h_strides, mask_stride = strides
    numbers = (
        t, n, *(*others, 0, 0, 0)[:3], part_length, parts, *(*z_strides, 0, 0, 0)[:4], mask_stride, *h_strides,
        *((1, n) if transposed else (r, 1)), *(*factors, 1.0, 1.0, 1.0)[:4],
    )  # fmt: skip
    constants = {
        "R": r, "R1": r1, "Z_TERMS": TERMS[dtype], "BLOCK_T": tiles.block_t, "BLOCK_N": tiles.block_n,
        "BLOCK_R": rank_block(r), "BLOCK_R1": rank_block(r1), "STAGES": tiles.num_stages, "num_warps": tiles.num_warps,
    }  # fmt: skip
    return LaunchPlan(blocks * parts, blocks, parts * (n * r + sum(others) * r1), numbers, constants)
