r"""Layer normalisation over the last dimension (Ba, Kiros and Hinton, arXiv:1607.06450).

    mean  = mean(x),  rstd = (mean((x - mean)^2) + eps)^-1/2             (fp32)
    y     = w * x_hat + b,  x_hat = (x - mean) * rstd
    dx    = rstd * (g - mean(g) - x_hat * mean(g * x_hat)),  g = dy * w
    dw    = sum_rows(dy * x_hat),  db = sum_rows(dy)

The kernels compute in fp32 and round once. They are in `kernels.py`.

Shapes: M = rows (all leading dimensions), N = features.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.memory.lean import recomputed_by_call
from tigon.ops.norms.kernels import NeededNormGradients, NormOptions, norm_backward, norm_forward
from tigon.ops.norms.norm_config import MAX_FEATURES
from tigon.runtime import checks
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # F.layer_norm accepts no mixture of dtypes on a GPU, and only some on a CPU.
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (x, weight, bias) if t is not None))
    weight, bias = (t if t is None else t.to(dtype) for t in (weight, bias))
    return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)


class _LayerNorm(Node):
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, _, statistics = norm_forward(x, None, weight, bias, NormOptions(eps, 0.0, False, True))
        ctx.save_for_backward(x, weight, statistics)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, statistics = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dtypes = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
        return norm_backward(dy, None, x, weight, statistics, 0.0, NeededNormGradients(needs_dx, *dtypes), None)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension as `F.layer_norm` does. `x`, `weight` and `bias` get gradients.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        weight: [N], or None for no scale.
        bias: [N], or None for no shift.
        eps: The number that is added to the variance.

    Returns:
        [..., N] in `x.dtype`, even if weight and bias have a wider dtype.

    Raises:
        TypeError: `x`, `weight` or `bias` is not a floating-point tensor, or `eps` is not a number.
        ValueError: `x` is a scalar, `weight` or `bias` does not have shape [N] or is on another device, or `eps` is
            negative.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.

    Example:
        >>> x, weight, bias = torch.randn(2, 5, 64), torch.ones(64), torch.zeros(64)
        >>> tigon.layer_norm(x, weight, bias).shape
        torch.Size([2, 5, 64])
    """
    checks.tensor("layer_norm", x=x)
    checks.floating("layer_norm", x=x, weight=weight, bias=bias)
    eps = checks.number("layer_norm", "eps", eps, 0.0)
    if x.dim() == 0:
        raise ValueError("layer_norm: x must have at least one dimension, got a scalar")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.shape("layer_norm", name, parameter, x.shape[-1:])
            checks.same("layer_norm", "device", x=x, **{name: parameter})
    return _layer_norm(x, weight, bias, eps)


@recomputed_by_call
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not runs_kernels(x, weight, bias) or not 0 < x.shape[-1] <= MAX_FEATURES:
        return layer_norm_reference(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `layer_norm`, with the same arguments and the same state dict.

    Args:
        normalized_shape, elementwise_affine, factory: As in `RMSNorm`, with the same errors.
        eps: The number that is added to the variance.
        bias: Whether the module has a bias too. Without a weight it has none.

    Example:
        >>> tigon.LayerNorm(64, bias=False)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, **factory: Any,
    ) -> None:  # fmt: skip
        checks.number("LayerNorm", "eps", eps, 0.0)
        checks.norm_module("LayerNorm", normalized_shape, factory, elementwise_affine=elementwise_affine, bias=bias)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return `layer_norm` of x [..., N]."""
        checks.features("LayerNorm", x, self.normalized_shape[0])
        return layer_norm(x, self.weight, self.bias, self.eps)
