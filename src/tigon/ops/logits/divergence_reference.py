"""The maths of `divergences` and of `distillation` in torch, for devices where no kernel runs, and for tests.

Shapes: M tokens, V vocabulary of the student.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

DivergenceReduction = Literal["batchmean", "mean", "sum", "none"]


def prepare_distributions(
    input: Tensor, target: Tensor, labels: Tensor | None, ignore_index: int, from_logits: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return student and teacher [..., V] in fp32 (or fp64), with zeros in ignored rows. Logits become
    log-probabilities."""
    dtype = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
    x, y = input.to(dtype), target.to(dtype)
    if labels is not None:
        is_ignored = (labels == ignore_index)[..., None]
        x, y = x.masked_fill(is_ignored, 0.0), y.masked_fill(is_ignored, 0.0)
    if from_logits:
        x, y = torch.log_softmax(x / temperature, -1), torch.log_softmax(y / temperature, -1)
    return x, y


def relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return a (log a - log b) for each element. It is 0 if a is 0, even if b is 0 too."""
    a = log_a.exp()
    return a * (log_a.clamp(min=-1e4) - torch.where(a == 0, log_b.clamp(min=-1e4), log_b))


def jsd_kind(beta: float) -> str:
    """Return the kind of divergence that the generalised Jensen-Shannon divergence of this beta is."""
    return {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")


def divergence_terms(x: Tensor, y: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return the losses [..., V] of log-probabilities x of the student and y of the teacher, and g = d loss / dx. g of
    "reverse_kl" omits the term q, which cancels in the gradient of logits."""
    if kind == "kl":
        return relative_entropy(y, x), -y.exp()
    if kind == "reverse_kl":
        loss = relative_entropy(x, y)
        return loss, loss
    if kind == "tvd":
        q = x.exp()
        difference = q - y.exp()
        return 0.5 * difference.abs(), 0.5 * q * difference.sign()
    # The exponentials of the lowest number and of -inf are both zero.
    x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
    # The second derivative of logaddexp would be NaN where the two numbers are far apart.
    log_m = torch.logsumexp(torch.stack((y + math.log(beta), x + math.log1p(-beta))), 0)
    g = (1.0 - beta) * x.exp() * (x - log_m)
    return beta * y.exp() * (y - log_m) + g, g


def divergence_reference(
    kind: str, input: Tensor, target: Tensor, *, reduction: DivergenceReduction = "batchmean",
    labels: Tensor | None = None, ignore_index: int = -100, from_logits: bool = False, temperature: float = 1.0,
    is_log: bool = True, beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute a divergence by its eager definition. `is_log` says whether the target, and for "tvd" also the input,
    holds logarithms."""
    x, y = prepare_distributions(input, target, labels, ignore_index, from_logits, temperature)
    if is_log or from_logits:
        losses = divergence_terms(x, y, kind, beta)[0]
    elif kind == "tvd":
        losses = 0.5 * (x - y).abs()
    else:
        losses = torch.xlogy(y, y) - y * torch.where(y == 0, x.clamp(min=-1e4), x)
    return reduce_losses(losses, labels, ignore_index, reduction)


def divisor(x: Tensor, labels: Tensor | None, reduction: DivergenceReduction) -> int:
    """Return the divisor that the host knows. With labels, the device also divides by the number of valid rows."""
    if reduction == "mean":
        return max(x.shape[-1] if labels is not None else x.numel(), 1)
    return max(x.shape[0], 1) if reduction == "batchmean" and labels is None else 1


def reduce_losses(losses: Tensor, labels: Tensor | None, ignore_index: int, reduction: DivergenceReduction) -> Tensor:
    """Return the loss for elementwise losses [..., V]."""
    if labels is not None:
        losses = losses.masked_fill((labels == ignore_index)[..., None], 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    rows = divisor(losses, labels, reduction) if labels is None else (labels != ignore_index).sum().clamp(min=1)
    return losses.sum() / (rows if labels is None else rows * divisor(losses, labels, reduction))


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
    # True if the divergence and the cross entropy are returned in addition to their weighted sum.
    returns_parts: bool
    with_entropy: bool

    @property
    def has_cross_entropy(self) -> bool:
        return self.has_labels and (self.hard_weight != 0.0 or self.returns_parts)


class RowLosses(NamedTuple):
    """The losses of rows, each [M] fp32 and scaled, except the entropy. All are 0 for ignored rows."""

    loss: Tensor
    # The divergence and the cross entropy are unweighted. They are None unless they are requested.
    soft: Tensor | None = None
    hard: Tensor | None = None
    entropy: Tensor | None = None  # the entropy of the student at the temperature in nats, or None


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
    return divergence_terms(x, y, kind, beta)[0].sum(-1)


def _divergence_and_gradient(z: Tensor, y: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return D [M] and dD / dz [M, V]. The formulas are those of `distillation` and `divergence_kernels`."""
    if kind == "cosine":
        norm_z, norm_y = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (z, y))
        inverse = 1.0 / (norm_z * norm_y).where((norm_z != 0) & (norm_y != 0), torch.inf)
        cosine = (z * y).sum(-1, keepdim=True) * inverse
        ratio = cosine / (norm_z * norm_z).where(norm_z != 0, torch.inf)
        return 1.0 - cosine[:, 0], z * ratio - y * inverse
    x, y = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    loss, g = divergence_terms(x, y, kind, beta)
    total = -1.0 if kind == "kl" else g.sum(-1, keepdim=True)
    return loss.sum(-1), g - x.exp() * total


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
