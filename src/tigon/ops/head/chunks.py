"""The logits of a linear layer's outputs, a chunk of tokens at a time, their losses, and the gradients of its inputs.

Maths and reasons: `linear_cross_entropy`.

Shapes: T tokens, H hidden, V vocabulary (of this rank), C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.vocab_parallel import Cut, parallel_statistics, sum_over_ranks
from tigon.ops.head.weight_gradient import WeightGradient
from tigon.ops.logits.token.kernels import Options, Statistics, Upstream, Wants, empty_statistics, gradient, statistics
from tigon.ops.logits.valid_rows import ValidRows
from tigon.runtime.device import cdiv, device_kind, runs_kernels
from tigon.runtime.launch import launcher
from tigon.runtime.products import product

__all__ = [
    "Call",
    "chunk_size",
    "find_rows",
    "linear_cross_entropy_chunks",
    "rows_to_compute",
]

# On a GPU a chunk must be long enough that its products hide the traffic of W and dW: 1280 tokens of a vocabulary of
# 256000. On a CPU, short enough for its caches.
DEFAULT_MIB = {"cuda": 640, "cpu": 96}
# With more, the roundings of a bf16 dW add up to more than twice those of one product: then the sum is in fp32.
MOST_CHUNKS = 8
# Multiplications of a product, on a GPU, that are worth finding out which tokens are ignored: 0.1 ms on an H200.
WORTH_COUNTING = 2**35


# --- configuration -------------------------------------------------------------------------------


def _bytes_per_logit(x: Tensor) -> int:
    """What a logit of a chunk takes: its own bytes, and where no kernel runs, those of two fp32 values beside it."""
    return x.element_size() + (0 if runs_kernels(x) else 8)


def chunk_size(
    tokens: int, vocabulary: int, itemsize: int, max_logits_mib: float | None, device_type: str, spare: int = 0
) -> int:
    """Tokens a chunk: equal chunks, in multiples of 128 (a tile of the products) where the budget allows.

    Without a cap, `spare` tokens more if there are no more than `MOST_CHUNKS` chunks then.
    """
    budget = max_logits_mib or DEFAULT_MIB.get(device_type, DEFAULT_MIB["cpu"])
    most = max(1, int(budget * 2**20) // (vocabulary * itemsize))
    few = cdiv(tokens, MOST_CHUNKS)
    if max_logits_mib is None and device_type == "cuda" and few <= most + spare:
        most = max(most, few)
    chunks = max(1, cdiv(tokens, most))
    return max(1, _tiled(cdiv(tokens, chunks), most))


def _tiled(tokens: int, most: int) -> int:
    """A multiple of 128, the tile of the products, if it is not more than `most`."""
    rounded = cdiv(tokens, 128) * 128
    return rounded if rounded <= most else min(tokens, most)


def _half(tokens: int, most: int) -> int:
    """About a half: in whole tiles, unless that leaves little."""
    half = cdiv(tokens, 2)
    tiled = _tiled(half, most)
    return tiled if 2 * (tokens - tiled) >= tiled else half


class Call(NamedTuple):
    """What a call asks for, as plain values."""

    needs: tuple[bool, bool, bool]  # gradients of input, weight and bias
    wants: Wants
    in_fp32: bool
    max_logits_mib: float | None
    cut: Cut
    options: Options

    @property
    def arguments(self) -> tuple:
        """What the launcher ends with."""
        return *self.needs, *self.wants, self.in_fp32, self.max_logits_mib, *self.cut, *self.options


# --- chunks --------------------------------------------------------------------------------------


def find_rows(target: Tensor, ignore_index: int, multiplications: int) -> ValidRows | None:
    """The rows that count; None where a graph fixes the sizes, or where looking would cost more than it saves."""
    if torch.compiler.is_compiling():
        return None
    if target.is_cuda and (multiplications < WORTH_COUNTING or torch.cuda.is_current_stream_capturing()):
        return None
    return ValidRows(target, ignore_index) if target.device.type in ("cpu", "cuda") else None


def rows_to_compute(
    given: ValidRows | bool | None, target: Tensor, ignore_index: int, multiplications: int
) -> tuple[Tensor | None, int]:
    """The rows that count and their number; None for all: by request (False), and where few are ignored."""
    m = target.numel()
    if given is None or (given and target.is_cuda and torch.cuda.is_current_stream_capturing()):
        given = find_rows(target, ignore_index, multiplications)
    return (None, m) if not given or (m - given.count) * 64 <= m else (given.rows, given.count)


Where = slice | Tensor  # rows of [T, ...]: neighbours, or by index


def _taken(x: Tensor | None, where: Where) -> Tensor | None:
    """Rows of x; x itself if it is one for all, or empty, or None."""
    if x is None or x.dim() == 0 or len(x) == 0:
        return x
    return x[where] if isinstance(where, slice) else x.index_select(0, where)


def _chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rows: Tensor | None, count: int,
    size: int,
) -> Iterator[tuple[Where, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Where a chunk is, its x [C, H], targets [C] and logits [C, V], in a buffer that the next chunk uses again."""
    buffer = x.new_empty(min(size, count), len(weight))
    start = 0
    while start < count:
        left = count - start
        # The last two share what is left: a short one would leave multiprocessors idle.
        part = slice(start, start + (_half(left, size) if size < left < 2 * size else min(size, left)))
        start = part.stop
        where = part if rows is None else rows[part]
        x_part = _taken(x, where)
        logits = buffer[: len(x_part)]
        if bias is None:
            product(x_part, weight.t(), out=logits)
        else:
            torch.addmm(bias, x_part, weight.t(), out=logits)
        yield where, x_part, _taken(target, where), logits


