r"""The backward of the activation between an expert's two products, and of the weights in the sum over experts.

    y[t] = sum_k w[t, k] * z[slot[t, k]],    z[s] = a[s] D^T,    a[s] = act(h[s])

With da[s] = dy[t] D, the gradient of `a` without the weight, one pass over the rows computes what the products need:

    dh[s] = w da[s] act'(h[s])
    (w a)[s], for dD = sum_s dy[t]^T (w a)[s]
    dw[t, k] = <dy[t], z[s]> = <dy[t], a[s] D^T> = <da[s], a[s]>

The forward therefore saves neither `a`, which is recomputed here, nor `z`. The kernel computes in fp32 and rounds each
result once. Rows that belong to no expert of this rank are neither read nor written, and their dw is 0.

Shapes: T tokens, K choices each, S = T K rows sorted by expert, I intermediate; h is [S, 2 I] = [gate | up], or [S, I]
for an activation without a gate.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.experts.choice_order import Routing
from tigon.ops.fp8.gated_gradients import gated_gradients_reference
from tigon.ops.fp8.quantisation import activate
from tigon.ops.mlps.activation_kernels import activation_and_slope
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import runs_kernels
from tigon.runtime.launch import launch
from tigon.runtime.tuning import rung


class NeededActivationGradients(NamedTuple):
    """True for each result of the backward that is computed. Only adapters have the last one."""

    dh: bool
    wa: bool
    dweights: bool
    dp: bool = False


def activation_gradients_reference(
    h: Tensor, da: Tensor | None, weights: Tensor, routing: Routing, kind: str, needs: NeededActivationGradients
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide_dtype = torch.promote_types(h.dtype, torch.float32)
    inner = h.shape[1] // (1 if kind == "relu2" else 2)
    factors = weights.flatten()[routing.order, None].to(wide_dtype)
    gate, *up = h.to(wide_dtype).split(max(1, inner), -1)
    a = activate(gate, up[0], kind) if up else F.relu(gate).square()
    dh, dots = None, torch.zeros_like(factors)
    if da is not None:
        dots, dy = (da * a).sum(-1, keepdim=True), da * factors
        if needs.dh and up:
            dh = torch.cat(gated_gradients_reference(dy, gate, up[0], kind)[:2], -1).to(h.dtype)
        elif needs.dh:
            dh = (2.0 * F.relu(gate) * dy).to(h.dtype)
    dweights = dots.masked_fill(routing.absent, 0.0)[routing.slot, 0].to(weights.dtype) if needs.dweights else None
    return dh, (a * factors).to(h.dtype) if needs.wa else None, dweights


# In each pair, the first number is the largest number of features of a block, and the second one is its warps.
WARPS = ((256, 1), (512, 2), (1024, 4))


@functools.cache
def _block_of_row(inner: int) -> tuple[int, int]:
    """Return how many features of a row a program computes at a time, and its warps: 8 features for each thread."""
    block = min(1024, triton.next_power_of_2(max(1, inner)))
    return block, rung(WARPS, block)


@triton.jit(do_not_specialize=["experts"])
def _gradients_kernel(
    h_ptr, da_ptr, weights_ptr, order_ptr, ends_ptr,  # [S, 2 I] or [S, I], [S, I] or None, [T, K], [S], [E]
    dh_ptr, wa_ptr, dweights_ptr,  # [S, 2 I] or [S, I], [S, I], [T, K]; None if not needed
    inner, experts,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dh, w a and dw of one row, each if it is needed."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order_ptr + row)
    features = tl.where(row < tl.load(ends_ptr + experts - 1, experts > 0, 0), inner, 0)
    weight = tl.load(weights_ptr + choice).to(tl.float32)
    gate_row = row * inner * (1 if KIND == "relu2" else 2)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < features
        gate = tl.load(h_ptr + gate_row + cols, mask=mask, other=0.0).to(tl.float32)
        act, slope = activation_and_slope(gate, KIND)
        a = act
        if KIND != "relu2":
            up = tl.load(h_ptr + gate_row + inner + cols, mask=mask, other=0.0).to(tl.float32)
            a = act * up
        if da_ptr is not None:
            da = tl.load(da_ptr + row * inner + cols, mask=mask, other=0.0).to(tl.float32)
            dots += da * a
            if dh_ptr is not None:
                dy = weight * da
                if KIND == "relu2":
                    # The result is 0 for gate <= 0, even if dy is NaN.
                    dgate = tl.where(gate <= 0.0, 0.0, dy * slope)
                else:
                    dgate = dy * up * slope
                    tl.store(dh_ptr + gate_row + inner + cols, dy * act, mask=mask)
                tl.store(dh_ptr + gate_row + cols, dgate, mask=mask)
        if wa_ptr is not None:
            tl.store(wa_ptr + row * inner + cols, weight * a, mask=mask)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + choice, tl.sum(dots))


def activation_gradients(
    h: Tensor, da: Tensor | None, weights: Tensor, routing: Routing, kind: str, needs: NeededActivationGradients,
    overwrites_h: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dh, w a [S, I] and dw [T, K]. A result that is not needed is None. da [S, I] is None if only w a is
    needed, which may overwrite it. With `overwrites_h`, the kernel writes dh into the memory of a contiguous h [S, 2 I]
    or [S, I]. Without kernels, h is not changed."""
    if not runs_kernels(h, da, weights):
        return activation_gradients_reference(h, da, weights, routing, kind, needs)
    inner = h.shape[1] // (1 if kind == "relu2" else 2)
    block, num_warps = _block_of_row(inner)
    h, da = h.contiguous(), None if da is None else da.contiguous()
    dh = (h if overwrites_h else torch.empty_like(h)) if needs.dh else None
    # Each thread overwrites only elements of h and da that it has loaded itself.
    wa = (h.new_empty(len(h), inner) if da is None else da) if needs.wa else None
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format) if needs.dweights else None
    launch(
        _gradients_kernel, len(h), h, da, weights.contiguous(), routing.order, routing.ends, dh, wa, dweights,
        inner, routing.ends.shape[0],
        KIND=kind, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return dh, wa, dweights
