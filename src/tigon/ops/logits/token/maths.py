"""The functions that the kernels of a token's loss share. Triton and Gluon can both call them."""

from tigon.ops.logits.token import reference
from tigon.runtime.compat.triton import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(reference.LOWEST)


@triton.jit
def transform(a, logit_scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return x and dx / da for raw logits a."""
    x = a.to(tl.float32)
    slope = 1.0
    if SCALED:
        x = x * logit_scale
        slope = logit_scale
    if SOFTCAP:
        # With e = exp(-2 |u|), neither tanh u nor 1 - tanh^2 u is a difference of nearly equal numbers.
        e = tl.exp(tl.abs(x) * (-2.0 / softcap))
        r = 1.0 / (1.0 + e)
        x = tl.where(x < 0, -softcap, softcap) * ((1.0 - e) * r)
        slope *= 4.0 * e * r * r
    return x, slope


@triton.jit
def target_weight(weight_ptr, target, V):
    """Return the class weight of the target, or NaN for a target outside [0, V)."""
    inside = (target >= 0) & (target < V)
    w = 1.0
    if weight_ptr is not None:
        w = tl.load(weight_ptr + target, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, w, float("nan"))
