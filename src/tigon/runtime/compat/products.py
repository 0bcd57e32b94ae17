"""The private names of torch for matrix products in FP8."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.runtime.compat.names import find

# The product of two FP8 matrices and their scales: `_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=...,
# use_fast_accum=...)`, with `a` [M, K] stored by rows and `b` [K, N] by columns. A scale is one fp32 number, or [M, 1]
# and [1, N]. Seen in 2.8 to 2.13. Without it: a product in FP8 on a GPU raises a RuntimeError that names it.
_scaled_mm: Callable[..., Tensor] = find("_scaled_mm")

# The products of groups of FP8 rows, each with a matrix of its own. torch has a public function for it since 2.10. The
# private one, `_scaled_grouped_mm(a, b, scale_a, scale_b, offs=..., out_dtype=..., use_fast_accum=...)`, seen in 2.8 to
# 2.13, takes `a` [S, K] by rows, `b` [E, K, N] by columns, and scales [S] and [E, N]. Without both: experts in FP8 on a
# GPU raise a RuntimeError that names it.
_public_grouped_mm: Callable[..., Tensor] | None = getattr(F, "scaled_grouped_mm", None)
_scaled_grouped_mm: Callable[..., Tensor] = find("_scaled_grouped_mm")


def multiply_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """Return (scale_a a) (scale_b b) + bias, accumulated in fp32. `options` are `out_dtype` and `use_fast_accum`."""
    return _scaled_mm(a, b, scale_a, scale_b, bias, **options)


def multiply_scaled_groups(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, is_fast: bool
) -> Tensor:
    """Return the products [S, N] in bf16 of groups of rows with their matrices, both in FP8. The rows are those of a
    [S, K], the columns those of b [E, K, N], and `ends` [E] int32 is one past the last row of each group. Rows behind
    the last group are not written. With `is_fast` the units accumulate fewer bits."""
    if _public_grouped_mm is None:
        return _scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast
        )  # fmt: skip
    by_rows = F.ScalingType.RowWise
    return _public_grouped_mm(
        a, b, scale_a, by_rows, scale_b, by_rows, offs=ends, output_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
