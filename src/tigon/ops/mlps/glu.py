r"""Gated linear units (Shazeer, arXiv:2002.05202): y = act(gate) * up.

    silu          act(x) = x * s(x)
    gelu          act(x) = x * (1 + erf(x / sqrt 2)) / 2
    gelu_sigmoid  act(x) = x * s(1.702 x), which `tigon.gelu` computes without a gate
    gelu_tanh     act(x) = x * s(2 u),  u = sqrt(2 / pi) * (x + 0.044715 x^3),  because (1 + tanh u) / 2 = s(2 u)

    dgate = dy * up * act'(gate),  dup = dy * act(gate)

s is the logistic function. The kernels compute in fp32 and round once. They also serve MLPs with constant factors
(Falcon H1) and with a limit (DeepSeek V4), y = s_y * act(min(s_g * gate, limit)) * max(-limit, min(up, limit)). A
gradient is 0 where its input exceeds the limit. Shapes: M = rows, I = features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, halves
from tigon.runtime.compat.triton import JITFunction, tl, triton
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launcher, on_device
from tigon.runtime.rows import block_of_row, dense_rows, launch_blocks
from tigon.runtime.tuning import LaunchConfig

Kind = Literal["silu", "gelu", "gelu_tanh"]


class Scaling(NamedTuple):
    """The numbers of a scaled gate: the factors s_g and s_y, and the limit of s_g * gate and of abs(up)."""

    gate: float = 1.0
    output: float = 1.0
    limit: float = math.inf


NO_SCALING = Scaling()


# --- reference -----------------------------------------------------------------------------------


def _unpack(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up. Without `up`, `gate` holds both, packed as [gate | up]."""
    return halves(gate) if up is None else (gate, up)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute `swiglu` in eager torch, for tests and for devices without Triton."""
    gate, up = _unpack(gate, up)
    return F.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Compute `geglu` in eager torch, for tests and for devices without Triton."""
    gate, up = _unpack(gate, up)
    return F.gelu(gate, approximate=approximate) * up


# --- configuration -------------------------------------------------------------------------------


class GLUProblem(NamedTuple):
    """The property that the launch parameters of a gated linear unit depend on."""

    # The activation, one of `Kind`.
    kind: str


@dataclass(frozen=True)
class GLUConfig(LaunchConfig):
    """Launch parameters. A program computes `block` features of a row, or of the whole tensor if it has no gaps."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: GLUProblem, device: Device) -> "GLUConfig":
        """Return a larger block for the activation that computes erf."""
        # erf takes long, so more loads in flight help: 0.93 ms instead of 1.01 (H200, 16384 x 14336).
        return GLUConfig(block=2048 if problem.kind == "gelu" else 1024, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """Return act(x) and act'(x) for x in fp32."""
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
    # s and 1 - s come from one exponential, each without cancellation, because the derivative multiplies both by large
    # values.
    e = tl.exp(-tl.abs(inner))
    large = 1.0 / (1.0 + e)
    gate, rest = tl.where(inner >= 0, large, e * large), tl.where(inner >= 0, e * large, large)
    return x * gate, gate + x * (gate * rest) * slope


