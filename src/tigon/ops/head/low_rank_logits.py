r"""A low-rank addition to the logits of a head, as an adapter (LoRA) on the head computes it: logits = x W^T + h B^T.

    dh = dlogits B,    dB = dlogits^T h

Each chunk of logits is written as h B^T first, and the product with W adds to it (beta = 1). Both gradients read the
chunk's dlogits once more. The products are those of `tigon.ops.adapters.low_rank`, whose results are as accurate as in
fp32; without kernels they run in torch.

Shapes: T tokens, C tokens of a chunk, V vocabulary, R ranks of all adapters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.adapters.low_rank import empty_hidden, expand, project, split_terms, token_sums
from tigon.runtime.device import runs_kernels
from tigon.runtime.products import multiply

__all__ = ["NO_ADDITION", "Addition", "LowRank"]


class LowRank(NamedTuple):
    """The two factors of a product that is added to the logits, both None if nothing is added."""

    h: Tensor | None = None  # [T, R]
    b: Tensor | None = None  # [V, R]


NO_ADDITION = LowRank()

# The rows of a chunk in tensors [T, ...]: a slice of consecutive rows, or the indices of any rows.
Rows = slice | Tensor


class Addition:
    """Adds h B^T to each chunk of logits, and collects dh and dB."""

    def __init__(self, x: Tensor, low_rank: LowRank, needs_dh: bool, needs_db: bool, computes_all_rows: bool) -> None:
        assert low_rank.h is not None
        assert low_rank.b is not None
        self.h, self.b, self.uses_kernels = low_rank.h, low_rank.b, runs_kernels(x, *low_rank)
        # fp32 has no tensor cores to gain.
        self.uses_kernels = self.uses_kernels and x.dtype in (torch.bfloat16, torch.float16)
        # The kernels take h as a sum of bf16 tensors [3, T, R].
        self.h_terms = split_terms(self.h) if self.uses_kernels else None
        empty = torch.empty_like if computes_all_rows else torch.zeros_like
        self.dh = empty(self.h, dtype=torch.promote_types(self.h.dtype, torch.float32)) if needs_dh else None
        self.db: Tensor | None = None
        self.needs_db = needs_db

    def write_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, logits: Tensor) -> None:
        """Write x W^T + bias + h B^T of a chunk x [C, H] to `logits` [C, V]."""
        if self.h_terms is not None:
            expand(self.h_terms[:, rows], self.b, logits, bias=bias)
            multiply(x, weight.t(), total=logits)
            return
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        logits += self.h[rows] @ self.b.t()

    def add_gradients(self, dlogits: Tensor, rows: Rows) -> None:
        """Add the part of dB, and write the rows of dh, that follow from dlogits [C, V]."""
        if self.h_terms is not None:
            if self.dh is not None:
                terms = project(dlogits, [self.b.t()], empty_hidden(dlogits, len(dlogits), self.b.shape[1]))
                self.dh[rows] = terms.sum(0, dtype=torch.float32)
            part = token_sums(dlogits, self.h_terms[:, rows]) if self.needs_db else None
        else:
            cast_dlogits = dlogits.to(self.b.dtype)
            if self.dh is not None:
                self.dh[rows] = (cast_dlogits @ self.b).to(self.dh.dtype)
            part = cast_dlogits.t() @ self.h[rows].to(cast_dlogits.dtype) if self.needs_db else None
        if part is not None:
            self.db = part if self.db is None else self.db.add_(part)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dh and dB in the dtypes of h and B. A gradient that is not needed is None."""
        dh = None if self.dh is None else self.dh.to(self.h.dtype)
        if not self.needs_db:
            return dh, None
        return dh, torch.zeros_like(self.b) if self.db is None else self.db.to(self.b.dtype)
