r"""From logits to cross entropy and its gradient: the kernels under `cross_entropy` and `linear_cross_entropy`.

For one token with raw logits a, target t, class weights w (default 1), W = sum(w), label smoothing s:

    x     = c * tanh(scale * a / c)                        softcap c; without it x = scale * a
    lse   = log sum_j exp(x_j)
    loss  = (1 - s) * w_t * (lse - x_t)  +  s / V * (W * lse - sum_j w_j x_j)  +  z * lse^2
    dx_j  = A * exp(x_j - lse) - s / V * w_j - [j = t] * (1 - s) * w_t,   A = (1 - s) * w_t + s * W / V + 2 z * lse
    da_j  = dx_j * (1 - (x_j / c)^2) * scale

The two terms are scaled on the device: cross entropy by 1 / D, z-loss by 1 / N. For a mean, D = sum_valid w_t and
N is the number of valid tokens, or both are `num_items`; otherwise both are 1. An ignored token has loss and
gradient 0. A target that is neither in [0, V) nor ignored makes its loss and its gradient NaN, and nothing is
read or written outside the row.

Shapes: M tokens, V vocabulary. `scales` [3] fp32 holds 1 / D, 1 / N and W.
"""

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.ops import token_loss_row
from tigon.ops.dispatch import Device, cdiv, device_of, launch, launcher, on_device, runs_kernels
from tigon.ops.token_loss_maths import LOG2E, target_weight, transformed
from tigon.ops.token_loss_torch import (
    Options,
    Statistics,
    gradient_scales_torch,
    gradient_torch,
    statistics_torch,
)

__all__ = ["Config", "Options", "Statistics", "gradient", "gradient_scales", "statistics"]


