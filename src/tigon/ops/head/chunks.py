"""The losses of a linear layer's outputs, one chunk of tokens at a time, and the gradients of the layer's inputs.

`linear_cross_entropy` has the maths and the reasons.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.computed_rows import rows_to_compute
from tigon.ops.head.low_rank_logits import Addition, LowRank, Rows
from tigon.ops.head.weight_gradient import WeightGradient, product_in_fp32
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
from tigon.ops.logits.vocab_parallel import largest_shard, parallel_statistics, sum_over_ranks
from tigon.runtime.device import Device, cdiv, device_kind, device_of, runs_kernels
from tigon.runtime.launch import launcher
from tigon.runtime.products import product
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------


class ChunkProblem(NamedTuple):
    """The properties that the length of a chunk depends on."""

    # rows of the head on the largest rank
    vocabulary: int
    # bytes that one logit of a chunk takes
    logit_bytes: int
    # "cuda", "cpu" and so on
    device_type: str
    # whether the logits of a teacher take a part of the bytes
    has_teacher: bool = False


@dataclass(frozen=True)
class ChunkConfig(LaunchConfig):
    """Parameters of the division of tokens into chunks."""

    # MiB that the logits of a chunk may take, unless the caller passes another cap
    budget_mib: float
    # whether chunks may be longer than the budget allows, so that there are no more than `max_chunks`
    may_exceed_budget: bool
    # MiB that the logits of one sequence, or of a pair, may take: of what `linear_loss` cannot divide
    unit_budget_mib: float
    # With more chunks, the roundings of a bf16 dW add up to more than twice those of one product. dW is then summed in
    # fp32.
    max_chunks: int
    # The length of a chunk is a multiple of `tile` tokens, the tile of the products, if the budget allows it.
    tile: int
    # tokens of a chunk, whatever the budget is; None derives them from the budget
    tokens: int | None = None

    @staticmethod
    def heuristic(problem: ChunkProblem, device: Device) -> "ChunkConfig":
        # On a GPU a chunk must be so long that its products hide the traffic of W and dW: 640 MiB are 1280 tokens of a
        # vocabulary of 256000. On a CPU it must be so short that it fits in the caches.
        # Beside the logits of a teacher it is about half as long, so fewer chunks may exceed the budget: 8192 tokens of
        # two models with a vocabulary of 128256 take 5 chunks of 802 MiB instead of 7 of 627 MiB. Each chunk reads and
        # writes dW, which takes 0.5 ms on an H200 if H is 4096.
        is_gpu = problem.device_type == "cuda"
        return ChunkConfig(
            budget_mib=640 if is_gpu else 96, may_exceed_budget=is_gpu, unit_budget_mib=1024 if is_gpu else 96,
            max_chunks=5 if is_gpu and problem.has_teacher else 8, tile=128,
        )  # fmt: skip

    def chunk_tokens(self, tokens: int, token_bytes: int, max_logits_mib: float | None, spare_tokens: int) -> int:
        """Return the number of tokens of a chunk.

        Args:
            tokens: The number of tokens of the call.
            token_bytes: The bytes that the logits of one token take.
            max_logits_mib: The caller's cap in MiB on the logits of a chunk, or None.
            spare_tokens: Tokens by which a chunk may exceed the budget of the config, if `max_chunks` chunks are then
                enough.
        """
        if self.tokens is not None:
            return self.tokens
        limit = self.token_limit(tokens, token_bytes, max_logits_mib, spare_tokens)
        chunks = max(1, cdiv(tokens, limit))
        return max(1, self.round_to_tiles(cdiv(tokens, chunks), limit))

    def token_limit(self, tokens: int, token_bytes: int, max_logits_mib: float | None, spare_tokens: int) -> int:
        """Return the largest number of tokens that a chunk may have. The arguments are those of `chunk_tokens`."""
        if self.tokens is not None:
            return self.tokens
        limit = max(1, int((max_logits_mib or self.budget_mib) * 2**20) // token_bytes)
        shortest = cdiv(tokens, self.max_chunks)
        if max_logits_mib is None and self.may_exceed_budget and shortest <= limit + spare_tokens:
            limit = max(limit, shortest)
        return limit

    def unit_limit(self, token_bytes: int, max_logits_mib: float | None) -> int:
        """Return the largest number of tokens of a sequence or a pair whose logits are computed once."""
        return self.tokens or max(1, int((max_logits_mib or self.unit_budget_mib) * 2**20) // token_bytes)

    def round_to_tiles(self, tokens: int, limit: int) -> int:
        """Return `tokens` rounded up to whole tiles, or the smaller of `tokens` and `limit` if that exceeds `limit`."""
        rounded = cdiv(tokens, self.tile) * self.tile
        return rounded if rounded <= limit else min(tokens, limit)

    def first_half(self, tokens: int, limit: int) -> int:
        """Return about half of the tokens: in whole tiles, unless that leaves a short second half."""
        half = cdiv(tokens, 2)
        tiled = self.round_to_tiles(half, limit)
        return tiled if 2 * (tokens - tiled) >= tiled else half


# --- the values that a call takes and returns ------------------------------------------------------


class Needs(NamedTuple):
    """True for each gradient that is computed."""

    dx: bool
    dw: bool
    db: bool
    # of the factors of `LowRank`
    dlow_h: bool = False
    dlow_b: bool = False


class LossSettings(NamedTuple):
    """Everything that a call requests, as plain values."""

    needs: Needs
    wants: Wants
    sums_in_fp32: bool
    max_logits_mib: float | None
    shard: Shard
    options: Options
    # `linear_log_probs` alone reads this flag: the logits are fp32, whatever the dtypes of their factors are.
    fp32_products: bool = False


NO_NEEDS = Needs(False, False, False)

# The argument `saved` of the first pass over the logits, before which no statistics exist.
NOTHING_SAVED = SavedStatistics()


class Gradients(NamedTuple):
    """The gradients of hidden states [T, H], weight [V, H], bias [V] and the factors [T, R] and [V, R] of `LowRank`.

    A gradient that is not needed is None.
    """

    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
    dlow_h: Tensor | None = None
    dlow_b: Tensor | None = None


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


# --- chunks --------------------------------------------------------------------------------------


def select(x: Tensor, rows: Rows) -> Tensor:
    """Return the rows of x."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def select_some(x: Tensor | None, rows: Rows) -> Tensor | None:
    """Return the rows of x, or x itself if it is None, empty, or one value for all rows."""
    return x if x is None or x.dim() == 0 or len(x) == 0 else select(x, rows)


