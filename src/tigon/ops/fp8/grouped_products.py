"""Products of groups of FP8 rows, each with the FP8 matrix of its group: on the units of a GPU, or emulated.

    y[s] = s_a[s] s_b[g] a[s] b[g]^T,    g the group of row s        a [S, K] and b [E, N, K], s_a [S, 1] and s_b [E, N]

torch computes these products on Hopper only, and only with a scale for each row. Rows behind the last group are not
computed: their values are undefined.
"""

import torch
from torch import Tensor

from tigon.ops.fp8.formats import Factor, has_fp8_units
from tigon.runtime.compat.products import multiply_scaled_groups
from tigon.runtime.device import device_of
from tigon.runtime.launch import launcher


def has_grouped_units(x: Tensor) -> bool:
    """Return whether torch computes grouped FP8 products on the device of `x`: only on GPUs of Hopper's generation."""
    return has_fp8_units(x) and device_of(x).arch == "sm_90"


def _empty_products(values: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty((values.shape[0], weights.shape[1]), dtype=dtype)


@launcher(fake=_empty_products)
def multiply_grouped_values(
    values: Tensor, scale: Tensor, weights: Tensor, weight_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `multiply_groups` of the tensors of two factors."""
    if not has_grouped_units(values):
        return emulate_groups(Factor(values, scale), Factor(weights, weight_scale), ends, dtype)
    return multiply_scaled_groups(values, weights.mT, scale.view(-1), weight_scale, ends, is_fast=True).to(dtype)


def multiply_groups(rows: Factor, weights: Factor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [S, N] in `dtype` for rows [S, K], weights [E, N, K] and ends [E] int32, one past the last row of a group.

    The units return bf16, which is then converted, and keep fewer bits while they accumulate. With precise sums,
    products of a few hundred rows for each group would take longer than in bf16.
    """
    return multiply_grouped_values(*rows, *weights, ends, dtype)


def emulate_groups(rows: Factor, weights: Factor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `multiply_groups` in torch, with products in fp32. Rows behind the last group are zero.

    The host waits for the sizes of the groups. On the meta device, which has none, nothing is computed.
    """
    y = _empty_products(rows.values, weights.values, dtype).zero_()
    start = 0
    for group, end in enumerate([] if ends.is_meta else ends.tolist()):
        product = rows.values[start:end].float() @ weights.values[group].float().t()
        y[start:end] = product * (rows.scale[start:end].view(-1, 1) * weights.scale[group])
        start = end
    return y