# --- configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Launch parameters: a program takes `block_v` logits at a time, each thread `lane` of them together."""

    block_v: int
    lane: int  # 16 bytes
    num_warps: int

    @staticmethod
    def heuristic(v: int, itemsize: int, device: Device) -> "Config":
        # 8192 x 128256 on an H200: 0.485 ms to read, 0.991 ms to read and write, at 4.33 and 4.24 TB/s; blocks of 4096
        # are as fast but short of registers with every option, 8192 take 5 % longer.
        block_v = min(max(triton.next_power_of_2(v), 64), 2048)
        return Config(block_v, 16 // itemsize, max(1, min(block_v // 512, 128 // device.warp_size)))


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _columns(start, BLOCK_V: tl.constexpr, LANE: tl.constexpr):
    """Indices [BLOCK_V / LANE, LANE]: one row is what a thread holds, so a reduction over it needs no exchange."""
    return start + tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def _accumulate(
    start, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap,
    high, total, weighted, best,  # [BLOCK_V / LANE] each
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PREDICTED: tl.constexpr,
    LAST: tl.constexpr, BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Fold a block of logits into each lane's maximum, sum of exp(x - maximum), sum of w (x - pivot), and argmax."""
    cols = _columns(start, BLOCK_V, LANE)
    inside = cols < V if LAST else None
    x, _ = transformed(tl.load(logits_ptr + cols, mask=inside), logit_scale, softcap, SCALED, SOFTCAP)
    if SMOOTHING:
        difference = x - pivot
        if weight_ptr is not None:
            difference *= tl.load(weight_ptr + cols, mask=inside).to(tl.float32)
        if LAST:
            difference = tl.where(inside, difference, 0.0)
        weighted += tl.sum(difference, axis=1)
    if LAST:  # the others need no mask, and the arithmetic has no time for one
        x = tl.where(inside, x, float("-inf"))
    if PREDICTED:
        block_high, index = tl.max(x, axis=1, return_indices=True)
        best = tl.where(block_high > high, tl.min(cols, axis=1) + index, best)
    else:
        block_high = tl.max(x, axis=1)
    new = tl.maximum(high, block_high)
    finite = tl.where(new == float("-inf"), 0.0, new)
    # The difference first: the largest logit then contributes exactly one.
    total = total * tl.exp2((high - finite) * LOG2E) + tl.sum(tl.exp2((x - finite[:, None]) * LOG2E), axis=1)
    return new, total, weighted, best


@triton.jit
def _row_gradient(
    x, slope, cols, V, target, here, weight_ptr, w_t, top, total, scale, z_scale, weight_sum, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr,
):  # fmt: skip
    hit = scale * (1.0 - label_smoothing) * w_t
    mass = hit + z_scale * 2.0 * z_loss * (top + tl.log(total))
    if SMOOTHING:
        mass += scale * label_smoothing / V * weight_sum
    dx = tl.div_rn(mass, total) * tl.exp2((x - top) * LOG2E)
    if here:
        dx -= tl.where(cols == target, hit, 0.0)
    if SMOOTHING:
        w = 1.0
        if weight_ptr is not None:
            w = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
        dx -= scale * label_smoothing / V * w
    return dx * slope


@triton.jit
def _loss_kernel(
    logits_ptr, target_ptr, weight_ptr, scales_ptr,  # [M, V], [M], [V] or None, [3]
    loss_ptr, lse_ptr, z_ptr, predicted_ptr,  # [M], [M, 2], [M] or None, [M] or None
    stride_logits, V,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """The statistics of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row * 2, 0.0)
        tl.store(lse_ptr + row * 2 + 1, 0.0)
        if z_ptr is not None:
            tl.store(z_ptr + row, 0.0)
        if predicted_ptr is not None:
            tl.store(predicted_ptr + row, -1)
        return

    a_t = tl.load(logits_ptr + target, mask=(target >= 0) & (target < V), other=0.0)
    x_t, _ = transformed(a_t, logit_scale, softcap, SCALED, SOFTCAP)
    pivot = tl.where(tl.abs(x_t) < float("inf"), x_t, 0.0)  # sums of differences: a shift of all logits costs no digits

    PREDICTED: tl.constexpr = predicted_ptr is not None
    high = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V // LANE], tl.float32)
    weighted = tl.zeros([BLOCK_V // LANE], tl.float32)
    best = tl.zeros([BLOCK_V // LANE], tl.int32)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V):
        high, total, weighted, best = _accumulate(
            start, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap, high, total, weighted, best,
            SMOOTHING, SCALED, SOFTCAP, PREDICTED, False, BLOCK_V, LANE,
        )  # fmt: skip
    if whole < V:
        high, total, weighted, best = _accumulate(
            whole, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap, high, total, weighted, best,
            SMOOTHING, SCALED, SOFTCAP, PREDICTED, True, BLOCK_V, LANE,
        )  # fmt: skip
    highest = tl.max(high, axis=0)
    top = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * tl.exp2((high - top) * LOG2E), axis=0)

    nll = tl.log(total) - (x_t - top)
    loss = (1.0 - label_smoothing) * target_weight(weight_ptr, target, V) * nll
    lse = top + tl.log(total)
    if SMOOTHING:
        above = tl.log(total) - (pivot - top)  # lse - pivot
        loss += label_smoothing / V * (tl.load(scales_ptr + 2) * above - tl.sum(weighted, axis=0))
    z = tl.load(scales_ptr + 1) * z_loss * lse * lse
    tl.store(loss_ptr + row, tl.load(scales_ptr) * loss + z)
    tl.store(lse_ptr + row * 2, top)
    tl.store(lse_ptr + row * 2 + 1, total)
    if z_ptr is not None:
        tl.store(z_ptr + row, z)
    if PREDICTED:
        tl.store(predicted_ptr + row, tl.min(tl.where(high == highest, best, V), axis=0))


@triton.jit(do_not_specialize=["stride_dloss"])
def _gradient_kernel(
    logits_ptr, target_ptr, weight_ptr, scales_ptr, lse_ptr, dloss_ptr, dlogits_ptr,
    stride_logits, stride_dloss, stride_dlogits, V, blocks,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_V
    cols = _columns(start, BLOCK_V, LANE)
    target = tl.load(target_ptr + row)
    dlogits_ptr += row * stride_dlogits
    if target == ignore_index:
        zeros = tl.zeros([BLOCK_V // LANE, LANE], tl.float32)
        tl.store(dlogits_ptr + cols, zeros, mask=cols < V)
        return
    a = tl.load(logits_ptr + row * stride_logits + cols, mask=cols < V, other=0.0)
    x, slope = transformed(a, logit_scale, softcap, SCALED, SOFTCAP)
    dloss = 1.0
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + row * stride_dloss)
    dx = _row_gradient(
        x, slope, cols, V, target, (target >= start) & (target < start + BLOCK_V), weight_ptr,
        target_weight(weight_ptr, target, V),
        tl.load(lse_ptr + row * 2), tl.load(lse_ptr + row * 2 + 1),
        dloss * tl.load(scales_ptr), dloss * tl.load(scales_ptr + 1), tl.load(scales_ptr + 2), label_smoothing, z_loss,
        SMOOTHING,
    )  # fmt: skip
    tl.store(dlogits_ptr + cols, dx, mask=cols < V)


@triton.jit(do_not_specialize=["M"])
def _scales_kernel(
    target_ptr, weight_ptr, num_items_ptr, scales_ptr, M, V, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: 1 / D, 1 / N (0 where nothing is valid) and W."""
    count, weights, weight_sum = 0.0, 0.0, V * 1.0
    if weight_ptr is not None:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            sums += tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
        weight_sum = tl.sum(sums, axis=0)
    if MEAN:
        if num_items_ptr is not None:
            count = tl.load(num_items_ptr).to(tl.float32)
            weights = count
        else:
            counts, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for start in range(0, M, BLOCK):
                rows = start + tl.arange(0, BLOCK)
                # Not as the load's `other`, which takes the type of the targets: int32 cannot hold every index.
                target = tl.where(rows < M, tl.load(target_ptr + rows, mask=rows < M, other=0), ignore_index)
                counts += tl.where(target != ignore_index, 1.0, 0.0)
                if weight_ptr is not None:
                    inside = (target != ignore_index) & (target >= 0) & (target < V)
                    sums += tl.load(weight_ptr + target, mask=inside, other=0.0).to(tl.float32)
            count = tl.sum(counts, axis=0)
            weights = count
            if weight_ptr is not None:
                weights = tl.sum(sums, axis=0)
        tl.store(scales_ptr, tl.where(weights == 0.0, 0.0, tl.div_rn(1.0, weights)))
        tl.store(scales_ptr + 1, tl.where(count == 0.0, 0.0, tl.div_rn(1.0, count)))
    else:
        tl.store(scales_ptr, 1.0)
        tl.store(scales_ptr + 1, 1.0)
    tl.store(scales_ptr + 2, weight_sum)


# --- launchers: kernels, or torch where none can run ---------------------------------------------


@launcher(fake=lambda target, weight, num_items, v, ignore_index, mean: target.new_empty(3, dtype=torch.float32))
def gradient_scales(
    target: Tensor, weight: Tensor | None, num_items: Tensor | None, v: int, ignore_index: int, mean: bool
) -> Tensor:
    """target [M], weight [V] | None, num_items [] | None -> scales [3] fp32: 1 / D, 1 / N, W."""
    scales = target.new_empty(3, dtype=torch.float32)
    if runs_kernels(scales, weight):
        launch(
            _scales_kernel, 1, target, weight, num_items, scales, target.numel(), v, ignore_index,
            MEAN=mean, BLOCK=2048, num_warps=8,
        )  # fmt: skip
        return scales
    return gradient_scales_torch(target, weight, num_items, v, ignore_index, mean, scales)


def _arguments(options: Options) -> tuple:
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = astuple(options)
    return ignore_index, label_smoothing, softcap or 0.0, logit_scale, z_loss


def _flags(options: Options) -> dict[str, bool]:
    return {
        "SMOOTHING": options.label_smoothing != 0,
        "SCALED": options.logit_scale != 1,
        "SOFTCAP": options.softcap is not None,
    }


def _empty_statistics(logits: Tensor, wants_z_loss: bool, wants_predicted: bool) -> Statistics:
    m, fp32 = logits.shape[0], torch.float32
    return Statistics(
        logits.new_empty(m, dtype=fp32),
        logits.new_empty(m, 2, dtype=fp32),
        logits.new_empty(m if wants_z_loss else 0, dtype=fp32),
        logits.new_empty(m if wants_predicted else 0, dtype=torch.int64),
    )


@on_device
def statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options,
    wants_z_loss: bool = False, wants_predicted: bool = False, gradient_: bool = False,
) -> Statistics:  # fmt: skip
    """logits [M, V], target [M] -> per-token statistics; `gradient_` also writes d(sum of losses) over the logits."""
    if not runs_kernels(logits, weight):
        return statistics_torch(logits, target, weight, scales, options, wants_z_loss, wants_predicted, gradient_)
    (m, v), device, itemsize = logits.shape, device_of(logits), logits.element_size()
    result = _empty_statistics(logits, wants_z_loss, wants_predicted)
    if gradient_ and token_loss_row.takes(logits, target, options, wants_predicted):
        row_config = token_loss_row.Config.heuristic(v, itemsize, device)
        if row_config is not None:
            token_loss_row.row_losses(logits, target, weight, scales, result, options, row_config, device)
            return result
    config = Config.heuristic(v, itemsize, device)
    launch(
        _loss_kernel, m, logits, target, weight, scales, result.loss, result.lse,
        result.z_loss if wants_z_loss else None, result.predicted if wants_predicted else None,
        logits.stride(0), v, *_arguments(options),
        **_flags(options), BLOCK_V=config.block_v, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
    if gradient_:
        gradient(logits, target, weight, scales, result.lse, None, options, out=logits)
    return result


def gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, lse: Tensor, dloss: Tensor | None,
    options: Options, out: Tensor,
) -> Tensor:  # fmt: skip
    """d(sum_i dloss_i * loss_i) / d(logits) [M, V] into `out`, perhaps `logits`; dloss [M] | [] | None: ones."""
    if not runs_kernels(logits, weight):
        return gradient_torch(logits, target, weight, scales, lse, dloss, options, out)
    (m, v), config = logits.shape, Config.heuristic(logits.shape[1], logits.element_size(), device_of(logits))
    blocks = cdiv(v, config.block_v)
    launch(
        _gradient_kernel, m * blocks, logits, target, weight, scales, lse, dloss, out,
        logits.stride(0), dloss.stride(0) if dloss is not None and dloss.dim() else 0, out.stride(0), v, blocks,
        *_arguments(options), **_flags(options),
        BLOCK_V=config.block_v, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
    return out
