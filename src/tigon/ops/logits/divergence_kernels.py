r"""Divergences between a student Q and a teacher P over a vocabulary: the kernels under `kl_div`, `jsd` and `tvd`.

With x = log q, y = log p, M = b P + (1 - b) Q, elementwise; `loss` sums over the vocabulary:

    kl           loss = p (y - x)                                   g = -p
    reverse_kl   loss = q (x - y)                                   g = loss + q
    jsd          loss = b p (y - log m) + (1 - b) q (x - log m)     g = (1 - b) q (x - log m)
    tvd          loss = |q - p| / 2                                 g = q sign(q - p) / 2

g is d loss / dx, and of tvd from probabilities d loss / dq = sign(q - p) / 2. In g of jsd the derivatives of log m
cancel, because they sum to dm - dm. From logits a, with x = a / t - logsumexp(a / t):

    da_j = (g_j - q_j * G) / t,   G = sum_k g_k

G of kl is -1, so its loss and gradient are one pass after the one for the log-sum-exps; the others need G first. Any
c q may be left out of g, because sum_k q_k = 1 takes c out again: c is 1 for reverse_kl, where G is then the loss, and
1/2 for tvd, where -G is then the student's mass below the teacher's, free of a cancellation with 1/2.

JSD needs three values of the special function unit an element. With h the larger of x and y, d = |x - y|, and u and v
the weights of the larger and the smaller (b or 1 - b each):

    e = exp(-d),   hi = log m - h = log(u + v e) <= 0,   lo = e (log m - (h - d)) = e (d + hi)
    loss = -exp(h) (u hi + v lo),   g = -exp(h) (1 - b) (hi where q is the larger, else lo)

Nothing overflows: e and u + v e are in [0, 1]. Nothing cancels either: an error of log m - x is an error of hi, a few
2^-23 whatever the size of x, where the difference of two logarithms near -12 is off by 2^-21. Equal inputs give
exactly zero. A probability below 2^-126 counts as zero, and zero times infinity is zero.

Shapes: M rows (all leading dimensions), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.ops.logits.divergence_reference import DivergenceReduction, divisor
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import Options as TokenOptions
from tigon.ops.logits.token.kernels import gradient_scales, statistics
from tigon.ops.logits.token.maths import LN2, LOG2E
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.device import HIP, INTERPRETED, Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig

__all__ = ["DivergenceConfig", "DivergenceProblem", "divergence", "native_log2"]

LOWEST = tl.constexpr(-1e4)  # stands for -inf in differences; its exponential is zero
EVERY = tl.constexpr(tl.PropagateNan.ALL)


# --- configuration -------------------------------------------------------------------------------


class DivergenceProblem(NamedTuple):
    """What the launch parameters of a divergence depend on."""

    vocabulary: int
    kind: str  # "kl", "jsd" or "tvd"


@dataclass(frozen=True)
class DivergenceConfig(LaunchConfig):
    """Launch parameters: a program takes `span` blocks of `block_v` elements of one row."""

    block_v: int
    span: int
    num_warps: int

    @staticmethod
    def heuristic(problem: DivergenceProblem, device: Device) -> "DivergenceConfig":
        block_v = min(max(triton.next_power_of_2(problem.vocabulary), 64), 1024)
        return DivergenceConfig(
            block_v,
            # The arithmetic of JSD wants longer loops: 0.761 ms for 0.771, from logits 1.94 for 2.12 (H200, 4096 x
            # 128256).
            span=16 if problem.kind == "jsd" else 4,
            num_warps=max(1, min(block_v // 256, 128 // device.warp_size)),
        )


def native_log2(x: Tensor, device: Device) -> bool:
    """Whether the kernels take NVIDIA's instruction for a logarithm, whose error is up to 2^-22 where fp32 has 2^-24.

    It hides under the rounding of half precision; Triton's own logarithm takes 35 instructions, and JSD has time for 40
    in all. The interpreter knows no instructions.
    """
    return x.element_size() == 2 and device.warp_size == 32 and not HIP and not INTERPRETED


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _exp(x):
    """exp(x) for x >= LOWEST: the rounding of x * log2(e), large where x is, is put right to first order."""
    z = x * LOG2E
    e = tl.exp2(z)
    return tl.fma(e, tl.fma(z, -LN2, x), e)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _finite(log):
    """A logarithm, but no -inf; NaN stays."""
    return tl.maximum(log, LOWEST, propagate_nan=EVERY)


@triton.jit
def _difference(a, log_a, log_b):
    """log a - log b for finite log a; finite where a is zero, even if b is as well."""
    return log_a - tl.where(a == 0.0, _finite(log_b), log_b)


@triton.jit
def _element(
    x, y, unit, beta, rest, KIND: tl.constexpr, LOGS: tl.constexpr, REDUCED: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Loss, g (less c q if REDUCED) and q, times `unit`; `rest` = 1 - beta; without LOGS y is p, and x of tvd is q."""
    if KIND == "kl":
        if LOGS:
            y = _finite(y)
            p = _exp(y)
        else:
            # One step of Newton's method makes up for the native logarithm; nothing below 2^-126 is told from 0.
            p, log2_p = y, tl.maximum(_log2(y, NATIVE), -126.0, propagate_nan=EVERY)
            y = log2_p * LN2 + (p * tl.exp2(-log2_p) - 1.0)
        return (p * unit) * _difference(p, y, x), p * -unit, _exp(_finite(x)) * unit
    elif KIND == "reverse_kl":
        x = _finite(x)
        q = _exp(x)
        loss = (q * unit) * _difference(q, x, y)
        return loss, loss if REDUCED else loss + q * unit, q * unit
    elif KIND == "jsd":
        h = _exp(_finite(tl.maximum(x, y, propagate_nan=EVERY)))
        d = tl.minimum(tl.abs(x - y) * LOG2E, 127.0)  # in base 2; 127 also where both are -inf
        student_first = x >= y
        u, v = tl.where(student_first, rest, beta), tl.where(student_first, beta, rest)
        e = tl.exp2(-d)
        hi = _log2(tl.fma(v, e, u), NATIVE)
        first, second = u * hi, v * (e * (d + hi))
        h *= unit
        scaled = h * -LN2
        g = scaled * tl.where(student_first, first, second)
        return scaled * (first + second), g, tl.where(student_first, h, h * e)
    else:
        if LOGS:
            x, y = _exp(_finite(x)), _exp(_finite(y))
        half: tl.constexpr = 0.5 if REDUCED else 0.0
        g = (tl.where(x == y, 0.0, tl.where(x > y, 0.5, -0.5)) - half) * unit
        return tl.abs(x - y) * (0.5 * unit), g * x if LOGS else g, x * unit


