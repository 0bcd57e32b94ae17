r"""Log-probabilities of a linear layer's outputs, and the gradients of the layer's inputs, without holding all logits.

The forward pass cuts the tokens into chunks, because a row of logits must be complete for its sum of exponentials. The
backward pass knows these sums, so it can cut the vocabulary into slabs of v columns, for all tokens of a block:

    a_s   = x W_s^T + b_s                one product; `token.kernels.gradient` then overwrites a_s with da_s
    dx   += da_s W_s                     one product, in an fp32 sum [T, H]
    dW_s  = da_s^T x,   db_s = sum_rows(da_s)      one product

Each row of dW is one product over all tokens, which cuBLAS sums in fp32 and which is rounded once. Chunks of tokens
would need an fp32 dW [V, H], which every chunk reads and writes (2 GiB and 4 ms for 8192 x 4096 x 128256 on an H200).
The fp32 dx takes 128 MiB there. If the sum dx of all tokens would take more memory than an fp32 sum of dW does, the
tokens are cut into blocks, and dW is summed over the blocks in fp32.

The two passes multiply matrices of different shapes, for which cuBLAS may pick kernels that round differently, in half
precision by a whole unit of a logit's last place. The probabilities of the backward pass then do not sum to one. For
most tokens this is no worse than the rounding of the logits itself. But if one probability is near one, eager code
loses nothing, because the rounding of its logit cancels: p = exp(z - lse). The forward pass therefore saves the index
of the largest logit, and the backward pass uses the largest logit of the forward pass there. With fp32 logits of 16 and
a temperature of 0.7, the error of dx is 10 times that of eager code without this, and at most that of eager code with
it.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk or block, v columns of a slab,
K extra targets of each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import (
    AllStatistics,
    ChunkConfig,
    ChunkProblem,
    LossSettings,
    select_some,
    token_chunks,
    without_ignored,
)
from tigon.ops.head.computed_rows import rows_to_compute
from tigon.ops.head.weight_gradient import WeightGradient, product_in_fp32
from tigon.ops.logits.token.kernels import (
    SavedStatistics,
    Shard,
    Statistics,
    Upstream,
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


class SlabProblem(NamedTuple):
    """The sizes that the division of the backward pass depends on."""

    hidden: int
    # rows of the head on the largest rank
    vocabulary: int
    # bytes that one logit takes
    logit_bytes: int
    # bytes that one column of a slab takes in addition to its logits
    column_bytes: int
    # MiB of `ChunkConfig`
    budget_mib: float


@dataclass(frozen=True)
class SlabConfig(LaunchConfig):
    """Parameters of the division of the backward pass into blocks of tokens and slabs of the vocabulary."""

    # the largest number of tokens of a block
    block_tokens: int
    # bytes for the logits of a slab and the fp32 sum of dx
    budget_bytes: int
    # The number of columns of a slab is a multiple of `tile`, the tile of the products.
    tile: int
    # columns of a slab, whatever the budget is; None derives them from the budget
    columns: int | None = None

    @staticmethod
    def heuristic(problem: SlabProblem, device: Device) -> "SlabConfig":
        budget = int(problem.budget_mib * 2**20)
        # The sum of dx may take half of the budget, or as much as the fp32 sum of a bf16 dW would take.
        sum_bytes = max(budget // 2, 2 * problem.vocabulary * problem.hidden)
        return SlabConfig(max(1, sum_bytes // (4 * problem.hidden)), budget, tile=128)

    def shorter_block(self, problem: SlabProblem, count: int, max_blocks: int) -> int:
        """Return the tokens of a block for which the sum of dx takes half of the budget, if `max_blocks` are enough.

        Every block then rounds dW, which needs no fp32 sum. All blocks are about equally long.
        """
        in_budget = max(1, self.budget_bytes // (8 * problem.hidden))
        tokens = max(1, min(count, self.block_tokens, max(in_budget, cdiv(count, max_blocks))))
        return cdiv(count, cdiv(count, tokens)) if count else tokens

    def slab_columns(self, problem: SlabProblem, tokens: int) -> int:
        """Return the number of columns of a slab, for blocks of this many tokens. All slabs are about equally wide."""
        if self.columns is not None:
            return self.columns
        sum_bytes = 4 * tokens * problem.hidden
        logits_bytes = max(self.budget_bytes - sum_bytes, self.budget_bytes // 2)
        most = max(self.tile, logits_bytes // (problem.logit_bytes * tokens + problem.column_bytes))
        slabs = cdiv(problem.vocabulary, most)
        return cdiv(cdiv(problem.vocabulary, slabs), self.tile) * self.tile


# --- forward -------------------------------------------------------------------------------------


def _logit_bytes(x: Tensor, settings: LossSettings) -> int:
    """Return the bytes that a logit takes. Without kernels, two more fp32 values per logit exist at a time."""
    return (4 if settings.fp32_products else x.element_size()) + (0 if runs_kernels(x) else 8)


def _chunk_config(x: Tensor, settings: LossSettings) -> ChunkConfig:
    vocabulary = max(largest_shard(settings.shard), 1)
    return ChunkConfig.choose(ChunkProblem(vocabulary, _logit_bytes(x, settings), device_kind(x)), device_of(x))


def _empty_log_prob_statistics(x: Tensor, settings: LossSettings) -> Statistics:
    return empty_statistics(x, settings.options, settings.wants)


@launcher(fake=_empty_log_prob_statistics)
def log_prob_statistics(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra_targets: Tensor | None, scales: Tensor,
    rows: Tensor | None, count: int, settings: LossSettings,
) -> Statistics:  # fmt: skip
    """Return the statistics of all tokens.

    Args:
        x, weight, target, bias: [T, H], [V, H], [T], [V].
        extra_targets: [T, K] or None.
        scales: [3], from `gradient_scales`.
        rows, count: [count] tokens to compute; None for all tokens. A count of -1 lets this function find them.
    """
    options, wants, shard = settings.options, settings.wants, settings.shard
    vocabulary = max(largest_shard(shard), 1)
    if count < 0:
        rows, count = rows_to_compute(None, target, options.ignore_index, x.numel() * vocabulary)
    config = _chunk_config(x, settings)
    tokens = config.chunk_tokens(count, vocabulary * _logit_bytes(x, settings), settings.max_logits_mib, 0)
    all_statistics = AllStatistics(x.shape[0])
    # Under autocast the weight is fp32.
    weight = weight if settings.fp32_products else weight.to(x.dtype)
    for chunk in token_chunks(
        x, weight, target, bias, None, rows, count, tokens, config, settings.fp32_products
    ):  # fmt: skip
        extra = select_some(extra_targets, chunk.rows)
        if shard.group_name:
            part = parallel_statistics(chunk.logits, chunk.target, None, scales, options, wants, shard, extra)
        else:
            part = statistics(chunk.logits, chunk.target, None, scales, options, wants, False, extra)
        all_statistics.add(part, chunk.rows)
    return all_statistics.finish(x, settings)


# --- backward ------------------------------------------------------------------------------------


class LogProbGradients(NamedTuple):
    """The gradients of hidden states [T, H], weight [V, H] and bias [V]. A gradient that is not needed is None."""

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def _parts(size: int, length: int) -> Iterator[slice]:
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


def _empty_log_prob_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: LossSettings
) -> LogProbGradients:
    empty = lambda tensor, need: torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
    needs = settings.needs
    return LogProbGradients(empty(x, needs.dx), empty(weight, needs.dw), empty(bias, needs.db))


@launcher(fake=_empty_log_prob_gradients)
def log_prob_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, extra_targets: Tensor | None, scales: Tensor,
    rows: Tensor | None, count: int, saved: SavedStatistics, upstream: Upstream, settings: LossSettings,
) -> LogProbGradients:  # fmt: skip
    """Return the gradients for the upstream gradients [T, ...] of the log-probabilities and entropies.

    The other arguments are those of `log_prob_statistics`, whose results `saved` has.
    """
    needs, options, shard, in_fp32 = settings.needs, settings.options, settings.shard, settings.fp32_products
    vocabulary, h, v = max(largest_shard(shard), 1), x.shape[1], len(weight)
    if count < 0:
        rows, count = rows_to_compute(None, target, options.ignore_index, x.numel() * vocabulary)
    # fp32 products copy a slab of the weight to fp32, and return a slab of dW in fp32.
    column_bytes = 8 * h if in_fp32 else 0
    chunk_config = _chunk_config(x, settings)
    budget_mib = chunk_config.budget_mib
    problem = SlabProblem(h, vocabulary, _logit_bytes(x, settings), column_bytes, budget_mib)
    config = SlabConfig.choose(problem, device_of(x))
    # All ranks have the same blocks, because every block contains a collective.
    tokens = max(1, min(count, config.block_tokens))
    if not settings.sums_in_fp32:
        tokens = config.shorter_block(problem, count, chunk_config.max_chunks)
    columns = config.slab_columns(problem, tokens)
    logits_dtype = torch.float32 if in_fp32 else x.dtype
    wide = torch.float32 if in_fp32 else torch.promote_types(x.dtype, torch.float32)
    dx = None
    if needs.dx:
        dx = x.new_zeros(x.shape) if rows is not None or count == 0 else x.new_empty(x.shape)
    most_roundings = 1 if settings.sums_in_fp32 else chunk_config.max_chunks
    dw = WeightGradient(weight, in_fp32=count > most_roundings * tokens) if needs.dw else None
    db = weight.new_zeros(v, dtype=wide) if needs.db else None
    for block in _parts(count, tokens):
        block_rows = block if rows is None else rows[block]
        pick = lambda values, block_rows=block_rows: select_some(values, block_rows)
        x_block, target_block, extra = pick(x), pick(target), pick(extra_targets)
        saved_block = SavedStatistics(*(pick(values) for values in saved))
        upstream_block = Upstream(*(pick(values) for values in upstream))
        assert x_block is not None
        assert target_block is not None
        if rows is None and dw is not None:
            x_block = without_ignored(x_block, target_block, options.ignore_index)
        n = len(x_block)
        buffer = x.new_empty(n * min(columns, v), dtype=logits_dtype)
        dx_sum = x.new_zeros(n, h, dtype=wide) if needs.dx and v == 0 else None
        for slab in _parts(v, columns):
            weight_slab = weight[slab] if in_fp32 else weight[slab].to(x.dtype)
            logits = buffer[: n * len(weight_slab)].view(n, len(weight_slab))
            if in_fp32:
                product_in_fp32(x_block, weight_slab.t(), logits)
                if bias is not None:
                    logits += bias[slab]
            elif bias is None:
                product(x_block, weight_slab.t(), out=logits)
            else:
                torch.addmm(bias[slab], x_block, weight_slab.t(), out=logits)
            gradient(
                logits, target_block, None, scales, saved_block, upstream_block, options, logits,
                Shard(shard.start + slab.start, shard.vocabulary), extra,
            )  # fmt: skip
            if needs.dx:
                is_first = dx_sum is None
                if dx_sum is None:
                    # One slab needs no sum, unless the ranks of a sharded head add theirs.
                    is_alone = v <= columns and not in_fp32 and not shard.group_name
                    dx_sum = x.new_empty(n, h, dtype=x.dtype if is_alone else wide)
                if dx_sum.dtype == x.dtype and not in_fp32:
                    product(logits, weight_slab, out=dx_sum, accumulate=not is_first)
                else:
                    product_in_fp32(logits, weight_slab, dx_sum, accumulate=not is_first)
            if dw is not None:
                _add_dw(dw, slab.start, logits, x_block)
            if db is not None:
                db[slab] += logits.sum(0, dtype=wide)
        # Free the logits before the next block allocates its own.
        del buffer
        if dw is not None:
            dw.has_sum = True
        if dx is not None:
            assert dx_sum is not None
            sum_over_ranks(dx_sum, shard)
            if isinstance(block_rows, slice):
                dx[block_rows] = dx_sum
            else:
                dx.index_copy_(0, block_rows, dx_sum.to(dx.dtype))
    db = None if db is None or bias is None else db.to(bias.dtype)
    return LogProbGradients(dx, None if dw is None else dw.finish(), db)


def _add_dw(dw: WeightGradient, start: int, dlogits: Tensor, x: Tensor) -> None:
    """Add the product of dlogits [C, v] and x [C, H] to the rows of dW from `start` on."""
    if dlogits.dtype == x.dtype:
        dw.add_rows(start, dlogits, x)
        return
    # The product of fp32 logits is summed in fp32, and rounded into a half-precision dW.
    part = x.new_empty(dlogits.shape[1], x.shape[1], dtype=torch.float32)
    product_in_fp32(dlogits.t(), x, part)
    dw.add_to_rows(start, part)
