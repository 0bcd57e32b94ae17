"""The maths of `distillation` in torch, for devices where no kernel runs."""

import math

import torch
from torch import Tensor

from tigon.ops.logits.distillation_types import DistillationOptions, RowLosses
from tigon.ops.logits.divergence_reference import relative_entropy

__all__ = ["apply_to_logits", "distillation_torch", "divergence_of_logits", "match_vocabulary"]


def apply_to_logits(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Return the logits after the scale and the soft cap, in this order."""
    z = logits if logit_scale == 1.0 else logits * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def match_vocabulary(teacher: Tensor, vocabulary: int, fill: float) -> Tensor:
    """Return the teacher's logits for the student's vocabulary: further columns are dropped, missing ones are `fill`."""
    width = teacher.shape[-1]
    if width >= vocabulary:
        return teacher[..., :vocabulary]
    return torch.nn.functional.pad(teacher, (0, vocabulary - width), value=fill)


def divergence_of_logits(z: Tensor, y: Tensor, kind: str, beta: float) -> Tensor:
    """Return D [...] of the student's logits z and the teacher's y [..., V], in their dtype. It is differentiable."""
    if kind == "cosine":
        norms = torch.linalg.vector_norm(z, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        # If a norm is zero, the cosine is zero, and so is its gradient.
        return 1.0 - (z * y).sum(-1) / norms.where(norms != 0, torch.inf)
    x, y = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    if kind == "kl":
        return relative_entropy(y, x).sum(-1)
    if kind == "reverse_kl":
        return relative_entropy(x, y).sum(-1)
    if kind == "tvd":
        return 0.5 * (x.exp() - y.exp()).abs().sum(-1)
    # The exponentials of the lowest number and of -inf are both zero.
    x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
    log_m = torch.logaddexp(y + math.log(beta), x + math.log1p(-beta))
    return (beta * y.exp() * (y - log_m) + (1.0 - beta) * x.exp() * (x - log_m)).sum(-1)


def distillation_torch(
    student: Tensor, teacher: Tensor, target: Tensor, scales: Tensor, dloss: Tensor | None,
    options: DistillationOptions, with_gradient: bool,
) -> RowLosses:  # fmt: skip
    """Compute `distill_rows` by autograd on these rows."""
    v, t, valid = student.shape[-1], options.temperature, target != options.ignore_index
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    with torch.autocast(student.device.type, enabled=False), torch.set_grad_enabled(with_gradient):
        a = student.detach().to(dtype, copy=True).requires_grad_(with_gradient)
        raw = apply_to_logits(a, options.logit_scale, options.softcap)
        z = raw / t
        y = apply_to_logits(teacher.detach().to(dtype), options.teacher_logit_scale, options.teacher_softcap) / t
        y = match_vocabulary(y, v, 0.0 if options.kind == "cosine" else -torch.inf)
        scale = scales[0].to(dtype)
        inside = (target >= 0) & (target < v)
        if options.has_cross_entropy:
            # A label outside of the vocabulary makes the losses and the gradient NaN.
            scale = scale * torch.where(inside, 1.0, torch.nan).to(dtype)
        soft, hard, entropy = divergence_of_logits(z, y, options.kind, options.beta) * scale, None, None
        loss = options.soft_weight * soft
        if options.has_cross_entropy:
            indices = target.where(inside, 0).long()[:, None]
            hard = -torch.log_softmax(raw, -1).gather(-1, indices)[:, 0] * scale
            loss = loss + options.hard_weight * hard
        # The rows that are ignored may hold any value.
        loss = loss.where(valid, 0.0)
        if with_gradient:
            upstream = torch.ones_like(loss) if dloss is None else dloss.to(dtype).expand_as(loss)
            (da,) = torch.autograd.grad(loss, a, upstream)
            student.copy_(da.masked_fill(~valid[:, None], 0.0))
    result = lambda x: None if x is None else x.detach().where(valid, 0.0)
    if options.with_entropy:
        log_q = torch.log_softmax(z.detach(), -1)
        entropy = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1)
    parts = (soft, hard) if options.returns_parts else (None, None)
    return RowLosses(loss.detach(), *map(result, (*parts, entropy)))
