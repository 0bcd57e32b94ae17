r"""The kernels of activations: y = act(x) without a gate, and y = act(gate) * up with one (Shazeer, arXiv:2002.05202).

    silu          act(x) = x * s(x)
    gelu          act(x) = x * (1 + erf(x / sqrt 2)) / 2
    gelu_sigmoid  act(x) = x * s(1.702 x)
    gelu_tanh     act(x) = x * s(2 u),  u = sqrt(2 / pi) * (x + 0.044715 x^3),  because (1 + tanh u) / 2 = s(2 u)
    relu2         act(x) = max(x, 0)^2

    without a gate  dx = dy * act'(x)
    with a gate     dgate = dy * up * act'(gate),  dup = dy * act(gate)

s is the logistic function. The kernels compute in fp32 and round once. `GateOptions` has the numbers of other gates:

    y = s_y * act(min(s_g * gate, limit)) * (max(-limit, min(up, limit)) + offset),  act(x) = x * s(alpha x) for silu

A gradient is 0 where its input exceeds the limit. Shapes: M = rows, N or I = features.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.launch import Plan, launcher, on_device
from tigon.runtime.rows import block_of_row, dense_rows, in_memory_order, plan_blocks


class GateOptions(NamedTuple):
    """The numbers of a gate, and its layout. The defaults are those of `swiglu` and `geglu`."""

    # The factors s_g and s_y.
    gate_scale: float = 1.0
    output_scale: float = 1.0
    # The limit of s_g * gate and of abs(up).
    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0
    is_interleaved: bool = False  # True if gate and up alternate in a packed tensor


PLAIN_GATE = GateOptions()


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr, alpha=None):
    """Return act(x) and act'(x) for x in fp32. NaN stays NaN. `alpha` is None or a number for "silu". The caller
    replaces the gradient of "relu2" by 0 for x <= 0, even if dy is NaN."""
    if KIND == "relu2":
        return tl.where(x <= 0.0, 0.0, x * x), 2.0 * x
    if KIND == "gelu":
        gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * gate, gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if KIND == "gelu_tanh":
        # This is 2 u.
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "gelu_sigmoid":
        inner, slope = 1.702 * x, 1.702
    else:
        inner, slope = x, 1.0
        if alpha is not None:
            inner = alpha * x
    # s and 1 - s come from one exponential, each without cancellation, because the derivative multiplies both by large
    # values.
    e = tl.exp(-tl.abs(inner))
    large = 1.0 / (1.0 + e)
    gate, rest = tl.where(inner >= 0, large, e * large), tl.where(inner >= 0, e * large, large)
    if KIND == "silu":
        return x * gate, gate + inner * (gate * rest)
    return x * gate, gate + x * (gate * rest) * slope


@triton.jit
def _clamp(x, limit):
    """Return min(x, limit). NaN stays NaN, because a comparison with it is False."""
    return tl.where(x > limit, limit, x)


@triton.jit
def _load_pairs(ptr, cols, width, BLOCK: tl.constexpr):
    """Return gate and up of a block of a row in which they alternate, in fp32. They are loaded in the order of memory,
    and split in registers."""
    both = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(ptr + both, mask=both < 2 * width, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(pairs, [BLOCK, 2]))


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    # [M, I] each, or [M, 2 I] if INTERLEAVED. Without a gate, `gate` is x, and `up` is None.
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, stride_y,
    gate_scale, scale, limit, alpha, offset, width, blocks,
    KIND: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    if INTERLEAVED:
        gate, up = _load_pairs(gate_ptr + row * stride_gate, cols, width, BLOCK)
    else:
        gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
        if up_ptr is not None:
            up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is not None:
        gate *= gate_scale
    if LIMITED:
        act, _ = activation_and_slope(_clamp(gate, limit), KIND, alpha)
        up = -_clamp(-_clamp(up, limit), limit) + offset
    else:
        act, _ = activation_and_slope(gate, KIND)
    if up_ptr is not None:
        act = act * up * scale
    tl.store(y_ptr + row * stride_y + cols, act, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,  # as in `_forward_kernel`; y is recomputed, or None
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, stride_y,
    gate_scale, scale, limit, alpha, offset, width, blocks,
    KIND: tl.constexpr, NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr, LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dgate, dup and y for a block, each if it is needed."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        gate, up = _load_pairs(gate_ptr + row * stride_gate, cols, width, BLOCK)
    else:
        gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
        # Only a finite limit needs up for the gradient of up.
        if up_ptr is not None and (NEEDS_DGATE or LIMITED or y_ptr is not None):
            up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is not None:
        gate *= gate_scale
    if LIMITED:
        act, slope = activation_and_slope(_clamp(gate, limit), KIND, alpha)
    else:
        act, slope = activation_and_slope(gate, KIND)
    if up_ptr is not None:
        act *= scale
        dup = dy * act
    if LIMITED:
        # The gradient of a clamp is 0 outside of its range, and for NaN.
        dup = tl.where((up <= limit) & (up >= -limit), dup, 0.0)
        up = -_clamp(-_clamp(up, limit), limit) + offset
    # All inputs are loaded by now, so results may overwrite them.
    if y_ptr is not None:
        tl.store(y_ptr + row * stride_y + cols, act if up_ptr is None else act * up, mask=mask)
    if NEEDS_DGATE:
        dgate = dy * slope if up_ptr is None else dy * up * (slope * gate_scale * scale)
        if LIMITED:
            dgate = tl.where(gate <= limit, dgate, 0.0)
        if KIND == "relu2":
            dgate = tl.where(gate <= 0.0, 0.0, dgate)
    if INTERLEAVED:
        both = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.join(dgate, dup), [2 * BLOCK]).to(dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * stride_dgate + both, pairs, mask=both < 2 * width)
    else:
        if NEEDS_DGATE:
            tl.store(dgate_ptr + row * stride_dgate + cols, dgate, mask=mask)
        if NEEDS_DUP:
            tl.store(dup_ptr + row * stride_dup + cols, dup, mask=mask)


def _plan(
    kernel: JITFunction, count: int, width: int, strides: tuple[int, ...], kind: str, options: GateOptions = PLAIN_GATE,
    block: int | None = None, **flags: bool,
) -> Plan:  # fmt: skip
    """Return the launch of a kernel that computes `count` values, on tensors whose rows have the given strides."""
    *numbers, is_interleaved = options
    is_plain = options.limit == math.inf and options.alpha == 1.0 and options.offset == 0.0
    # erf takes long, so more loads in flight help: 0.93 ms instead of 1.01 (H200, 16384 x 14336).
    block = block or (2048 if kind == "gelu" else 1024)
    return plan_blocks(
        kernel, count // width, width, strides, block, *numbers, KIND=kind, LIMITED=not is_plain,
        INTERLEAVED=is_interleaved, **flags, num_warps=4,
    )  # fmt: skip


# The arguments are those of `_plan` without the kernel.
_plan_forward = functools.lru_cache(4096)(functools.partial(_plan, _forward_kernel))
_plan_backward = functools.lru_cache(4096)(functools.partial(_plan, _backward_kernel))


def _block(x: Tensor) -> int:
    """Return the block without a gate: each thread accesses 16 bytes of each tensor twice. It has not been tuned."""
    return 4096 // x.element_size()


@launcher(fake=lambda x, kind: torch.empty_like(x))
def activation_forward(x: Tensor, kind: str) -> Tensor:
    """Return act(x), with the strides of `x` if `x` has no gaps."""
    result = torch.empty_like(x)
    (x, stride_x), (y, stride_y) = map(dense_rows, in_memory_order(result, x))
    width = x.shape[-1]
    plan = _plan_forward(x.numel(), width, (stride_x, width, stride_y), kind, block=_block(x))
    plan.launch(x, None, y)
    return result


def _run_backward(dy: Tensor, x: Tensor, dx: Tensor, y: Tensor | None, kind: str, strides: tuple[int, ...]) -> None:
    """Write dx and, if it is not None, y. `strides` are those of the rows of dy, x and dx."""
    n, (stride_dy, stride_x, stride_dx) = x.shape[-1], strides
    all_strides = stride_dy, stride_x, n, stride_dx, n, n
    plan = _plan_backward(x.numel(), n, all_strides, kind, block=_block(x), NEEDS_DGATE=True, NEEDS_DUP=False)
    plan.launch(dy, x, None, dx, None, y)


@launcher(fake=lambda dy, x, kind: torch.empty_like(x))
def activation_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return dx for dy and x of the same shape."""
    result = torch.empty_like(x)
    (dy, stride_dy), (x, stride_x), (dx, stride_dx) = map(dense_rows, in_memory_order(result, dy, x))
    _run_backward(dy, x, dx, None, kind, (stride_dy, stride_x, stride_dx))
    return result


