"""The engine of all losses of a linear layer's outputs: chunks of tokens, their logits, and the sums of gradients.

A loss divides its tokens into chunks by `plan_chunks`. `compute_chunks` computes the logits of each chunk, calls the
loss, which overwrites them with their gradient, and adds that to `GradientSums`:

    a   = x W^T + b + h B^T             the head, and the low-rank addition of an adapter on the head
    dx  = da W,   dW += da^T x,   db += sum_rows(da)
    dh  = da B,   dB += da^T h

`linear_cross_entropy`, `linear_distillation` and `linear_loss` do so in the forward pass. `linear_log_probs` computes
only results here, because its backward pass divides the vocabulary instead.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk, R ranks of all adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.computed_rows import Rows, rows_to_compute, select, without_ignored, write_rows
from tigon.ops.head.gradients import NO_LOW_RANK, Addition, Gradients, GradientSums, LowRank, Needs, product_in_fp32
from tigon.ops.logits.token.types import Shard
from tigon.ops.logits.valid_rows import ValidRows
from tigon.ops.logits.vocab_parallel import largest_shard
from tigon.runtime.device import Device, cdiv, device_kind, device_of, runs_kernels
from tigon.runtime.products import product
from tigon.runtime.tuning import LaunchConfig


@dataclass(frozen=True)
class ChunkConfig(LaunchConfig):
    budget_mib: float  # MiB that the logits of a chunk may take, unless the caller passes another cap
    # True if chunks may be longer than the budget allows, so that there are no more than `max_chunks`.
    may_exceed_budget: bool
    # MiB that the logits of one sequence or pair may take, which `linear_loss` cannot divide
    unit_budget_mib: float
    # With more chunks, the roundings of a bf16 dW add up to more than twice those of one product. dW is then summed in
    # fp32.
    max_chunks: int
    # The length of a chunk is a multiple of `tile` tokens, the tile of the products, if the budget allows it.
    tile: int
    tokens: int | None = None  # tokens of a chunk, whatever the budget is; None derives them from the budget

    @staticmethod
    def heuristic(problem: tuple[str, bool], device: Device) -> "ChunkConfig":
        """Return the parameters for a type of device, and for a loss with or without the logits of a teacher."""
        device_type, has_teacher = problem
        # On a GPU a chunk must be so long that its products hide the traffic of W and dW: 640 MiB are 1280 tokens of a
        # vocabulary of 256000. On a CPU it must be so short that it fits in the caches.
        # Beside the logits of a teacher it is about half as long, so fewer chunks may exceed the budget: 8192 tokens of
        # two models with a vocabulary of 128256 take 5 chunks of 802 MiB instead of 7 of 627 MiB. Each chunk reads and
        # writes dW, which takes 0.5 ms on an H200 if H is 4096.
        is_gpu = device_type == "cuda"
        return ChunkConfig(
            budget_mib=640 if is_gpu else 96, may_exceed_budget=is_gpu, unit_budget_mib=1024 if is_gpu else 96,
            max_chunks=5 if is_gpu and has_teacher else 8, tile=128,
        )  # fmt: skip

    def chunk_tokens(self, tokens: int, token_bytes: int, max_logits_mib: float | None, spare_tokens: int) -> int:
        """Return the number of tokens of a chunk. The arguments are those of `token_limit`."""
        if self.tokens is not None:
            return self.tokens
        limit = self.token_limit(tokens, token_bytes, max_logits_mib, spare_tokens)
        chunks = max(1, cdiv(tokens, limit))
        return max(1, self.round_to_tiles(cdiv(tokens, chunks), limit))

    def token_limit(self, tokens: int, token_bytes: int, max_logits_mib: float | None, spare_tokens: int) -> int:
        """Return the largest number of tokens of a chunk, for a call with `tokens` tokens and logits of `token_bytes`.
        A chunk may exceed the budget of the config, but not the caller's, by `spare_tokens`, if `max_chunks` chunks are
        then enough."""
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

    def divide(self, count: int, tokens: int) -> list[slice]:
        """Return the chunks of `count` tokens, with at most `tokens` tokens each. The last two chunks are about equally
        long, because a short one would leave multiprocessors idle. The first of them has whole tiles, unless that
        leaves a short second one."""
        chunks, start = [], 0
        while start < count:
            remaining = count - start
            length = min(tokens, remaining)
            if tokens < remaining < 2 * tokens:
                half = cdiv(remaining, 2)
                tiled = self.round_to_tiles(half, tokens)
                length = tiled if 2 * (remaining - tiled) >= tiled else half
            chunks.append(slice(start, start + length))
            start += length
        return chunks


class Head(NamedTuple):
    x: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V] or None
    target: Tensor  # [T]
    rows: Tensor | None = None  # the indices of the tokens to compute; None for all tokens
    computed: int = -1  # the number of these tokens, or -1 in compiled code, where the operator finds them when it runs

    def get_device(self) -> int:
        """Return the number of the device, on which launchers run their function."""
        return self.x.get_device()


class HeadSettings(NamedTuple):
    """Everything that a call requests of the engine, as plain values."""

    needs: Needs
    sums_in_fp32: bool  # whether a half-precision dW is summed in fp32 and rounded once
    # the caller's cap in MiB on the logits of a chunk, or None
    max_logits_mib: float | None
    ignore_index: int
    shard: Shard

    @property
    def vocabulary(self) -> int:
        """Return the rows of the head on the largest rank, and at least 1."""
        return max(largest_shard(self.shard), 1)


def head_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid_rows: ValidRows | bool | None,
    settings: HeadSettings,
) -> Head:  # fmt: skip
    """Return the head with the tokens to compute. The caller may know its valid rows."""
    rows, computed = rows_to_compute(valid_rows, x, target, settings.ignore_index, settings.shard)
    return Head(x, weight, bias, target, rows, computed)


def with_rows(head: Head, settings: HeadSettings) -> Head:
    """Return the head with the tokens to compute, which are unknown until a compiled operator runs."""
    return head if head.computed >= 0 else head_of(*head[:4], None, settings)


class ChunkPlan(NamedTuple):
    """The division of the computed tokens into chunks."""

    parts: list[Rows]  # the rows of each chunk
    sums_in_fp32: bool  # whether dW is summed in fp32
    has_all_rows: bool  # whether ignored tokens are computed too


def bytes_of_logit(x: Tensor, in_fp32: bool = False) -> int:
    """Return the bytes that a logit takes. Without kernels, two more fp32 values per logit exist at a time."""
    return (4 if in_fp32 else x.element_size()) + (0 if runs_kernels(x) else 8)


def plan_chunks(
    head: Head, settings: HeadSettings, token_bytes: int, *, has_teacher: bool = False, has_dw_buffer: bool = False
) -> ChunkPlan:
    """Divide the computed tokens into chunks whose logits fit into the budget; `token_bytes` are those of one token."""
    x, weight, _, _, rows, count = with_rows(head, settings)
    config = ChunkConfig.choose((device_kind(x), has_teacher), device_of(x))
    # An fp32 sum of a half-precision dW takes a buffer of its size. The logits of as many tokens may take it instead.
    may_sum_in_fp32 = settings.needs.dw and not has_dw_buffer and weight.element_size() == 2
    needs_spare = may_sum_in_fp32 and not settings.sums_in_fp32
    spare_tokens = 2 * settings.vocabulary * x.shape[1] // token_bytes if needs_spare else 0
    tokens = config.chunk_tokens(count, token_bytes, settings.max_logits_mib, spare_tokens)
    parts = config.divide(count, tokens)
    sums_in_fp32 = settings.sums_in_fp32 or (may_sum_in_fp32 and count > config.max_chunks * tokens)
    return ChunkPlan([part if rows is None else rows[part] for part in parts], sums_in_fp32, rows is None)


class Chunk(NamedTuple):
    rows: Rows
    x: Tensor  # [C, H]
    target: Tensor  # [C]
    logits: Tensor  # [C, V], in a buffer that the next chunk overwrites


def head_product(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """Write x W^T + bias to `logits` [C, V], in fp32 if they are in another dtype than x [C, H] or weight [V, H]."""
    has_one_dtype = x.dtype == weight.dtype == logits.dtype and (bias is None or bias.dtype == x.dtype)
    if has_one_dtype and bias is not None:
        torch.addmm(bias, x, weight.t(), out=logits)
    elif has_one_dtype:
        product(x, weight.t(), out=logits)
    else:
        product_in_fp32(x, weight.t(), logits)
        if bias is not None:
            logits += bias


def compute_chunks(
    head: Head, plan: ChunkPlan, settings: HeadSettings, compute: Callable[[Chunk], tuple[Any, Tensor]],
    empty: Callable[[], Any] | None, *, logits_dtype: torch.dtype | None = None, dw_buffer: Tensor | None = None,
    low_rank: LowRank = NO_LOW_RANK, casts_weight: bool = True,
) -> tuple[Any, Gradients]:  # fmt: skip
    """Return the results [T, ...] of all tokens, and the gradients of the inputs. `compute` returns a NamedTuple of the
    results of a chunk, and d(logits), which may overwrite the logits. These are in the dtype of x or in `logits_dtype`.
    Results that were not requested are None or empty. Tokens without a chunk have those of ignored tokens: -1 for
    predictions, and 0 for all others. `empty` allocates all results, or is None if there are none. dW is added to
    `dw_buffer`, if there is one. Products take the weight in the dtype of x, if `casts_weight`."""
    x, bias, tokens = head.x, head.bias, len(head.x)
    ignore_index = settings.ignore_index if plan.has_all_rows else None
    addition = None
    if low_rank.h is not None:
        if ignore_index is not None and settings.needs.dlow_b:
            low_rank = low_rank._replace(h=without_ignored(low_rank.h, head.target, ignore_index))
        addition = Addition(x, low_rank, settings.needs)
    sums = GradientSums(
        x, head.weight, bias, settings.needs, ignore_index=ignore_index, sums_in_fp32=plan.sums_in_fp32,
        dw_buffer=dw_buffer, addition=addition,
    )  # fmt: skip
    # Under autocast the weight is fp32, and so is dW.
    weight = head.weight.to(x.dtype) if casts_weight else head.weight
    lengths = [part.stop - part.start if isinstance(part, slice) else len(part) for part in plan.parts]
    buffer = x.new_empty(max(lengths, default=0), len(weight), dtype=logits_dtype)
    results = None
    for rows, length in zip(plan.parts, lengths, strict=True):
        chunk = Chunk(rows, select(x, rows), select(head.target, rows), buffer[:length])
        head_product(chunk.x, weight, bias, chunk.logits)
        if addition is not None:
            addition.add_to_logits(rows, chunk.logits)
        part, dlogits = compute(chunk)
        if any(settings.needs):
            sums.add(rows, chunk.x, chunk.target, dlogits, weight)
        if isinstance(rows, slice) and length == tokens:
            results = part
        elif empty is not None:
            results = _empty_as_ignored(empty, not plan.has_all_rows) if results is None else results
            for whole, values in zip(results, part, strict=True):
                if whole is not None and len(whole):
                    write_rows(whole, rows, values)
    if results is None and empty is not None:
        results = _empty_as_ignored(empty, True)
    return results, sums.finish(settings.shard)


def _empty_as_ignored(empty: Callable[[], Any], fills: bool) -> Any:
    """Return empty results; with `fills`, those of ignored tokens."""
    results = empty()
    for values in results if fills else ():
        if values is not None:
            values.fill_(0 if values.is_floating_point() else -1)
    return results