class _Gradients:
    """Those of x, weight and bias, of which a chunk's d(logits) make a part; None where not needed."""

    def __init__(self, x, weight, bias, rows, count, into, in_fp32, call: Call) -> None:
        needs_dx, needs_dw, needs_db = call.needs
        # Rows that are left out have gradients of zero.
        new = x.new_empty if rows is None and count else x.new_zeros
        self.dx = new(x.shape) if needs_dx else None
        self.db = weight.new_zeros(len(weight), dtype=torch.promote_types(x.dtype, torch.float32)) if needs_db else None
        self.dw, self.bias, self.cut = None, bias, call.cut
        if needs_dw:
            self.dw = WeightGradient(weight, in_fp32, into)

    def add(self, where: Where, x: Tensor, weight: Tensor, dlogits: Tensor) -> None:
        if self.dx is not None and isinstance(where, slice):
            torch.mm(dlogits, weight, out=self.dx[where])
        elif self.dx is not None:
            self.dx.index_copy_(0, where, dlogits @ weight)
        if self.dw is not None:
            self.dw.add(dlogits, x)
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.dx is not None:
            sum_over_ranks(self.dx, self.cut)
        dw = None if self.dw is None else self.dw.finish()
        return self.dx, dw, None if self.db is None else self.db.to(self.bias.dtype)


# --- launchers (2-D in, no autograd) -------------------------------------------------------------


def _fake_gradients(x, weight, bias, needs):
    kept = zip((x, weight, bias), needs, strict=True)
    return tuple(torch.empty_like(p, memory_format=torch.contiguous_format) if need else None for p, need in kept)


def _fake(x, weight, target, bias, class_weight, scales, rows, count, into, lse, *rest):
    needs, wants, options = rest[5:8], Wants(*rest[8:12]), Options(*rest[-6:])
    found = empty_statistics(x, options, wants) if lse is None else [None] * 6
    return *found, *_fake_gradients(x, weight, bias, needs)


