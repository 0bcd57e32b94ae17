r"""Kernels of the divergences between a student Q and a teacher P over a vocabulary: `kl_div`, `jsd` and `tvd`.

With x = log q, y = log p, M = b P + (1 - b) Q, elementwise; `loss` sums over the vocabulary:

    kl           loss = p (y - x)                                   g = -p
    reverse_kl   loss = q (x - y)                                   g = loss + q
    jsd          loss = b p (y - log m) + (1 - b) q (x - log m)     g = (1 - b) q (x - log m)
    tvd          loss = |q - p| / 2                                 g = q sign(q - p) / 2

g is d loss / dx. For tvd of probabilities it is d loss / dq = sign(q - p) / 2. In g of jsd the derivatives of log m
cancel, because they sum to dm - dm. `distillation` computes these divergences for logits a, with
x = a / t - logsumexp(a / t):

    da_j = (g_j - q_j * G) / t,   G = sum_k g_k

G of kl is -1. A term c q of g may be omitted, because sum_k q_k = 1 cancels it in da. For reverse_kl c is 1, and G is
then the loss. For tvd c is 1/2, and -G is then the mass by which the student is below the teacher, without a
cancellation with 1/2.

JSD needs three values of the special function unit per element. Let h be the larger of x and y, d = |x - y|, and u and
v the weights (b or 1 - b) of the larger and of the smaller one:

    e = exp(-d),   hi = log m - h = log(u + v e) <= 0,   lo = e (log m - (h - d)) = e (d + hi)
    loss = -exp(h) (u hi + v lo),   g = -exp(h) (1 - b) (hi where q is the larger, else lo)

No term overflows: e and u + v e are in [0, 1]. No terms cancel: the error of log m - x is the error of hi, a few 2^-23
for every x, while the difference of two logarithms near -12 has an error of 2^-21. Equal inputs give exactly zero. A
probability below 2^-126 is treated as zero, and zero times infinity is zero.

Shapes: M rows (all leading dimensions), V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.token.scan import LN2, LOG2E
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import HIP, INTERPRETED, Device, cdiv, device_of, next_power_of_2
from tigon.runtime.launch import in_order, launch
from tigon.runtime.tuning import LaunchConfig

# This number replaces -inf in differences. Its exponential is zero.
LOWEST = tl.constexpr(-1e4)
PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)


@dataclass(frozen=True)
class DivergenceConfig(LaunchConfig):
    """Launch parameters: a program reads `span` blocks of `block_v` elements of one row."""

    block_v: int
    span: int
    num_warps: int

    @staticmethod
    def heuristic(problem: tuple[int, str], device: Device) -> "DivergenceConfig":
        vocabulary, kind = problem
        block_v = min(max(next_power_of_2(vocabulary), 64), 1024)
        return DivergenceConfig(
            block_v,
            # JSD has more arithmetic, so longer loops are faster: 0.761 ms instead of 0.771 (H200, 4096 x 128256).
            span=16 if kind == "jsd" else 4,
            num_warps=max(1, min(block_v // 256, 128 // device.warp_size)),
        )


def has_native_log2(x: Tensor, device: Device) -> bool:
    """Return whether the kernels use NVIDIA's instruction for a logarithm. Its error of up to 2^-22 is below the
    rounding of half precision. Triton's logarithm takes 35 instructions, and the loop of JSD has time for 40 in total.
    The interpreter has no such instruction."""
    return x.element_size() == 2 and device.warp_size == 32 and not HIP and not INTERPRETED


@triton.jit
def _exp(x):
    """Return exp(x) for x >= LOWEST. The rounding of x * log2(e) grows with x, so it is corrected to first order."""
    z = x * LOG2E
    e = tl.exp2(z)
    return tl.fma(e, tl.fma(z, -LN2, x), e)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    """Return log2(x), with NATIVE by NVIDIA's instruction."""
    if NATIVE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _finite(log):
    """Return a logarithm with -inf replaced by LOWEST. NaN stays NaN."""
    return tl.maximum(log, LOWEST, propagate_nan=PROPAGATE_NAN)


@triton.jit
def _difference(a, log_a, log_b):
    """Return log a - log b for finite log a. The result is finite if a is zero, even if b is zero too."""
    return log_a - tl.where(a == 0.0, _finite(log_b), log_b)


