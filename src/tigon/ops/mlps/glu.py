r"""Gated linear units (Shazeer, arXiv:2002.05202): y = act(gate) * up.

    silu       act(x) = x * s(x)
    gelu       act(x) = x * (1 + erf(x / sqrt 2)) / 2
    gelu_tanh  act(x) = x * s(2 u),  u = sqrt(2 / pi) * (x + 0.044715 x^3),  because (1 + tanh u) / 2 = s(2 u)

    dgate = dy * up * act'(gate),  dup = dy * act(gate)

s is the logistic function. Everything in fp32, rounded once. Shapes: M = rows, I = features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launcher, on_device
from tigon.runtime.rows import block_of_row, dense_rows, launch_blocks
from tigon.runtime.tuning import LaunchConfig

__all__ = ["geglu", "geglu_reference", "swiglu", "swiglu_reference"]

Kind = Literal["silu", "gelu", "gelu_tanh"]


# --- reference -----------------------------------------------------------------------------------


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return gate.chunk(2, -1) if up is None else (gate, up)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Eager definition of `swiglu`; the tests' ground truth and the CPU path."""
    gate, up = _halves(gate, up)
    return F.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Eager definition of `geglu`; the tests' ground truth and the CPU path."""
    gate, up = _halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up


# --- configuration -------------------------------------------------------------------------------


class GLUProblem(NamedTuple):
    """What the launch parameters of a gated linear unit depend on."""

    kind: Kind


