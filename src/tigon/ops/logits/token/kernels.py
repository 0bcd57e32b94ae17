r"""Kernels from logits to cross entropy, log-probabilities and their gradients, in `logits` and `head`.

For one token with raw logits a, target t, class weights w (default 1), W = sum(w), label smoothing s:

    x     = c * tanh(scale * a / c)                        softcap c; without it x = scale * a
    lse   = log sum_j exp(x_j)
    loss  = (1 - s) * w_t * (lse - x_t)  +  s / V * (W * lse - sum_j w_j x_j)  +  z * lse^2
    dx_j  = A * exp(x_j - lse) - s / V * w_j - [j = t] * (1 - s) * w_t,   A = (1 - s) * w_t + s * W / V + 2 z * lse
    da_j  = dx_j * (1 - (x_j / c)^2) * scale

The two terms are scaled on the device: cross entropy by 1 / D, z-loss by 1 / N. For a mean, D = sum_valid w_t and
N is the number of valid tokens, or both are `num_items`; otherwise both are 1. An ignored token has loss and
gradient 0. A target that is neither in [0, V) nor ignored makes its loss and its gradient NaN, and no kernel
reads or writes outside the row.

With token scaling, the whole loss of a token is multiplied by its p_t as a constant, and so is its gradient. A token
has two more differentiable results. Their upstream gradients u and e add to dx:

    log p_t = x_t - lse                     dx_j += u ([j = t] - p_j)
    H       = lse - sum_j p_j x_j           dx_j -= e p_j (log p_j + H)

H = log S - R / S with m = max x, S = sum exp(x_j - m) and R = sum exp(x_j - m) (x_j - m). The terms of R vanish as x_j
falls to -inf.

A token may also have K extra targets t_k, whose log-probabilities x_k - lse are differentiable in the same way. The
mean of x and log sum_j p_j^2 = log Q - 2 log S, with Q = sum exp(x_j - m)^2, have no gradient here.

Shapes: M tokens, V vocabulary. `scales` [3] fp32 holds 1 / D, 1 / N and W.
"""

import torch
from torch import Tensor

from tigon.ops.logits.token.reference import gradient_scales_torch, gradient_torch, statistics_torch
from tigon.ops.logits.token.scan import LOG2E, LOWEST, ScanConfig, columns, constants, scan, target_weight, transform
from tigon.ops.logits.token.types import (
    LOSS_ALONE,
    WHOLE_LOSS,
    Options,
    SavedStatistics,
    Shard,
    Statistics,
    Upstream,
    Wants,
    empty_statistics,
)
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of, next_power_of_2, runs_kernels
from tigon.runtime.launch import in_order, launch, launcher, on_device

# Targets or class weights that the single program of `gradient_scales` reads at a time.
SCALES_BLOCK = 2048
SCALES_WARPS = 8


