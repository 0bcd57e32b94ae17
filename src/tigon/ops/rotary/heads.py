"""What the kernels of rotary embeddings share: heads and angles in a token's row, the turn of a pair, strides.

`tigon.ops.rotary.rope` turns heads as they are, `tigon.ops.rotary.qk_norm_rope_kernels` normalises them first. Shapes
and layouts as in `rope`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "PAIRED",
    "alike",
    "axis_bits",
    "blocks",
    "dense_features",
    "empty_like",
    "head_strides",
    "load_angles",
    "load_heads",
    "store_heads",
    "table_strides",
    "turn",
]

# Whether the features of a pair are neighbours in memory, in x and in y.
PAIRED = {"split_half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


# --- in kernels ----------------------------------------------------------------------------------


@triton.jit
def load_heads(
    ptrs, inside,  # [H, 1]: where each head starts, and whether there is such a head
    D: tl.constexpr, R: tl.constexpr, PAIRED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """x1, x2 [H, R / 2] of the pairs, and the rest [H, D - R] that no angle turns ([1, 1] of zero if none); fp32."""
    if PAIRED:
        # Read as they lie, so that a thread takes 16 bytes at once, and parted in its registers.
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
    """What `load_heads` loads."""
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
    TABLE: tl.constexpr,
):  # fmt: skip
    """A token's row of a table [R], or of one of three axes [3, R], for the first and the second of each pair; fp32."""
    cols = tl.arange(0, BLOCK_R)
    mask = (cols < R // 2) | (2 * BLOCK_R == R)
    if TABLE == "pairs":
        both = tl.arange(0, 2 * BLOCK_R)
        angles = tl.load(ptr + both, mask=(both < R) | (2 * BLOCK_R == R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(angles, [1, BLOCK_R, 2]))
        return first, second
    offsets = cols
    if AXES is not None:  # two bits a frequency, taken eight frequencies at a time: Triton's ints hold no more
        axis = tl.zeros([BLOCK_R], tl.int32)
        for start in tl.static_range(0, R // 2, 8):
            bits = tl.zeros([BLOCK_R], tl.int32) + ((AXES >> (2 * start)) & 65535)
            axis = tl.where(cols // 8 == start // 8, (bits >> (2 * (cols % 8))) & 3, axis)
        offsets = axis.to(tl.int64) * stride_a + cols
    first = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    second = first
    if not PAIRED and TABLE == "halves":
        second = tl.load(ptr + R // 2 + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def turn(x1, x2, cos1, cos2, sin1, sin2, BACKWARD: tl.constexpr):
    """Each pair by its angle, or the gradient of that."""
    if BACKWARD:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    return y1, y2


# --- in launchers --------------------------------------------------------------------------------


def empty_like(x: Tensor | None, like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """With the strides of `x`, if its features are dense then; without `x`, an empty tensor beside `like`."""
    if x is None:
        return like.new_empty(0)
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def dense_features(x: Tensor | None) -> Tensor | None:
    """`x`, copied if its features have gaps."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables, of the same strides and with dense features."""
    same = cos.stride() == sin.stride() and cos.stride(-1) == 1
    return (cos, sin) if same else (cos.contiguous(), sin.contiguous())


def head_strides(x: Tensor | None, heads: int) -> tuple[int, int, int]:
    """Of the batch, the heads (dimension `heads`) and the sequence."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(heads), x.stride(3 - heads))


def table_strides(table: Tensor) -> tuple[int, int, int]:
    """Of the axes, the batch and the sequence; none where there is one for all."""
    return (
        table.stride(0) if table.dim() == 4 else 0,
        table.stride(-3) if table.shape[-3] > 1 else 0,
        table.stride(-2),
    )


@functools.cache
def axis_bits(axes: str) -> int | None:
    """The axis of each frequency, one digit each -> two bits each, from the lowest on; None for tables of one axis."""
    return int(axes[::-1], 4) if axes else None


def blocks(d: int, r: int) -> dict[str, int]:
    """The constexprs that say how wide a tile is."""
    return {
        "D": d, "R": r, "BLOCK_R": triton.next_power_of_2(r // 2), "BLOCK_P": triton.next_power_of_2(max(d - r, 1)),
    }  # fmt: skip