@on_device
def activation_backward_into(dy: Tensor, x: Tensor, kind: str, dx: Tensor, y: Tensor | None) -> None:
    """Write dx and, if `y` is a tensor, act(x), all contiguous [M, N]. A result may be the same tensor as dy or x."""
    _run_backward(dy, x, dx, y, kind, (x.shape[-1],) * 3)


def _gated_rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """Return gate and up as rows, and the strides of their rows. Without `up`, `gate` holds both. If they alternate
    there, the first result begins with the first pair, and the second one is not read."""
    gate, stride_gate = dense_rows(gate)
    if up is None:
        gate, up = gate.chunk(2, -1)
        return gate, up, stride_gate, stride_gate
    up, stride_up = dense_rows(up)
    return gate, up, stride_gate, stride_up


def _empty_gated(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    # This takes the host half the time of `new_empty`.
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@launcher(fake=_empty_gated)
def glu_forward(gate: Tensor, up: Tensor | None, kind: str, options: GateOptions) -> Tensor:
    """Return y [..., I] for gate and up [..., I], or for a packed gate [..., 2 I] without up: [gate | up], or both
    alternating if `is_interleaved`."""
    y = _empty_gated(gate, up)
    width = y.shape[-1]
    gate, up, stride_gate, stride_up = _gated_rows(gate, up)
    _plan_forward(y.numel(), width, (stride_gate, stride_up, width), kind, options).launch(gate, up, y)
    return y


def _empty_gradients(gate: Tensor, needs_dgate: bool, needs_dup: bool) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape if needs_dgate else 0), gate.new_empty(gate.shape if needs_dup else 0)


