"""The divergence of TRL's distillation trainer, computed by `tigon.linear_distillation`.

TRL's `_chunked_divergence_loss` takes eight products with the heads, or six for the two KLs. The function here has the
same arguments and results and takes four, because the loss is a sum over tokens. The logits of half-precision models
are kept in fp32, as TRL keeps them.

Shapes: B sequences of K positions, N tokens, hidden size H (of the teacher G), vocabulary V.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.integrations.trl_head import Head, gather, gathered, is_partitioned
from tigon.ops.head.linear_distillation import linear_distillation

IGNORE_INDEX = -100


def _in_dtype_of(hidden: Tensor, head: Head) -> Head:
    """Return the head in the dtype of the hidden states, as TRL casts it. Autocast casts by itself."""
    weight, bias = head.whole()
    if torch.is_autocast_enabled(hidden.device.type):
        return Head(weight, bias)
    return Head(weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))


def chunked_divergence_loss(
    student_hidden_states: Tensor, teacher_hidden_states: Tensor, student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor, completion_mask: Tensor, beta: float, *,
    num_items_in_batch: Tensor | int | None = None, student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None, student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None, teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, the sum of the student's entropies, and the number of tokens: TRL's `_chunked_divergence_loss`.
    `completion_mask` [B, K] is not zero at the positions that count, and `num_items_in_batch` divides the sum of the
    divergences; None divides by the number of tokens."""
    valid = completion_mask != 0
    head, teacher_head = (
        Head(student_lm_head_weight, student_lm_head_bias), Head(teacher_lm_head_weight, teacher_lm_head_bias),
    )  # fmt: skip
    with gather(*teacher_head), gathered(head):
        if is_partitioned(teacher_head.weight):
            # Backward may read the teacher's head, and the context has ended then.
            copied_bias = None if teacher_head.bias is None else teacher_head.bias.detach().clone()
            teacher_head = Head(teacher_head.weight.detach().clone(), copied_bias)
        weight, bias = _in_dtype_of(student_hidden_states, head)
        teacher_weight, teacher_bias = _in_dtype_of(teacher_hidden_states, teacher_head)
        result: Any = linear_distillation(
            student_hidden_states, weight, torch.where(valid, 0, IGNORE_INDEX), bias=bias,
            teacher_hidden=teacher_hidden_states, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
            ignore_index=IGNORE_INDEX, beta=float(beta), temperature=float(temperature),
            softcap=student_final_logit_softcapping, logit_scale=float(student_logit_scale),
            teacher_softcap=teacher_final_logit_softcapping, teacher_logit_scale=float(teacher_logit_scale),
            num_items=num_items_in_batch, return_entropy=True, fp32_logits=True,
        )  # fmt: skip
    return result.loss, result.entropy.sum(), valid.sum()
