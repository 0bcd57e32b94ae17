"""The cross entropy of a linear layer's outputs, one chunk of tokens at a time, and the gradients of its inputs.

`linear_cross_entropy` has the maths and the reasons.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank).
"""

from typing import NamedTuple

from torch import Tensor

from tigon.ops.head.chunks import AllRows, plan_chunks, token_chunks
from tigon.ops.head.computed_rows import rows_to_compute, select_each, without_ignored
from tigon.ops.head.gradients import Addition, Gradients, GradientSums, LowRank, Needs, empty_gradients
from tigon.ops.logits.token.kernels import (
    WHOLE_LOSS,
    Options,
    SavedStatistics,
    Shard,
    Statistics,
    Upstream,
    Wants,
    empty_statistics,
    gradient,
    statistics,
)
from tigon.ops.logits.vocab_parallel import largest_shard, parallel_statistics
from tigon.runtime.device import runs_kernels
from tigon.runtime.launch import launcher

# The argument `saved` of the first pass over the logits, before which no statistics exist.
NOTHING_SAVED = SavedStatistics()


class LossSettings(NamedTuple):
    """Everything that a call requests, as plain values."""

    needs: Needs
    wants: Wants
    sums_in_fp32: bool
    max_logits_mib: float | None
    shard: Shard
    options: Options


class ChunkStatistics(NamedTuple):
    """The first fields of `Statistics` for all tokens, all None if they were computed by an earlier call."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    predicted: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None


class ChunkResults(NamedTuple):
    """The results of `linear_cross_entropy_chunks`."""

    statistics: ChunkStatistics
    gradients: Gradients


def _as_chunk_statistics(result: Statistics) -> ChunkStatistics:
    return ChunkStatistics(*result[: len(ChunkStatistics._fields)])


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank, saved: SavedStatistics, settings: LossSettings
) -> ChunkResults:
    """Allocate what `linear_cross_entropy_chunks` returns."""
    statistics = ChunkStatistics()
    if saved.lse is None:
        statistics = _as_chunk_statistics(empty_statistics(x, settings.options, settings.wants))
    return ChunkResults(statistics, empty_gradients(settings.needs, x, weight, bias, *low_rank))


@launcher(fake=_empty_results)
def linear_cross_entropy_chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, low_rank: LowRank, class_weight: Tensor | None,
    scales: Tensor, rows: Tensor | None, count: int, dw_buffer: Tensor | None, saved: SavedStatistics,
    upstream: Upstream, settings: LossSettings,
) -> ChunkResults:  # fmt: skip
    """Return the statistics of all tokens, and the gradients of the sum of the losses.

    If an earlier call returned the statistics, `saved` holds them. The gradients are then those of the losses, the
    log-probabilities and the entropies for the upstream gradients `upstream`, and the statistics of the result are
    None.

    Args:
        x, weight, target, bias: [T, H], [V, H], [T], [V].
        low_rank: The factors [T, R] and [V, R] of a product that is added to the logits.
        class_weight: [V] of the whole vocabulary.
        scales: [3], from `gradient_scales`.
        rows, count: [count] tokens to compute; None for all tokens. A count of -1 lets this function find them.
        dw_buffer: A gradient [V, H] that dW is added to, or None.
        saved, upstream: [T, ...] each; the upstream gradient of the loss is [T] or [].
    """
    needs, options, wants, shard = settings.needs, settings.options, settings.wants, settings.shard
    is_first, is_sharded, needs_any = saved.lse is None, bool(shard.group_name), any(needs)
    vocabulary = max(largest_shard(shard), 1)
    if count < 0:
        rows, count = rows_to_compute(None, x, target, options.ignore_index, shard)
    # Without kernels, a chunk takes two fp32 values per logit in addition to the logit itself.
    token_bytes = vocabulary * (x.element_size() + (0 if runs_kernels(x) else 8))
    parts, sums_in_fp32 = plan_chunks(
        x, weight, rows, count, vocabulary, token_bytes, settings.max_logits_mib,
        needs_dw=needs.dw and dw_buffer is None, sums_in_fp32=settings.sums_in_fp32,
    )  # fmt: skip
    addition = None
    if low_rank.h is not None:
        if rows is None and needs.dlow_b:
            low_rank = low_rank._replace(h=without_ignored(low_rank.h, target, options.ignore_index))
        addition = Addition(x, low_rank, needs)
    gradients = GradientSums(
        x, weight, bias, needs, ignore_index=options.ignore_index if rows is None else None,
        sums_in_fp32=sums_in_fp32, dw_buffer=dw_buffer, addition=addition,
    )  # fmt: skip
    all_statistics = AllRows[Statistics](len(x))
    # Under autocast the weight is fp32, and so is dW.
    weight = weight.to(x.dtype)
    for chunk in token_chunks(x, weight, target, bias, parts, addition=addition):
        loss_arguments = chunk.logits, chunk.target, class_weight, scales
        chunk_saved, chunk_upstream = select_each(saved, chunk.rows), WHOLE_LOSS
        if not is_first:
            chunk_upstream = select_each(upstream, chunk.rows)
        else:
            if is_sharded:
                part = parallel_statistics(*loss_arguments, options, wants, shard)
            else:
                part = statistics(*loss_arguments, options, wants, with_gradient=needs_any)
            all_statistics.add(part, chunk.rows)
            chunk_saved = SavedStatistics(part.lse, part.log_probs, part.entropy)
        if not is_first or (is_sharded and needs_any):
            gradient(
                *loss_arguments, chunk_saved, chunk_upstream, options, out=chunk.logits,
                shard=shard if is_sharded else None,
            )  # fmt: skip
        if needs_any:
            gradients.add(chunk.rows, chunk.x, chunk.target, chunk.logits, weight)
    result = ChunkStatistics()
    if is_first:
        result = _as_chunk_statistics(all_statistics.finish(lambda: empty_statistics(x, options, wants)))
    return ChunkResults(result, gradients.finish(shard))
