"""The maths of `token.kernels` in torch, for devices where no kernel runs.

The code saves memory: a block of logits needs at most two more blocks of its size in fp32, and is overwritten if the
caller allows it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.types import Options, SavedStatistics, Shard, Statistics, Wants

# This number replaces -inf where a logit is multiplied by its exponential, so that the product is zero.
LOWEST = -1e4


def gradient_scales_torch(
    target: Tensor, weight: Tensor | None, num_items: Tensor | None, vocabulary: int, ignore_index: int, is_mean: bool,
    scales: Tensor,
) -> Tensor:  # fmt: skip
    valid = target != ignore_index
    count = valid.sum() if num_items is None else num_items
    weights = count
    if weight is not None and num_items is None:
        inside = valid & (target >= 0) & (target < vocabulary)
        weights = torch.where(inside, weight.float()[target.clamp(0, vocabulary - 1).long()], 0.0).sum()
    for i, denominator in enumerate((weights, count)):
        inverse = torch.where(denominator == 0, 0.0, 1.0 / denominator.float())
        scales[i] = inverse if is_mean else 1.0
    scales[2] = vocabulary if weight is None else weight.float().sum()
    return scales


def _tanh_torch(logits: Tensor, options: Options) -> Tensor:
    """Return tanh(scale * a / c) as a new tensor."""
    assert options.softcap is not None
    x, scale = logits.float(), options.logit_scale / options.softcap
    return (x * scale if x is logits else x.mul_(scale)).tanh_()


def _transform_torch(logits: Tensor, options: Options) -> Tensor:
    """Return x for raw logits. The result is `logits` itself if they are fp32 and no option changes them."""
    if options.softcap is not None:
        return _tanh_torch(logits, options).mul_(options.softcap)
    return logits.float() if options.logit_scale == 1.0 else logits.float() * options.logit_scale


def _weighted_sum_torch(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return sum_j w_j values_j [M], in fp32 under autocast too."""
    if weight is None:
        return values.sum(-1)
    with torch.autocast(values.device.type, enabled=False):
        return values @ weight.float()


def _target_weight_torch(target: Tensor, weight: Tensor | None, v: int, options: Options) -> Tensor:
    """Return the class weights of the targets [M]: 0 for ignored tokens, NaN for targets outside [0, V)."""
    safe = target.clamp(0, v - 1).long()
    w_t = torch.ones_like(target, dtype=torch.float32) if weight is None else weight.float()[safe]
    w_t = w_t.masked_fill(safe != target, float("nan"))
    return w_t.masked_fill(target == options.ignore_index, 0.0)


class Sums(NamedTuple):
    """Sums over the exponentials of each row, relative to its largest logit. Sums that are not needed are None."""

    top: Tensor  # [M]: max x, or 0 if all logits are -inf
    total: Tensor  # [M]: sum exp(x - top)
    x_t: Tensor  # [M]: x_t - top
    weighted: Any  # [M]: sum w (x - top), for label smoothing
    moment: Any  # [M]: sum exp(x - top) (x - top), for the entropy
    argmax: Any  # [M] int64: argmax, for predictions
    squares: Any = None  # [M]: sum exp(x - top)^2, for the sum of squared probabilities
    extra_x: Any = None  # [M, K]: x_k - top of the extra targets


def extra_logits_torch(logits: Tensor, columns: Tensor, options: Options) -> Tensor:
    """Return x [M, K] in the columns [M, K] of logits [M, V]. Columns outside [0, V) have any value."""
    return _transform_torch(logits.gather(1, columns.clamp(0, logits.shape[1] - 1).long()), options)


