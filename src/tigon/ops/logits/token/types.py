"""The values that the functions of `token.kernels` take and return: options, statistics and upstream gradients.

Shapes: M tokens, V vocabulary, K extra targets of each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    token_scaling: bool = False


class Wants(NamedTuple):
    """True for each value of a token that is computed in addition to its loss."""

    z_loss: bool = False
    predicted: bool = False
    log_probs: bool = False
    entropy: bool = False
    mean_logits: bool = False
    sum_sq_probs: bool = False
    extra_targets: int = 0  # K, the number of extra targets of each token


LOSS_ALONE = Wants()


class Statistics(NamedTuple):
    """The results of one pass over the logits. A result that is not requested is an empty tensor, or None."""

    loss: Tensor  # [M] fp32, scaled
    # [M, 2] fp32: max x and sum exp(x - max x). lse = max + log sum is stored as these two numbers, because a single
    # number would add the rounding of this sum.
    lse: Tensor
    z_loss: Tensor  # [M] fp32: the part of `loss` that is the z-loss
    predicted: Tensor  # [M] int64: argmax, -1 for ignored tokens
    log_probs: Tensor  # [M] fp32: x_t - lse, 0 for ignored tokens; computed for token scaling too
    entropy: Tensor  # [M] fp32: lse - sum_j p_j x_j, 0 for ignored tokens
    mean_logits: Tensor | None = None  # [M] fp32: the mean of x over the vocabulary, 0 for ignored tokens
    log_sum_sq_probs: Tensor | None = None  # [M] fp32: log sum_j p_j^2, 0 for ignored tokens
    # [M, K] fp32: x_k - lse of the extra targets, 0 for ignored tokens and ignored extra targets
    extra_log_probs: Tensor | None = None


def empty_statistics(logits: Tensor, options: Options, wants: Wants) -> Statistics:
    """Return empty tensors of the shapes that `statistics` of logits [M, V] returns."""
    m, k = logits.shape[0], wants.extra_targets
    fp32 = lambda requested: logits.new_empty(m if requested else 0, dtype=torch.float32)
    return Statistics(
        loss=fp32(True), lse=logits.new_empty(m, 2, dtype=torch.float32), z_loss=fp32(wants.z_loss),
        predicted=logits.new_empty(m if wants.predicted else 0, dtype=torch.int64),
        log_probs=fp32(wants.log_probs or options.token_scaling), entropy=fp32(wants.entropy),
        mean_logits=fp32(True) if wants.mean_logits else None,
        log_sum_sq_probs=fp32(True) if wants.sum_sq_probs else None,
        extra_log_probs=logits.new_empty(m, k, dtype=torch.float32) if k else None,
    )  # fmt: skip


class SavedStatistics(NamedTuple):
    """The statistics that a backward pass reads; each may be None where the gradient does not depend on it."""

    lse: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    # [M] int64: the index of the largest logit, if the logits of the backward pass are computed anew. Their roundings
    # may differ from those of the forward pass, so the gradient takes this logit from `lse`, which holds the maximum.
    argmax: Tensor | None = None


class Upstream(NamedTuple):
    """The upstream gradients, each [M], for extra targets [M, K]; that of the loss may also be []. None means ones for
    the loss, and zeros for the others."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    extra_log_probs: Tensor | None = None


# The upstream gradients of the sum of all losses: ones for the losses, zeros for the other results.
WHOLE_LOSS = Upstream()


class Shard(NamedTuple):
    """The columns of a vocabulary that one rank holds: [start, start + logits.shape[1])."""

    start: int
    vocabulary: int
    # The process group that shares the vocabulary. The empty name stands for one process that has all of it.
    group_name: str = ""
