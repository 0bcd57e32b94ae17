r"""The kernels of the causal convolution. The docstring of `causal_conv1d.py` has the formulas.

A program walks through a run of tokens and computes a block of channels. It loads each row of x once, while it
computes the chunk of ROWS rows before, and keeps the last W - 1 rows of a chunk in registers. Backward also keeps there
the W - 1 rows of dx that later tokens still add to. So a row of z, with its exponential, is computed once. The halo of
a run is W - 1 rows, which the neighbouring program loads too.

On Hopper, an element of the backward takes 24 instructions, of which 19 compute (4 taps, SiLU, bf16). Masks would take
5 more, so only the last chunks of a run have them. Strides of rows are constants, so that all rows of a chunk share one
address: this saves 3.

The floor of 8192 tokens x 8192 channels in bf16 at 4.3 TB/s (H200) is 62 us for forward, which reads x and writes y,
and 94 us for backward, which reads x and dy and writes dx.

Shapes: B batch, T time, C channels, W taps of the kernel, P programs that share one block of channels.
"""

# A kernel extends a tuple by a sum, because not every version of Triton unpacks a tuple within another one.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.causal_conv1d_config import ConvConfig, ConvProblem, split_time
from tigon.ops.mixers.reach import INVALID
from tigon.ops.norms.row_sums import sum_rows
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import HIP, INTERPRETED, cdiv, device_of
from tigon.runtime.launch import Plan, launcher

# --- kernels -------------------------------------------------------------------------------------


def _strides(*tensors: str) -> list[str]:
    return [f"stride_{name}_{dimension}" for name in tensors for dimension in "bc"]