@triton.jit
def _clamp(x, limit):
    """Return min(x, limit). NaN stays NaN, because a comparison with it is False."""
    return tl.where(x > limit, limit, x)


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, stride_y, gate_scale, scale, limit,  # [M, I] each
    width, blocks,
    KIND: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y for a block."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    gate *= gate_scale
    if LIMITED:
        gate, up = _clamp(gate, limit), -_clamp(-_clamp(up, limit), limit)
    act, _ = activation_and_slope(gate, KIND)
    tl.store(y_ptr + row * stride_y + cols, act * up * scale, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,  # [M, I] each; y is recomputed, or None
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, stride_y, gate_scale, scale, limit,
    width, blocks,
    KIND: tl.constexpr, NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dgate, dup and y for a block, each if it is needed."""
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    gate *= gate_scale
    act, slope = activation_and_slope(_clamp(gate, limit) if LIMITED else gate, KIND)
    act *= scale
    # Only a finite limit needs up for the gradient of up.
    if NEEDS_DGATE or LIMITED or y_ptr is not None:
        up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    dact = dy * act
    if LIMITED:
        dact = tl.where((up <= limit) & (up >= -limit), dact, 0.0)
        slope = tl.where(gate <= limit, slope, 0.0)
        up = -_clamp(-_clamp(up, limit), limit)
    # All inputs are loaded by now, so results may overwrite them.
    if y_ptr is not None:
        tl.store(y_ptr + row * stride_y + cols, act * up, mask=mask)
    if NEEDS_DGATE:
        tl.store(dgate_ptr + row * stride_dgate + cols, dy * up * (slope * gate_scale * scale), mask=mask)
    if NEEDS_DUP:
        tl.store(dup_ptr + row * stride_dup + cols, dact, mask=mask)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _unpack_rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """Return gate and up as rows, and the strides of their rows."""
    gate, stride_gate = dense_rows(gate)
    if up is None:
        gate, up = gate.chunk(2, -1)
        return gate, up, stride_gate, stride_gate
    up, stride_up = dense_rows(up)
    return gate, up, stride_gate, stride_up


def _launch(
    kernel: JITFunction, kind: str, tensors: tuple[Any, ...], strides: tuple[int, ...], scaling: Scaling,
    **flags: bool,
) -> None:  # fmt: skip
    """Run a kernel on tensors [M, I], or None, whose rows have the given strides."""
    config = GLUConfig.choose(GLUProblem(kind), device_of(tensors[0]))
    launch_blocks(
        kernel, tensors[0].shape[-1], tensors, strides, config.block, *scaling,
        KIND=kind, **flags, num_warps=config.num_warps,
    )  # fmt: skip


def _empty_forward(gate: Tensor, up: Tensor | None) -> Tensor:
    """Allocate what `glu_forward` returns."""
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


@launcher(fake=_empty_forward)
def glu_forward(gate: Tensor, up: Tensor | None, kind: str, scaling: Scaling) -> Tensor:
    """Return y [..., I].

    `gate` and `up` are [..., I], or packed [gate | up] [..., 2 I] and None.
    """
    y = _empty_forward(gate, up)
    gate, up, stride_gate, stride_up = _unpack_rows(gate, up)
    _launch(
        _forward_kernel,
        kind,
        (gate, up, y),
        (stride_gate, stride_up, y.shape[-1]),
        scaling,
        LIMITED=math.isfinite(scaling.limit),
    )
    return y


def _empty_backward(gate: Tensor, needs_dgate: bool, needs_dup: bool) -> tuple[Tensor, Tensor]:
    """Allocate what `glu_backward` returns."""
    return gate.new_empty(gate.shape if needs_dgate else 0), gate.new_empty(gate.shape if needs_dup else 0)


@launcher(fake=_empty_backward)
def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, scaling: Scaling, needs_dgate: bool, needs_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dgate and dup, from dy [..., I] and the inputs of the forward. A gradient that is not needed is empty.

    For a packed input, they are [dgate | dup] [..., 2 I] and an empty tensor.
    """
    gradients, is_packed = _empty_backward(gate, needs_dgate, needs_dup), up is None
    dy, stride_dy = dense_rows(dy)
    gate, up, stride_gate, stride_up = _unpack_rows(gate, up)
    if is_packed:
        dgate, dup, stride_dgate, stride_dup = _unpack_rows(gradients[0], None)
    else:
        # A gradient that is not needed is not written. `gate` and its stride take its place.
        dgate, stride_dgate = (gradients[0], dy.shape[-1]) if needs_dgate else (gate, stride_gate)
        dup, stride_dup = (gradients[1], dy.shape[-1]) if needs_dup else (gate, stride_gate)
    _launch(
        _backward_kernel, kind, (dy, gate, up, dgate, dup, None),
        (stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, gate.shape[-1]), scaling,
        NEEDS_DGATE=needs_dgate, NEEDS_DUP=is_packed or needs_dup, LIMITED=math.isfinite(scaling.limit),
    )  # fmt: skip
    return gradients


@on_device
def glu_backward_into(
    dy: Tensor, gate: Tensor, up: Tensor, kind: str, scaling: Scaling, dgate: Tensor, dup: Tensor, y: Tensor | None
) -> None:
    """Write dgate, dup and, if `y` is a tensor, y.

    All tensors are contiguous [M, I]. A result may be the same tensor as dy, gate or up.
    """
    tensors = (dy, gate, up, dgate, dup, y)
    strides = (gate.shape[-1],) * 6
    is_limited = math.isfinite(scaling.limit)
    _launch(_backward_kernel, kind, tensors, strides, scaling, NEEDS_DGATE=True, NEEDS_DUP=True, LIMITED=is_limited)


# --- autograd ------------------------------------------------------------------------------------


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: Kind) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return glu_forward(gate, up, kind, NO_SCALING)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup = ctx.needs_input_grad[:2]
        dgate, dup = glu_backward(dy, gate, up, ctx.kind, NO_SCALING, needs_dgate, needs_dup)
        return dgate if needs_dgate else None, dup if needs_dup else None, None