def _sums_torch(
    logits: Tensor, columns: Tensor, weight: Tensor | None, options: Options, wants: Wants,
    extra_targets: Tensor | None,
) -> Sums:  # fmt: skip
    """Return the sums of logits [M, V] with targets `columns` [M] in [0, V)."""
    x = _transform_torch(logits, options)
    argmax = x.argmax(-1) if wants.predicted else None
    extra_x = None if extra_targets is None else extra_logits_torch(logits, extra_targets, options)
    top = x.amax(-1)
    top = top.where(top != -torch.inf, 0.0)
    shifted = x - top[:, None] if x is logits else x.sub_(top[:, None])
    x_t = shifted.gather(1, columns[:, None])[:, 0]
    weighted = _weighted_sum_torch(shifted, weight) if options.label_smoothing or wants.mean_logits else None
    extra_x = None if extra_x is None else extra_x - top[:, None]
    e = shifted.exp() if wants.entropy else shifted.exp_()
    moment = shifted.clamp_(min=LOWEST).mul_(e).sum(-1) if wants.entropy else None
    squares = torch.linalg.vector_norm(e, dim=-1).square() if wants.sum_sq_probs else None
    return Sums(top, e.sum(-1), x_t, weighted, moment, argmax, squares, extra_x)


def statistics_of(
    sums: Sums, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants, v: int,
    extra_targets: Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics that follow from the sums [M] over a vocabulary of v."""
    valid, smoothing = target != options.ignore_index, options.label_smoothing
    log_total = sums.total.log()
    lse, log_p = sums.top + log_total, sums.x_t - log_total
    loss = (1.0 - smoothing) * _target_weight_torch(target, weight, v, options) * -log_p
    if smoothing:
        loss = loss + smoothing / v * (scales[2] * log_total - sums.weighted)
    z = (scales[1] * options.z_loss) * lse.square()
    loss = scales[0] * loss + z
    log_p = log_p.masked_fill((target < 0) | (target >= v), float("nan"))
    if options.token_scaling:
        loss, z = (x * log_p.exp() for x in (loss, z))
    # Outputs of an operator must not share memory, so each missing result is a tensor of its own.
    no_values = lambda dtype=loss.dtype: loss.new_empty(0, dtype=dtype)
    # An ignored row may hold infinities, so its results are replaced, not multiplied by zero.
    valid_only = lambda values: values.where(valid, 0.0)
    entropy, predicted = no_values(), no_values(torch.int64)
    if wants.entropy:
        entropy = valid_only(log_total - sums.moment / sums.total)
    if wants.predicted:
        predicted = sums.argmax.masked_fill(~valid, -1)
    mean_logits = log_sum_sq_probs = extra_log_probs = None
    if wants.mean_logits:
        mean_logits = valid_only(sums.top + sums.weighted / v)
    if wants.sum_sq_probs:
        log_sum_sq_probs = valid_only(sums.squares.log() - 2.0 * log_total)
    if extra_targets is not None:
        extra_log_probs = (sums.extra_x - log_total[:, None]) + _extra_mask(extra_targets, v, options)
        extra_log_probs = extra_log_probs.where(valid[:, None] & (extra_targets != options.ignore_index), 0.0)
    return Statistics(
        loss=valid_only(loss), lse=torch.stack((sums.top, sums.total), -1),
        z_loss=valid_only(z) if wants.z_loss else no_values(), predicted=predicted,
        log_probs=valid_only(log_p) if wants.log_probs or options.token_scaling else no_values(), entropy=entropy,
        mean_logits=mean_logits, log_sum_sq_probs=log_sum_sq_probs, extra_log_probs=extra_log_probs,
    )  # fmt: skip


def _extra_mask(extra_targets: Tensor, v: int, options: Options) -> Tensor:
    """Return a term [M, K] that makes a value NaN if its extra target is outside [0, V) and not ignored."""
    is_wrong = ((extra_targets < 0) | (extra_targets >= v)) & (extra_targets != options.ignore_index)
    return torch.zeros_like(extra_targets, dtype=torch.float32).masked_fill_(is_wrong, float("nan"))


def statistics_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants,
    extra_targets: Tensor | None,
) -> Statistics:  # fmt: skip
    v = logits.shape[1]
    sums = _sums_torch(logits, target.clamp(0, v - 1).long(), weight, options, wants, extra_targets)
    return statistics_of(sums, target, weight, scales, options, wants, v, extra_targets)


def gradient_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, saved: Any, upstream: Any,
    options: Options, *, out: Tensor, shard: Shard, extra_targets: Any = None,
) -> Tensor:  # fmt: skip
    x, top = _transform_torch(logits, options), saved.lse[:, 0, None]
    shifted: Any = x - top if x is logits and out is not logits else x.sub_(top)
    if isinstance(saved, SavedStatistics) and saved.argmax is not None:
        local = saved.argmax - shard.start
        columns = local.clamp(0, logits.shape[1] - 1)[:, None]
        is_here = (local >= 0) & (local < logits.shape[1])
        shifted.scatter_(1, columns, shifted.gather(1, columns).masked_fill(is_here[:, None], 0.0))
    if upstream.entropy is None:
        e, shifted = shifted.exp_(), None
    else:
        e = shifted.exp()
    v, smoothing = logits.shape[1], options.label_smoothing
    total = saved.lse[:, 1]
    scale, z_scale = (x if upstream.loss is None else upstream.loss * x for x in scales[:2])
    if options.token_scaling:
        p_t = saved.log_probs.exp()
        scale, z_scale = scale * p_t, z_scale * p_t
    target_factor = scale * (1.0 - smoothing) * _target_weight_torch(target, weight, shard.vocabulary, options)
    if upstream.log_probs is not None:
        target_factor = target_factor - upstream.log_probs
    mass = target_factor + 2.0 * options.z_loss * z_scale * (saved.lse[:, 0] + total.log())
    if smoothing:
        mass = mass + scale * smoothing / shard.vocabulary * scales[2]
    dextra = None
    if upstream.extra_log_probs is not None:
        dextra = upstream.extra_log_probs + _extra_mask(extra_targets, shard.vocabulary, options)
        dextra = dextra.masked_fill(extra_targets == options.ignore_index, 0.0)
        mass = mass - dextra.sum(-1)
    mass = (mass / total)[:, None]
    if shifted is None:
        dx = e.mul_(mass)
    else:
        # This is the mean of x - top.
        mean = total.log() - saved.entropy
        dx = shifted.clamp_(min=LOWEST).sub_(mean[:, None]).mul_((-upstream.entropy / total)[:, None]).add_(mass)
        dx.mul_(e)
    local = target - shard.start
    target_factor = target_factor.where((local >= 0) & (local < v), 0.0)
    dx.scatter_add_(1, local.clamp(0, v - 1).long()[:, None], -target_factor[:, None])
    if dextra is not None:
        local = extra_targets - shard.start
        dx.scatter_add_(1, local.clamp(0, v - 1).long(), dextra.where((local >= 0) & (local < v), 0.0))
    if smoothing:
        w = 1.0 if weight is None else weight.float()[shard.start : shard.start + v]
        dx.sub_((scale * smoothing / shard.vocabulary).expand_as(total)[:, None] * w)
    # dx has the memory of one of these tensors. The other tensor is freed, so that the slope can use its memory.
    del e, shifted, x
    if options.softcap is not None:
        dx.mul_(_tanh_torch(logits, options).square_().neg_().add_(1.0))
    if options.logit_scale != 1.0:
        dx.mul_(options.logit_scale)
    ignored = target == options.ignore_index
    # On a CPU, an index avoids the pass over all of [M, V] that a mask costs. On other devices, the host would have to
    # wait for the number of ignored tokens.
    if dx.device.type == "cpu":
        dx.index_fill_(0, ignored.nonzero()[:, 0], 0.0)
    else:
        dx.masked_fill_(ignored[:, None], 0.0)
    return out.copy_(dx)