@launcher(fake=_empty_gradients)
def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, options: GateOptions, needs_dgate: bool, needs_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dgate and dup; for a packed input (`up` is None) its gradient [..., 2 I] and an empty tensor. A gradient
    that is not needed is empty."""
    gradients, is_packed = _empty_gradients(gate, needs_dgate, needs_dup), up is None
    dy, stride_dy = dense_rows(dy)
    width = dy.shape[-1]
    gate, up, stride_gate, stride_up = _gated_rows(gate, up)
    if is_packed:
        dgate, dup, stride_dgate, stride_dup = _gated_rows(gradients[0], None)
    else:
        # A gradient that is not needed is not written. `gate` and its stride take its place.
        dgate, stride_dgate = (gradients[0], width) if needs_dgate else (gate, stride_gate)
        dup, stride_dup = (gradients[1], width) if needs_dup else (gate, stride_gate)
    plan = _plan_backward(
        dy.numel(), width, (stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, width), kind, options,
        NEEDS_DGATE=needs_dgate, NEEDS_DUP=is_packed or needs_dup,
    )  # fmt: skip
    plan.launch(dy, gate, up, dgate, dup, None)
    return gradients


@on_device
def glu_backward_into(
    dy: Tensor, gate: Tensor, up: Tensor, kind: str, options: GateOptions, dgate: Tensor, dup: Tensor, y: Tensor | None
) -> None:
    """Write dgate, dup and, if `y` is a tensor, y, all contiguous [M, I]. A result may be the same tensor as dy, gate
    or up."""
    width = gate.shape[-1]
    plan = _plan_backward(gate.numel(), width, (width,) * 6, kind, options, NEEDS_DGATE=True, NEEDS_DUP=True)
    plan.launch(dy, gate, up, dgate, dup, y)
