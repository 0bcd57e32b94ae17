"""The private name of torch for matrix products in FP8."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tigon.runtime.torch_private.names import find

__all__ = ["multiply_scaled"]

# The product of two FP8 matrices and their scales: `_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=...,
# use_fast_accum=...)`, with `a` [M, K] stored by rows and `b` [K, N] by columns. A scale is one fp32 number, or [M, 1]
# and [1, N]. Seen in 2.8 to 2.13. Without it: a product in FP8 on a GPU raises a RuntimeError that names it.
_scaled_mm: Callable[..., Tensor] = find("_scaled_mm")


def multiply_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """Return (scale_a a) (scale_b b) + bias, accumulated in fp32. `options` are `out_dtype` and `use_fast_accum`."""
    return _scaled_mm(a, b, scale_a, scale_b, bias, **options)
