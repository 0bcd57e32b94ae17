r"""The statistics of a token whose logits are sharded by columns over ranks, as in a vocabulary-parallel head.

Let m_p, S_p and R_p be the m, S and R of `token.scan` for the columns of shard p, and m = max_p m_p. Then

    S = sum_p S_p exp(m_p - m),   R = sum_p (R_p + (m_p - m) S_p) exp(m_p - m),   Q = sum_p Q_p exp(m_p - m)^2

Each rank computes six numbers for each row, one for Q if it is requested, and one for each extra target. An all-gather
gives them to all ranks, and each rank combines them in the same way. `token.kernels.gradient` then computes the
gradient of one shard. On every rank, targets are indices of the whole vocabulary and class weights are [V].

Shapes: M tokens, V vocabulary, P shards.

Shapes of results: C = 6 + 1 (with Q) + K columns for K extra targets of each token.
"""

import torch
from torch import Tensor

from tigon.ops.logits.token.maths import transform
from tigon.ops.logits.token.reference import LOWEST, Sums, extra_logits_torch, statistics_of, sums_torch
from tigon.ops.logits.token.scan import ScanConfig, ScanProblem, constants, scan
from tigon.ops.logits.token.types import Options, Shard, Statistics, Wants
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import device_of, runs_kernels
from tigon.runtime.launch import in_order, launch, on_device

# --- kernel --------------------------------------------------------------------------------------


@triton.jit
def _partial_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, partial_ptr,  # [M, V], [M], [vocabulary] or None, [], [M, C]
    extra_target_ptr,  # [M, K] or None
    stride_logits, K, V, first,  # V columns of this shard; the first one has the index `first` in the vocabulary
    ignore_index, softcap, logit_scale,
    PREDICTED: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr, BLOCK_K: tl.constexpr,
    SMOOTHING: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Compute the C numbers of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    COLUMNS: tl.constexpr = 7 if SQUARES else 6
    WEIGHTED: tl.constexpr = SMOOTHING or MEAN
    if extra_target_ptr is not None:
        partial_ptr += row * (COLUMNS + K)
    else:
        partial_ptr += row * COLUMNS
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        for column in tl.static_range(COLUMNS):
            tl.store(partial_ptr + column, 0.0)
        if extra_target_ptr is not None:
            k = tl.arange(0, BLOCK_K)
            tl.store(partial_ptr + COLUMNS + k, tl.zeros([BLOCK_K], tl.float32), mask=k < K)
        return

    target -= first
    # x is 0 for a logit of 0, so x_t is 0 on all ranks that do not hold the target.
    a_t = tl.load(logits_ptr + target, mask=(target >= 0) & (target < V), other=0.0)
    x_t, _ = transform(a_t, logit_scale, softcap, SCALED, SOFTCAP)
    pivot = 0.0
    if WEIGHTED:
        a_0 = tl.load(logits_ptr, mask=V > 0, other=0.0)
        x_0, _ = transform(a_0, logit_scale, softcap, SCALED, SOFTCAP)
        pivot = tl.where(tl.abs(x_0) < float("inf"), x_0, 0.0)
        if weight_ptr is not None:
            weight_ptr += first
    highest, total, moment, squares, weighted, predicted = scan(
        logits_ptr, V, pivot, weight_ptr, logit_scale, softcap,
        WEIGHTED, SCALED, SOFTCAP, PREDICTED, ENTROPY, SQUARES, BLOCK_V, LANE,
    )  # fmt: skip
    if WEIGHTED:
        weight_sum = V * 1.0
        if weight_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
        weighted += weight_sum * (pivot - tl.where(highest == float("-inf"), 0.0, highest))
    if PREDICTED:
        predicted += first
    tl.store(partial_ptr, highest)
    tl.store(partial_ptr + 1, total)
    tl.store(partial_ptr + 2, x_t)
    tl.store(partial_ptr + 3, weighted)
    tl.store(partial_ptr + 4, moment)
    tl.store(partial_ptr + 5, predicted)
    if SQUARES:
        tl.store(partial_ptr + 6, squares)
    if extra_target_ptr is not None:
        k = tl.arange(0, BLOCK_K)
        extra = tl.load(extra_target_ptr + row * K + k, mask=k < K, other=0).to(tl.int64) - first
        # Like x_t, x_k is 0 on all ranks that do not hold the extra target.
        a_k = tl.load(logits_ptr + extra, mask=(k < K) & (extra >= 0) & (extra < V), other=0.0)
        x_k, _ = transform(a_k, logit_scale, softcap, SCALED, SOFTCAP)
        tl.store(partial_ptr + COLUMNS + k, x_k, mask=k < K)


# --- launchers: kernels, or torch where none can run ---------------------------------------------


