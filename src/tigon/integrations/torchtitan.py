"""Use Tigon's ops in torchtitan, by its overrides:

    --override.imports tigon.integrations.torchtitan.rms_norm,tigon.integrations.torchtitan.feed_forward

| override | replaces | computes |
|---|---|---|
| `rms_norm` | `RMSNorm` | `tigon.rms_norm`, rounded after the weight, as `torch.nn.RMSNorm` |
| `feed_forward` | `FeedForward` | `tigon.swiglu` between the three linear layers |
| `cross_entropy` | `CrossEntropyLoss` | `tigon.cross_entropy`, summed |

Parameters and state dicts stay those of torchtitan. A DTensor, as tensor parallelism passes it, takes the code of
torchtitan. Written for torchtitan 0.3.0, `torchtitan.config.override`.

Shapes: B sequences of S tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.config.override import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm

from tigon.ops.logits.cross_entropy import cross_entropy as tigon_cross_entropy
from tigon.ops.mlps.glu import swiglu
from tigon.ops.norms.rms_norm import rms_norm as tigon_rms_norm

__all__ = ["cross_entropy", "feed_forward", "rms_norm"]


def _is_plain(*tensors: Tensor | None) -> bool:
    """Return whether Tigon's ops take these tensors; they take no DTensors."""
    return all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


class TigonRMSNorm(RMSNorm):
    """torchtitan's `RMSNorm` on `tigon.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The fields are those of torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., N]."""
        if not _is_plain(x, self.weight):
            return super().forward(x)
        return tigon_rms_norm(x, self.weight, self.eps, rounding="after_weight")


class TigonFeedForward(FeedForward):
    """torchtitan's `FeedForward` with the gate in one kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """The fields are those of torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute w2(silu(w1 x) * w3 x)."""
        gate, up = self.w1(x), self.w3(x)
        if not _is_plain(gate, up):
            return self.w2(torch.nn.functional.silu(gate) * up)
        return self.w2(swiglu(gate, up))


class TigonCrossEntropyLoss(CrossEntropyLoss):
    """torchtitan's `CrossEntropyLoss` on `tigon.cross_entropy`. `torch.compile` of the loss stays off."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The fields are those of torchtitan."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)
        stock: Any = self.fn  # type: ignore[has-type]

        def fn(pred: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            """Return the summed loss of logits [B, S, V] and labels [B, S]."""
            vocabulary = kwargs.get("global_vocab_size")
            # With another number of columns, this rank has a shard of the vocabulary.
            if not _is_plain(pred, labels) or (vocabulary is not None and vocabulary != pred.shape[-1]):
                return stock(pred, labels, **kwargs)
            return tigon_cross_entropy(pred, labels, ignore_index=IGNORE_INDEX, reduction="sum")

        self.fn = fn


@override(target=RMSNorm.Config, exact=True, description="Tigon: RMSNorm in one kernel.")
def rms_norm(config: Any) -> Any:
    """Return the config of `TigonRMSNorm`."""
    return derive(config, TigonRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="Tigon: the gate of SwiGLU in one kernel.")
def feed_forward(config: Any) -> Any:
    """Return the config of `TigonFeedForward`."""
    return derive(config, TigonFeedForward.Config)


@override(target=CrossEntropyLoss.Config, exact=True, description="Tigon: cross entropy in one kernel.")
def cross_entropy(config: Any) -> Any:
    """Return the config of `TigonCrossEntropyLoss`."""
    return derive(config, TigonCrossEntropyLoss.Config)
