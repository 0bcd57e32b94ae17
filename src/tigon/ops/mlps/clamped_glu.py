r"""The gate of GPT-OSS, DeepSeek V4 and MiniMax M3: SwiGLU with clamped inputs.

    g = min(gate, limit),  u = max(-limit, min(up, limit)),  y = g * s(alpha g) * (u + offset)

    dgate = dy * (u + offset) * s(alpha g) * (1 + alpha g (1 - s(alpha g))),  0 where gate > limit
    dup   = dy * g * s(alpha g),                                              0 where |up| > limit

s is the logistic function. The kernels compute in fp32 and round once. They save h, from which autograd would save up
to six tensors of the size of y. gate and up are the halves of h, or its even and its odd features ("interleaved").

Shapes: M = rows, I = features of y; h is [M, 2 I].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.runtime.autograd import first_order, halves
from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.rows import block_of_row
from tigon.runtime.tuning import LaunchConfig


@dataclass(frozen=True)
class ClampedGate:
    """A clamped gate: a function of h [..., 2 I] that returns y [..., I]. h gets a gradient."""

    limit: float
    # None stands for 1, with the bits of `F.silu` in the reference.
    alpha: float | None = None
    offset: float = 0.0
    # True if gate and up alternate in h.
    is_interleaved: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        return _clamped_glu(h, self)

    def reference(self, h: Tensor) -> Tensor:
        """Compute the gate in eager torch, for recognition and for devices without Triton."""
        gate, up = (h[..., ::2], h[..., 1::2]) if self.is_interleaved else halves(h)
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        act = F.silu(gate) if self.alpha is None else gate * torch.sigmoid(gate * self.alpha)
        return act * (up + self.offset if self.offset else up)

    def __str__(self) -> str:
        return f"clamped swiglu, limit {self.limit:g}"


# --- configuration -------------------------------------------------------------------------------


class ClampedGLUProblem(NamedTuple):
    """The size that the launch parameters depend on."""

    # Bytes of an element.
    itemsize: int


@dataclass(frozen=True)
class ClampedGLUConfig(LaunchConfig):
    """Launch parameters. A program computes `block` features of a row of y."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: ClampedGLUProblem, device: Device) -> "ClampedGLUConfig":
        """Return a block with which each thread accesses 16 bytes of y, and 32 bytes of h."""
        # Not measured. The floor is the traffic: the forward reads h and writes y (3 M I elements), the backward reads
        # h and dy and writes dh (5 M I elements).
        return ClampedGLUConfig(block=2048 // problem.itemsize, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _load_clamped(h_ptr, row, cols, mask, width, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Return gate and up of a block, in fp32 and not clamped."""
    if INTERLEAVED:
        # The pairs are loaded in the order of memory, and split in registers.
        start = tl.min(cols, 0)
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(h_ptr + row * 2 * width + both, mask=both < 2 * width, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    else:
        gate = tl.load(h_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _logistic(x):
    """Return s(x) and 1 - s(x), each without cancellation."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    return tl.where(x >= 0, large, e * large), tl.where(x >= 0, e * large, large)


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    h_ptr, y_ptr, limit, alpha, offset, width, blocks,  # [M, 2 I], [M, I]
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    gate, up = _load_clamped(h_ptr, row, cols, mask, width, INTERLEAVED, BLOCK)
    # A comparison with NaN is False, so NaN stays NaN.
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    s, _ = _logistic(alpha * g)
    tl.store(y_ptr + row * width + cols, g * s * (u + offset), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, h_ptr, dh_ptr, limit, alpha, offset, width, blocks,  # [M, I], [M, 2 I], [M, 2 I]
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dh for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    gate, up = _load_clamped(h_ptr, row, cols, mask, width, INTERLEAVED, BLOCK)
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    s, rest = _logistic(alpha * g)
    dgate = dy * (u + offset) * (s + alpha * g * (s * rest))
    dup = dy * (g * s)
    # The gradient of a clamp is 0 outside of its range, and for NaN.
    dgate = tl.where(gate <= limit, dgate, 0.0)
    dup = tl.where((up <= limit) & (up >= -limit), dup, 0.0)
    if INTERLEAVED:
        both = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.join(dgate, dup), [2 * BLOCK])
        tl.store(dh_ptr + row * 2 * width + both, pairs.to(dh_ptr.dtype.element_ty), mask=both < 2 * width)
    else:
        tl.store(dh_ptr + row * 2 * width + cols, dgate, mask=mask)
        tl.store(dh_ptr + row * 2 * width + width + cols, dup, mask=mask)


# --- launchers (contiguous tensors, no autograd) -------------------------------------------------


def _launch(kernel: JITFunction, tensors: tuple[Tensor, ...], y: Tensor, gate: ClampedGate) -> None:
    """Run a kernel on tensors with the rows of y."""
    config = ClampedGLUConfig.choose(ClampedGLUProblem(y.element_size()), device_of(y))
    width = y.shape[-1]
    blocks = -(-width // config.block)
    alpha = 1.0 if gate.alpha is None else gate.alpha
    launch(
        kernel, y.numel() // width * blocks, *tensors, float(gate.limit), float(alpha), float(gate.offset), width,
        blocks, INTERLEAVED=gate.is_interleaved, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip


def _empty_output(h: Tensor, limit: float, alpha: float, offset: float, is_interleaved: bool) -> Tensor:
    return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))


@launcher(fake=_empty_output)
def clamped_glu_forward(h: Tensor, limit: float, alpha: float, offset: float, is_interleaved: bool) -> Tensor:
    """Return y."""
    y = _empty_output(h, limit, alpha, offset, is_interleaved)
    _launch(_forward_kernel, (h.contiguous(), y), y, ClampedGate(limit, alpha, offset, is_interleaved))
    return y


@launcher(fake=lambda dy, h, limit, alpha, offset, is_interleaved: h.new_empty(h.shape))
def clamped_glu_backward(
    dy: Tensor, h: Tensor, limit: float, alpha: float, offset: float, is_interleaved: bool
) -> Tensor:
    """Return dh."""
    dh, dy = h.new_empty(h.shape), dy.contiguous()
    _launch(_backward_kernel, (dy, h.contiguous(), dh), dy, ClampedGate(limit, alpha, offset, is_interleaved))
    return dh


# --- autograd ------------------------------------------------------------------------------------


class _ClampedGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(h)
        ctx.options = options
        return clamped_glu_forward(h, *options)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        return clamped_glu_backward(dy, h, *ctx.options), None, None, None, None


@recomputed_by_call
def _clamped_glu(h: Tensor, gate: ClampedGate) -> Tensor:
    if not runs_kernels(h) or not h.numel():
        return gate.reference(h)
    alpha = 1.0 if gate.alpha is None else float(gate.alpha)
    return _ClampedGLU.apply(h, float(gate.limit), alpha, float(gate.offset), gate.is_interleaved)
