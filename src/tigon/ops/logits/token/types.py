"""The words of `token_loss`: what defines a loss, what is asked for, what is found, what arrives.

Shapes: M tokens, V vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["LOSS_ALONE", "Options", "Shard", "Statistics", "Upstream", "Wants"]


class Options(NamedTuple):
    """What defines the loss of a token, besides logits, target and class weights."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    token_scaling: bool = False


class Wants(NamedTuple):
    """What to compute of each token beside its loss."""

    z_loss: bool = False
    predicted: bool = False
    log_probs: bool = False
    entropy: bool = False


LOSS_ALONE = Wants()


class Statistics(NamedTuple):
    """What one pass over the logits gives; what is not asked for is empty."""

    loss: Tensor  # [M] fp32, scaled
    lse: Tensor  # [M, 2] fp32: max x and sum exp(x - max x), whose rounding errors stay apart; lse = max + log sum
    z_loss: Tensor  # [M] fp32: the part of `loss` that it is
    predicted: Tensor  # [M] int64: argmax, -1 for ignored tokens
    log_probs: Tensor  # [M] fp32: x_t - lse, 0 for ignored tokens; made for token scaling also
    entropy: Tensor  # [M] fp32: lse - sum_j p_j x_j, 0 for ignored tokens


class Upstream(NamedTuple):
    """The gradients that arrive [M], of the loss also []; None: ones for the loss, zeros for the others."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None


class Shard(NamedTuple):
    """The logits are columns [start, start + logits.shape[1]) of a vocabulary."""

    start: int
    vocabulary: int
