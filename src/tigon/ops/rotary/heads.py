"""Helpers of the rotary kernels: loads and stores of heads, loads of angles, the rotation of a pair, and strides.

The kernels are in `tigon.ops.rotary.kernels`. `rope` explains the shapes and the layouts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import tl, triton

# Two flags for each layout, the first one for x and the second one for y. A flag is True if the two features of a pair
# are neighbours in memory.
PAIRED = {"split_half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


@triton.jit
def load_heads(
    ptrs, inside,  # [H, 1]: pointers to the heads, and False beyond the last head
    D: tl.constexpr, R: tl.constexpr, PAIRED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Return x1 and x2 [H, R / 2] of the pairs, and the features [H, D - R] that are not rotated, in fp32. If all
    features are rotated, the third result is a [1, 1] zero."""
    if PAIRED:
        # The pairs are loaded in the order of memory, so that a thread loads 16 bytes at once, and split in registers.
        cols = tl.arange(0, 2 * BLOCK_R)[None, :]
        x = tl.load(ptrs + cols, mask=inside & ((cols < R) | (2 * BLOCK_R == R)), other=0.0)
        x1, x2 = tl.split(tl.reshape(x, [x.shape[0], BLOCK_R, 2]))
    else:
        cols = tl.arange(0, BLOCK_R)[None, :]
        mask = inside & ((cols < R // 2) | (2 * BLOCK_R == R))
        x1, x2 = tl.load(ptrs + cols, mask=mask, other=0.0), tl.load(ptrs + R // 2 + cols, mask=mask, other=0.0)
    if R < D:
        cols = R + tl.arange(0, BLOCK_P)[None, :]
        rest = tl.load(ptrs + cols, mask=inside & ((cols < D) | (BLOCK_P == D - R)), other=0.0).to(tl.float32)
    else:
        rest = tl.zeros([1, 1], tl.float32)
    return x1.to(tl.float32), x2.to(tl.float32), rest


@triton.jit
def store_heads(
    ptrs, inside, y1, y2, rest,
    D: tl.constexpr, R: tl.constexpr, PAIRED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Store heads in the form in which `load_heads` returns them."""
    if PAIRED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, :]
        y = tl.reshape(tl.join(y1, y2), [y1.shape[0], 2 * BLOCK_R])
        tl.store(ptrs + cols, y.to(ptrs.dtype.element_ty), mask=inside & ((cols < R) | (2 * BLOCK_R == R)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, :]
        mask = inside & ((cols < R // 2) | (2 * BLOCK_R == R))
        tl.store(ptrs + cols, y1, mask=mask)
        tl.store(ptrs + R // 2 + cols, y2, mask=mask)
    if R < D:
        cols = R + tl.arange(0, BLOCK_P)[None, :]
        tl.store(ptrs + cols, rest, mask=inside & ((cols < D) | (BLOCK_P == D - R)))


@triton.jit
def load_angles(
    ptr, stride_a, R: tl.constexpr, PAIRED: tl.constexpr, AXES: tl.constexpr, BLOCK_R: tl.constexpr,
    TABLE: tl.constexpr, STEP: tl.constexpr = 1,
):  # fmt: skip
    """Return the angles of a token for the first and for the second feature of each pair, [1, R / 2] each, in fp32. The
    token's row of a table is [R], or [3, R] if each frequency has one of three axes. STEP is the stride of its columns.
    It is 2 for the real and the imaginary parts of complex numbers, with TABLE "once"."""
    cols = tl.arange(0, BLOCK_R)
    mask = (cols < R // 2) | (2 * BLOCK_R == R)
    if TABLE == "pairs":
        both = tl.arange(0, 2 * BLOCK_R)
        angles = tl.load(ptr + both, mask=(both < R) | (2 * BLOCK_R == R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(angles, [1, BLOCK_R, 2]))
        return first, second
    offsets = cols
    # AXES holds two bits for each frequency. Eight frequencies are read at a time, because Triton's ints have 32 bits.
    if AXES is not None:
        axis = tl.zeros([BLOCK_R], tl.int32)
        for start in tl.static_range(0, R // 2, 8):
            bits = tl.zeros([BLOCK_R], tl.int32) + ((AXES >> (2 * start)) & 65535)
            axis = tl.where(cols // 8 == start // 8, (bits >> (2 * (cols % 8))) & 3, axis)
        offsets = axis.to(tl.int64) * stride_a + cols
    first = tl.load(ptr + offsets * STEP, mask=mask, other=0.0).to(tl.float32)[None, :]
    second = first
    if not PAIRED and TABLE == "halves":
        second = tl.load(ptr + R // 2 + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def rotate_pairs(x1, x2, cos1, cos2, sin1, sin2, BACKWARD: tl.constexpr):
    """Rotate each pair by its angle, or compute the gradient of this rotation."""
    if BACKWARD:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    return y1, y2


class HeadOptions(NamedTuple):
    """The options of a rotation and of the norm before it, as launchers take them."""

    # The dimension of the heads, 1 or 2.
    heads: int
    layout: str
    # The axis of each frequency as a digit, or "" for tables of one axis.
    axes: str
    table: str
    eps: float = 0.0
    offset: float = 0.0
    together: bool = False  # True if all heads of a token are normalised together.


class HeadInputs(NamedTuple):
    # [B, Hq, S, D] and [B, Hk, S, D], or with the heads in dimension 2.
    q: Tensor
    k: Tensor | None
    # [D], or [H D] if all heads are normalised together.
    q_weight: Tensor | None
    k_weight: Tensor | None


class NeededHeadGradients(NamedTuple):
    q: bool
    k: bool
    q_weight: bool
    k_weight: bool


def allocate_output(x: Tensor | None, like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Allocate a tensor with the strides of `x` if these make its features dense, or contiguous otherwise. If `x` is
    None, the result is an empty tensor with the device and the dtype of `like`."""
    if x is None:
        return like.new_empty(0)
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def dense_features(x: Tensor | None) -> Any:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def with_equal_strides(cos: Tensor, sin: Tensor, largest_step: int = 1) -> tuple[Tensor, Tensor]:
    """Return the tables with equal strides, and features at most `largest_step` apart. Other tables are copied."""
    is_suitable = cos.stride() == sin.stride() and 1 <= cos.stride(-1) <= largest_step
    return (cos, sin) if is_suitable else (cos.contiguous(), sin.contiguous())


def head_strides(heads: int, *strides: tuple[int, ...] | None) -> list[int]:
    """Return the strides of the batch, of the heads (dimension `heads`) and of the sequence; zeros for None."""
    order = 0, heads, 3 - heads
    return [0 if each is None else each[i] for each in strides for i in order]


def table_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of the axes, of the batch and of the sequence. A dimension that is shared has stride 0."""
    axis, batch, sequence, _ = strides if len(strides) == 4 else (0, *strides)
    return axis, batch if shape[-3] > 1 else 0, sequence


def pack_axes(axes: str) -> int | None:
    """Pack the digits of `axes`, one for the axis of each frequency, into two bits each, from the lowest bits on.
    Return None for "", which stands for tables of one axis."""
    return int(axes[::-1], 4) if axes else None


def rotary_size(table: Tensor, kind: str) -> int:
    """Return R, the number of rotary features of a table of cosines or sines."""
    return table.shape[-1] * (2 if kind == "once" else 1)