# --- public --------------------------------------------------------------------------------------


def _glu(op: str, kind: Kind, reference: Callable, gate: Tensor, up: Tensor | None) -> Tensor:
    """Check the arguments of `op` and compute it."""
    checks.tensor(op, gate=gate)
    checks.floating(op, gate=gate, up=up)
    if up is not None:
        checks.shape(op, "up", up, gate.shape)
        checks.same(op, "device", gate=gate, up=up)
        checks.same(op, "dtype", gate=gate, up=up)
    elif gate.dim() == 0 or gate.shape[-1] % 2:
        raise ValueError(f"{op}: packed gate and up must have an even last dimension, got shape {tuple(gate.shape)}")
    return _activate_and_multiply(gate, up, kind, reference)


@recomputed_by_call
def _activate_and_multiply(gate: Tensor, up: Tensor | None, kind: Kind, reference: Callable) -> Tensor:
    if not runs_kernels(gate) or gate.dim() == 0 or gate.shape[-1] == 0:
        return reference(gate, up)
    return _GLU.apply(gate, up, kind)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up. Both get gradients.

    Args:
        gate: [..., I], fp32 | bf16 | fp16, any strides. Without `up` it is [..., 2 I], packed as [gate | up].
        up: [..., I], or None.

    Returns:
        [..., I] in the dtype of `gate`.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes, dtypes or devices differ, or a packed tensor has an odd last dimension.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Example:
        >>> tigon.swiglu(torch.randn(3, 8), torch.randn(3, 8)).shape
        torch.Size([3, 8])
        >>> tigon.swiglu(torch.randn(3, 16)).shape
        torch.Size([3, 8])
    """
    return _glu("swiglu", "silu", swiglu_reference, gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Return gelu(gate) * up. Both get gradients.

    Args:
        gate: [..., I], fp32 | bf16 | fp16, any strides. Without `up` it is [..., 2 I], packed as [gate | up].
        up: [..., I], or None.
        approximate: "none" is the exact GELU, and "tanh" the approximation of Gemma, as in `F.gelu`.

    Returns:
        [..., I] in the dtype of `gate`.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes, dtypes or devices differ, a packed tensor has an odd last dimension, or `approximate` is
            unknown.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> tigon.geglu(torch.randn(3, 8), torch.randn(3, 8), approximate="tanh").shape
        torch.Size([3, 8])
    """
    checks.choice("geglu", "approximate", approximate, ("none", "tanh"))
    reference = lambda gate, up: geglu_reference(gate, up, approximate=approximate)
    return _glu("geglu", "gelu_tanh" if approximate == "tanh" else "gelu", reference, gate, up)
