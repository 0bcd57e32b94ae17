"""Distillation of a teacher into a student, as a module that takes the hidden states and heads of both models."""

import inspect
from typing import Any

from torch import Tensor, nn

from tigon.ops.head.linear_distillation import DistillationOutput, linear_distillation
from tigon.runtime import checks

# The tensors of a call. The other keyword arguments of `linear_distillation` are options of the loss.
_TENSORS = (
    "bias", "teacher_hidden", "teacher_weight", "teacher_bias", "teacher_logits", "teacher_probs", "teacher_log_probs",
    "teacher_indices", "num_items",
)  # fmt: skip
# A module keeps no rows of a batch.
_OPTIONS = tuple(
    name
    for name in list(inspect.signature(linear_distillation).parameters)[3:]
    if name not in (*_TENSORS, "valid_rows")
)


class DistillationLoss(nn.Module):
    """Compute `linear_distillation` as a module: the divergence of a student's head from its teacher's.

    A step computes four products with the heads: the logits of both models, and the two gradients of the student. It
    computes three if the teacher is given without its head, and the logits again in backward with `reduction="none"` or
    in fp16.

    Args:
        **options: The options of `linear_distillation`: `divergence`, `beta`, `temperature`, `soft_weight`,
            `hard_weight`, `softcap`, `logit_scale`, `teacher_softcap`, `teacher_logit_scale`, `ignore_index`,
            `reduction`, `return_parts`, `return_entropy`, `fp32_logits`, `max_logits_mib` and `acc_dtype`.

    Raises:
        ValueError: An option has another name. The module checks values when it is called.

    Source: Hinton et al., arXiv:1503.02531; Agarwal et al., "On-Policy Distillation of Language Models",
    arXiv:2306.13649.

    Example:
        >>> loss_fn = tigon.DistillationLoss(divergence="kl", temperature=2.0, soft_weight=4.0, hard_weight=0.5)
        >>> hidden, head = torch.randn(2, 3, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher_hidden, teacher_head = torch.randn(2, 3, 32), torch.randn(100, 32)
        >>> labels = torch.randint(100, (2, 3))
        >>> loss_fn(hidden, head, labels, teacher_hidden=teacher_hidden, teacher_weight=teacher_head).shape
        torch.Size([])
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("DistillationLoss", "an option", name, _OPTIONS)
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.options.items())

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor | None = None, **tensors: Any
    ) -> Tensor | DistillationOutput:
        """Return `linear_distillation` of hidden [..., H], weight [V, H] and the teacher in one of its forms.

        `tensors` are `bias`, `num_items` and those of the teacher, by the names that `linear_distillation` has for
        them. For generated completions, `targets` are the tokens that the student has sampled, with `ignore_index` at
        the prompt: the loss is then that of on-policy distillation.
        """
        for name in tensors:
            checks.choice("DistillationLoss", "a tensor", name, _TENSORS)
        return linear_distillation(hidden, weight, targets, **tensors, **self.options)
