"""The loss of distillation over two heads, one chunk of tokens at a time, and the gradients of the student.

For each chunk, one product computes the student's logits a, and one the teacher's b. The kernel of
`ops/logits/distillation.py` overwrites a with da. Two products compute dx = da W and dW += da^T x. A teacher that is
given as logits, probabilities or log-probabilities needs no product.

Logits of half-precision models may be kept in fp32. Their gradient is rounded to half precision for its products, and
takes the first half of each row.

Shapes: T tokens, H hidden size of the student, V its vocabulary, G hidden size of the teacher, W its vocabulary, K
log-probabilities of each token, C tokens of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import (
    ChunkConfig,
    ChunkProblem,
    Gradients,
    GradientSums,
    Needs,
    head_product,
    select,
    select_some,
    token_chunks,
    without_ignored,
)
from tigon.ops.head.computed_rows import rows_to_compute
from tigon.ops.head.low_rank_logits import Rows
from tigon.ops.logits.distillation import distill_rows
from tigon.ops.logits.distillation_types import DistillationOptions, RowLosses
from tigon.ops.logits.token.kernels import Shard
from tigon.runtime.device import device_kind, device_of, runs_kernels
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
    # "top_k": [T, K] indices of the vocabulary
    indices: Tensor | None = None


class DistillationSettings(NamedTuple):
    """Everything that a call requests, as plain values."""

    # "hidden", "logits", "probs" or "top_k"
    form: str
    needs: Needs
    sums_in_fp32: bool
    # whether the logits of half-precision hidden states are kept in fp32
    fp32_logits: bool
    max_logits_mib: float | None
    options: DistillationOptions


class DistillationResults(NamedTuple):
    """The results of `distillation_chunks`."""

    # [T] each
    losses: RowLosses
    gradients: Gradients


class TeacherLogits:
    """The teacher's logits of one chunk at a time."""

    def __init__(self, teacher: Teacher, settings: DistillationSettings, tokens: int, vocabulary: int) -> None:
        self.teacher, self.form, self.vocabulary = teacher, settings.form, vocabulary
        self.fp32_logits, form = settings.fp32_logits, settings.form
        self.buffer, self.weight = None, None
        if form == "hidden":
            assert teacher.hidden is not None
            assert teacher.weight is not None
            # Under autocast the weight is fp32.
            self.weight = teacher.weight.to(teacher.hidden.dtype)
            dtype = _logits_dtype(teacher.hidden, self.fp32_logits)
            self.buffer = teacher.hidden.new_empty(tokens, len(teacher.weight), dtype=dtype)
        elif form == "top_k":
            assert teacher.values is not None
            dtype = torch.promote_types(teacher.values.dtype, torch.float32)
            self.buffer = teacher.values.new_empty(tokens, vocabulary + SPARE_COLUMNS, dtype=dtype)

    def of(self, rows: Rows) -> Tensor:
        """Return the logits [C, W] of the tokens `rows`, in a buffer that the next call may overwrite."""
        teacher = self.teacher
        if self.form == "hidden":
            assert teacher.hidden is not None
            assert self.weight is not None
            assert self.buffer is not None
            hidden = select(teacher.hidden, rows)
            logits = self.buffer[: len(hidden)]
            head_product(hidden, self.weight, teacher.bias, logits, self.fp32_logits)
            return logits
        assert teacher.values is not None
        values = select(teacher.values, rows)
        if self.form == "logits":
            return values
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self.form == "probs":
            return values.log()
        assert teacher.indices is not None
        assert self.buffer is not None
        indices = select(teacher.indices, rows).long()
        log_probs = self.buffer[: len(values)].fill_(-torch.inf)
        is_token = (indices >= 0) & (indices < self.vocabulary)
        log_probs.scatter_(1, indices.where(is_token, self.vocabulary), values)
        return log_probs[:, : self.vocabulary]


class AllLosses:
    """The losses of all tokens, into which those of each chunk are copied. Tokens without a chunk have zeros."""

    def __init__(self, x: Tensor, settings: DistillationSettings) -> None:
        self.result = _empty_losses(x, settings.options)
        for values in self.result:
            if values is not None:
                values.zero_()

    def add(self, part: RowLosses, rows: Rows) -> None:
        for whole, values in zip(self.result, part, strict=True):
            if whole is not None and values is not None:
                if isinstance(rows, slice):
                    whole[rows] = values
                else:
                    whole.index_copy_(0, rows, values.to(whole.dtype))


