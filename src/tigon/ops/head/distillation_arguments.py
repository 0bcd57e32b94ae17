"""The checks of the arguments of `linear_distillation`."""

from typing import Literal

import torch
from torch import Tensor

from tigon.ops.head.distillation_chunks import Teacher
from tigon.ops.logits.divergence_reference import DistillationOptions, jsd_kind
from tigon.runtime import checks

DistillationReduction = Literal["mean", "sum", "none"]
Divergence = Literal["jsd", "kl", "reverse_kl", "tvd", "cosine"]


def check_teacher(
    op: str, leading: torch.Size, *, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    logits: Tensor | None, probs: Tensor | None, log_probs: Tensor | None, indices: Tensor | None,
) -> tuple[Teacher, str]:  # fmt: skip
    """Check the tensors of the teacher; return them without gradients, with rows [T, ...], and the name of the form."""
    forms = {
        "teacher_hidden": hidden, "teacher_logits": logits, "teacher_probs": probs, "teacher_log_probs": log_probs,
    }  # fmt: skip
    names = [name for name, tensor in forms.items() if tensor is not None]
    if len(names) != 1:
        raise ValueError(f"{op}: exactly one of {', '.join(forms)} must be given, got {', '.join(names) or 'none'}")
    (name,) = names
    for other, tensor, owner in (
        ("teacher_weight", weight, "teacher_hidden"), ("teacher_bias", bias, "teacher_hidden"),
        ("teacher_indices", indices, "teacher_log_probs"),
    ):  # fmt: skip
        if tensor is not None and name != owner:
            raise ValueError(f"{op}: {other} needs {owner}, got {name}")
    rows = lambda x: x.detach().reshape(-1, x.shape[-1])
    if hidden is not None:
        if weight is None:
            raise ValueError(f"{op}: teacher_hidden needs teacher_weight, got None")
        checks.tensor(op, teacher_hidden=hidden, teacher_weight=weight)
        checks.floating(op, teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias)
        if weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(f"{op}: teacher_weight must have shape (W, G), got {tuple(weight.shape)}")
        checks.shape(op, "teacher_hidden", hidden, (*leading, weight.shape[1]))
        if bias is not None:
            checks.shape(op, "teacher_bias", bias, (len(weight),))
        return Teacher(rows(hidden), weight.detach(), None if bias is None else bias.detach()), "hidden"
    values = forms[name]
    assert values is not None
    checks.floating(op, **{name: values})
    if values.dim() == 0 or values.shape[:-1] != leading or values.shape[-1] == 0:
        size = "K" if indices is not None else "W"
        expected = ", ".join([*map(str, leading), size])
        raise ValueError(f"{op}: {name} must have shape ({expected}) with {size} > 0, got {tuple(values.shape)}")
    values = rows(values)
    if values.stride(1) != 1:
        values = values.contiguous()
    if indices is None:
        return Teacher(values=values), name.removeprefix("teacher_")
    checks.integer(op, teacher_indices=indices)
    checks.shape(op, "teacher_indices", indices, (*leading, values.shape[1]))
    return Teacher(values=values, indices=rows(indices)), "top_k"


def checked_options(
    op: str, options: DistillationOptions, teacher: Teacher, form: str, vocabulary: int
) -> DistillationOptions:
    """Check the options of the loss, whose kind is the `divergence` of the caller, and return them."""
    checks.choice(op, "divergence", options.kind, ("jsd", "kl", "reverse_kl", "tvd", "cosine"))
    beta = checks.number(op, "beta", options.beta, 0.0, 1.0)
    temperature = checks.number(op, "temperature", options.temperature, 0.0, excludes_low=True)
    soft_weight = checks.number(op, "soft_weight", options.soft_weight, 0.0)
    hard_weight = checks.number(op, "hard_weight", options.hard_weight, 0.0)
    if hard_weight and not options.has_labels:
        raise ValueError(f"{op}: hard_weight must be 0 without targets, got {hard_weight:g}")
    scales = {name: getattr(options, name) for name in ("logit_scale", "teacher_logit_scale")}
    caps = {name: getattr(options, name) for name in ("softcap", "teacher_softcap")}
    for name, value in scales.items():
        scales[name] = checks.number(op, name, value)
    for name, value in caps.items():
        if value is not None:
            caps[name] = cap = checks.number(op, name, value, 0.0, excludes_low=True)
            checks.number(op, f"{name} / temperature", cap / temperature, 0.0, excludes_low=True)
    for name, value in scales.items():
        checks.number(op, f"{name} / temperature", value / temperature)
    teacher_softcap, teacher_logit_scale = caps["teacher_softcap"], scales["teacher_logit_scale"]
    # The soft cap of log-probabilities is not the one of the logits that they were computed from.
    if form in ("probs", "log_probs", "top_k") and (teacher_softcap is not None or teacher_logit_scale != 1.0):
        raise ValueError(
            f"{op}: teacher_softcap must be None and teacher_logit_scale 1 for (log-)probabilities of the teacher, got "
            f"{teacher_softcap} and {teacher_logit_scale:g}"
        )
    kind = jsd_kind(beta) if options.kind == "jsd" else options.kind
    if kind in ("reverse_kl", "cosine"):
        tensor = teacher.weight if form == "hidden" else teacher.values
        assert tensor is not None
        width = len(tensor) if form == "hidden" else tensor.shape[1]
        rule = "is infinite for a teacher that" if kind == "reverse_kl" else "needs the logits of a teacher that"
        if form == "top_k" or width < vocabulary:
            limit = f"{width} log-probabilities of each token" if form == "top_k" else f"{width} tokens"
            raise ValueError(
                f"{op}: divergence {kind!r} {rule} has all {vocabulary} tokens of the student, got {limit}"
                if kind == "cosine"
                else f"{op}: divergence {kind!r} {rule} lacks some of the student's {vocabulary} tokens, got {limit}"
            )
        if kind == "cosine" and form in ("probs", "log_probs"):
            raise ValueError(f"{op}: divergence 'cosine' needs the logits of the teacher, got teacher_{form}")
    return options._replace(
        kind=kind, beta=beta, temperature=temperature, soft_weight=soft_weight, hard_weight=hard_weight,
        softcap=caps["softcap"], logit_scale=scales["logit_scale"], teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )  # fmt: skip