@triton.jit
def divergence_element(
    x, y, unit, beta, rest, KIND: tl.constexpr, LOGS: tl.constexpr, REDUCED: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Return the loss, g and q of the module docstring for each element, all multiplied by `unit`. If REDUCED, g omits
    the term c q. `rest` is 1 - beta. If LOGS is False, y is p instead of log p, and for tvd x is q instead of log q."""
    if KIND == "kl":
        if LOGS:
            y = _finite(y)
            p = _exp(y)
        else:
            # One step of Newton's method corrects the native logarithm. Probabilities below 2^-126 count as 0.
            p, log2_p = y, tl.maximum(_log2(y, NATIVE), -126.0, propagate_nan=PROPAGATE_NAN)
            y = log2_p * LN2 + (p * tl.exp2(-log2_p) - 1.0)
        return (p * unit) * _difference(p, y, x), p * -unit, _exp(_finite(x)) * unit
    elif KIND == "reverse_kl":
        x = _finite(x)
        q = _exp(x)
        loss = (q * unit) * _difference(q, x, y)
        return loss, loss if REDUCED else loss + q * unit, q * unit
    elif KIND == "jsd":
        # This variable is exp(h) of the module docstring. `d` and `hi` are in base 2, so `scaled` has the factor ln(2).
        h = _exp(_finite(tl.maximum(x, y, propagate_nan=PROPAGATE_NAN)))
        # If x and y are both -inf, as in masked lanes, their difference is NaN, which is not less than 127.
        d = tl.abs(x - y) * LOG2E
        d = tl.where(d < 127.0, d, 127.0)
        student_is_larger = x >= y
        u, v = tl.where(student_is_larger, rest, beta), tl.where(student_is_larger, beta, rest)
        e = tl.exp2(-d)
        hi = _log2(tl.fma(v, e, u), NATIVE)
        first, second = u * hi, v * (e * (d + hi))
        h *= unit
        scaled = h * -LN2
        g = scaled * tl.where(student_is_larger, first, second)
        return scaled * (first + second), g, tl.where(student_is_larger, h, h * e)
    else:
        if LOGS:
            x, y = _exp(_finite(x)), _exp(_finite(y))
        half: tl.constexpr = 0.5 if REDUCED else 0.0
        g = (tl.where(x == y, 0.0, tl.where(x > y, 0.5, -0.5)) - half) * unit
        return tl.abs(x - y) * (0.5 * unit), g * x if LOGS else g, x * unit


@triton.jit(do_not_specialize=["ignore_index"])
def _divergence_kernel(
    x_ptr, y_ptr, label_ptr, valid_ptr,  # [M, V] twice, [M] or None, 1 / valid rows or None
    dloss_ptr,  # [] or None
    loss_ptr, dx_ptr,  # [M, parts] and [M, V]; each may be None
    stride_x, stride_y, stride_dx, V, parts, ignore_index, scale, beta, rest,
    KIND: tl.constexpr, LOGS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_V: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Compute the loss and dx of one of the `parts` parts of a row per program, each if its pointer is not None."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    OTHER_X: tl.constexpr = 0.0 if KIND == "tvd" and not LOGS else float("-inf")
    OTHER_Y: tl.constexpr = float("-inf") if LOGS else 0.0

    width = V
    # An ignored row is treated as a row without elements: it is not read, and zeros are written.
    if label_ptr is not None:
        width = tl.where(tl.load(label_ptr + row) != ignore_index, V, 0)
    if valid_ptr is not None:
        scale = scale * tl.load(valid_ptr)
    # `unit` multiplies every element, and `rescale` only the sum of the losses. If dx is written, every element needs
    # the factor. Otherwise one product at the end is enough.
    unit, rescale = 1.0, scale
    if dx_ptr is not None:
        unit, rescale = scale, 1.0
        if dloss_ptr is not None:
            unit = scale * tl.load(dloss_ptr)

    losses = tl.zeros([BLOCK_V], tl.float32)
    first = part * (SPAN * BLOCK_V)
    for start in tl.range(first, tl.minimum(first + SPAN * BLOCK_V, V), BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < width, other=OTHER_X).to(tl.float32)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < width, other=OTHER_Y).to(tl.float32)
        loss, g, _ = divergence_element(x, y, unit, beta, rest, KIND, LOGS, False, NATIVE)
        losses += loss
        if dx_ptr is not None:
            tl.store(dx_ptr + row * stride_dx + cols, g, mask=cols < V)

    if loss_ptr is not None:
        tl.store(loss_ptr + tl.program_id(0), tl.sum(losses, axis=0) * rescale)


class DivergenceOptions(NamedTuple):
    kind: str  # "kl", "reverse_kl", "jsd" or "tvd"
    # whether the target (for tvd also the input) holds logarithms or logits
    is_log: bool
    from_logits: bool
    divisor: int
    ignore_index: int
    beta: float
    temperature: float


def divergence(
    x: Tensor, y: Tensor, labels: Tensor | None, inverse_count: Tensor | None, options: DivergenceOptions, *,
    with_loss: bool, with_dx: bool, dloss: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Read distributions x and y once, and return the loss [] and dx [M, V], each only if requested."""
    (m, v), device = x.shape, device_of(x)
    config = DivergenceConfig.choose((v, options.kind), device)
    parts = cdiv(v, config.block_v * config.span)
    losses = x.new_empty((m, parts), dtype=torch.float32) if with_loss else None
    dx = x.new_empty(m, v) if with_dx else None
    arguments = in_order(_divergence_kernel)(
        x_ptr=x, y_ptr=y, label_ptr=labels, valid_ptr=inverse_count, dloss_ptr=dloss, loss_ptr=losses, dx_ptr=dx,
        stride_x=x.stride(0), stride_y=y.stride(0), stride_dx=v, V=v, parts=parts,
        ignore_index=options.ignore_index, scale=1.0 / options.divisor, beta=options.beta, rest=1.0 - options.beta,
    )  # fmt: skip
    launch(
        _divergence_kernel, m * parts, *arguments,
        KIND=options.kind, LOGS=options.is_log, NATIVE=has_native_log2(x, device),
        BLOCK_V=config.block_v, SPAN=config.span, num_warps=config.num_warps,
    )  # fmt: skip
    return None if losses is None else losses.sum(), dx
