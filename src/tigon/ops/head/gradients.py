"""The gradients of a linear layer's inputs, summed over chunks of tokens (`chunks` has their formulas).

The first chunk writes the sum dW [V, H], and the others add to it. With a half-precision dW, every chunk reads dW, adds
to it, and rounds once more. An fp32 sum avoids these roundings, but as a whole it would need a buffer of twice the size
of dW in addition to the result. `WeightGradient` needs a buffer of the size of dW only: the fp32 sum of the upper rows
is in the memory of the half-precision result, and that of the lower rows is in the buffer. At the end both are rounded
into the result:

    result  |  rows [0, V/2) in fp32   |  ->  |  rows [0, V/2)  |  rows [V/2, V)  |
    buffer  |  rows [V/2, V) in fp32   |  ->                     rounded from here ^

Shapes: T tokens, H hidden, V vocabulary (the rows of this rank), C tokens of a chunk, R ranks of all adapters.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.head.computed_rows import Rows, select, without_ignored, write_rows
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.types import Shard
from tigon.ops.logits.vocab_parallel import sum_over_ranks
from tigon.runtime.device import cdiv
from tigon.runtime.products import accumulates_in_fp32, product

# Bytes of one slab of a product, and of one slab of its factor, if the product is added to a sum of another dtype.
SLAB_BYTES = 64 * 2**20
# The index of the first lower row is a multiple of this number, so that the columns of the logits are aligned.
ROW_ALIGNMENT = 64
# The number of rows that are rounded first, through a copy.
FIRST_ROWS = 256


def product_in_fp32(a: Tensor, b: Tensor, total: Tensor, accumulate: bool = False) -> None:
    """Compute total = a b or total += a b in fp32 (or fp64), for total [M, N], a [M, K] and b [K, N] of any dtype. Two
    half-precision factors, whose products are exact in fp32, are not copied where cuBLAS returns fp32 sums. Others are
    copied to fp32, one slab of N at a time."""
    if a.dtype == b.dtype and (a.dtype == total.dtype or accumulates_in_fp32(a)):
        product(a, b, out=total, accumulate=accumulate)
        return
    columns = max(1, SLAB_BYTES // (4 * max(1, b.shape[0])))
    a = a.float()
    for start in range(0, b.shape[1], columns):
        part = total[:, start : start + columns]
        slab = b[:, start : start + columns].float()
        if accumulate:
            part.addmm_(a, slab)
        else:
            torch.mm(a, slab, out=part)


class WeightGradient:
    """The gradient of a weight [V, H], summed over chunks, in addition to `buffer` [V, H] if there is one. With
    `in_fp32`, the gradient of a half-precision weight is summed in fp32. Other dtypes are at least as precise. The
    weight may be more precise than the products (fp32 under autocast)."""

    def __init__(self, weight: Tensor, in_fp32: bool, buffer: Tensor | None = None) -> None:
        self.result = torch.empty_like(weight, memory_format=torch.contiguous_format) if buffer is None else buffer
        self.has_sum = buffer is not None
        self.is_split = in_fp32 and self.result.element_size() == 2
        v, h = weight.shape
        self.middle = v // 2 // ROW_ALIGNMENT * ROW_ALIGNMENT if self.is_split else 0
        self.lower = self.result
        if self.is_split:
            self.upper = self.result.flatten()[: 2 * self.middle * h].view(torch.float32).view(self.middle, h)
            self.lower = weight.new_empty(v - self.middle, h, dtype=torch.float32)

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Add the product of a chunk's dlogits [C, V] and x [C, H]."""
        self.add_rows(0, dlogits, x)
        self.has_sum = True

    def add_rows(self, start: int, dlogits: Tensor, x: Tensor) -> None:
        """Add dlogits^T x, for the columns [C, v] of dlogits from `start` on and x [C, H]. The caller sets `has_sum`
        after all rows."""
        columns = dlogits.shape[1]
        in_upper = max(0, min(self.middle - start, columns))
        first = start + in_upper - self.middle
        totals = [(self.lower[first : first + columns - in_upper], slice(in_upper, columns))]
        if in_upper:
            totals.insert(0, (self.upper[start : start + in_upper], slice(0, in_upper)))
        if dlogits.dtype == x.dtype:
            for total, part in totals:
                self._add(total, dlogits[:, part], x)
            return
        # The product of fp32 logits is summed in fp32, and rounded into a half-precision dW.
        product_of_part = x.new_empty(columns, x.shape[1], dtype=torch.float32)
        product_in_fp32(dlogits.t(), x, product_of_part)
        for total, part in totals:
            self._write(total, product_of_part[part])

    def _write(self, total: Tensor, values: Tensor) -> None:
        if self.has_sum:
            total.add_(values)
        else:
            total.copy_(values)

    def _add(self, total: Tensor, dlogits: Tensor, x: Tensor) -> None:
        if not len(total):
            return
        if total.dtype == x.dtype or (total.dtype == torch.float32 and accumulates_in_fp32(x)):
            product(dlogits.t(), x, out=total, accumulate=self.has_sum)
            return
        # On a CPU, fp32 products are as fast as half-precision ones, and their results are not rounded.
        if x.device.type == "cpu":
            x = x.float()
        rows = max(1, SLAB_BYTES // (max(x.shape) * x.element_size()))
        slab = x.new_empty(min(rows, len(total)), x.shape[1])
        for start in range(0, len(total), rows):
            part = total[start : start + rows]
            # With `out`, autocast does not round the result.
            torch.mm(dlogits[:, start : start + rows].t().to(x.dtype), x, out=slab[: len(part)])
            self._write(part, slab[: len(part)])

    def finish(self) -> Tensor:
        """Return the sum [V, H], which is zero if no product was added."""
        if not self.has_sum:
            return self.result.zero_()
        if self.is_split:
            # Row r occupies bytes 4rH.. in fp32 and 2rH.. once rounded. Rounding rows [a, 2a) therefore overwrites the
            # fp32 rows [a/2, a), which have been rounded already.
            self.result[: min(FIRST_ROWS, self.middle)] = self.upper[:FIRST_ROWS].clone()
            for k in range(cdiv(self.middle, FIRST_ROWS).bit_length()):
                part = slice(FIRST_ROWS << k, min(FIRST_ROWS << (k + 1), self.middle))
                self.result[part] = self.upper[part]
            self.result[self.middle :] = self.lower
        return self.result


class Needs(NamedTuple):
    dx: bool
    dw: bool
    db: bool
    # These are the gradients of the factors of `LowRank`.
    dlow_h: bool = False
    dlow_b: bool = False


NO_NEEDS = Needs(False, False, False)


class Gradients(NamedTuple):
    """The gradients of hidden states [T, H], weight [V, H], bias [V] and the factors [T, R] and [V, R] of `LowRank`. A
    gradient that is not needed is None."""

    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
    dlow_h: Tensor | None = None
    dlow_b: Tensor | None = None


class LowRank(NamedTuple):
    """The two factors of a product that is added to the logits, both None if nothing is added."""

    h: Tensor | None = None  # [T, R]
    b: Tensor | None = None  # [V, R]


NO_LOW_RANK = LowRank()


def empty_gradients(needs: Needs, *inputs: Tensor | None) -> Gradients:
    """Allocate the gradients of the inputs x, weight, bias, h and B, of which the last ones may be left out."""
    empty = lambda tensor, need: torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else None
    return Gradients(*(empty(each, need) for each, need in zip(inputs, needs, strict=False)))


def rescale_gradients(gradients: list[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    """Return the gradients of a forward pass times the upstream gradient [], in place if their graph ends here."""
    scaled = lambda g: rescaled(g if g.dim() == 2 else g[None], factor).view(g.shape)
    return [None if g is None else scaled(g) for g in gradients]


class Addition:
    """Adds h B^T to each chunk of logits, and collects dh and dB.

    An adapter is usually in fp32. Its factors are split into two terms in the dtype of half-precision logits, h = h0 +
    h1 and B = B0 + B1, so that one product on tensor cores adds h0 B0^T + h0 B1^T + h1 B0^T to a chunk of logits in
    place. The omitted product h1 B1^T is 2^-17 of the addition in bf16 and 2^-22 in fp16, far below the rounding of the
    logits. Products with d(logits) take both terms too.

    The range of fp16 is small, and B is tiny in the first steps of training. Each column is therefore divided by a
    power of two s that brings its maximum to [0.5, 1): h' = h / s_h, and

        logits += h' (s_h B)^T,   dB = da^T h' s_h,   dh = da (B / s_b) s_b
    """

    def __init__(self, x: Tensor, low_rank: Any, needs: Needs) -> None:
        self.factors, self.rank, self.needs = low_rank, low_rank.b.shape[1], needs
        h, b = low_rank.h, low_rank.b
        b_of_dh, self.h_scale, self.b_scale = b, None, None
        if x.dtype == torch.float16 and h.element_size() > 2 and h.numel():
            self.h_scale, self.b_scale = _column_scales(h), _column_scales(b)
            h, b, b_of_dh = h / self.h_scale, b * self.h_scale, b / self.b_scale
        h_terms, b_terms = _terms(h, x.dtype), _terms(b, x.dtype)
        self.terms = len(h_terms)
        # Columns: h0, h0, h1 and B0, B1, B0, or the factors themselves.
        self.h = torch.cat((h_terms[0], *h_terms), 1) if self.terms == 2 else h_terms[0]
        self.b = torch.cat((*b_terms, b_terms[0]), 1) if self.terms == 2 else b_terms[0]
        columns = self.terms * self.rank
        self.b_of_dh = self.b[:, :columns] if self.b_scale is None else torch.cat(_terms(b_of_dh, x.dtype), 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        # Rows that are not computed have gradients of zero.
        self.dh = torch.zeros_like(low_rank.h, dtype=wide) if needs.dlow_h else None
        self.db = x.new_zeros(len(low_rank.b), columns, dtype=wide) if needs.dlow_b else None

    def add_to_logits(self, rows: Rows, logits: Tensor) -> None:
        """Add h B^T to the logits [C, V] of a chunk, in place."""
        logits.addmm_(select(self.h, rows), self.b.t())

    def add_gradients(self, dlogits: Tensor, rows: Rows) -> None:
        """Add the parts of dh and dB that follow from dlogits [C, V]."""
        columns = self.terms * self.rank
        if self.dh is not None:
            dh = dlogits.new_empty(len(dlogits), columns, dtype=self.dh.dtype)
            product_in_fp32(dlogits, self.b_of_dh, dh)
            write_rows(self.dh, rows, self._sum(dh, self.b_scale))
        if self.db is not None:
            product_in_fp32(dlogits.t(), select(self.h, rows)[:, -columns:], self.db, accumulate=True)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dh and dB in the dtypes of h and B. A gradient that is not needed is None."""
        h, b = self.factors
        dh = None if self.dh is None else self.dh.to(h.dtype)
        return dh, None if self.db is None else self._sum(self.db, self.h_scale).to(b.dtype)

    def _sum(self, products: Tensor, scale: Tensor | None) -> Tensor:
        """Return the sum [N, R] of the products of all terms [N, S R], times the scale [R] of the columns."""
        total = products if self.terms == 1 else products[:, : self.rank] + products[:, self.rank :]
        return total if scale is None else total * scale


def _column_scales(factor: Tensor) -> Tensor:
    """Return the power of two that divides the maximum of each column [R] to [0.5, 1); 1 if that is zero or not
    finite."""
    maxima = factor.detach().abs().amax(0)
    return torch.where(maxima.isfinite(), torch.ldexp(torch.ones_like(maxima), torch.frexp(maxima).exponent), 1.0)


def _terms(factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return one or two tensors of this dtype whose sum is the factor, up to the precision of two terms."""
    first = factor.to(dtype)
    return [first] if factor.element_size() <= first.element_size() else [first, (factor - first).to(dtype)]


class GradientSums:
    """The gradients of all inputs, to which the d(logits) of each chunk contribute. `ignore_index` is the target of
    ignored tokens if all tokens are computed, and None if only valid ones are. dW is added to `dw_buffer` [V, H], if
    there is one."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, *, ignore_index: int | None,
        sums_in_fp32: bool, dw_buffer: Tensor | None = None, addition: Addition | None = None,
    ) -> None:  # fmt: skip
        self.dx, self.dw, self.db, self.bias = None, None, None, bias
        self.ignore_index, self.addition = ignore_index, addition
        if needs.dx:
            # Rows that are not computed have gradients of zero.
            self.dx = x.new_zeros(x.shape) if ignore_index is None else x.new_empty(x.shape)
        if needs.dw:
            self.dw = WeightGradient(weight, sums_in_fp32, dw_buffer)
        if needs.db:
            self.db = weight.new_zeros(len(weight), dtype=torch.promote_types(x.dtype, torch.float32))

    def add(self, rows: Rows, x: Tensor, target: Tensor, dlogits: Tensor, weight: Tensor) -> None:
        """Add the gradients of a chunk with x [C, H], target [C] and dlogits [C, V], for the weight [V, H]."""
        if self.dx is not None:
            if isinstance(rows, slice):
                torch.mm(dlogits, weight, out=self.dx[rows])
            else:
                self.dx.index_copy_(0, rows, dlogits @ weight)
        if self.dw is not None:
            if self.ignore_index is not None:
                x = without_ignored(x, target, self.ignore_index)
            self.dw.add(dlogits, x)
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)
        if self.addition is not None:
            self.addition.add_gradients(dlogits, rows)

    def finish(self, shard: Shard | None = None) -> Gradients:
        """Return the gradients, with dx summed over the ranks that share the vocabulary."""
        if self.dx is not None and shard is not None:
            sum_over_ranks(self.dx, shard)
        db = None
        if self.db is not None:
            assert self.bias is not None
            db = self.db.to(self.bias.dtype)
        addition_gradients = (None, None) if self.addition is None else self.addition.gradients()
        return Gradients(self.dx, None if self.dw is None else self.dw.finish(), db, *addition_gradients)
