r"""Gated linear units (Shazeer, arXiv:2002.05202): y = act(gate) * up, and clamped gates.

`activation_kernels.py` has the formulas and the kernels. The gate of GPT-OSS, DeepSeek V4 and MiniMax M3 is SwiGLU with
clamped inputs:

    g = min(gate, limit),  u = max(-limit, min(up, limit)),  y = g * s(alpha g) * (u + offset)

Its op saves h = [gate | up], from which autograd would save up to six tensors of the size of y.

Shapes: I = features of y; a packed input is [..., 2 I].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mlps.activation_kernels import PLAIN_GATE, GateOptions, glu_backward, glu_forward
from tigon.runtime import checks
from tigon.runtime.autograd import halves
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

Kind = Literal["silu", "gelu", "gelu_tanh"]


def _unpack(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up. Without `up`, `gate` holds both, packed as [gate | up]."""
    return halves(gate) if up is None else (gate, up)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = _unpack(gate, up)
    return F.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    gate, up = _unpack(gate, up)
    return F.gelu(gate, approximate=approximate) * up


class _GLU(Node):
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: str, *options: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.options = kind, GateOptions(*options) if options else PLAIN_GATE
        return glu_forward(gate, up, kind, ctx.options)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup = ctx.needs_input_grad[:2]
        return glu_backward(dy, gate, up, ctx.kind, ctx.options, needs_dgate, needs_dup)


@recomputed_by_call
def _activate_and_multiply(gate: Tensor, up: Tensor | None, kind: str, reference: Callable, *options: Any) -> Tensor:
    if not runs_kernels(gate) or gate.dim() == 0 or gate.shape[-1] == 0:
        return reference(gate, up)
    return _GLU.apply(gate, up, kind, *options)


@dataclass(frozen=True)
class ClampedGate:
    """A clamped gate: a function of h [..., 2 I] that returns y [..., I]. h gets a gradient."""

    limit: float
    # None means 1, computed as `F.silu` in the reference.
    alpha: float | None = None
    offset: float = 0.0
    is_interleaved: bool = False  # True if gate and up alternate in h

    def __call__(self, h: Tensor) -> Tensor:
        alpha = 1.0 if self.alpha is None else float(self.alpha)
        options = GateOptions(
            limit=float(self.limit), alpha=alpha, offset=float(self.offset), is_interleaved=self.is_interleaved
        )
        return _activate_and_multiply(h, None, "silu", self.reference, *options)

    def reference(self, h: Tensor, up: None = None) -> Tensor:
        """Compute the gate in eager torch, for recognition and for devices without Triton."""
        gate, up_values = (h[..., ::2], h[..., 1::2]) if self.is_interleaved else halves(h)
        gate, up_values = gate.clamp(max=self.limit), up_values.clamp(min=-self.limit, max=self.limit)
        act = F.silu(gate) if self.alpha is None else gate * torch.sigmoid(gate * self.alpha)
        return act * (up_values + self.offset if self.offset else up_values)

    def __str__(self) -> str:
        return f"clamped swiglu, limit {self.limit:g}"


def _glu(op: str, kind: Kind, reference: Callable, gate: Tensor, up: Tensor | None) -> Tensor:
    checks.tensor(op, gate=gate)
    checks.floating(op, gate=gate, up=up)
    if up is not None:
        checks.shape(op, "up", up, gate.shape)
        checks.same(op, "device", gate=gate, up=up)
        checks.same(op, "dtype", gate=gate, up=up)
    elif gate.dim() == 0 or gate.shape[-1] % 2:
        raise ValueError(f"{op}: packed gate and up must have an even last dimension, got shape {tuple(gate.shape)}")
    return _activate_and_multiply(gate, up, kind, reference)


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
        gate, up: As in `swiglu`.
        approximate: "none" is the exact GELU, and "tanh" the approximation of Gemma, as in `F.gelu`.

    Returns:
        [..., I] in the dtype of `gate`.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: As in `swiglu`, or `approximate` is unknown.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> tigon.geglu(torch.randn(3, 8), torch.randn(3, 8), approximate="tanh").shape
        torch.Size([3, 8])
    """
    checks.choice("geglu", "approximate", approximate, ("none", "tanh"))
    reference = lambda gate, up: geglu_reference(gate, up, approximate=approximate)
    return _glu("geglu", "gelu_tanh" if approximate == "tanh" else "gelu", reference, gate, up)
