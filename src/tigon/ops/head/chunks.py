"""The engine of all losses of a linear layer's outputs: chunks of tokens, their logits, and the sums of gradients.

A loss divides its tokens into chunks by `plan_chunks`, reads the logits of each one from `token_chunks`, overwrites
them with their gradient, and adds that to `GradientSums`:

    a   = x W^T + b + h B^T             the head, and the low-rank addition of an adapter on the head
    dx  = da W,   dW += da^T x,   db += sum_rows(da)
    dh  = da B,   dB += da^T h

`linear_cross_entropy`, `linear_distillation` and `linear_loss` do so in the forward pass. `linear_log_probs` takes only
the chunks from here, because its backward pass divides the vocabulary instead.

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk, R ranks of all adapters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tigon.ops.head.computed_rows import Rows, select, write_rows
from tigon.ops.head.gradients import Addition
from tigon.ops.head.weight_gradient import product_in_fp32
from tigon.runtime.device import Device, cdiv, device_kind, device_of
from tigon.runtime.products import product
from tigon.runtime.tuning import LaunchConfig

Results = TypeVar("Results", bound=NamedTuple)

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

    def divide(self, count: int, tokens: int) -> list[slice]:
        """Return the chunks of `count` tokens, with at most `tokens` tokens each.

        The last two chunks are about equally long, because a short one would leave multiprocessors idle. The first of
        them has whole tiles, unless that leaves a short second one.
        """
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


# --- chunks --------------------------------------------------------------------------------------


class ChunkPlan(NamedTuple):
    """The division of the computed tokens into chunks."""

    # The rows of each chunk.
    parts: list[Rows]
    # True if dW is summed in fp32.
    sums_in_fp32: bool


def plan_chunks(
    x: Tensor, weight: Tensor, rows: Tensor | None, count: int, vocabulary: int, token_bytes: int,
    max_logits_mib: float | None, *, needs_dw: bool, sums_in_fp32: bool, has_teacher: bool = False,
) -> ChunkPlan:  # fmt: skip
    """Divide the tokens of a call into chunks whose logits fit into the budget.

    Args:
        x, weight: [T, H] and [V, H].
        rows, count: The [count] tokens to compute; None for all tokens.
        vocabulary: The rows of the head on the largest rank.
        token_bytes: The bytes that the logits of one token take.
        max_logits_mib: The caller's cap in MiB on the logits of a chunk, or None.
        needs_dw: Whether chunks add to a dW that has no buffer yet.
        sums_in_fp32: Whether the caller requests an fp32 sum of dW.
        has_teacher: Whether the logits of a teacher take a part of the bytes.
    """
    problem = ChunkProblem(vocabulary, max(1, token_bytes // vocabulary), device_kind(x), has_teacher)
    config = ChunkConfig.choose(problem, device_of(x))
    # An fp32 sum of a half-precision dW takes a buffer of its size. The logits of as many tokens may take it instead.
    may_sum_in_fp32 = needs_dw and weight.element_size() == 2
    spare_tokens = 2 * vocabulary * x.shape[1] // token_bytes if may_sum_in_fp32 and not sums_in_fp32 else 0
    tokens = config.chunk_tokens(count, token_bytes, max_logits_mib, spare_tokens)
    parts = config.divide(count, tokens)
    sums_in_fp32 = sums_in_fp32 or (may_sum_in_fp32 and count > config.max_chunks * tokens)
    return ChunkPlan([part if rows is None else rows[part] for part in parts], sums_in_fp32)


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
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, parts: list[Rows], *,
    addition: Addition | None = None, logits_dtype: torch.dtype | None = None,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the chunks of these rows with their logits, in the dtype of x or in `logits_dtype`."""
    lengths = [part.stop - part.start if isinstance(part, slice) else len(part) for part in parts]
    buffer = x.new_empty(max(lengths, default=0), len(weight), dtype=logits_dtype)
    for rows, length in zip(parts, lengths, strict=True):
        x_chunk, logits = select(x, rows), buffer[:length]
        head_product(x_chunk, weight, bias, logits)
        if addition is not None:
            addition.add_to_logits(rows, logits)
        yield Chunk(rows, x_chunk, select(target, rows), logits)


def head_product(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """Write x W^T + bias to `logits` [C, V], for x [C, H] and the weight [V, H].

    fp32 logits of other dtypes are computed in fp32.
    """
    has_one_dtype = x.dtype == weight.dtype == logits.dtype and (bias is None or bias.dtype == x.dtype)
    if has_one_dtype and bias is not None:
        torch.addmm(bias, x, weight.t(), out=logits)
    elif has_one_dtype:
        product(x, weight.t(), out=logits)
    else:
        product_in_fp32(x, weight.t(), logits)
        if bias is not None:
            logits += bias


# --- results over chunks -------------------------------------------------------------------------


class AllRows(Generic[Results]):
    """A NamedTuple of results [T, ...] of all tokens, into which those of each chunk are copied.

    Results that were not requested are None or empty. The results of tokens without a chunk are those of ignored ones:
    -1 for predictions, and 0 for all others.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.result: Results | None = None

    def add(self, part: Results, rows: Rows) -> None:
        """Copy the results of a chunk. Those of a chunk that has all tokens are not copied."""
        if isinstance(rows, slice) and rows == slice(0, self.tokens):
            self.result = part
            return
        if self.result is None:
            empty = lambda x: None if x is None else x.new_empty(self.tokens if len(x) else 0, *x.shape[1:])
            self.result = part._make(map(empty, part))
            if not isinstance(rows, slice):
                _fill_as_ignored(self.result)
        for whole, values in zip(self.result, part, strict=True):
            if whole is not None and len(whole):
                write_rows(whole, rows, values)

    def finish(self, empty: Callable[[], Results]) -> Results:
        """Return the results. `empty` allocates them if there was no chunk."""
        if self.result is None:
            self.result = empty()
            _fill_as_ignored(self.result)
        return self.result


def _fill_as_ignored(results: tuple) -> None:
    """Write the results that ignored tokens have."""
    for values in results:
        if values is not None:
            values.fill_(0 if values.is_floating_point() else -1)
