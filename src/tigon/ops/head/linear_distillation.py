r"""Distillation of a teacher into a student through both heads, without holding the logits of either.

For one token with the student's logits z_q = cap(s (x W^T + b)) / t, the teacher's logits z_p of the same form with its
own head, scale and soft cap, and the temperature t of both:

    q = softmax(z_q),  p = softmax(z_p),  M = beta p + (1 - beta) q
    kl            D = KL(p || q)                                              (forward KL: Hinton et al.)
    reverse_kl    D = KL(q || p)                                              (MiniLLM)
    jsd           D = beta KL(p || M) + (1 - beta) KL(q || M)                 (GKD; beta 0 and 1 are the two KLs)
    tvd           D = 1/2 sum_j |q_j - p_j|
    cosine        D = 1 - z_q z_p / (|z_q| |z_p|)

    loss = soft_weight D + hard_weight CE,   CE = -log softmax(t z_q)_label

The tokens are processed in chunks. One product computes the student's logits of a chunk and one the teacher's, one
kernel reads both and overwrites the student's with their gradient (`ops/logits/distillation.py`), and two products
compute dx and dW: four products in total, in the forward pass. Backward multiplies the gradients by the upstream
gradient. With `reduction="none"` the upstream gradient differs from token to token, and in fp16 it contains the loss
scale. Backward then recomputes both logits: six products.

Shapes: T tokens (all leading dimensions), H hidden, V vocabulary, G and W those of the teacher, K log-probabilities.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.head.arguments import (
    HeadNames,
    cast_for_products,
    check_head,
    check_sums,
    check_valid_rows,
    needed_gradients,
)
from tigon.ops.head.chunks import Head, HeadSettings, head_of
from tigon.ops.head.distillation_chunks import (
    DistillationReduction,
    DistillationSettings,
    Divergence,
    Teacher,
    check_teacher,
    checked_options,
    distillation_chunks,
)
from tigon.ops.head.gradients import NO_NEEDS, Needs, rescale_gradients
from tigon.ops.logits.divergence_reference import (
    DistillationOptions,
    apply_to_logits,
    divergence_of_logits,
    jsd_kind,
    match_vocabulary,
)
from tigon.ops.logits.loss_arguments import as_scalar, check_loss_arguments
from tigon.ops.logits.token.kernels import Shard, gradient_scales
from tigon.ops.logits.valid_rows import ValidRows, as_targets
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.op import Node
from tigon.runtime.products import accumulates_in_fp32

TEACHER_NAMES = HeadNames("teacher_hidden", "teacher_weight", "teacher_bias")


class DistillationOutput(NamedTuple):
    """The loss of distillation and the further results that were requested. The fields of other results are None.

    `loss` alone is differentiable.

    Example:
        >>> hidden, head, labels = torch.randn(6, 16), torch.randn(100, 16), torch.randint(100, (6,))
        >>> result = tigon.linear_distillation(
        ...     hidden, head, labels, teacher_logits=torch.randn(6, 100), hard_weight=0.5, return_parts=True
        ... )
        >>> torch.allclose(result.loss, result.divergence + 0.5 * result.cross_entropy)
        True
    """

    loss: Tensor
    # The divergence and the cross entropy (fp32) are unweighted and reduced like the loss. They are None unless
    # requested.
    divergence: Tensor | None = None
    cross_entropy: Tensor | None = None
    # [...] fp32: the entropy of the student at the temperature in nats. It is 0 for ignored tokens.
    entropy: Tensor | None = None


def linear_distillation_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor | None = None, *, bias: Tensor | None = None,
    teacher_hidden: Tensor | None = None, teacher_weight: Tensor | None = None, teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | None = None, teacher_probs: Tensor | None = None,
    teacher_log_probs: Tensor | None = None, teacher_indices: Tensor | None = None,
    divergence: Divergence = "jsd", beta: float = 0.5, temperature: float = 1.0,
    soft_weight: float = 1.0, hard_weight: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0, ignore_index: int = -100,
    reduction: DistillationReduction = "mean", num_items: Tensor | float | None = None, return_parts: bool = False,
    return_entropy: bool = False, fp32_logits: bool = False, max_logits_mib: float | None = None,
    acc_dtype: torch.dtype | None = None, valid_rows: ValidRows | Literal[False] | None = None,
) -> Tensor | DistillationOutput:  # fmt: skip
    """Compute `linear_distillation` by its eager definition with all logits, the ground truth of the tests."""
    wide = torch.promote_types(hidden.dtype, torch.float32)

    def logits(x: Tensor, head: Tensor, b: Tensor | None) -> Tensor:
        rounded = F.linear(x, head, b).to(wide)
        if not fp32_logits or x.dtype == wide:
            return rounded
        with torch.no_grad():
            if accumulates_in_fp32(x):
                precise = torch.mm(x.reshape(-1, x.shape[-1]), head.t(), out_dtype=wide).view_as(rounded)
            else:
                precise = F.linear(x.to(wide), head.to(wide))
            precise = precise if b is None else precise + b
        # The gradient is that of the half-precision layer.
        return rounded + (precise - rounded).detach()

    raw = apply_to_logits(logits(hidden, weight, bias), logit_scale, softcap)
    v = raw.shape[-1]
    if teacher_hidden is not None:
        assert teacher_weight is not None
        y = logits(teacher_hidden, teacher_weight, teacher_bias)
    elif teacher_logits is not None:
        y = teacher_logits.to(wide)
    elif teacher_probs is not None:
        y = teacher_probs.to(wide).log()
    else:
        assert teacher_log_probs is not None
        y = teacher_log_probs.to(wide)
        if teacher_indices is not None:
            is_token = (teacher_indices >= 0) & (teacher_indices < v)
            dense = y.new_full((*y.shape[:-1], v + 1), -torch.inf)
            y = dense.scatter(-1, teacher_indices.long().where(is_token, v), y)[..., :v]
    y = apply_to_logits(y, teacher_logit_scale, teacher_softcap) / temperature
    y = match_vocabulary(y, v, 0.0 if divergence == "cosine" else -torch.inf).detach()
    kind = jsd_kind(beta) if divergence == "jsd" else divergence
    valid = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    if targets is not None:
        valid = targets != ignore_index
    soft = divergence_of_logits(raw / temperature, y, kind, beta).where(valid, 0.0)
    losses, hard = soft_weight * soft, None
    if targets is not None and (hard_weight != 0.0 or return_parts):
        inside = (targets >= 0) & (targets < v)
        picked = raw.log_softmax(-1).gather(-1, targets.where(inside, 0).long()[..., None])[..., 0]
        hard = -picked.where(inside, torch.nan).where(valid, 0.0)
        losses = losses + hard_weight * hard
    divisor = 1.0 if reduction != "mean" else valid.sum().clamp(min=1) if num_items is None else num_items
    reduced = lambda x: x if reduction == "none" else x.sum() / divisor
    if not (return_parts or return_entropy):
        return reduced(losses)
    log_q = torch.log_softmax(raw.detach() / temperature, -1)
    entropy = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1).where(valid, 0.0)
    return DistillationOutput(
        reduced(losses),
        reduced(soft.detach()) if return_parts else None,
        reduced(hard.detach()) if return_parts and hard is not None else None,
        entropy if return_entropy else None,
    )


class _LinearDistillation(Node):
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher: Teacher, scales: Tensor,
        valid_rows: ValidRows | Literal[False] | None, settings: DistillationSettings,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        keep_none_gradients(ctx)
        in_forward = settings.is_reduced and x.dtype != torch.float16
        head = head_of(x, weight, bias, target, valid_rows, settings.head)
        needs = settings.head.needs if in_forward else NO_NEEDS
        forward_settings = settings._replace(head=settings.head._replace(needs=needs))
        losses, gradients = distillation_chunks(head, teacher, scales, None, forward_settings)
        if in_forward:
            ctx.save_for_backward(*(g if need else None for g, need in zip(gradients[:3], needs[:3], strict=True)))
        else:
            ctx.save_for_backward(*head[:5], *teacher, scales)
        ctx.in_forward, ctx.computed, ctx.settings = in_forward, head.computed, settings
        loss, soft, hard, entropy = losses
        if settings.is_reduced:
            loss = loss.sum()
        further = soft, hard, entropy
        ctx.mark_non_differentiable(*(each for each in further if each is not None))
        return loss, *further

    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        settings, saved = ctx.settings, ctx.saved_tensors
        if dloss is None:
            return ()
        if ctx.in_forward:
            gradients = rescale_gradients(saved, dloss)
        else:
            head, teacher = Head._make((*saved[:5], ctx.computed)), Teacher(*saved[5:10])
            results = distillation_chunks(head, teacher, saved[10], dloss, settings)
            gradients = list(results.gradients[:3])
        return tuple(gradients)


def linear_distillation(
    hidden: Tensor, weight: Tensor, targets: Tensor | None = None, *, bias: Tensor | None = None,
    teacher_hidden: Tensor | None = None, teacher_weight: Tensor | None = None, teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | None = None, teacher_probs: Tensor | None = None, teacher_log_probs: Tensor | None = None,
    teacher_indices: Tensor | None = None, divergence: Divergence = "jsd", beta: float = 0.5, temperature: float = 1.0,
    soft_weight: float = 1.0, hard_weight: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0, ignore_index: int = -100,
    reduction: DistillationReduction = "mean", num_items: Tensor | float | None = None, return_parts: bool = False,
    return_entropy: bool = False, fp32_logits: bool = False, max_logits_mib: float | None = None,
    acc_dtype: torch.dtype | None = None, valid_rows: ValidRows | Literal[False] | None = None,
) -> Tensor | DistillationOutput:  # fmt: skip
    """Return the divergence of a student's head from its teacher's, with an optional cross entropy of labels, in fp32.

    Only the logits of one chunk of tokens exist at a time, on every device. Ignored tokens are not computed, and the
    teacher gets no gradient. For on-policy distillation, pass the hidden states of both models for tokens that the
    student has sampled.

    Args:
        hidden: [..., H] hidden states of the student, fp32 | bf16 | fp16.
        weight: [V, H] of the student's head, of the same dtype. Under autocast both are cast as `linear` casts them.
        targets: [...] labels, int64 | int32, or None if all tokens count. The divergence only reads which of them are
            `ignore_index`.
        bias: [V].
        teacher_hidden, teacher_weight: [..., G] and [W, G], of one dtype. G may differ from H. The W - V columns that
            only a larger teacher has are left out, and the columns that a smaller teacher lacks have probability 0.
        teacher_bias: [W].
        teacher_logits: [..., W] in place of the teacher's hidden states and head.
        teacher_probs: [..., W] probabilities in place of them. They are normalised.
        teacher_log_probs: [..., W] log-probabilities in place of them. With `teacher_indices`, [..., K] of some tokens.
            They are normalised, so all other tokens have probability 0.
        teacher_indices: [..., K] different tokens, int64 | int32. Entries outside of [0, V) are left out.
        divergence: "jsd", "kl" (of the teacher from the student), "reverse_kl", "tvd", or "cosine" of the logits,
            which a teacher of (log-)probabilities does not have.
        beta: In [0, 1], the share of the teacher in the mixture of "jsd"; 0 is "kl", and 1 is "reverse_kl".
        temperature: Divides the logits of both models after scale and soft cap, for the divergence only. Its square
            does not multiply the loss; Hinton et al. pass `soft_weight=temperature**2`.
        soft_weight, hard_weight: The factors of the divergence and of the cross entropy with `targets`.
        softcap, logit_scale: The student's logits become `softcap * tanh(logit_scale * logits / softcap)`.
        teacher_softcap, teacher_logit_scale: The same of the teacher, for hidden states and logits. Probabilities and
            log-probabilities contain them already.
        ignore_index: Tokens with this label have loss and gradients of exactly zero.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none" for [...], which takes six products.
        num_items: With "mean", divide the sum by this number.
        return_parts: Also return the divergence and, with `targets`, the cross entropy, without their weights.
        return_entropy: Also return the entropy of the student's probabilities at the temperature. It has no gradient.
        fp32_logits: Keep the logits of half-precision models in fp32, as TRL and Liger do. By default they are rounded
            as the outputs of the models' own heads are. The gradient is a difference of two close distributions, so the
            rounding is its largest error.
        max_logits_mib: The largest memory in MiB for the logits of both models of a chunk, as in
            `linear_cross_entropy`.
        acc_dtype: As in `linear_cross_entropy`.
        valid_rows: The `ValidRows` of `targets`, or False to compute ignored tokens too and never wait.

    Returns:
        The loss in fp32, or a `DistillationOutput` if a further result is requested. A mean over no token is 0. If
        the cross entropy is computed, a label that is neither in [0, V) nor `ignore_index` makes the loss NaN.

    Raises:
        TypeError: A tensor has a wrong dtype, or an option a wrong type.
        ValueError: Shapes, dtypes or devices do not match, there is not exactly one form of the teacher, an option is
            out of range, "reverse_kl" has a teacher with fewer tokens (it would be infinite), an option of logits is
            given for (log-)probabilities, or a tensor is a DTensor (a sharded vocabulary is not supported).

    Source: Hinton et al., arXiv:1503.02531; Gu et al., "MiniLLM", arXiv:2306.08543; Agarwal et al., "GKD",
    arXiv:2306.13649; Wen et al., arXiv:2307.15190 (total variation).

    Example:
        >>> hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher_hidden, teacher_head = torch.randn(6, 32), torch.randn(100, 32)
        >>> loss = tigon.linear_distillation(
        ...     hidden, head, teacher_hidden=teacher_hidden, teacher_weight=teacher_head, beta=0.1, temperature=2.0
        ... )
        >>> loss.backward(); hidden.grad.shape
        torch.Size([6, 16])
    """
    op = "linear_distillation"
    checks.tensor(op, hidden=hidden, weight=weight)
    checks.flag(op, return_parts=return_parts, return_entropy=return_entropy, fp32_logits=fp32_logits)
    check_sums(op, max_logits_mib, acc_dtype)
    has_targets = targets is not None
    if targets is None:
        targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    named = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, "teacher_hidden": teacher_hidden,
             "teacher_weight": teacher_weight, "teacher_bias": teacher_bias, "teacher_logits": teacher_logits,
             "teacher_probs": teacher_probs, "teacher_log_probs": teacher_log_probs}  # fmt: skip
    for name, tensor in named.items():
        if hasattr(tensor, "placements"):
            raise ValueError(
                f"{op}: {name} must be a plain tensor, because no vocabulary may be sharded; got a DTensor"
            )
    check_head(op, hidden, weight, bias, targets)
    (v, h), leading = weight.shape, hidden.shape[:-1]
    teacher, form = check_teacher(
        op, leading, hidden=teacher_hidden, weight=teacher_weight, bias=teacher_bias, logits=teacher_logits,
        probs=teacher_probs, log_probs=teacher_log_probs, indices=teacher_indices,
    )  # fmt: skip
    checks.same(op, "device", **named, teacher_indices=teacher_indices)
    check_loss_arguments(op, v, targets, None, reduction, num_items, hidden.device)
    ignore_index = checks.ignore_index(op, ignore_index)
    options = DistillationOptions(
        divergence, beta, temperature, soft_weight, hard_weight, softcap, logit_scale, teacher_softcap,
        teacher_logit_scale, ignore_index, has_targets, return_parts, return_entropy,
    )  # fmt: skip
    options = checked_options(op, options, teacher, form, v)
    valid_rows = check_valid_rows(op, valid_rows, targets, ignore_index)
    hidden, bias = cast_for_products(op, hidden, weight, bias)
    if teacher.hidden is not None and teacher.weight is not None:
        cast_hidden, cast_bias = cast_for_products(op, teacher.hidden, teacher.weight, teacher.bias, TEACHER_NAMES)
        teacher = teacher._replace(hidden=cast_hidden, bias=cast_bias)
    x, target = hidden.reshape(-1, h), as_targets(targets, ignore_index)
    if not has_targets:
        # No token is ignored, whatever `ignore_index` is.
        options, valid_rows = options._replace(ignore_index=-1), False
    needs = Needs(*needed_gradients(hidden, weight, bias))
    scales = gradient_scales(
        target, None, as_scalar(num_items, hidden.device), v, options.ignore_index, reduction == "mean"
    )
    # Log-probabilities are logits whose exponentials sum to one.
    form = "logits" if form == "log_probs" else form
    head = HeadSettings(needs, acc_dtype is not None, max_logits_mib, options.ignore_index, Shard(0, v))
    settings = DistillationSettings(form, head, fp32_logits, reduction != "none", options)
    loss, soft, hard, entropy = _LinearDistillation.apply(
        x, weight, bias, target, teacher, scales, valid_rows, settings
    )
    shaped = lambda values: values.view(leading)
    reduced = lambda values: shaped(values) if reduction == "none" else values.sum()
    loss = shaped(loss) if reduction == "none" else loss
    if not (return_parts or return_entropy):
        return loss
    return DistillationOutput(
        loss,
        reduced(soft) if return_parts else None,
        reduced(hard) if return_parts and has_targets else None,
        shaped(entropy) if return_entropy else None,
    )
