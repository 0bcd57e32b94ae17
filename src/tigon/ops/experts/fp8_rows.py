r"""Tokens that are quantised to FP8 and copied to the rows of their experts, in one pass.

    q[slot[t, k]] = round(x[t] / s[t]),    scale[slot[t, k]] = s[t] w[t, k],    s[t] = max_h |x[t, h]| / 448

The weights w of the router are left out unless they multiply the inputs of the experts. They only change the scale, so
they add no rounding. A program reads its token once, or twice if it does not fit in a block, and writes one byte for
each value of its K rows. Rows of experts of other ranks are not written.

Shapes: T tokens, K choices each, S = T K rows, E experts, H features.
"""

import torch
from torch import Tensor

from tigon.ops.experts.choice_order import Routing
from tigon.ops.fp8.formats import E4M3, Factor, runs_fp8_kernels
from tigon.ops.fp8.quantisation import Layout, quantise_reference
from tigon.ops.fp8.quantisation_kernels import Fp8RowConfig, scaling
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import device_of
from tigon.runtime.launch import launch
from tigon.runtime.maxima import magnitude_bits
from tigon.runtime.rows import dense_rows


def quantise_and_spread_reference(x: Tensor, weights: Tensor | None, routing: Routing) -> Factor:
    """Compute `quantise_and_spread` in torch, for tests and for devices without Triton or FP8 units."""
    values, row_scale, *_ = quantise_reference(x, Layout(True, True, False))
    assert values is not None
    assert row_scale is not None
    token = routing.order // max(1, routing.slot.shape[1])
    scale = row_scale[token]
    if weights is not None:
        scale = scale * weights.flatten()[routing.order, None].float()
    # Not every version of torch indexes FP8 values, but all of them index bytes.
    return Factor(values.view(torch.uint8)[token].view(E4M3), scale)


@triton.jit(do_not_specialize=["experts"])
def quantise_spread_kernel(
    x_ptr, weights_ptr, slot_ptr, ends_ptr,  # [T, H], [T, K] or None, [T, K], [E]
    row_ptr, scale_ptr,  # [S, H] fp8, [S] fp32
    stride_x, width, experts,
    K: tl.constexpr, CHOICES: tl.constexpr, FITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the K rows of one token and their scales. A token that FITS in a block is read once. CHOICES is the next
    power of two of K."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * stride_x
    present_rows = tl.load(ends_ptr + experts - 1, experts > 0, 0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    block_bits = magnitude_bits(x)
    if not FITS:
        for start in range(BLOCK, width, BLOCK):
            later = tl.load(x_ptr + start + cols, mask=start + cols < width, other=0.0).to(tl.float32)
            block_bits = tl.maximum(block_bits, magnitude_bits(later))
    factor, scale = scaling(tl.max(block_bits, 0))
    ks = tl.arange(0, CHOICES)
    slots = tl.load(slot_ptr + token * K + ks, mask=ks < K, other=0)
    if weights_ptr is not None:
        scale *= tl.load(weights_ptr + token * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    tl.store(scale_ptr + slots, scale, mask=(ks < K) & (slots < present_rows))
    for start in range(0, width, BLOCK):
        block_cols = start + cols
        if not FITS:
            x = tl.load(x_ptr + block_cols, mask=block_cols < width, other=0.0).to(tl.float32)
        q = (x * factor).to(row_ptr.dtype.element_ty)
        # Unrolling all choices would need too many addresses.
        for k in tl.range(0, K, loop_unroll_factor=2 if K > 2 else 1):
            slot = tl.load(slot_ptr + token * K + k)
            features = tl.where(slot < present_rows, width, 0)
            tl.store(row_ptr + slot * width + block_cols, q, mask=block_cols < features)


def quantise_and_spread(x: Tensor, weights: Tensor | None, routing: Routing) -> Factor:
    """Return the FP8 rows [S, H] of x [T, H], sorted by expert, and their scales [S, 1]. There is at least one row. If
    weights [T, K] is not None, the rows are those of weights[t, k] * x[t]."""
    if not runs_fp8_kernels(x):
        return quantise_and_spread_reference(x, weights, routing)
    rows, width, choices = routing.order.shape[0], x.shape[1], routing.slot.shape[1]
    factor = Factor(x.new_empty((rows, width), dtype=E4M3), x.new_empty((rows, 1), dtype=torch.float32))
    x, stride = dense_rows(x)
    config = Fp8RowConfig.choose((width,), device_of(x))
    launch(
        quantise_spread_kernel, x.shape[0], x, None if weights is None else weights.contiguous(), routing.slot,
        routing.ends, factor.values, factor.scale, stride, width, routing.ends.shape[0],
        K=choices, CHOICES=triton.next_power_of_2(choices), FITS=width <= config.block, BLOCK=config.block,
        num_warps=config.num_warps,
    )  # fmt: skip
    return factor