def _empty_losses(x: Tensor, options: DistillationOptions) -> RowLosses:
    dtype = torch.promote_types(x.dtype, torch.float32)
    empty = lambda needed: x.new_empty(len(x), dtype=dtype) if needed else None
    return RowLosses(
        x.new_empty(len(x), dtype=dtype), empty(options.returns_parts),
        empty(options.returns_parts and options.has_cross_entropy), empty(options.with_entropy),
    )  # fmt: skip


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: DistillationSettings
) -> DistillationResults:
    empty = lambda tensor, need: torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
    gradients = [empty(each, need) for each, need in zip((x, weight, bias), settings.needs[:3], strict=True)]
    return DistillationResults(_empty_losses(x, settings.options), Gradients(*gradients))


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


@launcher(fake=_empty_results)
def distillation_chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, teacher: Teacher, scales: Tensor,
    rows: Tensor | None, count: int, dloss: Tensor | None, settings: DistillationSettings,
) -> DistillationResults:  # fmt: skip
    """Return the losses of all tokens, and the gradients of their sum.

    Args:
        x, weight, target, bias: [T, H], [V, H], [T], [V] of the student.
        teacher: The distributions of the teacher.
        scales: [3], from `gradient_scales`.
        rows, count: [count] tokens to compute; None for all tokens. A count of -1 lets this function find them.
        dloss: The upstream gradients [T] or [] of the losses, or None for ones.
    """
    needs, options, v, form = settings.needs, settings.options, len(weight), settings.form
    logits_dtype = _logits_dtype(x, settings.fp32_logits)
    teacher_bytes = _teacher_bytes(teacher, form, v, settings.fp32_logits)
    if count < 0:
        rows, count = rows_to_compute(None, target, options.ignore_index, x.numel() * v)
    token_bytes = v * logits_dtype.itemsize + teacher_bytes
    token_bytes += 0 if runs_kernels(x) else v * TORCH_LOGIT_BYTES
    problem = ChunkProblem(v, max(1, token_bytes // v), device_kind(x), teacher_bytes > 0)
    config = ChunkConfig.choose(problem, device_of(x))
    # An fp32 sum of a half-precision dW takes a buffer of its size. The logits of as many tokens may take it instead.
    may_sum_in_fp32 = needs.dw and weight.element_size() == 2
    spare_tokens = 0
    if may_sum_in_fp32 and not settings.sums_in_fp32:
        spare_tokens = weight.numel() * weight.element_size() // token_bytes
    tokens = config.chunk_tokens(count, token_bytes, settings.max_logits_mib, spare_tokens)
    sums_in_fp32 = settings.sums_in_fp32 or (may_sum_in_fp32 and count > config.max_chunks * tokens)
    gradients = GradientSums(x, weight, bias, rows is None and count > 0, None, sums_in_fp32, needs, None)
    losses = AllLosses(x, settings)
    teacher_logits = TeacherLogits(teacher, settings, min(tokens, count), v)
    # Under autocast the weight is fp32, and so is dW.
    weight = weight.to(x.dtype)
    for chunk in token_chunks(x, weight, target, bias, None, rows, count, tokens, config, settings.fp32_logits):
        # fp32 rows have room for twice as many half-precision numbers.
        dlogits = chunk.logits.view(x.dtype)[:, :v] if any(needs) else None
        part = distill_rows(
            chunk.logits, teacher_logits.of(chunk.rows), chunk.target, scales, select_some(dloss, chunk.rows), options,
            dlogits,
        )  # fmt: skip
        losses.add(part, chunk.rows)
        if dlogits is not None:
            if not x.is_cuda:
                # The bf16 products of oneDNN read beyond the ends of rows. Between rows that are not contiguous, they
                # would find parts of fp32 numbers, which may be NaN in bf16.
                dlogits = dlogits.contiguous()
            hidden = without_ignored(chunk.x, chunk.target, options.ignore_index) if rows is None else chunk.x
            gradients.add(chunk._replace(x=hidden, logits=dlogits), weight)
    return DistillationResults(losses.result, gradients.finish(Shard(0, v)))
