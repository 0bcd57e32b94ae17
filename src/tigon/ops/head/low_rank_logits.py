r"""A low-rank addition to the logits of a head, as an adapter (LoRA) on the head computes it: logits = x W^T + h B^T.

    dh = dlogits B,    dB = dlogits^T h

In half precision, two kernels compute the addition, the loss, its gradient and dh from the logits of the head alone
(`low_rank_loss`), and one of `ops/adapters/low_rank.py` computes dB. With a larger rank than the kernels compute dh
for, dh has a kernel of its own too. Elsewhere torch adds h B^T to each chunk of logits, and computes dh and dB from its
dlogits.

Shapes: T tokens, C tokens of a chunk, V vocabulary, R ranks of all adapters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank import empty_hidden, project, split_terms, token_sums
from tigon.ops.head.low_rank_loss import LARGEST_RANK_WITH_DH, LowRankTerms, low_rank_gradient, low_rank_statistics
from tigon.ops.logits.token.types import Options, SavedStatistics, Statistics, Upstream, Wants
from tigon.runtime.device import runs_kernels


class LowRank(NamedTuple):
    """The two factors of a product that is added to the logits, both None if nothing is added."""

    h: Tensor | None = None  # [T, R]
    b: Tensor | None = None  # [V, R]


NO_ADDITION = LowRank()

# The rows of a chunk in tensors [T, ...]: a slice of consecutive rows, or the indices of any rows.
Rows = slice | Tensor


class Addition:
    """Adds h B^T to each chunk of logits, and collects dh and dB.

    If `is_in_loss` is True, the logits of a chunk never contain the addition: `statistics` and `gradient` replace the
    functions of `token.kernels`, and compute it themselves. Otherwise `add_to_logits` writes it to memory.
    """

    def __init__(self, x: Tensor, low_rank: LowRank, needs_dh: bool, needs_db: bool, computes_all_rows: bool) -> None:
        assert low_rank.h is not None
        assert low_rank.b is not None
        self.h, self.b = low_rank.h, low_rank.b
        # fp32 has no tensor cores to gain.
        self.is_in_loss = runs_kernels(x, *low_rank) and x.dtype in (torch.bfloat16, torch.float16)
        if self.is_in_loss:
            # The kernels take both factors as sums of bf16 tensors, [S, T, R] and [S, V, R].
            self.h_terms, self.b_terms = _split(self.h), _split(self.b)
        empty = torch.empty_like if computes_all_rows else torch.zeros_like
        self.dh = empty(self.h, dtype=torch.promote_types(self.h.dtype, torch.float32)) if needs_dh else None
        self.db: Tensor | None = None
        self.needs_db = needs_db

    def add_to_logits(self, rows: Rows, logits: Tensor) -> None:
        """Add h B^T to the logits [C, V] of a chunk."""
        logits += self.h[rows] @ self.b.t()

    def statistics(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, options: Options, wants: Wants,
        rows: Rows,
    ) -> Statistics:  # fmt: skip
        """Return the statistics of a chunk, as `token.kernels.statistics` does for logits that contain the addition."""
        return low_rank_statistics(logits, target, weight, scales, self._terms(rows), options, wants)

    def gradient(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, scales: Tensor, saved: SavedStatistics,
        upstream: Upstream, options: Options, rows: Rows,
    ) -> None:  # fmt: skip
        """Overwrite the logits [C, V] of a chunk with dlogits, and add the parts of dh and dB that follow from them."""
        terms, rank = self._terms(rows), self.b.shape[1]
        dh_in_kernel = self.dh is not None and rank <= LARGEST_RANK_WITH_DH
        dh = low_rank_gradient(logits, target, weight, scales, terms, saved, upstream, options, dh_in_kernel)
        if self.dh is not None and not dh_in_kernel:
            dh = project(logits, [self.b.t()], empty_hidden(logits, len(logits), rank)).sum(0, dtype=torch.float32)
        self._add(dh, token_sums(logits, _three_terms(terms.h)) if self.needs_db else None, rows)

    def add_gradients(self, dlogits: Tensor, rows: Rows) -> None:
        """Add the parts of dh and dB that follow from dlogits [C, V], unless `gradient` has added them."""
        if self.is_in_loss:
            return
        cast_dlogits = dlogits.to(self.b.dtype)
        dh = None if self.dh is None else cast_dlogits @ self.b
        db = cast_dlogits.t() @ self.h[rows].to(cast_dlogits.dtype) if self.needs_db else None
        self._add(dh, db, rows)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dh and dB in the dtypes of h and B. A gradient that is not needed is None."""
        dh = None if self.dh is None else self.dh.to(self.h.dtype)
        if not self.needs_db:
            return dh, None
        return dh, torch.zeros_like(self.b) if self.db is None else self.db.to(self.b.dtype)

    def _terms(self, rows: Rows) -> LowRankTerms:
        return LowRankTerms(self.h_terms[:, rows], self.b_terms)

    def _add(self, dh: Tensor | None, db: Tensor | None, rows: Rows) -> None:
        """Write the rows of dh, and add a part of dB."""
        if self.dh is not None:
            assert dh is not None
            self.dh[rows] = dh.to(self.dh.dtype)
        if self.needs_db:
            assert db is not None
            self.db = db if self.db is None else self.db.add_(db)


def _split(factor: Tensor) -> Tensor:
    """Return the bf16 terms [S, N, R] of a factor [N, R]."""
    # As one long row, the factor is split by programs that have many elements each.
    return split_terms(factor.reshape(1, -1)).view(-1, *factor.shape)


def _three_terms(h: Tensor) -> Tensor:
    """Return [3, C, R] for the terms of h, of which half-precision factors have fewer."""
    return h if len(h) == 3 else torch.cat((h, h.new_zeros(3 - len(h), *h.shape[1:])))
