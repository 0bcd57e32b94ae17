"""The maths of `token_loss` in torch, for devices where no kernel runs.

Written for memory: a block of logits needs at most two more of its size in fp32, and is overwritten where it may be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.types import Options, Shard, Statistics, Upstream, Wants

__all__ = [
    "LOWEST",
    "Sums",
    "gradient_scales_torch",
    "gradient_torch",
    "statistics_of",
    "statistics_torch",
    "sums_torch",
]

LOWEST = -1e4  # stands for -inf where that is multiplied by its exponential: their product is zero


def gradient_scales_torch(
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    v: int,
    ignore_index: int,
    mean: bool,
    scales: Tensor,
) -> Tensor:
    """As `token_loss.gradient_scales`, into `scales`."""
    valid = target != ignore_index
    count = valid.sum() if num_items is None else num_items
    weights = count
    if weight is not None and num_items is None:
        inside = valid & (target >= 0) & (target < v)
        weights = torch.where(inside, weight.float()[target.clamp(0, v - 1).long()], 0.0).sum()
    for i, denominator in enumerate((weights, count)):
        inverse = torch.where(denominator == 0, 0.0, 1.0 / denominator.float())
        scales[i] = inverse if mean else 1.0
    scales[2] = v if weight is None else weight.float().sum()
    return scales


def _tanh_torch(logits: Tensor, options: Options) -> Tensor:
    """tanh(scale * a / c), a new tensor."""
    x, scale = logits.float(), options.logit_scale / options.softcap
    return (x * scale if x is logits else x.mul_(scale)).tanh_()


def _transformed_torch(logits: Tensor, options: Options) -> Tensor:
    """Raw logits -> x, which is the logits themselves where there is nothing to do."""
    if options.softcap is not None:
        return _tanh_torch(logits, options).mul_(options.softcap)
    return logits.float() if options.logit_scale == 1.0 else logits.float() * options.logit_scale


def _weighted_torch(values: Tensor, weight: Tensor | None) -> Tensor:
    """sum_j w_j values_j [M], in fp32 under autocast too."""
    if weight is None:
        return values.sum(-1)
    with torch.autocast(values.device.type, enabled=False):
        return values @ weight.float()


def _target_weight_torch(target: Tensor, weight: Tensor | None, v: int, options: Options) -> Tensor:
    """w_t [M]: 0 for ignored tokens, NaN for targets out of range."""
    safe = target.clamp(0, v - 1).long()
    w_t = torch.ones_like(target, dtype=torch.float32) if weight is None else weight.float()[safe]
    w_t = w_t.masked_fill(safe != target, float("nan"))
    return w_t.masked_fill(target == options.ignore_index, 0.0)


class Sums(NamedTuple):
    """Of the exponentials of one row, relative to its largest logit."""

    top: Tensor  # [M]: max x; 0 where all are -inf
    total: Tensor  # [M]: sum exp(x - top)
    x_t: Tensor  # [M]: x_t - top
    weighted: Tensor | None  # [M]: sum w (x - top), for label smoothing
    moment: Tensor | None  # [M]: sum exp(x - top) (x - top), for the entropy
    best: Tensor | None  # [M] int64: argmax, for predictions


def sums_torch(
    logits: Tensor, at: Tensor, weight: Tensor | None, options: Options, wants: Wants, overwrite: bool = False
) -> tuple[Sums, Tensor]:
    """logits [M, V], targets `at` [M] in [0, V) -> sums, and the exponentials [M, V], which may be in their place."""
    x = _transformed_torch(logits, options)
    best = x.argmax(-1) if wants.predicted else None
    top = x.amax(-1)
    top = top.where(top != -torch.inf, 0.0)
    shifted = x - top[:, None] if x is logits and not overwrite else x.sub_(top[:, None])
    x_t = shifted.gather(1, at[:, None])[:, 0]
    weighted = _weighted_torch(shifted, weight) if options.label_smoothing else None
    e = shifted.exp() if wants.entropy else shifted.exp_()
    moment = shifted.clamp_(min=LOWEST).mul_(e).sum(-1) if wants.entropy else None
    return Sums(top, e.sum(-1), x_t, weighted, moment, best), e


def statistics_of(
    sums: Sums, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants, v: int
) -> Statistics:
    """What follows from the sums [M] over a vocabulary of v."""
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
    # Where, not a product: an ignored row may hold infinities.
    kept = lambda values, wanted=True: values.where(valid, 0.0) if wanted else loss.new_empty(0)
    return Statistics(
        kept(loss),
        torch.stack((sums.top, sums.total), -1),
        kept(z, wants.z_loss),
        sums.best.masked_fill(~valid, -1) if wants.predicted else target.new_empty(0, dtype=torch.int64),
        kept(log_p, wants.log_probs or options.token_scaling),
        kept(log_total - sums.moment / sums.total if wants.entropy else None, wants.entropy),
    )


def statistics_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options,
    wants: Wants, gradient_: bool,
) -> Statistics:  # fmt: skip
    """As `token_loss.statistics`."""
    v = logits.shape[1]
    sums, e = sums_torch(logits, target.clamp(0, v - 1).long(), weight, options, wants, gradient_)
    found = statistics_of(sums, target, weight, scales, options, wants, v)
    if gradient_:
        dx = _gradient_of(e, None, target, weight, scales, found, Upstream(), options, Shard(0, v))
        logits.copy_(_times_slope(dx, logits, target, options))
    return found


def gradient_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, found: Statistics, upstream: Upstream,
    options: Options, out: Tensor, shard: Shard,
) -> Tensor:  # fmt: skip
    """As `token_loss.gradient`."""
    x, top = _transformed_torch(logits, options), found.lse[:, 0, None]
    shifted = x - top if x is logits and out is not logits else x.sub_(top)
    if upstream.entropy is None:
        e, shifted = shifted.exp_(), None
    else:
        e = shifted.exp()
    dx = _gradient_of(e, shifted, target, weight, scales, found, upstream, options, shard)
    del e, shifted  # one of them is dx; the other makes room for the slope
    return out.copy_(_times_slope(dx, logits, target, options))


def _gradient_of(e, shifted, target, weight, scales, found, upstream, options, shard) -> Tensor:
    """Exponentials e = exp(x - top) [M, V], and x - top if the entropy has a gradient -> dx, in the place of either."""
    v, smoothing = e.shape[1], options.label_smoothing
    total = found.lse[:, 1]
    scale, z_scale = (x if upstream.loss is None else upstream.loss * x for x in scales[:2])
    if options.token_scaling:
        scale, z_scale = (x * found.log_probs.exp() for x in (scale, z_scale))
    hit = scale * (1.0 - smoothing) * _target_weight_torch(target, weight, shard.vocabulary, options)
    if upstream.log_probs is not None:
        hit = hit - upstream.log_probs
    mass = hit + 2.0 * options.z_loss * z_scale * (found.lse[:, 0] + total.log())
    if smoothing:
        mass = mass + scale * smoothing / shard.vocabulary * scales[2]
    mass = (mass / total)[:, None]
    if shifted is None:
        dx = e.mul_(mass)
    else:
        mean = total.log() - found.entropy  # of x - top
        dx = shifted.clamp_(min=LOWEST).sub_(mean[:, None]).mul_((-upstream.entropy / total)[:, None]).add_(mass)
        dx.mul_(e)
    local = target - shard.start
    hit = hit.where((local >= 0) & (local < v), 0.0)
    dx.scatter_add_(1, local.clamp(0, v - 1).long()[:, None], -hit[:, None])
    if smoothing:
        w = 1.0 if weight is None else weight.float()[shard.start : shard.start + v]
        dx.sub_((scale * smoothing / shard.vocabulary).expand_as(total)[:, None] * w)
    return dx


def _times_slope(dx: Tensor, logits: Tensor, target: Tensor, options: Options) -> Tensor:
    """dx -> da, in place, with zeros for ignored tokens."""
    if options.softcap is not None:
        dx.mul_(_tanh_torch(logits, options).square_().neg_().add_(1.0))
    if options.logit_scale != 1.0:
        dx.mul_(options.logit_scale)
    ignored = target == options.ignore_index
    if dx.device.type == "cpu":  # rows by index: a mask costs a pass over all of [M, V], an index elsewhere a wait
        return dx.index_fill_(0, ignored.nonzero()[:, 0], 0.0)
    return dx.masked_fill_(ignored[:, None], 0.0)
