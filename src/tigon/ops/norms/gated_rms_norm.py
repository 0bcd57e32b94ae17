r"""Root-mean-square normalisation and a gate in one kernel, as Mamba 2 and gated delta networks compute them.

    gate last    y = (offset + w) * x_hat * act(gate),  x_hat = x * rstd(x)
    gate first   y = (offset + w) * z_hat,  z = x * act(gate),  z_hat = z * rstd(z)
    rstd(z)      = (mean_group(z^2) + eps)^-1/2                                                             (fp32)

    gate last    dgate = dy * (offset + w) * x_hat * act'(gate),  dx = d(dy * act(gate), x_hat)
    gate first   dgate = dz * x * act'(gate),  dx = dz * act(gate),  dz = d(dy, z_hat)
    d(u, z_hat)  = rstd * (g - z_hat * mean_group(g * z_hat)),  g = u * (offset + w),  and dw = sum_rows(u * z_hat)

A group is all features of a row, or `group_size` of them. Only x, the gate and rstd are saved for backward. The kernels
are in `gated_rms_norm_kernels.py`.

Shapes: M = rows (all leading dimensions), N = features.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.norms.gated_rms_norm_kernels import (
    MAX_GROUP_SIZE,
    GatedNormOptions,
    NeededGatedNormGradients,
    gated_norm_backward,
    gated_norm_forward,
)
from tigon.ops.norms.rms_norm import Rounding, check_norm, rms_norm_reference
from tigon.runtime import checks
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

GateActivation = Literal["silu", "sigmoid"]


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-6, *, activation: GateActivation = "silu",
    gate_first: bool = False, group_size: int | None = None, offset: float = 0.0, rounding: Rounding = "before_weight",
) -> Tensor:  # fmt: skip
    fp32 = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = (F.silu if activation == "silu" else torch.sigmoid)(gate.to(fp32))
    z = x.to(fp32) * factor if gate_first else x
    if group_size is not None:
        z, weight = z.unflatten(-1, (-1, group_size)), weight if weight is None else weight.view(-1, group_size)
    # A gate that follows a norm with rounding after the weight multiplies the unrounded values.
    dtype = x.dtype if gate_first or rounding == "before_weight" else fp32
    y = rms_norm_reference(z, weight, eps, offset=offset, rounding=rounding, dtype=dtype)
    y = y if group_size is None else y.flatten(-2)
    return y if gate_first else (y * factor).to(x.dtype)


class _GatedRMSNorm(Node):
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
        ctx.options = GatedNormOptions(*options)
        y, rstd = gated_norm_forward(x, gate, weight, ctx.options)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        needs = NeededGatedNormGradients(*ctx.needs_input_grad[:3])
        return gated_norm_backward(dy, x, gate, weight, rstd, ctx.options, needs)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float = 1e-6, *, activation: GateActivation = "silu",
    gate_first: bool = False, group_size: int | None = None, offset: float = 0.0, rounding: Rounding = "before_weight",
) -> Tensor:  # fmt: skip
    """Normalise the last dimension by its root mean square, and multiply by `act(gate)`, before or after the norm.

    `x`, `gate` and `weight` get gradients.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        gate: [..., N].
        weight: [N], or None for no scale.
        eps: The number that is added to the mean square.
        activation: "silu" (Mamba 2, Qwen3-Next) or "sigmoid" (Kimi Linear).
        gate_first: True if the gate multiplies `x` before the norm (Mamba 2); False if it multiplies the result
            (Qwen3-Next).
        group_size: The number of features that are normalised together (Zamba 2), or None for all N.
        offset: The number that is added to `weight`, as in `rms_norm`.
        rounding: Where the normalised value is rounded to `x.dtype`: before the multiplication by `weight`, or only
            after it (and after the gate).

    Returns:
        [..., N] in `x.dtype`. With `gate_first` and `rounding="before_weight"`, the dtype is the common dtype of `x`
        and `weight`, which is the dtype of their product.

    Raises:
        TypeError: `x`, `gate` or `weight` is not a floating-point tensor, or `eps` or `offset` is not a number.
        ValueError: `x` is a scalar, `gate` has another shape, `weight` does not have shape [N], two tensors are on
            different devices, an option is unknown, `eps` is negative, or `group_size` does not divide N.

    Source: Dao and Gu, "Transformers are SSMs", arXiv:2405.21060 (gate first); Yang et al., "Gated Delta Networks",
        arXiv:2412.06464 (gate last).

    Example:
        >>> x, gate, weight = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.ones(64)
        >>> tigon.gated_rms_norm(x, gate, weight, gate_first=True, group_size=32).shape
        torch.Size([2, 5, 64])
    """
    op = "gated_rms_norm"
    checks.tensor(op, x=x, gate=gate)
    checks.floating(op, gate=gate)
    eps, offset = check_norm(op, x, weight, eps, offset, rounding)
    checks.shape(op, "gate", gate, x.shape)
    checks.same(op, "device", x=x, gate=gate)
    checks.choice(op, "activation", activation, ("silu", "sigmoid"))
    checks.flag(op, gate_first=gate_first)
    if group_size is not None and x.shape[-1] % checks.size(op, "group_size", group_size):
        raise ValueError(f"{op}: group_size must divide the {x.shape[-1]} features of x, got {group_size}")
    size = x.shape[-1] if group_size is None else group_size
    options = GatedNormOptions(size, eps, offset, activation == "silu", gate_first, rounding == "before_weight")
    return _gated_rms_norm(x, gate, weight, options)


@recomputed_by_call
def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor | None, options: GatedNormOptions) -> Tensor:
    size, eps, offset, is_silu, gate_first, round_first = options
    if runs_kernels(x, gate, weight) and 0 < size <= MAX_GROUP_SIZE:
        return _GatedRMSNorm.apply(x, gate, weight, *options)
    return gated_rms_norm_reference(
        x, gate, weight, eps, activation="silu" if is_silu else "sigmoid", gate_first=gate_first,
        group_size=None if size == x.shape[-1] else size, offset=offset,
        rounding="before_weight" if round_first else "after_weight",
    )  # fmt: skip
