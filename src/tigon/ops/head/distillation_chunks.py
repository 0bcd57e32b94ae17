"""The loss of distillation over two heads, one chunk of tokens at a time, the gradients of the student, and checks.

For each chunk, one product computes the logits of the student and one those of the teacher, and the kernel of
`ops/logits/distillation.py` overwrites the former with their gradient. A teacher that is given as logits, probabilities
or log-probabilities needs no product.

Logits of half-precision models may be stored in fp32. Their gradient is rounded to half precision for its products, and
takes the first half of each row.

Shapes: T tokens, H hidden size of the student, V its vocabulary, G hidden size of the teacher, W its vocabulary, K
log-probabilities of each token, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import Chunk, Head, HeadSettings, compute_chunks, head_product, plan_chunks
from tigon.ops.head.computed_rows import Rows, select, select_some
from tigon.ops.head.gradients import Gradients, empty_gradients
from tigon.ops.logits.distillation import distill_rows
from tigon.ops.logits.divergence_reference import DistillationOptions, RowLosses, jsd_kind
from tigon.runtime import checks
from tigon.runtime.device import runs_kernels
from tigon.runtime.launch import launcher

# Bytes that a logit takes in addition to itself where no kernel runs: about ten fp32 values per logit exist at a time.
TORCH_LOGIT_BYTES = 40
# A dense row of log-probabilities has this many columns more than the vocabulary. The entries of the top K whose index
# is outside of the vocabulary are written there, and rows stay aligned to 16 bytes.
SPARE_COLUMNS = 16


class Teacher(NamedTuple):
    """The distributions of the teacher in one of four forms, as `form` of the settings says."""

    # "hidden": [T, G], [W, G], [W] or None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    # "logits" (which may be log-probabilities) or "probs": [T, W]. "top_k": [T, K] log-probabilities
    values: Tensor | None = None
    indices: Tensor | None = None  # "top_k": [T, K] indices of the vocabulary


class DistillationSettings(NamedTuple):
    # "hidden", "logits", "probs" or "top_k"
    form: str
    head: HeadSettings
    fp32_logits: bool  # whether the logits of half-precision hidden states are kept in fp32
    # whether the losses of all tokens are summed
    is_reduced: bool
    options: DistillationOptions


class DistillationResults(NamedTuple):
    # [T] each
    losses: RowLosses
    gradients: Gradients


def _teacher_logits(
    teacher: Teacher, settings: DistillationSettings, tokens: int, vocabulary: int
) -> Callable[[Rows], Tensor]:
    """Return a function from at most `tokens` rows to their logits [C, W] of the teacher, in a buffer that it
    reuses."""
    tensors: Any = teacher
    hidden, weight, bias, values, indices = tensors
    if settings.form == "hidden":
        # Under autocast the weight is fp32.
        head = weight.to(hidden.dtype)
        logits = hidden.new_empty(tokens, len(weight), dtype=_logits_dtype(hidden, settings.fp32_logits))

        def multiply(rows: Rows) -> Tensor:
            x = select(hidden, rows)
            head_product(x, head, bias, logits[: len(x)])
            return logits[: len(x)]

        return multiply
    if settings.form == "logits":
        return lambda rows: select(values, rows)
    dtype = torch.promote_types(values.dtype, torch.float32)
    if settings.form == "probs":
        return lambda rows: select(values, rows).to(dtype).log()
    log_probs = values.new_empty(tokens, vocabulary + SPARE_COLUMNS, dtype=dtype)

    def scatter(rows: Rows) -> Tensor:
        top_k, columns = select(values, rows).to(dtype), select(indices, rows).long()
        is_token = (columns >= 0) & (columns < vocabulary)
        chunk = log_probs[: len(top_k)].fill_(-torch.inf)
        return chunk.scatter_(1, columns.where(is_token, vocabulary), top_k)[:, :vocabulary]

    return scatter


def _empty_losses(x: Tensor, options: DistillationOptions) -> RowLosses:
    dtype = torch.promote_types(x.dtype, torch.float32)
    empty = lambda needed: x.new_empty(len(x), dtype=dtype) if needed else None
    return RowLosses(
        x.new_empty(len(x), dtype=dtype), empty(options.returns_parts),
        empty(options.returns_parts and options.has_cross_entropy), empty(options.with_entropy),
    )  # fmt: skip


def _logits_dtype(hidden: Tensor, fp32_logits: bool) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32) if fp32_logits else hidden.dtype


def _teacher_bytes(teacher: Any, form: str, vocabulary: int, fp32_logits: bool) -> int:
    """Return the bytes that the teacher's logits of one token take in buffers of this op."""
    if form == "hidden":
        return len(teacher.weight) * _logits_dtype(teacher.hidden, fp32_logits).itemsize
    if form == "logits":
        return 0
    return 4 * vocabulary


@launcher(
    fake=lambda head, settings: DistillationResults(
        _empty_losses(head.x, settings.options), empty_gradients(settings.head.needs, *head[:3])
    )
)
def distillation_chunks(
    head: Head, teacher: Teacher, scales: Tensor, dloss: Tensor | None, settings: DistillationSettings
) -> DistillationResults:
    """Return the losses of all tokens, and the gradients of their sum for the upstream gradients `dloss` [T] or [].
    `scales` are those of `gradient_scales`, and a `dloss` of None stands for ones."""
    x, options, v, needs_any = head.x, settings.options, len(head.weight), any(settings.head.needs)
    logits_dtype = _logits_dtype(x, settings.fp32_logits)
    teacher_bytes = _teacher_bytes(teacher, settings.form, v, settings.fp32_logits)
    token_bytes = v * logits_dtype.itemsize + teacher_bytes
    token_bytes += 0 if runs_kernels(x) else v * TORCH_LOGIT_BYTES
    plan = plan_chunks(head, settings.head, token_bytes, has_teacher=teacher_bytes > 0)
    teacher_logits: list[Callable[[Rows], Tensor]] = []

    def compute(chunk: Chunk) -> tuple[RowLosses, Tensor]:
        if not teacher_logits:
            # No chunk is longer than the first one.
            teacher_logits.append(_teacher_logits(teacher, settings, len(chunk.x), v))
        # fp32 rows have room for twice as many half-precision numbers.
        dlogits = chunk.logits.view(x.dtype)[:, :v]
        part = distill_rows(
            chunk.logits, teacher_logits[0](chunk.rows), chunk.target, scales, select_some(dloss, chunk.rows), options,
            dlogits if needs_any else None,
        )  # fmt: skip
        # The bf16 products of oneDNN read beyond the ends of rows. Between rows that are not contiguous, they would
        # find parts of fp32 numbers, which may be NaN in bf16.
        return part, dlogits if x.is_cuda else dlogits.contiguous()

    losses, gradients = compute_chunks(
        head, plan, settings.head, compute, lambda: _empty_losses(x, options), logits_dtype=logits_dtype
    )
    return DistillationResults(losses, gradients)


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
    values: Any = forms[name]
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
        tensor: Any = teacher.weight if form == "hidden" else teacher.values
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
