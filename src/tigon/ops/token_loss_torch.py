"""The maths of `token_loss` in torch, for devices where no kernel runs, and the words that both share.

Written for memory: a block of logits needs at most two more of its size in fp32, and is overwritten where it may be.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Options", "Statistics", "gradient_scales_torch", "gradient_torch", "statistics_torch"]


@dataclass(frozen=True)
class Options:
    """What defines the loss of a token, besides logits, target and class weights."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


class Statistics(NamedTuple):
    """What one pass over the logits gives."""

    loss: Tensor  # [M] fp32, scaled
    lse: Tensor  # [M, 2] fp32: max x and sum exp(x - max x), whose rounding errors stay apart; lse = max + log sum
    z_loss: Tensor  # [M] fp32: the part of `loss` that it is; empty unless asked for
    predicted: Tensor  # [M] int64: argmax, -1 for ignored tokens; empty unless asked for


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


def _transformed_torch(logits: Tensor, options: Options, overwrite: bool) -> tuple[Tensor, Tensor | None]:
    """Raw logits -> x, and tanh(scale * a / c) if there is a cap, which may `overwrite` the logits."""
    x = logits.float()
    if options.softcap is None:
        return x if options.logit_scale == 1.0 else x * options.logit_scale, None
    overwrite = overwrite or x is not logits
    scale = options.logit_scale / options.softcap
    tanh = x.mul_(scale).tanh_() if overwrite else (x * scale).tanh_()
    return tanh * options.softcap, tanh


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


def statistics_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options,
    wants_z_loss: bool, wants_predicted: bool, gradient_: bool,
) -> Statistics:  # fmt: skip
    """As `token_loss.statistics`."""
    v, smoothing = logits.shape[1], options.label_smoothing
    (x, tanh), valid = _transformed_torch(logits, options, gradient_), target != options.ignore_index
    at_target = target.clamp(0, v - 1).long()[:, None]
    # With the gradient, a block of log-probabilities serves both; without it, no such block is kept.
    log_p = torch.log_softmax(x, -1) if gradient_ else None
    if log_p is None:
        top = x.amax(-1)
        top = top.where(top != -torch.inf, 0.0)
        shifted = x - top[:, None]
        nll, off = -shifted.gather(1, at_target)[:, 0], _weighted_torch(shifted, weight) if smoothing else None
        total = shifted.exp_().sum(-1)
        nll = nll + total.log()
    else:
        top, total = torch.logsumexp(x, -1) if options.z_loss else x.new_zeros(len(x)), x.new_ones(len(x))
        nll, off = -log_p.gather(1, at_target)[:, 0], _weighted_torch(log_p, weight) if smoothing else None
    lse = top + total.log()
    w_t = _target_weight_torch(target, weight, v, options)
    loss = (1.0 - smoothing) * w_t * nll
    if smoothing:
        loss = loss + smoothing / v * (scales[2] * total.log() - off)
    z = (scales[1] * options.z_loss) * lse.square()
    # Where, not a product: an ignored row may hold infinities.
    loss, z = (scales[0] * loss + z).where(valid, 0.0), z.where(valid, 0.0) if wants_z_loss else z[:0]
    predicted = x.argmax(-1).masked_fill(~valid, -1) if wants_predicted else target.new_empty(0, dtype=torch.int64)
    del x  # and its memory, before the gradient's
    if log_p is not None:
        logits.copy_(_gradient_from(log_p.exp_(), tanh, lse, target, weight, scales, None, options))
    return Statistics(loss, torch.stack((top, total), -1), z, predicted)


def gradient_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, lse: Tensor, dloss: Tensor | None,
    options: Options, out: Tensor,
) -> Tensor:  # fmt: skip
    """As `token_loss.gradient`."""
    x, tanh = _transformed_torch(logits, options, out is logits)
    return out.copy_(
        _gradient_from(torch.softmax(x, -1), tanh, lse[:, 0] + lse[:, 1].log(), target, weight, scales, dloss, options)
    )


def _gradient_from(p, tanh, lse, target, weight, scales, dloss, options) -> Tensor:
    """Turn probabilities p [M, V] into da, in place; `tanh` is used up."""
    v, smoothing = p.shape[1], options.label_smoothing
    scale, z_scale = (scales[0], scales[1]) if dloss is None else (dloss * scales[0], dloss * scales[1])
    hit = scale * (1.0 - smoothing) * _target_weight_torch(target, weight, v, options)
    slope = hit + 2.0 * options.z_loss * z_scale * lse
    if smoothing:
        slope = slope + scale * smoothing / v * scales[2]
    da = p.mul_(slope[:, None])
    da.scatter_add_(1, target.clamp(0, v - 1).long()[:, None], -hit[:, None])
    if smoothing:
        da.sub_((scale * smoothing / v).expand_as(lse)[:, None] * (1.0 if weight is None else weight.float()))
    if tanh is not None:
        da.mul_(tanh.square_().neg_().add_(1.0))
    if options.logit_scale != 1.0:
        da.mul_(options.logit_scale)
    ignored = target == options.ignore_index
    if da.device.type == "cpu":  # rows by index: a mask costs a pass over all of [M, V], an index elsewhere a wait
        return da.index_fill_(0, ignored.nonzero()[:, 0], 0.0)
    return da.masked_fill_(ignored[:, None], 0.0)
