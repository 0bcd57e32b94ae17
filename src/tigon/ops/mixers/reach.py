r"""The reach of each token in packed samples: how many earlier tokens of its sample a short convolution reads.

    reach[t] = min(t - s, W - 1),  s = the first token of the sample of t

A token begins a sample if `cu_seqlens` have it, or if its position is 0 or does not continue that of its predecessor.

Shapes: B batch, T time, N samples, W taps of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv
from tigon.runtime.launch import launch, launcher

# The reach of every token if `cu_seqlens` are malformed. Every result of an op is NaN then.
INVALID = 127

# A program of the kernel computes this many tokens.
BLOCK = 1024


# --- reference -----------------------------------------------------------------------------------


def reach_reference(taps: int, length: int, cu_seqlens: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Return the reach of each token, [1, T] or [B, T].

    It is `INVALID` for all tokens if `cu_seqlens` are malformed.
    """
    if cu_seqlens is not None:
        time = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        sample = (torch.searchsorted(cu_seqlens, time, right=True) - 1).clamp(min=0)
        is_valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
        return (time - cu_seqlens[sample]).clamp(max=taps - 1).where(is_valid, INVALID)[None]
    assert position_ids is not None
    # A token continues the sample of its predecessor if its position is the next one.
    continues = (position_ids[:, 1:] == position_ids[:, :-1] + 1) & (position_ids[:, 1:] != 0)
    reach, is_unbroken = torch.zeros_like(position_ids), torch.ones_like(position_ids, dtype=torch.bool)
    for d in range(1, taps):
        is_unbroken = is_unbroken & F.pad(continues, (d, 0))[:, :length]
        reach = reach + is_unbroken
    return reach


# --- kernel --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T", "N", "steps"])
def _reach_kernel(
    source_ptr, reach_ptr,  # [N + 1] if IS_BOUNDS, or else positions [B, T]; uint8 [B, T]
    T, N, steps,
    IS_BOUNDS: tl.constexpr, TAPS: tl.constexpr, INVALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the reach of a block of tokens."""
    blocks = tl.cdiv(T, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    time = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = time < T
    reach = tl.zeros([BLOCK], tl.int32)
    if IS_BOUNDS:
        # A binary search finds the last sample that begins at or before each token.
        low = tl.zeros([BLOCK], tl.int32)
        high = low + (N - 1)
        for _ in range(steps):
            middle = (low + high + 1) // 2
            is_before = tl.load(source_ptr + middle) <= time
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle - 1)
        reach = tl.minimum(time - tl.load(source_ptr + low), TAPS - 1).to(tl.int32)
        # Every program checks all bounds, so that all results are NaN if one bound is wrong.
        errors = ((tl.load(source_ptr) != 0) | (tl.load(source_ptr + N) != T)).to(tl.int32)
        for first in range(0, N, BLOCK):
            sample = first + tl.arange(0, BLOCK)
            start = tl.load(source_ptr + sample, mask=sample < N, other=0)
            end = tl.load(source_ptr + sample + 1, mask=sample < N, other=0)
            errors += tl.sum((start > end).to(tl.int32), axis=0)
        reach = tl.where(errors > 0, INVALID, reach)
    else:
        source_ptr += batch * T
        position = tl.load(source_ptr + time, mask=mask, other=0)
        is_unbroken = mask
        for d in tl.static_range(1, TAPS):
            previous = tl.load(source_ptr + time - d, mask=mask & (time >= d), other=0)
            is_unbroken = is_unbroken & (time >= d) & (position != 0) & (position == previous + 1)
            reach += is_unbroken.to(tl.int32)
            position = previous
    tl.store(reach_ptr + batch * T + time, reach.to(tl.uint8), mask=mask)


# --- launcher ------------------------------------------------------------------------------------


def _empty_reach(source: Tensor, is_bounds: bool, length: int) -> Tensor:
    return source.new_empty((1 if is_bounds else len(source), length), dtype=torch.uint8)


@launcher(fake=_empty_reach)
def sample_reach(source: Tensor, is_bounds: bool, length: int, taps: int) -> Tensor:
    """Return the reach of each token, uint8 [1, T] or [B, T].

    `source` is `cu_seqlens` [N + 1], or positions [B, T]. Every result is `INVALID` if `cu_seqlens` are malformed.
    """
    reach = _empty_reach(source, is_bounds, length)
    samples = len(source) - 1 if is_bounds else 0
    launch(
        _reach_kernel, len(reach) * cdiv(length, BLOCK), source.contiguous(), reach,
        length, samples, samples.bit_length(),
        IS_BOUNDS=is_bounds, TAPS=taps, INVALID=INVALID, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return reach