@dataclass(frozen=True)
class GLUConfig(LaunchConfig):
    """Launch parameters: a program takes `block` features of one row (or of the whole tensor, if it has no gaps)."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: GLUProblem, device: Device) -> "GLUConfig":
        # erf takes long enough to want more loads in flight: 0.93 ms for 1.01 (H200, 16384 x 14336).
        return GLUConfig(block=2048 if problem.kind == "gelu" else 1024, num_warps=4)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """x fp32 -> act(x), act'(x)."""
    if KIND == "gelu":
        gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * gate, gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if KIND == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 u
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        inner, slope = x, 1.0
    # s and 1 - s from one exponential, each without cancellation: the derivative multiplies both by large values.
    e = tl.exp(-tl.abs(inner))
    large = 1.0 / (1.0 + e)
    gate, rest = tl.where(inner >= 0, large, e * large), tl.where(inner >= 0, e * large, large)
    return x * gate, gate + x * (gate * rest) * slope


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, stride_y, width, blocks,  # [M, I] each
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    act, _ = activation_and_slope(gate, KIND)
    tl.store(y_ptr + row * stride_y + cols, act * up, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,  # [M, I] each; y, made again, or None
    stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, stride_y, width, blocks,
    KIND: tl.constexpr, NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols, mask = block_of_row(width, blocks, BLOCK)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    act, slope = activation_and_slope(gate, KIND)
    if NEEDS_DGATE or y_ptr is not None:
        up = tl.load(up_ptr + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    # All is read by now: results may be written over it.
    if y_ptr is not None:
        tl.store(y_ptr + row * stride_y + cols, act * up, mask=mask)
    if NEEDS_DGATE:
        tl.store(dgate_ptr + row * stride_dgate + cols, dy * up * slope, mask=mask)
    if NEEDS_DUP:
        tl.store(dup_ptr + row * stride_dup + cols, dy * act, mask=mask)


# --- launchers (any strides, no autograd) --------------------------------------------------------


def _dense_halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """gate and up as rows, and the strides of these."""
    gate, stride = dense_rows(gate)
    if up is None:
        return *gate.chunk(2, -1), stride, stride
    up, stride_up = dense_rows(up)
    return gate, up, stride, stride_up


def _launch(kernel, kind: str, tensors: tuple[Tensor, ...], strides: tuple[int, ...], **flags: bool) -> None:
    config = GLUConfig.choose(GLUProblem(kind), device_of(tensors[0]))
    launch_blocks(
        kernel, tensors[0].shape[-1], tensors, strides, config.block, KIND=kind, **flags, num_warps=config.num_warps
    )


def _fake_forward(gate, up, kind):
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


@launcher(fake=_fake_forward)
def glu_forward(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """gate, up [..., I], or packed [gate | up] [..., 2 I] and None -> act(gate) * up [..., I]."""
    y = _fake_forward(gate, up, kind)
    gate, up, stride_gate, stride_up = _dense_halves(gate, up)
    _launch(_forward_kernel, kind, (gate, up, y), (stride_gate, stride_up, y.shape[-1]))
    return y


def _fake_backward(dy, gate, up, kind, needs_dgate, needs_dup):
    return tuple(gate.new_empty(gate.shape if needed else 0) for needed in (needs_dgate, needs_dup))


@launcher(fake=_fake_backward)
def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, needs_dgate: bool, needs_dup: bool
) -> tuple[Tensor, Tensor]:
    """dy [..., I], gate and up -> dgate and dup, empty where not needed; packed: [dgate | dup] [..., 2 I] and empty."""
    gradients, packed = _fake_backward(dy, gate, up, kind, needs_dgate, needs_dup), up is None
    dy, stride_dy = dense_rows(dy)
    gate, up, stride_gate, stride_up = _dense_halves(gate, up)
    if packed:
        *halves, stride_dgate, stride_dup = _dense_halves(gradients[0], None)
    else:  # what is not needed is not written: `gate` and its stride stand in
        halves = [made if made.numel() else gate for made in gradients]
        stride_dgate, stride_dup = (dy.shape[-1] if made.numel() else stride_gate for made in gradients)
    _launch(
        _backward_kernel, kind, (dy, gate, up, *halves, None),
        (stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, gate.shape[-1]),
        NEEDS_DGATE=needs_dgate, NEEDS_DUP=packed or needs_dup,
    )  # fmt: skip
    return gradients


@on_device
def glu_backward_into(
    dy: Tensor, gate: Tensor, up: Tensor, kind: str, dgate: Tensor, dup: Tensor, y: Tensor | None
) -> None:
    """dy, gate, up -> dgate, dup and y = act(gate) * up again, if it is given: contiguous all, each of [M, I].

    Results may be dy, gate or up themselves.
    """
    tensors = (dy, gate, up, dgate, dup, y)
    _launch(_backward_kernel, kind, tensors, (gate.shape[-1],) * 6, NEEDS_DGATE=True, NEEDS_DUP=True)


# --- autograd ------------------------------------------------------------------------------------


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, kind):
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return glu_forward(gate, up, kind)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        dgate, dup = glu_backward(dy, gate, up, ctx.kind, *needs)
        return dgate if needs[0] else None, dup if needs[1] else None, None


# --- public --------------------------------------------------------------------------------------


def _glu(op: str, kind: Kind, reference, gate: Tensor, up: Tensor | None) -> Tensor:
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
    """silu(gate) * up, with gradients for both.

    Args:
        gate: [..., I], fp32 | bf16 | fp16, any strides; without `up`, gate and up packed as [..., 2 I] = [gate | up].
        up: [..., I], or None.

    Returns:
        [..., I] in the dtype of `gate`.

    Raises:
        TypeError: An argument is no floating-point tensor.
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
    """gelu(gate) * up, with gradients for both.

    Args:
        gate: [..., I], fp32 | bf16 | fp16, any strides; without `up`, gate and up packed as [..., 2 I] = [gate | up].
        up: [..., I], or None.
        approximate: "none" is the exact GELU, "tanh" the approximation that Gemma uses, as in `F.gelu`.

    Returns:
        [..., I] in the dtype of `gate`.

    Raises:
        TypeError: An argument is no floating-point tensor.
        ValueError: Shapes, dtypes or devices differ, or `approximate` is unknown.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> tigon.geglu(torch.randn(3, 8), torch.randn(3, 8), approximate="tanh").shape
        torch.Size([3, 8])
    """
    checks.choice("geglu", "approximate", approximate, ("none", "tanh"))
    reference = lambda gate, up: geglu_reference(gate, up, approximate=approximate)
    return _glu("geglu", "gelu_tanh" if approximate == "tanh" else "gelu", reference, gate, up)
