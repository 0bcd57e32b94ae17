"""The values that the functions of `distillation` take and return."""

from typing import NamedTuple

from torch import Tensor


class DistillationOptions(NamedTuple):
    """The options of the loss of distillation. `distillation` has the maths."""

    # "kl", "reverse_kl", "jsd", "tvd" or "cosine"
    kind: str
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    ignore_index: int
    has_labels: bool
    # whether the divergence and the cross entropy are returned in addition to their weighted sum
    returns_parts: bool
    with_entropy: bool

    @property
    def has_cross_entropy(self) -> bool:
        """Return whether the cross entropy is computed."""
        return self.has_labels and (self.hard_weight != 0.0 or self.returns_parts)


class RowLosses(NamedTuple):
    """The losses of rows, each [M] fp32 and scaled, except the entropy. All are 0 for ignored rows."""

    loss: Tensor
    # the divergence and the cross entropy, without their weights; None unless they are requested
    soft: Tensor | None = None
    hard: Tensor | None = None
    # the entropy of the student at the temperature in nats, or None
    entropy: Tensor | None = None
