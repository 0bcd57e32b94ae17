r"""The activation of a gated MLP whose projections have low-rank adapters, forward and backward, in one pass each.

    gate' = gate + s_g h_g B_g^T,  up' = up + s_u h_u B_u^T,  a = act(gate') * up',  h_d = a A_d^T

    da'   = da + dh_d A_d                                   (da from the base product of down, dh_d scaled by s_d)
    dgate = da' * up' * act'(gate'),  dup = da' * act(gate')
    dB_g  = s_g dgate^T h_g,  dB_u = s_u dup^T h_u,  dA_d = dh_d^T a

gate and up are the base products, without their adapters. The low-rank products are added here, in registers, without
traffic. As separate products they would read and write [T, I] three times in forward and again in backward. The
products round h, B and A to bf16 once (to two bf16 terms in an fp16 model). Eager code rounds gate' and up' before the
activation, and these kernels do not, so the results are as accurate.

h_d is a sum over features, so a program of the forward kernel computes a block of tokens and a part of the features. dB
and dA are sums over tokens, so a program of the backward kernel computes a block of features and a part of the tokens.
The last program of a block adds the sums of its parts, as in `low_rank`.

An FP8 product with one scale for a matrix needs the largest |a|, and in backward the largest of |dgate| and |dup|
together. The kernels find it on request, which saves a pass that reads 2 T I bytes, and 4 T I in backward.

Shapes: T tokens, I intermediate features, r rank of one adapter (at most 16).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank import TERMS, LaunchPlan, PartTiles, empty_hidden, hidden_strides, rank_block
from tigon.ops.adapters.low_rank_kernels import add_parts, is_last, store_terms
from tigon.ops.mlps.activation_kernels import activation_and_slope
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.counters import scratch
from tigon.runtime.device import Device, cdiv, device_of
from tigon.runtime.launch import launch
from tigon.runtime.maxima import magnitude_bits, raise_to_largest


@triton.jit
def _load_terms(h_ptr, stride_term, offsets, mask, ORDER: tl.constexpr):
    """Return the first and the second term of h. If ORDER is 1, the first term replaces the second, which is unused."""
    first = tl.load(h_ptr + offsets, mask, 0.0)
    second = first
    if ORDER == 2:
        second = tl.load(h_ptr + stride_term + offsets, mask, 0.0)
    return first, second


@triton.jit
def _load_split(b_ptr, offsets, mask, factor, ORDER: tl.constexpr):
    """Return factor * b as one or two bf16 terms, in the form of `_load_terms`."""
    b = tl.load(b_ptr + offsets, mask, 0.0).to(tl.float32) * factor
    first = b.to(tl.bfloat16)
    second = first
    if ORDER == 2:
        second = (b - first.to(tl.float32)).to(tl.bfloat16)
    return first, second


@triton.jit
def _add_product(base, h, h_second, b, b_second, ORDER: tl.constexpr):
    """Return base [T, I] + h [T, r] b [I, r]^T in fp32."""
    total = tl.dot(h, tl.trans(b), base.to(tl.float32))
    if ORDER == 2:
        total = tl.dot(h, tl.trans(b_second), total)
        total = tl.dot(h_second, tl.trans(b), total)
    return total


@triton.jit
def _add_sums(total, z, h, h_second, ORDER: tl.constexpr):
    """Return total [I, r] + z [T, I]^T h [T, r] in fp32. z is in bf16 if ORDER is 1, and in fp16 if ORDER is 2."""
    if ORDER == 2:
        first = z.to(tl.bfloat16)
        second = (z.to(tl.float32) - first.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(tl.trans(second), h, total)
        total = tl.dot(tl.trans(first), h_second, total)
        total = tl.dot(tl.trans(first), h, total)
    else:
        total = tl.dot(tl.trans(z), h, total)
    return total


@triton.jit
def _write_sum(out_ptr, sum_ptr, offsets, stride_part, parts, mask):
    """Write the sum of the values of all parts."""
    tl.store(out_ptr + offsets, add_parts(sum_ptr, offsets, stride_part, parts, mask), mask)


@triton.jit(do_not_specialize=["T", "part_length", "parts"])
def _lora_glu_forward_kernel(
    gate_ptr, up_ptr, a_ptr,  # [T, N] each
    maximum_ptr,  # [1] int32, the bits of the largest |a|, or None
    h_ptr, gate_b_ptr, up_b_ptr,  # [3, T, GATE_R + UP_R] bf16 or None, [N, r] or None
    # [r, N] or None, [parts, T, r] fp32, an int32 for each block of tokens, [3, T, r] bf16
    down_a_ptr, sum_ptr, counter_ptr, down_h_ptr,
    T, N, part_length, parts, stride_h, stride_term, stride_down_term, gate_factor, up_factor,
    GATE_R: tl.constexpr, UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write a for a block of tokens and a part of the features. The last program of a block writes the terms of h_d."""
    pid = tl.program_id(0)
    part = pid % parts
    rows = ((pid // parts).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    ranks = tl.arange(0, BLOCK_R)[None, :]
    steps = tl.arange(0, BLOCK_N)
    if gate_b_ptr is not None:
        gate_mask = (rows < T) & (ranks < GATE_R)
        gate_h, gate_h2 = _load_terms(h_ptr, stride_term, rows * stride_h + ranks, gate_mask, ORDER)
    if up_b_ptr is not None:
        up_mask = (rows < T) & (ranks < UP_R)
        up_h, up_h2 = _load_terms(h_ptr + GATE_R, stride_term, rows * stride_h + ranks, up_mask, ORDER)
    down_h = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    # Keep one maximum for each row of a tile. One for each element of it would need so many registers that a
    # multiprocessor of an H200 runs one program instead of two.
    if maximum_ptr is not None:
        row_bits = tl.zeros([BLOCK_T, 1], tl.int32)
    # The length of a part is a multiple of `BLOCK_N`. Triton vectorises the loads only if it knows that.
    first = tl.multiple_of(part * part_length, BLOCK_N)
    for start in tl.range(first, tl.minimum(first + part_length, N), BLOCK_N, num_stages=STAGES):
        cols = (start + steps)[None, :]
        features = (start + steps)[:, None]
        inside = (rows < T) & (cols < N)
        offsets = rows * N + cols
        gate = tl.load(gate_ptr + offsets, inside, 0.0)
        up = tl.load(up_ptr + offsets, inside, 0.0)
        if gate_b_ptr is not None:
            mask = (features < N) & (ranks < GATE_R)
            b, b2 = _load_split(gate_b_ptr, features * GATE_R + ranks, mask, gate_factor, ORDER)
            gate = _add_product(gate, gate_h, gate_h2, b, b2, ORDER)
        if up_b_ptr is not None:
            b, b2 = _load_split(
                up_b_ptr, features * UP_R + ranks, (features < N) & (ranks < UP_R), up_factor, ORDER
            )  # fmt: skip
            up = _add_product(up, up_h, up_h2, b, b2, ORDER)
        act, _ = activation_and_slope(gate.to(tl.float32), KIND)
        a = (act * up.to(tl.float32)).to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + offsets, a, inside)
        if maximum_ptr is not None:
            bits = tl.where(inside, magnitude_bits(a.to(tl.float32)), 0)
            row_bits = tl.maximum(row_bits, tl.max(bits, axis=1, keep_dims=True))
        if down_a_ptr is not None:
            down_ranks = tl.arange(0, BLOCK_R)[:, None]
            down_mask = (down_ranks < DOWN_R) & (cols < N)
            down_a, down_a2 = _load_split(down_a_ptr, down_ranks * N + cols, down_mask, 1.0, ORDER)
            # Elements outside of `a` add nothing, because `down_a` is zero there, and gate and up are finite.
            down_h = _add_sums(down_h, tl.trans(a), tl.trans(down_a), tl.trans(down_a2), ORDER)
    if maximum_ptr is not None:
        raise_to_largest(maximum_ptr, row_bits)
    if down_a_ptr is not None:
        mask = (rows < T) & (ranks < DOWN_R)
        offsets = rows * DOWN_R + ranks
        stride_part = T.to(tl.int64) * DOWN_R
        tl.store(sum_ptr + part * stride_part + offsets, down_h, mask)
        if is_last(counter_ptr + pid // parts, parts):
            down_h = add_parts(sum_ptr, offsets, stride_part, parts, mask)
            store_terms(down_h, down_h_ptr, offsets, stride_down_term, mask)


@triton.jit(do_not_specialize=["T", "part_length", "parts"])
def _lora_glu_backward_kernel(
    da_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,  # [T, N] each
    maximum_ptr,  # [1] int32, the bits of the largest |dgate| or |dup|, or None
    h_ptr, gate_b_ptr, up_b_ptr,  # [3, T, GATE_R + UP_R] bf16 or None, [N, r] or None
    down_dh_ptr, down_a_ptr,  # [3, T, r] bf16 or None, [r, N] or None
    # [N, r] fp32 or None, the third [r, N]; [parts, N * (all ranks)] fp32; an int32 for each block of features
    gate_db_ptr, up_db_ptr, down_da_ptr, sum_ptr, counter_ptr,
    T, N, part_length, parts, stride_h, stride_term, stride_dh, stride_dh_term, gate_factor, up_factor,
    GATE_R: tl.constexpr, UP_R: tl.constexpr, DOWN_R: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dgate and dup for a block of features and a part of the tokens. The last program of a block adds the sums.
    dgate and dup may be stored in the memory of gate and up, or of da, because a tile is read before it is written."""
    pid = tl.program_id(0)
    part = pid % parts
    first_feature = (pid // parts) * BLOCK_N
    cols = (first_feature + tl.arange(0, BLOCK_N))[None, :]
    features = (first_feature + tl.arange(0, BLOCK_N))[:, None]
    ranks = tl.arange(0, BLOCK_R)[None, :]
    gate_mask, up_mask = (features < N) & (ranks < GATE_R), (features < N) & (ranks < UP_R)
    down_mask = (features < N) & (ranks < DOWN_R)
    gate_offsets, up_offsets, down_offsets = features * GATE_R + ranks, features * UP_R + ranks, ranks * N + features
    if gate_b_ptr is not None:
        gate_b, gate_b2 = _load_split(gate_b_ptr, gate_offsets, gate_mask, gate_factor, ORDER)
    if up_b_ptr is not None:
        up_b, up_b2 = _load_split(up_b_ptr, up_offsets, up_mask, up_factor, ORDER)
    if down_dh_ptr is not None:
        # This is a tile [N, r], the transpose of the tensor in memory.
        down_a, down_a2 = _load_split(down_a_ptr, down_offsets, down_mask, 1.0, ORDER)
    gate_db = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    up_db = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    down_da = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if maximum_ptr is not None:
        half_bits = tl.zeros([BLOCK_T // 2, BLOCK_N], tl.int32)
    steps = tl.arange(0, BLOCK_T)[:, None]
    first = part.to(tl.int64) * part_length
    for start in tl.range(first, tl.minimum(first + part_length, T), BLOCK_T, num_stages=STAGES):
        rows = start + steps
        inside = (rows < T) & (cols < N)
        offsets = rows * N + cols
        gate = tl.load(gate_ptr + offsets, inside, 0.0)
        up = tl.load(up_ptr + offsets, inside, 0.0)
        da = tl.load(da_ptr + offsets, inside, 0.0)
        if gate_b_ptr is not None:
            mask = (rows < T) & (ranks < GATE_R)
            gate_h, gate_h2 = _load_terms(h_ptr, stride_term, rows * stride_h + ranks, mask, ORDER)
            gate = _add_product(gate, gate_h, gate_h2, gate_b, gate_b2, ORDER)
        if up_b_ptr is not None:
            mask = (rows < T) & (ranks < UP_R)
            up_h, up_h2 = _load_terms(h_ptr + GATE_R, stride_term, rows * stride_h + ranks, mask, ORDER)
            up = _add_product(up, up_h, up_h2, up_b, up_b2, ORDER)
        if down_dh_ptr is not None:
            down_dh, down_dh2 = _load_terms(
                down_dh_ptr, stride_dh_term, rows * stride_dh + ranks, (rows < T) & (ranks < DOWN_R), ORDER
            )  # fmt: skip
            da = _add_product(da, down_dh, down_dh2, down_a, down_a2, ORDER)
        act, slope = activation_and_slope(gate.to(tl.float32), KIND)
        dgate = (da.to(tl.float32) * up.to(tl.float32) * slope).to(dgate_ptr.dtype.element_ty)
        dup = (da.to(tl.float32) * act).to(dup_ptr.dtype.element_ty)
        tl.store(dgate_ptr + offsets, dgate, inside)
        tl.store(dup_ptr + offsets, dup, inside)
        if maximum_ptr is not None:
            bits = tl.maximum(magnitude_bits(dgate.to(tl.float32)), magnitude_bits(dup.to(tl.float32)))
            # In a tile of 16 rows, a thread holds the same columns of both halves of the rows. The maximum over the
            # halves needs no exchange between threads, and takes half as many registers as one for each element.
            halves = tl.reshape(tl.where(inside, bits, 0), [2, BLOCK_T // 2, BLOCK_N])
            half_bits = tl.maximum(half_bits, tl.max(halves, axis=0))
        # Rows beyond T add nothing, because h and dh are zero there, and the other factor is finite.
        if gate_db_ptr is not None:
            gate_db = _add_sums(gate_db, dgate, gate_h, gate_h2, ORDER)
        if up_db_ptr is not None:
            up_db = _add_sums(up_db, dup, up_h, up_h2, ORDER)
        if down_da_ptr is not None:
            a = (act * up.to(tl.float32)).to(dgate_ptr.dtype.element_ty)
            down_da = _add_sums(down_da, a, down_dh, down_dh2, ORDER)
    if maximum_ptr is not None:
        raise_to_largest(maximum_ptr, half_bits)
    # The sums of a part lie one after the other: those of gate, those of up, and those of down.
    up_sums = N * GATE_R
    down_sums = up_sums + N * UP_R
    stride_part = (down_sums + N * DOWN_R).to(tl.int64)
    part_ptr = sum_ptr + part * stride_part
    if gate_db_ptr is not None:
        tl.store(part_ptr + gate_offsets, gate_db * gate_factor, gate_mask)
    if up_db_ptr is not None:
        tl.store(part_ptr + up_sums + up_offsets, up_db * up_factor, up_mask)
    if down_da_ptr is not None:
        tl.store(part_ptr + down_sums + down_offsets, down_da, down_mask)
    if is_last(counter_ptr + pid // parts, parts):
        if gate_db_ptr is not None:
            _write_sum(gate_db_ptr, sum_ptr, gate_offsets, stride_part, parts, gate_mask)
        if up_db_ptr is not None:
            _write_sum(up_db_ptr, sum_ptr + up_sums, up_offsets, stride_part, parts, up_mask)
        if down_da_ptr is not None:
            _write_sum(down_da_ptr, sum_ptr + down_sums, down_offsets, stride_part, parts, down_mask)


class GLUAdapters(NamedTuple):
    """The tensors of the adapters that the kernels read. The tensors of a projection without an adapter are None."""

    h: Tensor | None  # [3, T, R] bf16, the columns of gate and then those of up
    # [I, r], contiguous.
    gate_b: Tensor | None
    up_b: Tensor | None
    # [r, I], contiguous.
    down_a: Tensor | None
    gate_scaling: float
    up_scaling: float

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Return the ranks of gate, up and down. The rank of a projection without an adapter is 0."""
        _, gate_b, up_b, down_a, _, _ = self
        return (
            0 if gate_b is None else gate_b.shape[1],
            0 if up_b is None else up_b.shape[1],
            0 if down_a is None else down_a.shape[0],
        )


def _tiles(is_backward: bool, device: Device) -> PartTiles:
    """Return tiles of `block_t` tokens and `block_n` features."""
    # Microseconds with 8192 x 14336 and 8192 x 9216 elements in bf16, rank 16, on an H200, for (block_t, block_n,
    # num_warps, num_stages, programs_per_multiprocessor). Forward: (128, 32, 8, 3, 8) 278 and 178,
    # (64, 32, 4, 3, 4) 301 and 197, (64, 64, 4, 2, 4) 290 and 190. Its traffic alone takes 164 and 105. Backward, in
    # the memory of its inputs: (16, 64, 4, 4, 16) 357 and 243, (32, 64, 4, 3, 16) 391 and 259, (64, 64, 4, 3, 16) 431
    # and 292, (64, 32, 4, 3, 4) 643 and 502. Its traffic alone takes 273 and 176.
    if is_backward:
        return PartTiles(16, 64, 4, num_stages=4 if device.async_copy else 1, programs_per_multiprocessor=16)
    return PartTiles(128, 32, 8, num_stages=3 if device.async_copy else 1, programs_per_multiprocessor=8)


@functools.lru_cache(1024)
def _plan_launch(
    is_backward: bool, tokens: int, features: int, ranks: tuple[int, int, int], kind: str, dtype: torch.dtype,
    device: Device,
) -> LaunchPlan:  # fmt: skip
    """Return the numbers of a launch. Those of the strides and the factors follow the numbers of the plan."""
    tiles = _tiles(is_backward, device)
    long, long_block, short, short_block = tokens, tiles.block_t, features, tiles.block_n
    if not is_backward:
        long, long_block, short, short_block = short, short_block, long, long_block
    blocks = cdiv(short, short_block)
    part_length, parts = tiles.divide(long, long_block, blocks, device)
    constants = {
        "GATE_R": ranks[0],
        "UP_R": ranks[1],
        "DOWN_R": ranks[2],
        "KIND": kind,
        "ORDER": TERMS[dtype],
        "BLOCK_T": tiles.block_t,
        "BLOCK_N": tiles.block_n,
        "BLOCK_R": rank_block(max(ranks)),
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    sums = features * sum(ranks) if is_backward else tokens * ranks[2]
    return LaunchPlan(blocks * parts, blocks, parts * sums, (tokens, features, part_length, parts), constants)


def lora_glu_forward(
    gate: Tensor, up: Tensor, adapters: GLUAdapters, kind: str, maximum: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return a [T, I] and the terms of h_d [3, T, r], from gate and up [T, I]. h_d is None if down has no adapter.
    `maximum` [1] int32 holds the bits of an fp32 number. If it is passed, the kernel raises it to the largest |a|."""
    t, i = gate.shape
    ranks, h = adapters.ranks, adapters.h
    plan = _plan_launch(False, t, i, ranks, kind, gate.dtype, device_of(gate))
    a = torch.empty_like(gate)
    down_h = empty_hidden(gate, t, ranks[2]) if ranks[2] else None
    counters, sums = scratch(gate, plan.counters, plan.floats)
    launch(
        _lora_glu_forward_kernel, plan.programs,
        gate, up, a, maximum, h, adapters.gate_b, adapters.up_b, adapters.down_a, sums, counters, down_h,
        *plan.numbers, *hidden_strides(h), 0 if down_h is None else down_h.stride(0),
        adapters.gate_scaling, adapters.up_scaling, **plan.constants,
    )  # fmt: skip
    return a, down_h


def lora_glu_backward(
    da: Tensor, gate: Tensor, up: Tensor, adapters: GLUAdapters, down_dh: Tensor | None, kind: str,
    dgate: Tensor, dup: Tensor, *, needs: Sequence[bool], maximum: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Write dgate and dup [T, I], which may be the tensors gate and up, and return the gradients of B_g, B_u and A_d.
    da [T, I] is the gradient of a through the base product of down. `down_dh` [3, T, r] holds the terms of the gradient
    of h_d. `needs` says which of the gradients of B_g, B_u and A_d are needed. The others are None. `maximum` [1] int32
    holds the bits of an fp32 number. If it is passed, the kernel raises it to the largest of |dgate| and |dup|."""
    t, i = gate.shape
    h, gate_b, up_b, down_a, gate_scaling, up_scaling = adapters
    gradients = [
        torch.empty_like(tensor) if need and tensor is not None else None
        for tensor, need in zip((gate_b, up_b, down_a), needs, strict=True)
    ]
    plan = _plan_launch(True, t, i, adapters.ranks, kind, gate.dtype, device_of(gate))
    counters, sums = scratch(gate, plan.counters, plan.floats)
    launch(
        _lora_glu_backward_kernel, plan.programs,
        da, gate, up, dgate, dup, maximum, h, gate_b, up_b, down_dh, down_a, *gradients, sums, counters,
        *plan.numbers, *hidden_strides(h), *hidden_strides(down_dh), gate_scaling, up_scaling, **plan.constants,
    )  # fmt: skip
    return gradients