@triton.jit
def _loss_kernel(
    logits_ptr, target_ptr, weight_ptr, scales_ptr,  # [M, V], [M], [V] or None, [3]
    loss_ptr, lse_ptr, z_ptr, predicted_ptr, log_prob_ptr, entropy_ptr,  # [M], [M, 2], four times [M] or None
    mean_ptr, squares_ptr, extra_target_ptr, extra_log_prob_ptr,  # [M] or None, twice, and [M, K] or None, twice
    stride_logits, V, K,
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALING: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row per program."""
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
        if log_prob_ptr is not None:
            tl.store(log_prob_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, 0.0)
        if squares_ptr is not None:
            tl.store(squares_ptr + row, 0.0)
        if extra_log_prob_ptr is not None:
            k = tl.arange(0, BLOCK_K)
            tl.store(extra_log_prob_ptr + row * K + k, tl.zeros([BLOCK_K], tl.float32), mask=k < K)
        return

    inside = (target >= 0) & (target < V)
    a_t = tl.load(logits_ptr + target, mask=inside, other=0.0)
    x_t, _ = transform(a_t, logit_scale, softcap, SCALED, SOFTCAP)
    pivot = tl.where(tl.abs(x_t) < float("inf"), x_t, 0.0)
    highest, total, moment, squares, weighted, predicted = scan(
        logits_ptr, V, pivot, weight_ptr, logit_scale, softcap, SMOOTHING or (mean_ptr is not None),
        SCALED, SOFTCAP, predicted_ptr is not None, entropy_ptr is not None, squares_ptr is not None, BLOCK_V, LANE,
    )  # fmt: skip
    top = tl.where(highest == float("-inf"), 0.0, highest)

    nll = tl.log(total) - (x_t - top)
    loss = (1.0 - label_smoothing) * target_weight(weight_ptr, target, V) * nll
    lse = top + tl.log(total)
    if SMOOTHING:
        # This is lse - pivot.
        pivot_difference = tl.log(total) - (pivot - top)
        loss += label_smoothing / V * (tl.load(scales_ptr + 2) * pivot_difference - weighted)
    z = tl.load(scales_ptr + 1) * z_loss * lse * lse
    loss = tl.load(scales_ptr) * loss + z
    log_prob = tl.where(inside, -nll, float("nan"))
    if TOKEN_SCALING:
        loss *= tl.exp(log_prob)
        z *= tl.exp(log_prob)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row * 2, top)
    tl.store(lse_ptr + row * 2 + 1, total)
    if z_ptr is not None:
        tl.store(z_ptr + row, z)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted)
    if log_prob_ptr is not None:
        tl.store(log_prob_ptr + row, log_prob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, tl.log(total) - tl.div_rn(moment, total))
    if mean_ptr is not None:
        tl.store(mean_ptr + row, pivot + tl.div_rn(weighted, V * 1.0))
    if squares_ptr is not None:
        tl.store(squares_ptr + row, tl.log(squares) - 2.0 * tl.log(total))
    if extra_log_prob_ptr is not None:
        k = tl.arange(0, BLOCK_K)
        extra = tl.load(extra_target_ptr + row * K + k, mask=k < K, other=0)
        is_class = (extra >= 0) & (extra < V)
        a_k = tl.load(logits_ptr + extra, mask=is_class, other=0.0)
        x_k, _ = transform(a_k, logit_scale, softcap, SCALED, SOFTCAP)
        extra_log_prob = tl.where(is_class, (x_k - top) - tl.log(total), float("nan"))
        extra_log_prob = tl.where(extra == ignore_index, 0.0, extra_log_prob)
        tl.store(extra_log_prob_ptr + row * K + k, extra_log_prob, mask=k < K)


@triton.jit(do_not_specialize=["stride_dloss"])
def _gradient_kernel(
    logits_ptr, target_ptr, weight_ptr, scales_ptr, lse_ptr,  # [M, V], [M], [vocabulary] or None, [3], [M, 2]
    log_prob_ptr, entropy_ptr,  # [M] or None: read for token scaling, and for the gradient of the entropy
    argmax_ptr,  # [M] or None
    dloss_ptr, dlog_prob_ptr, dentropy_ptr,  # [M] or None
    extra_target_ptr, dextra_log_prob_ptr,  # [M, K] or None
    dlogits_ptr,  # [M, V]
    stride_logits, stride_dloss, stride_dlogits,
    V, K, blocks, vocabulary, first,  # `first` is the index of the shard's first column, None if V is the vocabulary
    ignore_index, label_smoothing, softcap, logit_scale, z_loss,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of one row per program."""
    row = tl.program_id(0).to(tl.int64) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_V
    cols = columns(start, BLOCK_V, LANE)
    target = tl.load(target_ptr + row)
    dlogits_ptr += row * stride_dlogits
    if target == ignore_index:
        zeros = tl.zeros([BLOCK_V // LANE, LANE], tl.float32)
        tl.store(dlogits_ptr + cols, zeros, mask=cols < V)
        return
    a = tl.load(logits_ptr + row * stride_logits + cols, mask=cols < V, other=0.0)
    x, slope = transform(a, logit_scale, softcap, SCALED, SOFTCAP)
    top, total = tl.load(lse_ptr + row * 2), tl.load(lse_ptr + row * 2 + 1)
    dloss = 1.0
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + row * stride_dloss)
    if log_prob_ptr is not None:
        dloss *= tl.exp(tl.load(log_prob_ptr + row))
    scale, z_scale = dloss * tl.load(scales_ptr), dloss * tl.load(scales_ptr + 1)

    target_factor = scale * (1.0 - label_smoothing) * target_weight(weight_ptr, target, vocabulary)
    if dlog_prob_ptr is not None:
        target_factor -= tl.load(dlog_prob_ptr + row)
    mass = target_factor + z_scale * 2.0 * z_loss * (top + tl.log(total))
    if SMOOTHING:
        mass += scale * label_smoothing / vocabulary * tl.load(scales_ptr + 2)
    if dextra_log_prob_ptr is not None:
        k = tl.arange(0, BLOCK_K)
        extra = tl.load(extra_target_ptr + row * K + k, mask=k < K, other=0).to(tl.int64)
        dextra = tl.load(dextra_log_prob_ptr + row * K + k, mask=k < K, other=0.0)
        dextra = tl.where((extra >= 0) & (extra < vocabulary), dextra, float("nan"))
        dextra = tl.where(extra == ignore_index, 0.0, dextra)
        mass -= tl.sum(dextra, axis=0)
    per_exponential = tl.div_rn(mass, total)
    shifted = x - top
    if argmax_ptr is not None:
        best = tl.load(argmax_ptr + row)
        if first is not None:
            best -= first
        if (best >= start) & (best < start + BLOCK_V):
            shifted = tl.where(cols == best, 0.0, shifted)
    if dentropy_ptr is not None:
        # This is the mean of x - top.
        mean = tl.log(total) - tl.load(entropy_ptr + row)
        per_exponential -= tl.div_rn(tl.load(dentropy_ptr + row), total) * (tl.maximum(shifted, LOWEST) - mean)
    dx = per_exponential * tl.exp2(shifted * LOG2E)
    if first is not None:
        target -= first
    if (target >= start) & (target < start + BLOCK_V):
        dx -= tl.where(cols == target, target_factor, 0.0)
    if dextra_log_prob_ptr is not None:
        column = tl.where((k < K) & (extra != ignore_index), extra, -1)
        if first is not None:
            column = tl.where(column >= 0, column - first, -1)
        is_here = (column >= start) & (column < start + BLOCK_V)
        # Few blocks of a row contain an extra target, and only these compare it with every column.
        if tl.max(is_here.to(tl.int32), axis=0) > 0:
            for i in range(0, K):
                # A sum over one element reads the i-th column and its upstream gradient from registers.
                column_i = tl.sum(tl.where(k == i, column, 0), axis=0)
                if (column_i >= start) & (column_i < start + BLOCK_V):
                    dx += tl.where(cols == column_i, tl.sum(tl.where(k == i, dextra, 0.0), axis=0), 0.0)
    if SMOOTHING:
        w = 1.0
        if weight_ptr is not None:
            if first is not None:
                weight_ptr += first
            w = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
        dx -= scale * label_smoothing / vocabulary * w
    tl.store(dlogits_ptr + cols, dx * slope, mask=cols < V)


@triton.jit(do_not_specialize=["M"])
def _scales_kernel(
    target_ptr, weight_ptr, num_items_ptr, scales_ptr, M, V, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute 1 / D, 1 / N (0 if no target is valid) and W in one program."""
    count, weights, weight_sum, M = 0.0, 0.0, V * 1.0, M.to(tl.int64)
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
                # The load's `other` would have the dtype of the targets, and int32 cannot hold every ignore_index.
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


@launcher(fake=lambda target: target.new_empty(3, dtype=torch.float32))
def gradient_scales(
    target: Tensor, weight: Tensor | None, num_items: Tensor | None, vocabulary: int, ignore_index: int, is_mean: bool
) -> Tensor:
    """Return scales [3] fp32, which are 1 / D, 1 / N and W, for target [M], weight [V] | None, num_items [] | None."""
    scales = target.new_empty(3, dtype=torch.float32)
    if runs_kernels(scales, weight):
        launch(
            _scales_kernel, 1, target, weight, num_items, scales, target.numel(), vocabulary, ignore_index,
            MEAN=is_mean, BLOCK=SCALES_BLOCK, num_warps=SCALES_WARPS,
        )  # fmt: skip
        return scales
    return gradient_scales_torch(target, weight, num_items, vocabulary, ignore_index, is_mean, scales)


def option_numbers(options: Options) -> dict[str, float]:
    """Return the options that the kernels take as numbers, by the names of the kernels' parameters."""
    return {
        "ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing,
        "softcap": options.softcap or 0.0, "logit_scale": options.logit_scale, "z_loss": options.z_loss,
    }  # fmt: skip


def _extra_block(extra_targets: int) -> int:
    """Return how many extra targets of a row a program reads at once."""
    return next_power_of_2(max(1, extra_targets))


@on_device
def statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options,
    wants: Wants = LOSS_ALONE, with_gradient: bool = False, extra_targets: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics of each token, for logits [M, V], target [M] and extra targets [M, K]. `with_gradient` also
    overwrites the logits with the gradient of the sum of the losses. The mean of the logits cannot be requested
    together with class weights."""
    if not runs_kernels(logits, weight):
        result = statistics_torch(logits, target, weight, scales, options, wants, extra_targets)
        if with_gradient:
            gradient(logits, target, weight, scales, result, WHOLE_LOSS, options, out=logits)
        return result
    (m, v), result = logits.shape, empty_statistics(logits, options, wants)
    config = ScanConfig.choose((v, logits.element_size()), device_of(logits))
    unless_empty = lambda x: x if x.numel() else None
    arguments = in_order(_loss_kernel)(
        logits_ptr=logits, target_ptr=target, weight_ptr=weight, scales_ptr=scales,
        loss_ptr=result.loss, lse_ptr=result.lse,
        z_ptr=unless_empty(result.z_loss), predicted_ptr=unless_empty(result.predicted),
        log_prob_ptr=unless_empty(result.log_probs), entropy_ptr=unless_empty(result.entropy),
        mean_ptr=result.mean_logits, squares_ptr=result.log_sum_sq_probs,
        extra_target_ptr=extra_targets, extra_log_prob_ptr=result.extra_log_probs,
        stride_logits=logits.stride(0), V=v, K=wants.extra_targets or None, **option_numbers(options),
    )  # fmt: skip
    launch(
        _loss_kernel, m, *arguments, TOKEN_SCALING=options.token_scaling,
        **constants(options, config), BLOCK_K=_extra_block(wants.extra_targets),
    )  # fmt: skip
    if with_gradient:
        gradient(logits, target, weight, scales, result, WHOLE_LOSS, options, out=logits)
    return result


@on_device
def gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, saved: Statistics | SavedStatistics,
    upstream: Upstream, options: Options, *, out: Tensor, shard: Shard | None = None,
    extra_targets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write d(upstream . (losses, log_probs, entropy, extra_log_probs)) / d(logits) [M, V] to `out`. `out` may be
    `logits`. `saved` must hold lse, with token scaling log_probs, and with an upstream gradient of the entropy the
    entropy. If its lse belongs to other roundings of the logits, it must also hold the argmax."""
    m, v = logits.shape
    # An empty shard has no columns.
    if v == 0:
        return out
    if not runs_kernels(logits, weight):
        return gradient_torch(
            logits, target, weight, scales, saved, upstream, options,
            out=out, shard=shard or Shard(0, v), extra_targets=extra_targets,
        )  # fmt: skip
    config = ScanConfig.choose((v, logits.element_size()), device_of(logits))
    blocks, dloss = cdiv(v, config.block_v), upstream.loss
    k = 0 if upstream.extra_log_probs is None else upstream.extra_log_probs.shape[1]
    dense = lambda x: None if x is None else x.contiguous()
    arguments = in_order(_gradient_kernel)(
        logits_ptr=logits, target_ptr=target, weight_ptr=weight, scales_ptr=scales, lse_ptr=saved.lse,
        log_prob_ptr=saved.log_probs if options.token_scaling else None,
        entropy_ptr=None if upstream.entropy is None else saved.entropy,
        argmax_ptr=saved.argmax if isinstance(saved, SavedStatistics) else None,
        dloss_ptr=dloss, dlog_prob_ptr=dense(upstream.log_probs), dentropy_ptr=dense(upstream.entropy),
        extra_target_ptr=extra_targets if k else None, dextra_log_prob_ptr=dense(upstream.extra_log_probs),
        dlogits_ptr=out,
        stride_logits=logits.stride(0), stride_dloss=dloss.stride(0) if dloss is not None and dloss.dim() else 0,
        stride_dlogits=out.stride(0),
        V=v, K=k or None, blocks=blocks,
        vocabulary=v if shard is None else shard.vocabulary, first=None if shard is None else shard.start,
        **option_numbers(options),
    )  # fmt: skip
    launch(_gradient_kernel, m * blocks, *arguments, **constants(options, config), BLOCK_K=_extra_block(k))
    return out
