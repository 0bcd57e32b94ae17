"""The cross entropy of a linear layer's outputs, one chunk of tokens at a time, and the gradients of its inputs.

`linear_cross_entropy` has the maths and the reasons.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank).
"""

from typing import NamedTuple

from torch import Tensor

from tigon.ops.head.chunks import Chunk, Head, HeadSettings, bytes_of_logit, compute_chunks, plan_chunks
from tigon.ops.head.computed_rows import select_each
from tigon.ops.head.gradients import Gradients, LowRank, empty_gradients
from tigon.ops.logits.token.kernels import (
    WHOLE_LOSS,
    Options,
    SavedStatistics,
    Statistics,
    Upstream,
    Wants,
    empty_statistics,
    gradient,
    statistics,
)
from tigon.ops.logits.vocab_parallel import parallel_statistics
from tigon.runtime.launch import launcher

# The argument `saved` of the first pass over the logits, before which no statistics exist.
NOTHING_SAVED = SavedStatistics()


class LossSettings(NamedTuple):
    """Everything that a call requests, as plain values."""

    head: HeadSettings
    wants: Wants
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


def _empty_results(head: Head, low_rank: LowRank, saved: SavedStatistics, settings: LossSettings) -> ChunkResults:
    """Allocate what `linear_cross_entropy_chunks` returns."""
    statistics = ChunkStatistics()
    if saved.lse is None:
        statistics = _as_chunk_statistics(empty_statistics(head.x, settings.options, settings.wants))
    return ChunkResults(statistics, empty_gradients(settings.head.needs, *head[:3], *low_rank))


@launcher(fake=_empty_results)
def linear_cross_entropy_chunks(
    head: Head, low_rank: LowRank, class_weight: Tensor | None, scales: Tensor, dw_buffer: Tensor | None,
    saved: SavedStatistics, upstream: Upstream, settings: LossSettings,
) -> ChunkResults:  # fmt: skip
    """Return the statistics of all tokens, and the gradients of the sum of the losses.

    If an earlier call returned the statistics, `saved` holds them. The gradients are then those of the losses, the
    log-probabilities and the entropies for the upstream gradients `upstream` [T] (that of the loss may be []), and the
    statistics of the result are None. `scales` are those of `gradient_scales`, and dW is added to `dw_buffer` [V, H].
    """
    options, wants, shard = settings.options, settings.wants, settings.head.shard
    is_first, is_sharded, needs_any = saved.lse is None, bool(shard.group_name), any(settings.head.needs)
    token_bytes = settings.head.vocabulary * bytes_of_logit(head.x)
    plan = plan_chunks(head, settings.head, token_bytes, has_dw_buffer=dw_buffer is not None)

    def compute(chunk: Chunk) -> tuple[Statistics | None, Tensor]:
        arguments = chunk.logits, chunk.target, class_weight, scales
        result, chunk_saved, chunk_upstream = None, select_each(saved, chunk.rows), WHOLE_LOSS
        if not is_first:
            chunk_upstream = select_each(upstream, chunk.rows)
        else:
            if is_sharded:
                result = parallel_statistics(*arguments, options, wants, shard)
            else:
                result = statistics(*arguments, options, wants, with_gradient=needs_any)
            chunk_saved = SavedStatistics(result.lse, result.log_probs, result.entropy)
        if not is_first or (is_sharded and needs_any):
            columns = shard if is_sharded else None
            gradient(*arguments, chunk_saved, chunk_upstream, options, out=chunk.logits, shard=columns)
        return result, chunk.logits

    result, gradients = compute_chunks(
        head, plan, settings.head, compute, (lambda: empty_statistics(head.x, options, wants)) if is_first else None,
        dw_buffer=dw_buffer, low_rank=low_rank,
    )  # fmt: skip
    return ChunkResults(ChunkStatistics() if result is None else _as_chunk_statistics(result), gradients)
