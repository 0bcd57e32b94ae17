"""The cross entropy of a linear layer's outputs, one chunk of tokens at a time, and the gradients of its inputs.

`linear_cross_entropy` has the maths and the reasons.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class LossSettings(NamedTuple):
    head: HeadSettings
    wants: Wants
    # True if the losses of all tokens are summed.
    is_reduced: bool
    options: Options


class ChunkResults(NamedTuple):
    statistics: Statistics
    gradients: Gradients


@launcher(
    fake=lambda head, low_rank, settings: ChunkResults(
        empty_statistics(head.x, settings.options, settings.wants),
        empty_gradients(settings.head.needs, *head[:3], *low_rank),
    )
)
def linear_cross_entropy_chunks(
    head: Head, low_rank: LowRank, class_weight: Tensor | None, scales: Tensor, dw_buffer: Tensor | None,
    settings: LossSettings,
) -> ChunkResults:  # fmt: skip
    """Return the statistics of all tokens and the gradients of the sum of the losses. `scales` are the result of
    `gradient_scales`, and dW is added to `dw_buffer` [V, H] if there is one."""
    options, wants, shard, needs_any = settings.options, settings.wants, settings.head.shard, any(settings.head.needs)

    def compute(chunk: Chunk) -> tuple[Statistics, Tensor]:
        arguments = chunk.logits, chunk.target, class_weight, scales
        if not shard.group_name:
            return statistics(*arguments, options, wants, with_gradient=needs_any), chunk.logits
        result = parallel_statistics(*arguments, options, wants, shard)
        if needs_any:
            gradient(*arguments, result, WHOLE_LOSS, options, out=chunk.logits, shard=shard)
        return result, chunk.logits

    empty = lambda: empty_statistics(head.x, options, wants)
    return ChunkResults(*_compute(head, low_rank, dw_buffer, settings, compute, empty))


@launcher(fake=lambda head, low_rank, settings: empty_gradients(settings.head.needs, *head[:3], *low_rank))
def linear_cross_entropy_gradients(
    head: Head, low_rank: LowRank, class_weight: Tensor | None, scales: Tensor, dw_buffer: Tensor | None,
    saved: SavedStatistics, upstream: Upstream, settings: LossSettings,
) -> Gradients:  # fmt: skip
    """Return the gradients for the upstream gradients [T] of the losses (or []), log-probabilities and entropies.
    `saved` has the statistics of the forward pass."""
    shard = settings.head.shard if settings.head.shard.group_name else None

    def compute(chunk: Chunk) -> tuple[None, Tensor]:
        gradient(
            chunk.logits, chunk.target, class_weight, scales, select_each(saved, chunk.rows),
            select_each(upstream, chunk.rows), settings.options, out=chunk.logits, shard=shard,
        )  # fmt: skip
        return None, chunk.logits

    return _compute(head, low_rank, dw_buffer, settings, compute, None)[1]


def _compute(
    head: Head, low_rank: LowRank, dw_buffer: Tensor | None, settings: LossSettings,
    compute: Callable[[Chunk], tuple[Any, Tensor]], empty: Callable[[], Statistics] | None,
) -> tuple[Any, Gradients]:  # fmt: skip
    """Divide the tokens into chunks, and return the results and the gradients of all chunks."""
    token_bytes = settings.head.vocabulary * bytes_of_logit(head.x)
    plan = plan_chunks(head, settings.head, token_bytes, has_dw_buffer=dw_buffer is not None)
    return compute_chunks(head, plan, settings.head, compute, empty, dw_buffer=dw_buffer, low_rank=low_rank)
