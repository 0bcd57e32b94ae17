r"""The kernels of the causal convolution. The docstring of `causal_conv1d.py` has the formulas.

A program walks through a run of tokens and computes a block of channels. It loads each row of x once, and keeps the
W - 1 rows before it in registers. Backward also keeps there the W - 1 rows of dx that later tokens still add to. So a
row of z, with its exponential, is computed once. The halo of a run is W - 1 rows, which the neighbouring program loads
too.

The floor of 8192 tokens x 8192 channels in bf16 at 4.3 TB/s (H200) is 62 us for forward, which reads x and writes y,
and 94 us for backward, which reads x and dy and writes dx.

Shapes: B batch, T time, C channels, W taps of the kernel, P programs that share one block of channels.
"""

# A kernel extends a tuple by a sum, because not every version of Triton unpacks a tuple within another one.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.reach import INVALID
from tigon.ops.norms.row_sums import sum_rows
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import HIP, INTERPRETED, Device, cdiv, device_of, next_power_of_2
from tigon.runtime.launch import Plan, launcher
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------


class ConvProblem(NamedTuple):
    """The sizes that the launch parameters of a convolution depend on."""

    channels: int
    taps: int
    is_packed: bool


class WalkConfig(NamedTuple):
    """Launch parameters of one direction."""

    # Channels of a program.
    block_c: int
    num_warps: int
    # The rows that a program loads at a time.
    rows: int
    # Pipeline stages of the loop over rows.
    num_stages: int
    # More programs would not shorten the runs of tokens.
    programs: int


@dataclass(frozen=True)
class ConvConfig(LaunchConfig):
    """Launch parameters of the forward and the backward. A sweep replaces them by `tuned(ConvConfig, forward=...)`."""

    forward: WalkConfig
    backward: WalkConfig

    @staticmethod
    def heuristic(problem: ConvProblem, device: Device) -> "ConvConfig":
        """Return the parameters for any number of channels and 2 to 8 taps.

        A thread computes 8 channels in forward, so that it loads 16 bytes of bf16. In backward, taps, sums and rows
        take 4 W registers for each channel, so it computes 4, or 2 of more than 4 taps. All programs run at once: on
        Hopper, a thread of the forward takes 128 registers, and one of the backward 96 (10 programs a multiprocessor),
        121 with 8 taps, or 168 with packed samples.
        """
        width, warps = next_power_of_2(problem.channels), 2
        block = lambda thread_channels: min(width, thread_channels * warps * device.warp_size)
        few_taps = problem.taps <= 4
        programs = 6 if problem.is_packed else 10 if few_taps else 8
        return ConvConfig(
            WalkConfig(block(8 if few_taps else 4), warps, 8, 1, 8 * device.multiprocessors),
            WalkConfig(block(4 if few_taps else 2), warps, 4, 1, programs * device.multiprocessors),
        )