def _partial_statistics_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, shard: Shard, wants: Wants,
    extra_targets: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `partial_statistics` in torch."""
    (m, v), start = logits.shape, shard.start
    partials = logits.new_zeros((m, _columns(wants)), dtype=torch.float32)
    if v == 0:
        partials[:, 0], partials[:, 5] = -torch.inf, start
        return partials
    weight = None if weight is None else weight[start : start + v]
    local = target - start
    sums, _ = sums_torch(logits, local.clamp(0, v - 1).long(), weight, options, wants)
    if extra_targets is not None:
        local_extra = extra_targets - start
        x_k = extra_logits_torch(logits, local_extra, options)
        partials[:, -wants.extra_targets :] = x_k.where((local_extra >= 0) & (local_extra < v), 0.0)
    partials[:, 0] = sums.top.where(sums.total != 0, -torch.inf)
    partials[:, 1] = sums.total
    partials[:, 2] = (sums.x_t + sums.top).where((local >= 0) & (local < v), 0.0)
    for column, values in ((3, sums.weighted), (4, sums.moment), (5, sums.argmax), (6, sums.squares)):
        if values is not None:
            partials[:, column] = values
    if wants.predicted:
        partials[:, 5] += start
    return partials.masked_fill_((target == options.ignore_index)[:, None], 0.0)


def _columns(wants: Wants) -> int:
    """Return the number of columns of `partial_statistics`."""
    return 6 + wants.sum_sq_probs + wants.extra_targets


@on_device
def partial_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, shard: Shard, wants: Wants,
    extra_targets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return C numbers [M, C] fp32 of each row of a shard, the input of `combined_statistics`.

    The columns are m = max x; S; x_t, or 0 if another shard holds it; sum w (x - m), 0 without label smoothing and
    `wants.mean_logits`; R, 0 unless `wants.entropy`; the index of the largest logit, 0 unless `wants.predicted`; with
    `wants.sum_sq_probs` Q; x_k of each extra target, or 0 if another shard holds it. All are 0 for ignored tokens.

    Args:
        logits: [M, V] of the shard.
        target: [M] indices of the whole vocabulary.
        weight: [vocabulary] class weights.
        extra_targets: [M, K] indices of the whole vocabulary.
    """
    if not runs_kernels(logits, weight):
        return _partial_statistics_torch(logits, target, weight, options, shard, wants, extra_targets)
    (m, v), start = logits.shape, shard.start
    partials = logits.new_empty(m, _columns(wants), dtype=torch.float32)
    weight_sum = None
    if options.label_smoothing and weight is not None:
        weight_sum = weight[start : start + v].sum(dtype=torch.float32)
    config = ScanConfig.choose(ScanProblem(v, logits.element_size()), device_of(logits))
    arguments = in_order(_partial_kernel)(
        logits_ptr=logits, target_ptr=target, weight_ptr=weight if options.label_smoothing else None,
        weight_sum_ptr=weight_sum, partial_ptr=partials, extra_target_ptr=extra_targets,
        stride_logits=logits.stride(0), K=wants.extra_targets or None, V=v, first=start,
        ignore_index=options.ignore_index, softcap=options.softcap or 0.0, logit_scale=options.logit_scale,
    )  # fmt: skip
    launch(
        _partial_kernel, m, *arguments, PREDICTED=wants.predicted, ENTROPY=wants.entropy, MEAN=wants.mean_logits,
        SQUARES=wants.sum_sq_probs, BLOCK_K=triton.next_power_of_2(max(1, wants.extra_targets)),
        **constants(options, config),
    )  # fmt: skip
    return partials


def combined_statistics(
    partials: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants,
    sizes: tuple[int, ...], extra_targets: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics of the whole vocabulary, from partials [P, M, C] of shards with `sizes` columns."""
    tops, totals, x_t, weighted, moments, argmax = partials[..., :6].unbind(-1)  # [P, M] each
    highest = tops.amax(0)
    top = highest.where(highest != -torch.inf, 0.0)
    fall = tops - top
    factor = fall.exp()
    moment = (factor * (moments + fall.clamp(min=LOWEST) * totals)).sum(0)
    weighted_sum = None
    if options.label_smoothing or wants.mean_logits:
        # The sum of a shard whose logits are all -inf is relative to 0, not to its maximum.
        shift = tops.where(tops != -torch.inf, 0.0) - top
        masses = sizes if weight is None else [part.sum() for part in weight.float().split(sizes)]
        weighted_sum = sum((weighted[p] + mass * shift[p] for p, mass in enumerate(masses)), torch.zeros_like(top))
    first_argmax = argmax.where(tops == highest, float(sum(sizes))).amin(0).long()
    squares = (partials[..., 6] * factor.square()).sum(0) if wants.sum_sq_probs else None
    x_k = None if extra_targets is None else partials[..., -wants.extra_targets :].sum(0) - top[:, None]
    sums = Sums(top, (totals * factor).sum(0), x_t.sum(0) - top, weighted_sum, moment, first_argmax, squares, x_k)
    return statistics_of(sums, target, weight, scales, options, wants, sum(sizes), extra_targets)
