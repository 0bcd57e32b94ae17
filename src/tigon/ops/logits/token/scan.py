r"""One pass over a row of logits, in blocks, and the functions that the kernels of logits share.

Each thread has its own sums. Let m be the maximum so far, S = sum exp(x_j - m), R = sum exp(x_j - m) (x_j - m) and
Q = sum exp(x_j - m)^2. A new maximum m' changes the sums to

    S' = S exp(m - m'),   R' = (R + (m - m') S) exp(m - m'),   Q' = Q exp(m - m')^2

Shapes: V vocabulary, or the columns of a shard.
"""

from dataclasses import dataclass

from tigon.ops.logits.token import reference
from tigon.ops.logits.token.types import Options
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import Device, next_power_of_2
from tigon.runtime.tuning import LaunchConfig

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(reference.LOWEST)


@dataclass(frozen=True)
class ScanConfig(LaunchConfig):
    """Launch parameters: a program reads `block_v` logits at a time, and each thread reads `lane` neighbours."""

    block_v: int
    # This is the number of logits in 16 bytes.
    lane: int
    num_warps: int

    @staticmethod
    def heuristic(problem: tuple[int, int], device: Device) -> "ScanConfig":
        """Return the parameters for the columns of the logits on this rank, and the bytes of a logit."""
        vocabulary, itemsize = problem
        # 8192 x 128256 on an H200: 0.485 ms to read, 0.991 ms to read and write, at 4.33 and 4.24 TB/s. Blocks of 4096
        # are as fast, but lack registers when every option is on; blocks of 8192 take 5 % longer.
        block_v = min(max(next_power_of_2(vocabulary), 64), 2048)
        num_warps = max(1, min(block_v // 512, 128 // device.warp_size))
        return ScanConfig(block_v, 16 // itemsize, num_warps)


def constants(options: Options, config: ScanConfig) -> dict[str, bool | int]:
    """Return the constexprs and the number of warps of every kernel that scans logits."""
    return {
        "SMOOTHING": options.label_smoothing != 0, "SCALED": options.logit_scale != 1,
        "SOFTCAP": options.softcap is not None, "BLOCK_V": config.block_v, "LANE": config.lane,
        "num_warps": config.num_warps,
    }  # fmt: skip


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


@triton.jit
def columns(start, BLOCK_V: tl.constexpr, LANE: tl.constexpr):
    """Return column indices [BLOCK_V / LANE, LANE], such that one thread holds a row of them and sums over it without
    exchange."""
    return start + tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def _accumulate(
    start, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap,
    high, total, moment, squares, weighted, best,  # [BLOCK_V / LANE] each
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PREDICTED: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, LAST: tl.constexpr, BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Add a block of logits to each thread's maximum m, S, R, Q, sum of w (x - pivot), and argmax."""
    cols = columns(start, BLOCK_V, LANE)
    inside = cols < V if LAST else None
    x, _ = transform(tl.load(logits_ptr + cols, mask=inside), logit_scale, softcap, SCALED, SOFTCAP)
    if WEIGHTED:
        difference = x - pivot
        if weight_ptr is not None:
            difference *= tl.load(weight_ptr + cols, mask=inside).to(tl.float32)
        if LAST:
            difference = tl.where(inside, difference, 0.0)
        weighted += tl.sum(difference, axis=1)
    # Only the last block needs a mask. With masks in all blocks, the arithmetic would take longer than the loads.
    if LAST:
        x = tl.where(inside, x, float("-inf"))
    if PREDICTED:
        block_high, index = tl.max(x, axis=1, return_indices=True)
        best = tl.where(block_high > high, tl.min(cols, axis=1) + index, best)
    else:
        block_high = tl.max(x, axis=1)
    new_high = tl.maximum(high, block_high)
    finite = tl.where(new_high == float("-inf"), 0.0, new_high)
    # The difference comes before the product with log2(e), so that the largest logit contributes exactly one.
    fall, shifted = high - finite, x - finite[:, None]
    factor, e = tl.exp2(fall * LOG2E), tl.exp2(shifted * LOG2E)
    if ENTROPY:
        moment = (moment + tl.maximum(fall, LOWEST) * total) * factor + tl.sum(e * tl.maximum(shifted, LOWEST), axis=1)
    if SQUARES:
        squares = squares * factor * factor + tl.sum(e * e, axis=1)
    total = total * factor + tl.sum(e, axis=1)
    return new_high, total, moment, squares, weighted, best


@triton.jit
def scan(
    logits_ptr, V, pivot, weight_ptr, logit_scale, softcap,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PREDICTED: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK_V: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return m = max x, S, R, Q, sum w (x - pivot) and the argmax of one row. Without ENTROPY, R is 0. Without SQUARES,
    Q is 0. Without WEIGHTED, sum w (x - pivot) is 0. Without PREDICTED, the argmax is 0. `pivot` is any number near the
    logits: the sum of differences from it loses no digits if all logits have a large common offset. If all logits are
    -inf, the sums are relative to 0."""
    high = tl.full([BLOCK_V // LANE], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V // LANE], tl.float32)
    moment = tl.zeros([BLOCK_V // LANE], tl.float32)
    squares = tl.zeros([BLOCK_V // LANE], tl.float32)
    weighted = tl.zeros([BLOCK_V // LANE], tl.float32)
    best = tl.zeros([BLOCK_V // LANE], tl.int32)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V):
        high, total, moment, squares, weighted, best = _accumulate(
            start, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap, high, total, moment, squares, weighted, best,
            WEIGHTED, SCALED, SOFTCAP, PREDICTED, ENTROPY, SQUARES, False, BLOCK_V, LANE,
        )  # fmt: skip
    if whole < V:
        high, total, moment, squares, weighted, best = _accumulate(
            whole, logits_ptr, pivot, V, weight_ptr, logit_scale, softcap, high, total, moment, squares, weighted, best,
            WEIGHTED, SCALED, SOFTCAP, PREDICTED, ENTROPY, SQUARES, True, BLOCK_V, LANE,
        )  # fmt: skip
    highest = tl.max(high, axis=0)
    fall = high - tl.where(highest == float("-inf"), 0.0, highest)
    factor = tl.exp2(fall * LOG2E)
    r, q, weighted_sum, argmax = 0.0, 0.0, 0.0, 0
    if ENTROPY:
        r = tl.sum((moment + tl.maximum(fall, LOWEST) * total) * factor, axis=0)
    if SQUARES:
        q = tl.sum(squares * factor * factor, axis=0)
    if WEIGHTED:
        weighted_sum = tl.sum(weighted, axis=0)
    if PREDICTED:
        argmax = tl.min(tl.where(high == highest, best, V), axis=0)
    return highest, tl.sum(total * factor, axis=0), r, q, weighted_sum, argmax