def split_time(length: int, rows: int, shares: int, programs: int) -> tuple[int, int]:
    """Return into how many runs the tokens of a sequence are split, and the tokens of a run, a multiple of `rows`.

    `shares` is the number of programs that compute one run of every sequence. A run has at least 4 chunks of `rows`,
    because its halo is loaded and computed twice.
    """
    run = max(4, cdiv(cdiv(length, max(1, programs // max(1, shares))), rows)) * rows
    return cdiv(length, run), run


def _strides(*tensors: str) -> list[str]:
    return [f"stride_{name}_{dimension}" for name in tensors for dimension in "btc"]


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _place(T, C, runs, run, EVEN: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the sequence of this program, the number of its run, the run's first and last token + 1, and channels."""
    blocks = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(0) // blocks
    start = part % runs * run
    return (part // runs).to(tl.int64), part.to(tl.int64), start, tl.minimum(start + run, T), cols, EVEN | (cols < C)


@triton.jit
def _locate(ptr, batch, stride_b, stride_t, stride_c, cols, UNIT: tl.constexpr):
    """Return the address of a sequence, the stride of its rows in int64, and the offsets of the channels.

    With UNIT, channels are dense, and the other strides are numbers of units. So the compiler knows that rows are
    aligned, and compiles the same for every batch and length. Without it, strides are those of any view.
    """
    row_stride, offsets = stride_t.to(tl.int64), cols.to(tl.int64)
    sequence = batch * stride_b
    if UNIT > 0:
        row_stride *= UNIT
        sequence *= UNIT
    else:
        offsets *= stride_c
    return ptr + sequence, row_stride, offsets


@triton.jit
def _load_rows(ptr, stride_t, offsets, first, stop, inside, ROWS: tl.constexpr, MAY_PRECEDE: tl.constexpr = False):
    """Return a tuple of the rows [BC] from `first` on, in fp32. Rows from `stop` on are zero.

    If MAY_PRECEDE is True, `first` may be negative, and the rows before the first token are zero.
    """
    ptr += first.to(tl.int64) * stride_t
    rows = ()
    for i in tl.static_range(ROWS):
        mask = inside & (first + i < stop)
        if MAY_PRECEDE:
            mask = mask & (first + i >= 0)
        rows = rows + (tl.load(ptr + offsets, mask=mask, other=0).to(tl.float32),)
        ptr += stride_t
    return rows


@triton.jit
def _last_rows(rows, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT items of a tuple from index FIRST on."""
    last = ()
    for i in tl.static_range(COUNT):
        last = last + (rows[FIRST + i],)
    return last


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
    stride_x_b, stride_x_t, stride_x_c, stride_y_b, stride_y_t, stride_y_c, stride_reach,
    T, C, runs, run,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, NATIVE: tl.constexpr, INVALID: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y of a run of tokens and a block of channels."""
    IS_PACKED: tl.constexpr = reach_ptr is not None
    batch, _, start, end, cols, inside = _place(T, C, runs, run, EVEN, BLOCK_C)
    x_ptr, x_stride, x_offsets = _locate(x_ptr, batch, stride_x_b, stride_x_t, stride_x_c, cols, UNIT)
    y_ptr, y_stride, y_offsets = _locate(y_ptr, batch, stride_y_b, stride_y_t, stride_y_c, cols, UNIT)
    weights, bias, _ = _load_parameters(w_ptr, bias_ptr, reach_ptr, cols, inside, TAPS, INVALID)
    if IS_PACKED:
        reach_ptr += batch * stride_reach

    past = _load_rows(x_ptr, x_stride, x_offsets, start - TAPS + 1, end, inside, TAPS - 1, True)
    for step in tl.range(0, end - start, ROWS, num_stages=STAGES):
        first = start + step
        rows = past + _load_rows(x_ptr, x_stride, x_offsets, first, end, inside, ROWS)
        if IS_PACKED:
            reaches = _load_rows(reach_ptr, 1, 0, first, end, True, ROWS)
        row_ptr = y_ptr + first.to(tl.int64) * y_stride
        for i in tl.static_range(ROWS):
            z, _window = _convolve(rows, reaches[i] if IS_PACKED else 0, weights, bias, i, TAPS, IS_PACKED)
            y = z * _sigmoid(z, NATIVE) if IS_SILU else z
            tl.store(row_ptr + y_offsets, y, mask=inside & (first + i < end))
            row_ptr += y_stride
        past = _last_rows(rows, ROWS, TAPS - 1)


@triton.jit(do_not_specialize=[*_strides("dy", "x", "dx"), "stride_reach", "T", "runs", "run"])
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, bias_ptr, reach_ptr,  # [B, T, C], [B, T, C], [C, W], [C] or None, uint8 [B | 1, T] or None
    dx_ptr, dw_ptr, dbias_ptr,  # [B, T, C], fp32 [P, C, W], fp32 [P, C]; None if not needed
    stride_dy_b, stride_dy_t, stride_dy_c, stride_x_b, stride_x_t, stride_x_c, stride_dx_b, stride_dx_t, stride_dx_c,
    stride_reach,
    T, C, runs, run,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, NATIVE: tl.constexpr, INVALID: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of a run of tokens and a block of channels, and their parts of dw and dbias."""
    IS_PACKED: tl.constexpr = reach_ptr is not None
    batch, part, start, end, cols, inside = _place(T, C, runs, run, EVEN, BLOCK_C)
    dy_ptr, dy_stride, dy_offsets = _locate(dy_ptr, batch, stride_dy_b, stride_dy_t, stride_dy_c, cols, UNIT)
    x_ptr, x_stride, x_offsets = _locate(x_ptr, batch, stride_x_b, stride_x_t, stride_x_c, cols, UNIT)
    weights, bias, poison = _load_parameters(w_ptr, bias_ptr, reach_ptr, cols, inside, TAPS, INVALID)
    if IS_PACKED:
        reach_ptr += batch * stride_reach
    if dx_ptr is not None:
        dx_ptr, dx_stride, dx_offsets = _locate(dx_ptr, batch, stride_dx_b, stride_dx_t, stride_dx_c, cols, UNIT)
    # `dw` has one row for each tap, and `dx` the rows t - W + 1 to t - 1, to which row t of dz is still added.
    dbias = tl.zeros([BLOCK_C], tl.float32)
    dw = ()
    for _ in tl.static_range(TAPS):
        dw = dw + (dbias,)
    dx = _last_rows(dw, 0, TAPS - 1)

    # The tokens after the run add to dx of its last rows.
    stop = tl.minimum(end + TAPS - 1, T)
    past = _load_rows(x_ptr, x_stride, x_offsets, start - TAPS + 1, stop, inside, TAPS - 1, True)
    for step in tl.range(0, end - start + TAPS - 1, ROWS, num_stages=STAGES):
        first = start + step
        rows = past + _load_rows(x_ptr, x_stride, x_offsets, first, stop, inside, ROWS)
        dys = _load_rows(dy_ptr, dy_stride, dy_offsets, first, stop, inside, ROWS)
        if IS_PACKED:
            reaches = _load_rows(reach_ptr, 1, 0, first, stop, True, ROWS)
        if dx_ptr is not None:
            row_ptr = dx_ptr + (first - (TAPS - 1)).to(tl.int64) * dx_stride
        for i in tl.static_range(ROWS):
            t = first + i
            reach = reaches[i] if IS_PACKED else 0
            z, window = _convolve(rows, reach, weights, bias, i, TAPS, IS_PACKED)
            dz = dys[i]
            if IS_SILU:
                sigmoid = _sigmoid(z, NATIVE)
                dz *= sigmoid + z * sigmoid * (1.0 - sigmoid)
            own_dz = tl.where(t < end, dz, 0.0)
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
                is_own = (t >= start + TAPS - 1) & (t < end + TAPS - 1)
                tl.store(row_ptr + dx_offsets, sums[0], mask=inside & is_own)
                row_ptr += dx_stride
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
    block_c, num_warps, rows, num_stages, limit = config.backward if is_backward else config.forward
    batch, length, channels = sizes
    blocks, unit = cdiv(channels, block_c), _unit(strides, channels)
    runs, run = split_time(length, rows, batch * blocks, limit)
    numbers = [n // unit if unit else n for stride in strides for n in stride]
    plan = Plan(
        kernel, blocks * batch * runs, *numbers, reach_stride, length, channels, runs, run,
        TAPS=taps, IS_SILU=is_silu, NATIVE=is_native, INVALID=INVALID, UNIT=unit, EVEN=channels % block_c == 0,
        ROWS=rows, BLOCK_C=block_c, STAGES=num_stages, num_warps=num_warps,
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
