"""The maths of `distillation` in torch, for devices where no kernel runs, and for the reference of the op.

Shapes: M tokens, V vocabulary of the student.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.divergence_reference import elementwise_divergence, relative_entropy


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


# --- logits ---------------------------------------------------------------------------------------


def apply_to_logits(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Return the logits after the scale and the soft cap, in this order."""
    z = logits if logit_scale == 1.0 else logits * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def match_vocabulary(teacher: Tensor, vocabulary: int, fill: float) -> Tensor:
    """Return the teacher's logits for the student's vocabulary: columns beyond it are dropped, missing ones `fill`."""
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
    return elementwise_divergence(x, y, kind, beta).sum(-1)


# --- losses and gradients ------------------------------------------------------------------------


def _divergence_and_gradient(z: Tensor, y: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return D [M] and dD / dz [M, V]. The formulas are those of `distillation` and `divergence_kernels`."""
    if kind == "cosine":
        norm_z, norm_y = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (z, y))
        inverse = 1.0 / (norm_z * norm_y).where((norm_z != 0) & (norm_y != 0), torch.inf)
        cosine = (z * y).sum(-1, keepdim=True) * inverse
        ratio = cosine / (norm_z * norm_z).where(norm_z != 0, torch.inf)
        return 1.0 - cosine[:, 0], z * ratio - y * inverse
    x, y = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    q = x.exp()
    if kind == "kl":
        return relative_entropy(y, x).sum(-1), q - y.exp()
    if kind == "reverse_kl":
        g = relative_entropy(x, y)
        loss = g.sum(-1)
    elif kind == "tvd":
        difference = q - y.exp()
        loss, g = 0.5 * difference.abs().sum(-1), 0.5 * q * difference.sign()
    else:
        x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
        log_m = torch.logaddexp(y + math.log(beta), x + math.log1p(-beta))
        g = (1.0 - beta) * q * (x - log_m)
        loss = (beta * y.exp() * (y - log_m)).sum(-1) + g.sum(-1)
    return loss, g - q * g.sum(-1, keepdim=True)


def distillation_torch(
    student: Tensor, teacher: Tensor, target: Tensor, scales: Tensor, dloss: Tensor | None,
    options: DistillationOptions, gradient: Tensor | None,
) -> RowLosses:  # fmt: skip
    """Compute `distill_rows`. Autograd cannot do it, because it does not run inside of custom operators."""
    with_gradient = gradient is not None
    v, t, valid = student.shape[-1], options.temperature, target != options.ignore_index
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    raw = apply_to_logits(student.to(dtype), options.logit_scale, options.softcap)
    y = apply_to_logits(teacher.to(dtype), options.teacher_logit_scale, options.teacher_softcap) / t
    y = match_vocabulary(y, v, 0.0 if options.kind == "cosine" else -torch.inf)
    z, scale = raw / t, scales[0].to(dtype).expand(len(student))
    inside = (target >= 0) & (target < v)
    if options.has_cross_entropy:
        # A label outside of the vocabulary makes the losses and the gradient NaN.
        scale = scale * torch.where(inside, 1.0, torch.nan).to(dtype)
    divergence, dz = _divergence_and_gradient(z, y, options.kind, options.beta)
    del y
    # A teacher in fp64 does not change the dtype of the losses.
    result = lambda values: values.where(valid, 0.0).to(torch.promote_types(student.dtype, torch.float32))
    soft, hard, entropy = divergence * scale, None, None
    loss = options.soft_weight * soft
    if options.with_entropy:
        log_q = torch.log_softmax(z, -1)
        entropy = result(-(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1))
    if with_gradient:
        dz *= options.soft_weight
    if options.has_cross_entropy:
        log_p, indices = torch.log_softmax(raw, -1), target.where(inside, 0).long()[:, None]
        hard = -log_p.gather(-1, indices)[:, 0] * scale
        loss = loss + options.hard_weight * hard
        if with_gradient:
            one_hot = torch.zeros_like(log_p).scatter_(-1, indices, 1.0)
            dz += (options.hard_weight * t) * (log_p.exp_() - one_hot)
    if gradient is not None:
        upstream = scale if dloss is None else scale * dloss.to(dtype)
        if options.softcap is not None:
            dz *= 1.0 - (raw / options.softcap).square()
        dz *= (upstream * (options.logit_scale / t))[:, None]
        gradient.copy_(dz.masked_fill(~valid[:, None], 0.0))
    if not options.returns_parts:
        return RowLosses(result(loss), None, None, entropy)
    return RowLosses(result(loss), result(soft), None if hard is None else result(hard), entropy)
