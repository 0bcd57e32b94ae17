"""Products of FP8 factors: on the FP8 units of a GPU, or emulated on any other device.

    y = s_a s_b a b^T + bias        a [M, K] and b [N, K], both stored by rows; s_a is [1] or [M, 1], s_b [1] or [N, 1]

Products of groups of rows have one matrix for each group:

    y[s] = s_a[s] s_b[g] a[s] b[g]^T,    g the group of row s        a [S, K] and b [E, N, K], s_a [S, 1] and s_b [E, N]

torch computes these on Hopper only, and only with a scale for each row. Rows behind the last group are not computed:
their values are undefined.

The emulation multiplies the FP8 values in fp32, in which each product of two values is exact. Its result differs from
that of the units only by the order and the precision of the sum.
"""

import torch
from torch import Tensor

from tigon.ops.fp8.formats import Factor, has_fp8_units
from tigon.runtime.compat.products import multiply_scaled, multiply_scaled_groups
from tigon.runtime.device import device_of
from tigon.runtime.launch import launcher

# Products with a scale for each row have results of these dtypes only.
_ROWWISE_DTYPES = (torch.bfloat16,)
# The units add a bias in these dtypes only.
_BIAS_DTYPES = (torch.bfloat16, torch.float16)


def multiply_fp8(a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None, is_fast: bool = False) -> Tensor:
    """Return a b^T + bias [M, N] in `dtype`. With `is_fast` the units keep fewer bits while they accumulate. fp16 and
    fp32 results of factors with a scale for each row are rounded to bf16 first, because the units return nothing else.
    Without rows, or without columns to sum, the result is the bias or zero."""
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


def has_grouped_units(x: Tensor) -> bool:
    """Return whether torch computes grouped FP8 products on the device of `x`: only on GPUs of Hopper's generation."""
    return has_fp8_units(x) and device_of(x).arch == "sm_90"


def _empty_products(rows: Factor, weights: Factor, dtype: torch.dtype) -> Tensor:
    return rows.values.new_empty((rows.values.shape[0], weights.values.shape[1]), dtype=dtype)


@launcher(fake=_empty_products)
def multiply_groups(rows: Factor, weights: Factor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [S, N] in `dtype` for rows [S, K], weights [E, N, K] and ends [E] int32, one past the last row of a group.
    The units return bf16, which is then converted, and keep fewer bits while they accumulate. With precise sums,
    products of a few hundred rows for each group would take longer than in bf16."""
    if not has_grouped_units(rows.values):
        return emulate_groups(rows, weights, ends, dtype)
    scale = rows.scale.view(-1)
    return multiply_scaled_groups(rows.values, weights.values.mT, scale, weights.scale, ends, is_fast=True).to(dtype)


def emulate_groups(rows: Factor, weights: Factor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `multiply_groups` in torch, with products in fp32. Rows behind the last group are zero. The host waits
    for the sizes of the groups. On the meta device, which has none, nothing is computed."""
    y = _empty_products(rows, weights, dtype).zero_()
    start = 0
    for group, end in enumerate([] if ends.is_meta else ends.tolist()):
        product = rows.values[start:end].float() @ weights.values[group].float().t()
        y[start:end] = product * (rows.scale[start:end].view(-1, 1) * weights.scale[group])
        start = end
    return y
