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
precision by a whole unit of a logit's last place. The probabilities of the backward pass then do not sum to one. This
matters if one probability is near one: eager code then loses nothing, because in p = exp(z - lse) the rounding of its
logit cancels. The forward pass therefore saves the index of the largest logit, and the backward pass uses the largest
logit of the forward pass there. With fp32 logits of 16 and a temperature of 0.7, the error of dx is at most that of
eager code, and 10 times as large without this.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk or block, v columns of a slab,
K extra targets of each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.chunks import (
    Chunk,
    ChunkConfig,
    Head,
    HeadSettings,
    bytes_of_logit,
    compute_chunks,
    head_product,
    plan_chunks,
    with_rows,
)
from tigon.ops.head.computed_rows import select, select_each, select_some, without_ignored, write_rows
from tigon.ops.head.gradients import NO_NEEDS, Gradients, WeightGradient, empty_gradients, product_in_fp32
from tigon.ops.logits.token.kernels import (
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
from tigon.ops.logits.vocab_parallel import parallel_statistics, sum_over_ranks
from tigon.runtime.device import Device, cdiv, device_kind, device_of
from tigon.runtime.launch import launcher
from tigon.runtime.products import product
from tigon.runtime.tuning import LaunchConfig


class SlabProblem(NamedTuple):
    """The sizes that the division of the backward pass depends on."""

    hidden: int
    vocabulary: int  # rows of the head on the largest rank
    logit_bytes: int  # bytes that one logit takes
    column_bytes: int  # bytes that one column of a slab takes in addition to its logits
    budget_mib: float  # MiB of `ChunkConfig`


@dataclass(frozen=True)
class SlabConfig(LaunchConfig):
    """Parameters of the division of the backward pass into blocks of tokens and slabs of the vocabulary."""

    block_tokens: int  # the largest number of tokens of a block
    budget_bytes: int  # bytes for the logits of a slab and the fp32 sum of dx
    tile: int  # The number of columns of a slab is a multiple of `tile`, the tile of the products.
    columns: int | None = None  # columns of a slab, whatever the budget is; None derives them from the budget

    @staticmethod
    def heuristic(problem: SlabProblem, device: Device) -> "SlabConfig":
        budget = int(problem.budget_mib * 2**20)
        # The sum of dx may take half of the budget, or as much as the fp32 sum of a bf16 dW would take.
        sum_bytes = max(budget // 2, 2 * problem.vocabulary * problem.hidden)
        return SlabConfig(max(1, sum_bytes // (4 * problem.hidden)), budget, tile=128)

    def shorter_block(self, problem: SlabProblem, count: int, max_blocks: int) -> int:
        """Return the tokens of a block for which the sum of dx takes half of the budget, if `max_blocks` of about equal
        size are enough. Each block then rounds dW, which needs no fp32 sum."""
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


class LogProbSettings(NamedTuple):
    head: HeadSettings
    wants: Wants
    options: Options
    fp32_products: bool  # True if the logits are fp32, whatever the dtypes of their factors are.


@launcher(fake=lambda head, settings: empty_statistics(head.x, settings.options, settings.wants))
def log_prob_statistics(
    head: Head, extra_targets: Tensor | None, scales: Tensor, settings: LogProbSettings
) -> Statistics:
    """Return the statistics of all tokens and of their extra targets [T, K], with the scales of `gradient_scales`."""
    options, wants, in_fp32 = settings.options, settings.wants, settings.fp32_products
    head_settings = settings.head._replace(needs=NO_NEEDS)
    token_bytes = head_settings.vocabulary * bytes_of_logit(head.x, in_fp32)
    plan = plan_chunks(head, head_settings, token_bytes)

    def compute(chunk: Chunk) -> tuple[Statistics, Tensor]:
        extra, shard = select_some(extra_targets, chunk.rows), head_settings.shard
        arguments = chunk.logits, chunk.target, None, scales, options, wants
        if shard.group_name:
            return parallel_statistics(*arguments, shard, extra), chunk.logits
        return statistics(*arguments, extra_targets=extra), chunk.logits

    result, _ = compute_chunks(
        head, plan, head_settings, compute, lambda: empty_statistics(head.x, options, wants),
        logits_dtype=torch.float32 if in_fp32 else None, casts_weight=not in_fp32,
    )  # fmt: skip
    return result


def _parts(size: int, length: int) -> Iterator[slice]:
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


@launcher(fake=lambda head, settings: empty_gradients(settings.head.needs, *head[:3]))
def log_prob_gradients(
    head: Head, extra_targets: Tensor | None, scales: Tensor, saved: SavedStatistics, upstream: Upstream,
    settings: LogProbSettings,
) -> Gradients:  # fmt: skip
    """Return the gradients for the upstream gradients [T, ...] of the log-probabilities and entropies in `saved`."""
    x, weight, bias, target, rows, count = with_rows(head, settings.head)
    options, in_fp32 = settings.options, settings.fp32_products
    needs, sums_in_fp32, _, ignore_index, shard = settings.head
    vocabulary, h, v = settings.head.vocabulary, x.shape[1], len(weight)
    logit_bytes = bytes_of_logit(x, in_fp32)
    chunk_config = ChunkConfig.choose((device_kind(x), False), device_of(x))
    # fp32 products copy a slab of the weight to fp32, and return a slab of dW in fp32.
    problem = SlabProblem(h, vocabulary, logit_bytes, 8 * h if in_fp32 else 0, chunk_config.budget_mib)
    config = SlabConfig.choose(problem, device_of(x))
    # All ranks have the same blocks, because every block contains a collective.
    tokens = max(1, min(count, config.block_tokens))
    if not sums_in_fp32:
        tokens = config.shorter_block(problem, count, chunk_config.max_chunks)
    columns = config.slab_columns(problem, tokens)
    wide = torch.float32 if in_fp32 else torch.promote_types(x.dtype, torch.float32)
    dx = None
    if needs.dx:
        dx = x.new_empty(x.shape) if rows is None else x.new_zeros(x.shape)
    most_roundings = 1 if sums_in_fp32 else chunk_config.max_chunks
    dw = WeightGradient(weight, in_fp32=count > most_roundings * tokens) if needs.dw else None
    db = weight.new_zeros(v, dtype=wide) if needs.db else None
    # One slab needs no sum of dx, unless the ranks of a sharded head add theirs.
    needs_sum = v > columns or in_fp32 or bool(shard.group_name)
    for block in _parts(count, tokens):
        block_rows = block if rows is None else rows[block]
        x_block, target_block = select(x, block_rows), select(target, block_rows)
        extra = select_some(extra_targets, block_rows)
        saved_block, upstream_block = select_each(saved, block_rows), select_each(upstream, block_rows)
        if rows is None and dw is not None:
            x_block = without_ignored(x_block, target_block, ignore_index)
        n = len(x_block)
        buffer = x.new_empty(n * min(columns, v), dtype=wide if in_fp32 else x.dtype)
        if dx is not None:
            # A shard without rows adds zeros to the sum over the ranks.
            allocate = x.new_empty if v else x.new_zeros
            dx_sum = allocate((n, h), dtype=wide if needs_sum else x.dtype)
        for slab in _parts(v, columns):
            weight_slab = weight[slab] if in_fp32 else weight[slab].to(x.dtype)
            logits = buffer[: n * len(weight_slab)].view(n, len(weight_slab))
            head_product(x_block, weight_slab, None if bias is None else bias[slab], logits)
            gradient(
                logits, target_block, None, scales, saved_block, upstream_block, options, out=logits,
                shard=Shard(shard.start + slab.start, shard.vocabulary), extra_targets=extra,
            )  # fmt: skip
            if dx is not None:
                multiply = product_in_fp32 if needs_sum else product
                multiply(logits, weight_slab, dx_sum, accumulate=slab.start > 0)
            if dw is not None:
                dw.add_rows(slab.start, logits, x_block)
            if db is not None:
                db[slab] += logits.sum(0, dtype=wide)
        # Free the logits before the next block allocates its own.
        del buffer
        if dw is not None:
            dw.has_sum = True
        if dx is not None:
            sum_over_ranks(dx_sum, shard)
            write_rows(dx, block_rows, dx_sum)
    db = None if db is None or bias is None else db.to(bias.dtype)
    return Gradients(dx, None if dw is None else dw.finish(), db)