@triton.jit(do_not_specialize=["ignore_index", "stride_dloss"])
def _divergence_kernel(
    x_ptr, y_ptr, label_ptr, valid_ptr,  # [M, V] twice, [M] or None, 1 / valid rows or None
    x_lse_ptr, y_lse_ptr, slope_ptr,  # [M, 2] twice: max, sum exp(x - max), or None; [M]: G, or None
    dloss_ptr,  # [], [M, V] if ELEMENTS, or None
    loss_ptr, slopes_ptr, dx_ptr,  # [M, parts] or [M, V] if ELEMENTS; [M, parts]; [M, V]; each may be None
    stride_x, stride_y, stride_dloss, stride_dloss_v, stride_dx, V, parts,
    ignore_index, scale, beta, rest, inverse_temperature,
    KIND: tl.constexpr, LOGS: tl.constexpr, ELEMENTS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_V: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    FROM_LOGITS: tl.constexpr = x_lse_ptr is not None
    REDUCED: tl.constexpr = FROM_LOGITS and not ELEMENTS
    OTHER_X: tl.constexpr = 0.0 if KIND == "tvd" and not LOGS else float("-inf")
    OTHER_Y: tl.constexpr = float("-inf") if LOGS else 0.0

    width = V
    if label_ptr is not None:  # an ignored row has no elements: nothing of it is read, and what is written is zero
        width = tl.where(tl.load(label_ptr + row) != ignore_index, V, 0)
    if valid_ptr is not None:
        scale = scale * tl.load(valid_ptr)
    if FROM_LOGITS:
        x_top = tl.load(x_lse_ptr + row * 2)
        y_top = tl.load(y_lse_ptr + row * 2)
        x_log = tl.log(tl.load(x_lse_ptr + row * 2 + 1, mask=width > 0, other=1.0))
        y_log = tl.log(tl.load(y_lse_ptr + row * 2 + 1, mask=width > 0, other=1.0))
        slope = -1.0  # of kl
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + row)
    # With a gradient, everything is computed times what that is multiplied by; else sums are, in the end.
    unit, rescale = 1.0, scale
    if dx_ptr is not None:
        unit, rescale = scale, 1.0
        if dloss_ptr is not None and not ELEMENTS:
            unit = scale * tl.load(dloss_ptr)

    losses, slopes = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    first = part * (SPAN * BLOCK_V)
    for start in tl.range(first, tl.minimum(first + SPAN * BLOCK_V, V), BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < V
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < width, other=OTHER_X).to(tl.float32)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < width, other=OTHER_Y).to(tl.float32)
        if FROM_LOGITS:
            x = (x * inverse_temperature - x_top) - x_log
            y = (y * inverse_temperature - y_top) - y_log
        loss, g, q = _element(x, y, unit, beta, rest, KIND, LOGS, REDUCED, NATIVE)
        if ELEMENTS:
            if loss_ptr is not None:
                tl.store(loss_ptr + row * V + cols, loss, mask=inside)
            if dloss_ptr is not None:
                g *= tl.load(dloss_ptr + row * stride_dloss + cols.to(tl.int64) * stride_dloss_v, mask=inside, other=0)
        losses += loss
        slopes += g
        if dx_ptr is not None:
            if FROM_LOGITS:
                g = (g - q * slope) * inverse_temperature
            tl.store(dx_ptr + row * stride_dx + cols, g, mask=inside)

    if loss_ptr is not None and not ELEMENTS:
        tl.store(loss_ptr + tl.program_id(0), tl.sum(losses, axis=0) * rescale)
    if slopes_ptr is not None:
        tl.store(slopes_ptr + tl.program_id(0), tl.sum(slopes, axis=0))