def without_ignored(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the hidden states [C, H] of a chunk, with zeros for ignored tokens.

    Their d(logits) are zero, but zero times a hidden state that is infinite or NaN would be NaN in dW.
    """
    return x.where((target != ignore_index)[:, None], 0.0)


class Chunk(NamedTuple):
    """One chunk of tokens."""

    rows: Rows
    # [C, H]
    x: Tensor
    # [C]
    target: Tensor
    # [C, V], in a buffer that the next chunk overwrites
    logits: Tensor


def token_chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, addition: Addition | None, rows: Tensor | None,
    count: int, tokens: int, config: ChunkConfig, fp32_products: bool = False,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield chunks of `tokens` tokens, with their logits, that cover the `count` rows.

    With `fp32_products` the logits are fp32 and not rounded, whatever the dtypes of x and the weight are.
    """
    buffer = x.new_empty(min(tokens, count), len(weight), dtype=torch.float32 if fp32_products else x.dtype)
    start = 0
    while start < count:
        remaining = count - start
        # The last two chunks are about equally long, because a short one would leave multiprocessors idle.
        is_last_pair = tokens < remaining < 2 * tokens
        length = config.first_half(remaining, tokens) if is_last_pair else min(tokens, remaining)
        part = slice(start, start + length)
        start = part.stop
        chunk_rows = part if rows is None else rows[part]
        x_chunk = select(x, chunk_rows)
        logits = buffer[: len(x_chunk)]
        head_product(x_chunk, weight, bias, logits, fp32_products)
        if addition is not None and not addition.is_in_loss:
            addition.add_to_logits(chunk_rows, logits)
        yield Chunk(chunk_rows, x_chunk, select(target, chunk_rows), logits)


def head_product(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, in_fp32: bool = False) -> None:
    """Write x W^T + bias to `logits` [C, V], for x [C, H] and the weight [V, H]; in fp32 if `in_fp32` is True."""
    if in_fp32:
        product_in_fp32(x, weight.t(), logits)
        if bias is not None:
            logits += bias
    elif bias is None:
        product(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)


class GradientSums:
    """The gradients of all inputs, to which the d(logits) of each chunk contribute."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, computes_all_rows: bool, dw_buffer: Tensor | None,
        sums_in_fp32: bool, needs: Needs, addition: Addition | None,
    ) -> None:  # fmt: skip
        self.dx, self.dw, self.db, self.bias, self.addition = None, None, None, bias, addition
        if needs.dx:
            # Rows that are not computed have gradients of zero.
            self.dx = x.new_empty(x.shape) if computes_all_rows else x.new_zeros(x.shape)
        if needs.dw:
            self.dw = WeightGradient(weight, sums_in_fp32, dw_buffer)
        if needs.db:
            self.db = weight.new_zeros(len(weight), dtype=torch.promote_types(x.dtype, torch.float32))

    def add(self, chunk: Chunk, weight: Tensor) -> None:
        """Add the gradients of a chunk, whose logits have been overwritten with their gradient."""
        dlogits = chunk.logits
        if self.dx is not None:
            if isinstance(chunk.rows, slice):
                torch.mm(dlogits, weight, out=self.dx[chunk.rows])
            else:
                self.dx.index_copy_(0, chunk.rows, dlogits @ weight)
        if self.dw is not None:
            self.dw.add(dlogits, chunk.x)
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)
        if self.addition is not None:
            self.addition.add_gradients(dlogits, chunk.rows)

    def finish(self, shard: Shard) -> Gradients:
        """Return the gradients, with dx summed over the ranks that share the vocabulary."""
        if self.dx is not None:
            sum_over_ranks(self.dx, shard)
        db = None
        if self.db is not None:
            assert self.bias is not None
            db = self.db.to(self.bias.dtype)
        addition_gradients = (None, None) if self.addition is None else self.addition.gradients()
        return Gradients(self.dx, None if self.dw is None else self.dw.finish(), db, *addition_gradients)


class AllStatistics:
    """The statistics of all tokens, into which those of each chunk are copied."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.result: Statistics | None = None

    def add(self, part: Statistics, rows: Rows) -> None:
        """Copy the statistics of a chunk. A chunk that has all tokens is not copied."""
        if isinstance(rows, slice) and rows == slice(0, self.tokens):
            self.result = part
            return
        if self.result is None:
            t = self.tokens
            empty: Any = lambda x: None if x is None else x.new_empty(t if len(x) else 0, *x.shape[1:])
            self.result = Statistics(*map(empty, part))
            if not isinstance(rows, slice):
                _fill_as_ignored(self.result)
        for whole, values in zip(self.result, part, strict=True):
            # The statistics that were not requested are None or empty.
            if whole is None or values is None or len(whole) == 0:
                continue
            if isinstance(rows, slice):
                whole[rows] = values
            else:
                whole.index_copy_(0, rows, values)

    def finish(self, x: Tensor, settings: LossSettings) -> Statistics:
        """Return the statistics, which are those of ignored tokens if there was no chunk."""
        if self.result is None:
            self.result = empty_statistics(x, settings.options, settings.wants)
            _fill_as_ignored(self.result)
        return self.result


def _fill_as_ignored(result: Statistics) -> None:
    """Write the statistics that ignored tokens have."""
    for field, values in result._asdict().items():
        if values is not None:
            values.fill_(-1 if field == "predicted" else 0)


def _as_chunk_statistics(result: Statistics) -> ChunkStatistics:
    return ChunkStatistics(*result[: len(ChunkStatistics._fields)])


# --- launcher (2-D in, no autograd) --------------------------------------------------------------


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank, saved: SavedStatistics, settings: LossSettings
) -> ChunkResults:
    """Allocate what `linear_cross_entropy_chunks` returns."""
    needs, statistics = settings.needs, ChunkStatistics()
    if saved.lse is None:
        statistics = _as_chunk_statistics(empty_statistics(x, settings.options, settings.wants))
    empty = lambda tensor, need: torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
    inputs = x, weight, bias, *low_rank
    return ChunkResults(statistics, Gradients(*(empty(each, need) for each, need in zip(inputs, needs, strict=True))))


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
    needs, options, shard, is_first = settings.needs, settings.options, settings.shard, saved.lse is None
    is_sharded, needs_any, vocabulary = bool(shard.group_name), any(needs), max(largest_shard(shard), 1)
    if count < 0:
        rows, count = rows_to_compute(None, target, options.ignore_index, x.numel() * vocabulary)
    # Without kernels, a chunk takes two fp32 values per logit in addition to the logit itself.
    logit_bytes = x.element_size() + (0 if runs_kernels(x) else 8)
    kind = device_kind(x)
    config = ChunkConfig.choose(ChunkProblem(vocabulary, logit_bytes, kind), device_of(x))
    # An fp32 sum of a half-precision dW takes a buffer as large as the logits of H tokens.
    may_sum_in_fp32 = needs.dw and dw_buffer is None and weight.element_size() == 2
    spare_tokens = x.shape[1] if may_sum_in_fp32 and not settings.sums_in_fp32 else 0
    tokens = config.chunk_tokens(count, vocabulary * logit_bytes, settings.max_logits_mib, spare_tokens)
    sums_in_fp32 = settings.sums_in_fp32 or (may_sum_in_fp32 and count > config.max_chunks * tokens)
    computes_all_rows = rows is None and count > 0
    addition = None
    if low_rank.h is not None:
        if rows is None and needs.dlow_b:
            low_rank = low_rank._replace(h=without_ignored(low_rank.h, target, options.ignore_index))
        addition = Addition(x, low_rank, needs.dlow_h, needs.dlow_b, computes_all_rows)
    fused_addition = addition if addition is not None and addition.is_in_loss else None
    gradients = GradientSums(x, weight, bias, computes_all_rows, dw_buffer, sums_in_fp32, needs, addition)
    all_statistics = AllStatistics(x.shape[0]) if is_first else None
    # Under autocast the weight is fp32, and so is dW.
    weight = weight.to(x.dtype)
    for chunk in token_chunks(x, weight, target, bias, addition, rows, count, tokens, config):
        chunk_upstream, chunk_saved = WHOLE_LOSS, saved
        loss_arguments = chunk.logits, chunk.target, class_weight, scales
        if all_statistics is None:
            chunk_saved = SavedStatistics(*(select_some(values, chunk.rows) for values in saved))
            chunk_upstream = Upstream(*(select_some(values, chunk.rows) for values in upstream))
        else:
            if is_sharded:
                part = parallel_statistics(*loss_arguments, options, settings.wants, shard)
            elif fused_addition is not None:
                part = fused_addition.statistics(*loss_arguments, options, settings.wants, chunk.rows)
            else:
                part = statistics(*loss_arguments, options, settings.wants, with_gradient=needs_any)
            all_statistics.add(part, chunk.rows)
            chunk_saved = SavedStatistics(part.lse, part.log_probs, part.entropy)
        if fused_addition is not None and needs_any:
            fused_addition.gradient(*loss_arguments, chunk_saved, chunk_upstream, options, chunk.rows)
        elif not is_first or (is_sharded and needs_any):
            gradient(
                *loss_arguments, chunk_saved, chunk_upstream, options, out=chunk.logits,
                shard=shard if is_sharded else None,
            )  # fmt: skip
        if rows is None and needs.dw:
            chunk = chunk._replace(x=without_ignored(chunk.x, chunk.target, options.ignore_index))
        if needs_any:
            gradients.add(chunk, weight)
    result = ChunkStatistics() if all_statistics is None else _as_chunk_statistics(all_statistics.finish(x, settings))
    return ChunkResults(result, gradients.finish(shard))
