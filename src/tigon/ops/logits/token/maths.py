"""What the kernels of `token_loss` and `token_loss_row` compute alike; callable from Triton and from Gluon."""

import triton
import triton.language as tl

from tigon.ops.logits.token import reference as token_loss_torch

__all__ = ["LN2", "LOG2E", "LOWEST", "target_weight", "transformed"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(token_loss_torch.LOWEST)


@triton.jit
def transformed(a, logit_scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Raw logits -> x, dx / da."""
    x = a.to(tl.float32)
    slope = 1.0
    if SCALED:
        x = x * logit_scale
        slope = logit_scale
    if SOFTCAP:
        # tanh u and 1 - tanh^2 u from e = exp(-2 |u|), neither by a difference of nearly equal numbers.
        e = tl.exp(tl.abs(x) * (-2.0 / softcap))
        r = 1.0 / (1.0 + e)
        x = tl.where(x < 0, -softcap, softcap) * ((1.0 - e) * r)
        slope *= 4.0 * e * r * r
    return x, slope


@triton.jit
def target_weight(weight_ptr, target, V):
    """w_t, NaN for a target out of range."""
    inside = (target >= 0) & (target < V)
    w = 1.0
    if weight_ptr is not None:
        w = tl.load(weight_ptr + target, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, w, float("nan"))