@launcher(fake=_fake)
def linear_cross_entropy_chunks(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, scales: Tensor,
    rows: Tensor | None, count: int, into: Tensor | None,
    lse: Tensor | None, log_probs: Tensor | None, entropy: Tensor | None,
    dloss: Tensor | None, dlog_probs: Tensor | None, dentropy: Tensor | None,
    needs_dx: bool, needs_dw: bool, needs_db: bool,
    wants_z_loss: bool, wants_predicted: bool, wants_log_probs: bool, wants_entropy: bool,
    in_fp32: bool, max_logits_mib: float | None, group_name: str, start: int, vocabulary: int,
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    token_scaling: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, H], weight [V, H] -> the fields of `Statistics` for all tokens, then dx, dW and db where needed.

    The gradients are those of the sum of the losses. Or, where `lse` [T, 2], `log_probs` and `entropy` [T] come from a
    call before, of all three by dloss ([T] | []), dlog_probs and dentropy [T]; the statistics are then None.
    `rows` [count] are the tokens to compute (None: all; a count of -1: as is found here); dW is added to `into`.
    """
    call = Call(
        (needs_dx, needs_dw, needs_db), Wants(wants_z_loss, wants_predicted, wants_log_probs, wants_entropy), in_fp32,
        max_logits_mib, Cut(group_name, start, vocabulary),
        Options(ignore_index, label_smoothing, softcap, logit_scale, z_loss, token_scaling),
    )  # fmt: skip
    options, shard, needed, v = call.options, call.cut.shard, any(call.needs), max(call.cut.most_rows, 1)
    if count < 0:
        rows, count = rows_to_compute(None, target, ignore_index, x.numel() * v)
    # A dW in half precision that is summed in fp32 takes a buffer as large as the logits of H tokens.
    may_split = needs_dw and into is None and weight.element_size() == 2
    spare = x.shape[1] if may_split and not in_fp32 else 0
    size = chunk_size(count, v, _bytes_per_logit(x), max_logits_mib, device_kind(x), spare)
    in_fp32 = in_fp32 or (may_split and count > MOST_CHUNKS * size)
    gradients = _Gradients(x, weight, bias, rows, count, into, in_fp32, call)
    weight = weight.to(x.dtype)  # fp32 under autocast, as dW is
    found = None
    for where, x_part, targets, logits in _chunks(x, weight, target, bias, rows, count, size):
        upstream = Upstream()
        if lse is not None:
            part = Statistics(None, _taken(lse, where), None, None, _taken(log_probs, where), _taken(entropy, where))
            upstream = Upstream(_taken(dloss, where), _taken(dlog_probs, where), _taken(dentropy, where))
        elif shard is not None:
            part = parallel_statistics(logits, targets, class_weight, scales, options, call.wants, call.cut)
        else:
            part = statistics(logits, targets, class_weight, scales, options, call.wants, gradient_=needed)
        if lse is not None or (shard is not None and needed):
            gradient(logits, targets, class_weight, scales, part, upstream, options, out=logits, shard=shard)
        if lse is None:
            found = _spread(part, where, x.shape[0], found)
        if needed:
            gradients.add(where, x_part, weight, logits)
    if lse is not None:
        found = [None] * 6
    elif found is None:  # not one token counts
        found = _blank(empty_statistics(x, options, call.wants))
    return *found, *gradients.finish()


def _blank(found: Statistics) -> Statistics:
    """As of ignored tokens."""
    for field, values in found._asdict().items():
        values.fill_(-1 if field == "predicted" else 0)
    return found


def _spread(part: Statistics, where: Where, t: int, found: Statistics | None) -> Statistics:
    """A chunk's statistics, put where they belong among those of all `t` tokens."""
    if isinstance(where, slice) and where == slice(0, t):
        return part
    if found is None:
        found = Statistics(*(x.new_empty(t if len(x) else 0, *x.shape[1:]) for x in part))
        found = found if isinstance(where, slice) else _blank(found)
    for whole, values in zip(found, part, strict=True):
        if len(whole) and isinstance(where, slice):
            whole[where] = values
        elif len(whole):
            whole.index_copy_(0, where, values)
    return found
