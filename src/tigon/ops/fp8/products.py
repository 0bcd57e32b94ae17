"""Products of FP8 factors: on the FP8 units of a GPU, or emulated on any other device.

    y = s_a s_b a b^T + bias        a [M, K] and b [N, K], both stored by rows; s_a is [1] or [M, 1], s_b [1] or [N, 1]

The emulation multiplies the FP8 values in fp32, in which each product of two values is exact. Its result differs from
that of the units only by the order and the precision of the sum.
"""

import torch
from torch import Tensor

from tigon.ops.fp8.formats import Factor, has_fp8_units
from tigon.runtime.compat.products import multiply_scaled

# Products with a scale for each row have results of these dtypes only.
_ROWWISE_DTYPES = (torch.bfloat16,)
# The units add a bias in these dtypes only.
_BIAS_DTYPES = (torch.bfloat16, torch.float16)


def multiply_fp8(a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None, is_fast: bool = False) -> Tensor:
    """Return a b^T + bias [M, N] in `dtype`. With `is_fast` the units keep fewer bits while they accumulate.

    fp16 and fp32 results of factors with a scale for each row are rounded to bf16 first, because the units return
    nothing else. Without rows, or without columns to sum, the result is the bias or zero.
    """
    m, k = a.values.shape
    if m == 0 or k == 0:
        y = a.scale.new_zeros((m, b.values.shape[0]), dtype=dtype)
        return y if bias is None else y + bias.to(dtype)
    if not has_fp8_units(a.values) or dtype == torch.float64:
        return emulate_fp8(a, b, dtype, bias)
    out_dtype = dtype if a.scale.dim() == 1 or dtype in _ROWWISE_DTYPES else torch.bfloat16
    adds_bias = bias is not None and bias.dtype == out_dtype == dtype and dtype in _BIAS_DTYPES
    y = multiply_scaled(
        a.values, b.values.t(), a.scale, b.scale if b.scale.dim() == 1 else b.scale.view(1, -1),
        bias if adds_bias else None, out_dtype=out_dtype, use_fast_accum=is_fast,
    ).to(dtype)  # fmt: skip
    return y if bias is None or adds_bias else y.add_(bias)


def emulate_fp8(a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute `multiply_fp8` in torch, in fp64 for results in fp64 and in fp32 for all others."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = torch.mm(a.values.to(wide), b.values.to(wide).t())
    y *= a.scale.to(wide).view(-1, 1) * b.scale.to(wide).view(1, -1)
    return (y if bias is None else y + bias.to(wide)).to(dtype)