# --- launchers (2-D in, no autograd) -------------------------------------------------------------


class Options(NamedTuple):
    """What defines a divergence, besides its tensors."""

    kind: str  # "kl", "reverse_kl", "jsd" or "tvd"
    logs: bool  # whether the target (of tvd, both) comes as logarithms or logits
    from_logits: bool
    elements: bool  # elementwise losses, and a gradient for each of them
    divisor: int
    ignore_index: int
    beta: float
    temperature: float


class _Results(NamedTuple):
    """None is what is not asked for, or what backward does not need."""

    loss: Tensor  # [], or [M, V] if elementwise; fp32
    dx: Tensor | None  # [M, V]
    x_lse: Tensor | None  # [M, 2] fp32, from logits
    y_lse: Tensor | None
    slope: Tensor | None  # [M] fp32: G, from logits


def _run(
    x: Tensor, y: Tensor, labels: Tensor | None, valid: Tensor | None, lse: tuple[Tensor | None, Tensor | None],
    options: Options, loss: bool = False, slopes: bool = False, dx: bool = False,
    slope: Tensor | None = None, dloss: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """One pass over x and y: of loss ([] or [M, V]), G [M] and dx [M, V] those that are asked for."""
    (m, v), device = x.shape, device_of(x)
    config = DivergenceConfig.choose(DivergenceProblem(v, options.kind), device)
    parts = cdiv(v, config.block_v * config.span)
    elements = options.elements
    losses = x.new_empty((m, v if elements else parts), dtype=torch.float32) if loss else None
    sums = x.new_empty((m, parts), dtype=torch.float32) if slopes else None
    gradient = x.new_empty(m, v) if dx else None
    launch(
        _divergence_kernel, m * parts, x, y, labels, valid, *lse, slope, dloss, losses, sums, gradient,
        x.stride(0), y.stride(0), *(dloss.stride() if elements and dloss is not None else (0, 0)), v, v, parts,
        options.ignore_index, 1.0 / options.divisor, options.beta, 1.0 - options.beta, 1.0 / options.temperature,
        KIND=options.kind, LOGS=options.logs, ELEMENTS=elements, NATIVE=native_log2(x, device),
        BLOCK_V=config.block_v, SPAN=config.span, num_warps=config.num_warps,
    )  # fmt: skip
    return losses.sum() if loss and not elements else losses, sums.sum(1) if slopes else None, gradient


def _needs_slope(options: Options, weighted: bool = False) -> bool:
    return options.from_logits and (weighted or options.kind != "kl")


def _fake_forward(x, y, labels, valid, needs_dx, *options):
    options, (m, v) = Options(*options), x.shape
    fp32 = lambda *shape: x.new_empty(shape, dtype=torch.float32)
    return _Results(
        fp32(m, v) if options.elements else fp32(),
        x.new_empty(m, v) if needs_dx else None,
        *(fp32(m, 2) if options.from_logits else None for _ in range(2)),
        fp32(m) if _needs_slope(options) and not options.elements else None,
    )


@launcher(fake=_fake_forward)
def divergence_forward(
    x: Tensor, y: Tensor, labels: Tensor | None, valid: Tensor | None, needs_dx: bool,
    kind: str, logs: bool, from_logits: bool, elements: bool, divisor: int, ignore_index: int, beta: float,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, y [M, V], labels [M] | None, valid: 1 / valid rows | None -> `_Results`."""
    options = Options(kind, logs, from_logits, elements, divisor, ignore_index, beta, temperature)
    lse = (None, None)
    if from_logits:
        targets, ignored = labels, ignore_index
        if labels is None:  # no row is ignored, whatever `ignore_index` says
            targets, ignored = x.new_zeros(x.shape[0], dtype=torch.int64), -1
        scales, softmax = x.new_ones(3, dtype=torch.float32), TokenOptions(ignored, logit_scale=1.0 / temperature)
        lse = tuple(statistics(logits, targets, None, scales, softmax).lse for logits in (x, y))
    slopes = _needs_slope(options) and not elements
    loss, slope, dx = _run(x, y, labels, valid, lse, options, loss=True, slopes=slopes, dx=needs_dx and not slopes)
    if needs_dx and slopes:
        *_, dx = _run(x, y, labels, valid, lse, options, dx=True, slope=slope)
    return loss, dx, *lse, slope


@launcher(fake=lambda dloss, x, *arguments: x.new_empty(x.shape))
def divergence_backward(
    dloss: Tensor, x: Tensor, y: Tensor, labels: Tensor | None, valid: Tensor | None,
    x_lse: Tensor | None, y_lse: Tensor | None, slope: Tensor | None,
    kind: str, logs: bool, from_logits: bool, elements: bool, divisor: int, ignore_index: int, beta: float,
    temperature: float,
) -> Tensor:  # fmt: skip
    """dloss [] or, if elementwise, [M, V] -> dx [M, V]."""
    options = Options(kind, logs, from_logits, elements, divisor, ignore_index, beta, temperature)
    lse = (x_lse, y_lse) if from_logits else (None, None)
    if from_logits and elements:
        _, slope, _ = _run(x, y, labels, valid, lse, options, slopes=True, dloss=dloss)
    slope = slope if _needs_slope(options, weighted=elements) else None
    *_, dx = _run(x, y, labels, valid, lse, options, dx=True, slope=slope, dloss=dloss)
    return dx


# --- autograd ------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return dense_rows(x)[0].view(-1, x.shape[-1])


def _flat(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.reshape(-1).contiguous()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, labels, valid, needs_dx, options):
        x, y = _rows(input), _rows(target)
        # Later: where each element's gradient comes then, or fp16 lives by the loss scale that comes with it.
        at_once = needs_dx and not options[3] and x.dtype != torch.float16
        results = _Results(*divergence_forward(x, y, _flat(labels), valid, at_once, *options))
        if at_once:
            ctx.save_for_backward(results.dx)
        elif needs_dx:
            ctx.save_for_backward(input, target, labels, valid, *results[2:])
        ctx.at_once, ctx.options, ctx.shape = at_once, options, input.shape
        return results.loss.view(input.shape) if options[3] else results.loss

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        if ctx.at_once:
            dx = rescaled(*ctx.saved_tensors, dloss)
        else:
            input, target, labels, *others = ctx.saved_tensors
            dloss = dloss.reshape(-1, ctx.shape[-1]) if dloss.dim() else dloss
            dx = divergence_backward(dloss, _rows(input), _rows(target), _flat(labels), *others, *ctx.options)
        return dx.view(ctx.shape), None, None, None, None, None


# --- public: the body of the three functions -----------------------------------------------------


def divergence(
    op: str, kind: str, reference: Callable[[], Tensor], input: Tensor, target: Tensor, labels: Tensor | None,
    ignore_index: int, from_logits: bool, temperature: float, reduction: DivergenceReduction,
    logs: bool = True, beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Check, and run the kernels or `reference`."""
    checks.tensor(op, input=input, target=target)
    checks.floating(op, input=input, target=target)
    checks.flag(op, from_logits=from_logits)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: input must have shape (..., V) with V > 0, got {tuple(input.shape)}")
    checks.shape(op, "target", target, input.shape)
    checks.choice(op, "reduction", reduction, ("batchmean", "mean", "sum", "none"))
    temperature = checks.number(op, "temperature", temperature, 0.0, above=True)
    if temperature != 1.0 and not from_logits:
        raise ValueError(
            f"{op}: temperature applies to logits, but from_logits is False, got {temperature:g} "
            "(log-probabilities are logits too)"
        )
    checks.ignore_index(op, ignore_index)
    if labels is not None:
        checks.integer(op, labels=labels)
        checks.shape(op, "labels", labels, input.shape[:-1])
    checks.same(op, "device", input=input, target=target, labels=labels)
    needs_grad = torch.is_grad_enabled()
    if not runs_kernels(input, target) or (needs_grad and target.requires_grad):
        return reference()
    valid = None
    if labels is not None and reduction in ("batchmean", "mean"):
        valid = gradient_scales(_flat(labels), None, None, 1, ignore_index, True)
    options = Options(
        kind, logs or from_logits, from_logits, reduction == "none", divisor(input, labels, reduction), ignore_index,
        beta, temperature,
    )  # fmt: skip
    return _Divergence.apply(input, target, labels, valid, needs_grad and input.requires_grad, tuple(options))