@triton.jit
def _place(T, C, runs, run, EVEN: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the sequence of this program, the number of its run, the run's first and last token + 1, and channels."""
    blocks = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(0) // blocks
    start = part % runs * run
    return (part // runs).to(tl.int64), part.to(tl.int64), start, tl.minimum(start + run, T), cols, EVEN | (cols < C)


@triton.jit
def _locate(ptr, batch, first, stride_b, STRIDE_T: tl.constexpr, stride_c, cols, UNIT: tl.constexpr):
    """Return the address of row `first` of a sequence, and the offsets of the channels.

    With UNIT, channels are dense, and `stride_b` is a number of units. So the compiler knows that rows are aligned, and
    compiles the same for every batch and length, unless time precedes the batch in memory. Without it, strides are
    those of any view.
    """
    sequence, offsets = batch * stride_b, cols.to(tl.int64)
    if UNIT > 0:
        sequence *= UNIT
    else:
        offsets *= stride_c
    return ptr + sequence + first.to(tl.int64) * STRIDE_T, offsets


@triton.jit
def _last_rows(rows, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT items of a tuple from index FIRST on."""
    last = ()
    for i in tl.static_range(COUNT):
        last = last + (rows[FIRST + i],)
    return last


@triton.jit
def _load_rows(ptrs, STRIDE: tl.constexpr, first, stop, inside, ROWS: tl.constexpr, IS_FULL: tl.constexpr = False):
    """Return a tuple of the rows [BC] from `first` on. A row of bf16 is returned as pairs, uint32 [BC / 2].

    Rows before the first token and from `stop` on are zero. IS_FULL says that there are none of them.
    """
    rows = ()
    for i in tl.static_range(ROWS):
        mask = inside if IS_FULL else inside & (first + i >= 0) & (first + i < stop)
        row = tl.load(ptrs + i * STRIDE, mask=mask, other=0)
        if row.dtype == tl.bfloat16:
            # A number of 16 bits would take a whole register of 32 bits.
            low, high = tl.split(row.to(tl.uint16, bitcast=True).reshape([row.shape[0] // 2, 2]))
            row = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
        rows = rows + (row,)
    return rows


@triton.jit
def _to_fp32(rows, ROWS: tl.constexpr):
    """Return the results of `_load_rows` in fp32."""
    converted = ()
    for i in tl.static_range(ROWS):
        row = rows[i]
        if row.dtype == tl.uint32:
            row = tl.join(row << 16, row & 0xFFFF0000).to(tl.float32, bitcast=True).reshape([2 * row.shape[0]])
        converted = converted + (row.to(tl.float32),)
    return converted


@triton.jit
def _load_parameters(w_ptr, bias_ptr, reach_ptr, cols, inside, TAPS: tl.constexpr, INVALID: tl.constexpr):
    """Return the taps, a tuple of [BC] fp32, the bias [BC], and NaN if the bounds of samples are malformed, or else 0.

    The taps and the bias contain the NaN.
    """
    poison = 0.0
    if reach_ptr is not None:
        poison = tl.where(tl.load(reach_ptr) == INVALID, float("nan"), 0.0)
    weights = ()
    for tap in tl.static_range(TAPS):
        w = tl.load(w_ptr + cols * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        weights = weights + (w + poison,)
    bias = tl.zeros_like(weights[0]) + poison
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return weights, bias, poison


@triton.jit
def _sigmoid(z, NATIVE: tl.constexpr):
    if NATIVE:
        # Triton's function takes 14 instructions, of which half are for denormal numbers. Here these round to 0.
        asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;"
        return tl.inline_asm_elementwise(asm, "=f,f", [z * -1.4426950408889634], tl.float32, is_pure=True, pack=1)
    return tl.sigmoid(z)


@triton.jit
def _convolve(rows, reach, weights, bias, ROW: tl.constexpr, TAPS: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return z of row ROW of a chunk, and what its taps read: a tuple of x[t - W + 1] to x[t] in fp32."""
    z, window = bias, ()
    for tap in tl.static_range(TAPS):
        x = rows[ROW + tap]
        if IS_PACKED:
            x = tl.where(reach >= TAPS - 1 - tap, x, 0.0)
        z += weights[tap] * x
        window = window + (x,)
    return z, window


@triton.jit(do_not_specialize=[*_strides("x", "y"), "stride_reach", "T", "runs", "run"])
def _forward_kernel(
    x_ptr, w_ptr, bias_ptr, reach_ptr, y_ptr,  # [B, T, C], [C, W], [C] or None, uint8 [B | 1, T] or None, [B, T, C]
    stride_x_b, stride_x_c, stride_y_b, stride_y_c, stride_reach,
    T, C, runs, run,
    STRIDE_X_T: tl.constexpr, STRIDE_Y_T: tl.constexpr,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, NATIVE: tl.constexpr, INVALID: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute y of a run of tokens and a block of channels."""
    IS_PACKED: tl.constexpr = reach_ptr is not None
    batch, _, start, end, cols, inside = _place(T, C, runs, run, EVEN, BLOCK_C)
    x_ptr, x_offsets = _locate(x_ptr, batch, start - (TAPS - 1), stride_x_b, STRIDE_X_T, stride_x_c, cols, UNIT)
    y_ptr, y_offsets = _locate(y_ptr, batch, start, stride_y_b, STRIDE_Y_T, stride_y_c, cols, UNIT)
    weights, bias, _ = _load_parameters(w_ptr, bias_ptr, reach_ptr, cols, inside, TAPS, INVALID)
    if IS_PACKED:
        reach_ptr += batch * stride_reach + start

    past = _load_rows(x_ptr + x_offsets, STRIDE_X_T, start - (TAPS - 1), end, inside, TAPS - 1)
    past = _to_fp32(past, TAPS - 1)
    x_ptr += (TAPS - 1) * STRIDE_X_T
    next_rows = _load_rows(x_ptr + x_offsets, STRIDE_X_T, start, end, inside, ROWS)
    next_reaches = _load_rows(reach_ptr, 1, start, end, True, ROWS) if IS_PACKED else ()
    # The chunks before `split`, and the chunk after each, are in the run, and need no masks.
    split = start + tl.maximum(end - start - ROWS, 0) // ROWS * ROWS
    for IS_LAST in tl.static_range(2):
        for first in tl.range(split if IS_LAST else start, end if IS_LAST else split, ROWS):
            rows = past + _to_fp32(next_rows, ROWS)
            reaches = next_reaches
            x_ptr += ROWS * STRIDE_X_T
            next_rows = _load_rows(x_ptr + x_offsets, STRIDE_X_T, first + ROWS, end, inside, ROWS, not IS_LAST)
            if IS_PACKED:
                reach_ptr += ROWS
                next_reaches = _load_rows(reach_ptr, 1, first + ROWS, end, True, ROWS, not IS_LAST)
            for i in tl.static_range(ROWS):
                t = first + i
                z, _window = _convolve(rows, reaches[i] if IS_PACKED else 0, weights, bias, i, TAPS, IS_PACKED)
                y = z * _sigmoid(z, NATIVE) if IS_SILU else z
                tl.store(y_ptr + y_offsets, y, mask=inside & (t < end) if IS_LAST else inside)
                y_ptr += STRIDE_Y_T
            past = _last_rows(rows, ROWS, TAPS - 1)


@triton.jit(do_not_specialize=[*_strides("dy", "x", "dx"), "stride_reach", "T", "runs", "run"])
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, bias_ptr, reach_ptr,  # [B, T, C], [B, T, C], [C, W], [C] or None, uint8 [B | 1, T] or None
    dx_ptr, dw_ptr, dbias_ptr,  # [B, T, C], fp32 [P, C, W], fp32 [P, C]; None if not needed
    stride_dy_b, stride_dy_c, stride_x_b, stride_x_c, stride_dx_b, stride_dx_c, stride_reach,
    T, C, runs, run,
    STRIDE_DY_T: tl.constexpr, STRIDE_X_T: tl.constexpr, STRIDE_DX_T: tl.constexpr,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, NATIVE: tl.constexpr, INVALID: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute dx of a run of tokens and a block of channels, and their parts of dw and dbias."""
    IS_PACKED: tl.constexpr = reach_ptr is not None
    batch, part, start, end, cols, inside = _place(T, C, runs, run, EVEN, BLOCK_C)
    dy_ptr, dy_offsets = _locate(dy_ptr, batch, start, stride_dy_b, STRIDE_DY_T, stride_dy_c, cols, UNIT)
    x_ptr, x_offsets = _locate(x_ptr, batch, start - (TAPS - 1), stride_x_b, STRIDE_X_T, stride_x_c, cols, UNIT)
    weights, bias, poison = _load_parameters(w_ptr, bias_ptr, reach_ptr, cols, inside, TAPS, INVALID)
    if IS_PACKED:
        reach_ptr += batch * stride_reach + start
    if dx_ptr is not None:
        dx_ptr, dx_offsets = _locate(
            dx_ptr, batch, start - (TAPS - 1), stride_dx_b, STRIDE_DX_T, stride_dx_c, cols, UNIT
        )
    # `dw` has one row for each tap, and `dx` the rows t - W + 1 to t - 1, to which row t of dz is still added.
    dbias = tl.zeros([BLOCK_C], tl.float32)
    dw = ()
    for _ in tl.static_range(TAPS):
        dw = dw + (dbias,)
    dx = _last_rows(dw, 0, TAPS - 1)

    # The tokens after the run add to dx of its last rows.
    stop = tl.minimum(end + TAPS - 1, T)
    past = _load_rows(x_ptr + x_offsets, STRIDE_X_T, start - (TAPS - 1), stop, inside, TAPS - 1)
    past = _to_fp32(past, TAPS - 1)
    x_ptr += (TAPS - 1) * STRIDE_X_T
    next_rows = _load_rows(x_ptr + x_offsets, STRIDE_X_T, start, stop, inside, ROWS)
    next_dys = _load_rows(dy_ptr + dy_offsets, STRIDE_DY_T, start, stop, inside, ROWS)
    next_reaches = _load_rows(reach_ptr, 1, start, stop, True, ROWS) if IS_PACKED else ()
    split = start + tl.maximum(end - start - ROWS, 0) // ROWS * ROWS
    for IS_LAST in tl.static_range(2):
        for first in tl.range(split if IS_LAST else start, end + TAPS - 1 if IS_LAST else split, ROWS):
            rows = past + _to_fp32(next_rows, ROWS)
            dys = _to_fp32(next_dys, ROWS)
            reaches = next_reaches
            x_ptr += ROWS * STRIDE_X_T
            dy_ptr += ROWS * STRIDE_DY_T
            next_rows = _load_rows(x_ptr + x_offsets, STRIDE_X_T, first + ROWS, stop, inside, ROWS, not IS_LAST)
            next_dys = _load_rows(dy_ptr + dy_offsets, STRIDE_DY_T, first + ROWS, stop, inside, ROWS, not IS_LAST)
            if IS_PACKED:
                reach_ptr += ROWS
                next_reaches = _load_rows(reach_ptr, 1, first + ROWS, stop, True, ROWS, not IS_LAST)
            for i in tl.static_range(ROWS):
                t = first + i
                reach = reaches[i] if IS_PACKED else 0
                z, window = _convolve(rows, reach, weights, bias, i, TAPS, IS_PACKED)
                dz = dys[i]
                if IS_SILU:
                    sigmoid = _sigmoid(z, NATIVE)
                    dz *= sigmoid + sigmoid * (z - z * sigmoid)
                own_dz = tl.where(t < end, dz, 0.0) if IS_LAST else dz
                if dw_ptr is not None:
                    sums = ()
                    for tap in tl.static_range(TAPS):
                        sums = sums + (dw[tap] + own_dz * window[tap],)
                    dw = sums
                if dbias_ptr is not None:
                    dbias += own_dz
                if dx_ptr is not None:
                    sums = ()
                    for tap in tl.static_range(TAPS):
                        term = tl.where(reach >= TAPS - 1 - tap, dz, 0.0) if IS_PACKED else dz
                        sums = sums + ((dx[tap] if tap < TAPS - 1 else 0.0) + weights[tap] * term,)
                    # Row t is the last one that adds to dx of row t - W + 1.
                    mask = inside & (t < end + TAPS - 1) if IS_LAST else inside
                    if i < TAPS - 1:
                        # The condition is t - W + 1 >= start. All rows of a chunk share a mask that depends on `first`.
                        mask &= first >= start + (TAPS - 2 - i + ROWS) // ROWS * ROWS
                    tl.store(dx_ptr + dx_offsets, sums[0], mask=mask)
                    dx_ptr += STRIDE_DX_T
                    dx = _last_rows(sums, 1, TAPS - 1)
            past = _last_rows(rows, ROWS, TAPS - 1)

    if dw_ptr is not None:
        for tap in tl.static_range(TAPS):
            tl.store(dw_ptr + (part * C + cols) * TAPS + tap, dw[tap] + poison, mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part * C + cols, dbias + poison, mask=inside)


# --- launchers (any strides, no autograd) --------------------------------------------------------


class ConvOptions(NamedTuple):
    """The flags say whether the activation is silu or none, and whether x is [B, T, C] or [B, C, T]."""

    is_silu: bool
    channels_last: bool


def _sizes(x: Tensor, channels_last: bool) -> tuple[int, ...]:
    """Return B, T and C, and the strides of these dimensions. The stride of a single sequence is not used, and is 0."""
    x = x if channels_last else x.transpose(1, 2)
    batch_stride, *strides = x.stride()
    return *x.shape, batch_stride if len(x) > 1 else 0, *strides


def _unit(strides: tuple[tuple[int, ...], ...], channels: int) -> int:
    """Return the largest unit of the strides of batch and time, 16 or 1, or 0 if channels are not dense in a tensor.

    The channels of a tensor [B, C, 1] do not count as dense, because those of a longer one are not.
    """
    if not all(channel == 1 and time >= channels for _, time, channel in strides):
        return 0
    return 16 if all(batch % 16 == time % 16 == 0 for batch, time, _ in strides) else 1


@functools.lru_cache(4096)
def _cached_plan(
    config: ConvConfig, is_backward: bool, is_native: bool, is_silu: bool, taps: int, sizes: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...], reach_stride: int,
) -> tuple[Plan, int]:  # fmt: skip
    kernel = _backward_kernel if is_backward else _forward_kernel
    block_c, num_warps, rows, limit = config.backward if is_backward else config.forward
    batch, length, channels = sizes
    blocks, unit = cdiv(channels, block_c), _unit(strides, channels)
    runs, run = split_time(length, rows, batch * blocks, limit)
    numbers = [n for batch_stride, _, channel in strides for n in (batch_stride // (unit or 1), channel)]
    names = ("DY", "X", "DX") if is_backward else ("X", "Y")
    times = {f"STRIDE_{name}_T": time for name, (_, time, _) in zip(names, strides, strict=True)}
    plan = Plan(
        kernel, blocks * batch * runs, *numbers, reach_stride, length, channels, runs, run,
        TAPS=taps, IS_SILU=is_silu, NATIVE=is_native, INVALID=INVALID, UNIT=unit, EVEN=channels % block_c == 0,
        ROWS=rows, BLOCK_C=block_c, num_warps=num_warps, **times,
    )  # fmt: skip
    return plan, batch * runs


def _plan(
    is_backward: bool, x: Tensor, weight: Tensor, reach: Tensor | None, options: ConvOptions, *others: Tensor | None
) -> tuple[Plan, int]:
    """Return the launch for x and other tensors of its shape, and the number of programs for one block of channels."""
    sizes, taps, device = _sizes(x, options.channels_last), weight.shape[1], device_of(x)
    # A gradient that is not needed has the strides of x.
    strides = tuple([_sizes(x if y is None else y, options.channels_last)[3:] for y in others])
    reach_stride = 0 if reach is None or len(reach) == 1 else sizes[1]
    # The instructions of NVIDIA are exact to two units in the last place of fp32. The interpreter does not have them.
    is_native = x.element_size() == 2 and device.warp_size == 32 and not HIP and not INTERPRETED
    config = ConvConfig.choose(ConvProblem(sizes[2], taps, reach is not None), device)
    return _cached_plan(config, is_backward, is_native, options.is_silu, taps, sizes[:3], strides, reach_stride)


@launcher(fake=lambda x: torch.empty_like(x))
def conv_forward(x: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor | None, options: ConvOptions) -> Tensor:
    """Return y, of the shape and the memory order of x, of taps [C, W] and a bias [C]."""
    y = torch.empty_like(x)
    plan, _ = _plan(False, x, weight, reach, options, x, y)
    plan.launch(x, weight.contiguous(), None if bias is None else bias.contiguous(), reach, y)
    return y


class NeededConvGradients(NamedTuple):
    """The flags say whether the gradients of x, of the taps and of the bias are needed."""

    x: bool
    weight: bool
    bias: bool


def _empty_backward(x: Tensor, weight: Tensor, bias: Tensor | None, needs: NeededConvGradients) -> tuple[Any, Any, Any]:
    """Allocate the gradients that are needed. The others are None."""
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs.bias and bias is not None else None
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs.weight else None
    return torch.empty_like(x) if needs.x else None, dw, dbias


@launcher(fake=_empty_backward)
def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor | None, options: ConvOptions,
    needs: NeededConvGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dw [C, W] and dbias [C]. A gradient that is not needed is None."""
    dx, dw, dbias = _empty_backward(x, weight, bias, needs)
    plan, parts = _plan(True, x, weight, reach, options, dy, x, dx)
    dw_parts = None if dw is None else x.new_empty((parts, weight.numel()), dtype=torch.float32)
    dbias_parts = None if dbias is None else x.new_empty((parts, weight.shape[0]), dtype=torch.float32)
    bias = None if bias is None else bias.contiguous()
    plan.launch(dy, x, weight.contiguous(), bias, reach, dx, dw_parts, dbias_parts)
    if dw_parts is not None:
        sum_rows(dw_parts, dw.view(-1))
    if dbias_parts is not None:
        sum_rows(dbias_parts, dbias)
    return dx, dw, dbias
