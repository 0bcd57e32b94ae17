"""The loss of distillation over two heads, one chunk of tokens at a time, and the gradients of the student.

For each chunk, one product computes the student's logits a, and one the teacher's b. The kernel of
`ops/logits/distillation.py` overwrites a with da. Two products compute dx = da W and dW += da^T x. A teacher that is
given as logits, probabilities or log-probabilities needs no product.

Logits of half-precision models may be stored in fp32. Their gradient is rounded to half precision for its products, and
takes the first half of each row.

Shapes: T tokens, H hidden size of the student, V its vocabulary, G hidden size of the teacher, W its vocabulary, K
log-probabilities of each token, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import Chunk, Head, HeadSettings, compute_chunks, head_product, plan_chunks
from tigon.ops.head.computed_rows import Rows, select, select_some
from tigon.ops.head.gradients import Gradients, empty_gradients
from tigon.ops.logits.distillation import distill_rows
from tigon.ops.logits.divergence_reference import DistillationOptions, RowLosses
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
    """Everything that a call requests, as plain values."""

    # "hidden", "logits", "probs" or "top_k"
    form: str
    head: HeadSettings
    fp32_logits: bool  # whether the logits of half-precision hidden states are kept in fp32
    # whether the losses of all tokens are summed
    is_reduced: bool
    options: DistillationOptions


class DistillationResults(NamedTuple):
    """The results of `distillation_chunks`."""

    # [T] each
    losses: RowLosses
    gradients: Gradients


def _teacher_logits(
    teacher: Teacher, settings: DistillationSettings, tokens: int, vocabulary: int
) -> Callable[[Rows], Tensor]:
    """Return a function from at most `tokens` rows to their logits [C, W] of the teacher, in a buffer that it
    reuses."""
    hidden, weight, bias, values, indices = teacher
    if settings.form == "hidden":
        assert hidden is not None
        assert weight is not None
        # Under autocast the weight is fp32.
        head = weight.to(hidden.dtype)
        logits = hidden.new_empty(tokens, len(weight), dtype=_logits_dtype(hidden, settings.fp32_logits))

        def multiply(rows: Rows) -> Tensor:
            x = select(hidden, rows)
            head_product(x, head, bias, logits[: len(x)])
            return logits[: len(x)]

        return multiply
    assert values is not None
    if settings.form == "logits":
        return lambda rows: select(values, rows)
    dtype = torch.promote_types(values.dtype, torch.float32)
    if settings.form == "probs":
        return lambda rows: select(values, rows).to(dtype).log()
    log_probs = values.new_empty(tokens, vocabulary + SPARE_COLUMNS, dtype=dtype)

    def scatter(rows: Rows) -> Tensor:
        assert indices is not None
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


def _teacher_bytes(teacher: Teacher, form: str, vocabulary: int, fp32_logits: bool) -> int:
    """Return the bytes that the teacher's logits of one token take in buffers of this op."""
    if form == "hidden":
        assert teacher.weight is not None
        assert teacher.hidden is not None
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
