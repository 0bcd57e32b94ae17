r"""Root-mean-square normalisation over the last dimension (Zhang and Sennrich, arXiv:1910.07467), alone or of a sum.

    rstd  = (mean(x^2) + eps)^-1/2                        (fp32)
    y     = (offset + w) * x * rstd
    dx    = rstd * (g - x_hat * mean(g * x_hat)),  g = dy * (offset + w),  x_hat = x * rstd
    dw    = sum_rows(dy * x_hat)

`add_rms_norm` normalises x + residual and returns the sum too, for the next residual; dx then has the gradient of the
sum added, and is the residual's as well. The kernels are in `norm.py`.

Shapes: M = rows (all leading dimensions), N = features.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from tigon.memory.lean import remade, remember, remembers
from tigon.ops.norms.kernels import WIDEST, norm_again, norm_backward, norm_forward
from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients
from tigon.runtime.device import runs_kernels

__all__ = ["RMSNorm", "add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_passing", "rms_norm_reference"]

Rounding = Literal["before_weight", "after_weight"]  # where x_hat returns to x.dtype: Llama / Gemma, OLMo 2


# --- reference -----------------------------------------------------------------------------------


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight"
) -> Tensor:
    """Eager definition of `rms_norm`; the tests' ground truth and the CPU path."""
    x_hat = x if x.dtype == torch.float64 else x.float()
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if rounding == "after_weight":
        return (x_hat * (offset + weight.to(x_hat.dtype))).to(x.dtype)
    if offset:
        return (x_hat.to(x.dtype).to(x_hat.dtype) * (offset + weight.to(x_hat.dtype))).to(
            torch.promote_types(x.dtype, weight.dtype)
        )
    return weight * x_hat.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> tuple[Tensor, Tensor]:
    """Eager definition of `add_rms_norm`; the tests' ground truth and the CPU path."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset, rounding=rounding), total


# --- autograd ------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    """x -> y, and with `passes_x` x again: the gradient of what becomes of it is added by the kernel that makes dx."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, round_first, passes_x):
        y, _, statistics = norm_forward(x, None, weight, None, eps, offset, False, round_first)
        ctx.save_for_backward(x, weight, statistics)
        ctx.offset = offset
        if not passes_x:
            return y
        keep_none_gradients(ctx)
        passed = x.detach()
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(passed)
        return y, passed

    @staticmethod
    @first_order
    def backward(ctx, dy, dpassed=None):
        x, weight, statistics = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        if dy is None:
            return dpassed, *(None,) * 5
        dw_dtype = weight.dtype if needs_dw else None
        dx, dw, _ = norm_backward(dy, dpassed, x, weight, statistics, ctx.offset, False, needs_dx, dw_dtype, None)
        return dx if needs_dx else None, dw if needs_dw else None, *(None,) * 4


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, round_first, gives_statistics):
        y, total, statistics = norm_forward(x, residual, weight, None, eps, offset, False, round_first)
        ctx.save_for_backward(total, weight, statistics)
        ctx.offset, ctx.dtypes = offset, (x.dtype, residual.dtype)
        keep_none_gradients(ctx)
        if not gives_statistics:
            return y, total
        ctx.mark_non_differentiable(statistics)
        return y, total, statistics

    @staticmethod
    @first_order
    def backward(ctx, dy, dtotal, _=None):
        total, weight, statistics = ctx.saved_tensors
        *needs, needs_dw = ctx.needs_input_grad[:3]
        dz, dw = dtotal, None
        if dy is not None:
            dw_dtype = weight.dtype if needs_dw else None
            dz, dw, _ = norm_backward(
                dy, dtotal, total, weight, statistics, ctx.offset, False, any(needs), dw_dtype, None
            )
        # One tensor serves both inputs, as that of a sum in eager code.
        dx, dresidual = (
            dz.to(dtype) if needed and dz is not None else None for needed, dtype in zip(needs, ctx.dtypes, strict=True)
        )
        return dx, dresidual, dw if needs_dw else None, None, None, None, None


# --- public --------------------------------------------------------------------------------------


def _checked(
    op: str, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: Rounding
) -> tuple[float, float]:
    """eps and offset as floats; refuses what neither op takes."""
    checks.tensor(op, x=x)
    checks.floating(op, x=x, weight=weight)
    checks.choice(op, "rounding", rounding, ("before_weight", "after_weight"))
    eps, offset = checks.number(op, "eps", eps, 0.0), checks.number(op, "offset", offset)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if weight is not None:
        checks.shape(op, "weight", weight, x.shape[-1:])
        checks.same(op, "device", x=x, weight=weight)
    return eps, offset


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight"
) -> Tensor:
    """RMS normalisation of the last dimension, with gradients for `x` and `weight`.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        weight: [N], or None for no scale.
        eps: Added to the mean square.
        offset: Added to `weight`; 1.0 for Gemma, whose weights start at zero.
        rounding: Where the normalised value returns to `x.dtype`: before the multiplication by
            `weight` (Llama) or after it (Gemma, OLMo 2).

    Returns:
        [..., N]. In `x.dtype`; with `rounding="before_weight"` in the common dtype of `x` and `weight`, as
        the product of the two has it.

    Raises:
        TypeError: `x` or `weight` is no floating-point tensor.
        ValueError: `x` is a scalar, `weight` is not of shape [N] or lies on another device, `rounding` is unknown, or
            `eps` is negative.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Example:
        >>> x, weight = torch.randn(2, 5, 64), torch.ones(64)
        >>> tigon.rms_norm(x, weight).shape
        torch.Size([2, 5, 64])
    """
    eps, offset = _checked("rms_norm", x, weight, eps, offset, rounding)
    return _rms_norm(x, weight, eps, offset, rounding)


@remade
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: Rounding) -> Tensor:
    if not runs_kernels(x, weight) or not 0 < x.shape[-1] <= WIDEST:
        return rms_norm_reference(x, weight, eps, offset=offset, rounding=rounding)
    return _RMSNorm.apply(x, weight, eps, offset, rounding == "before_weight", False)


def rms_norm_passing(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight"
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and x again, for the residual: both gradients of x are summed in the kernel of the norm's."""
    if not runs_kernels(x, weight) or not 0 < x.shape[-1] <= WIDEST or torch.compiler.is_compiling():
        return rms_norm(x, weight, eps, offset=offset, rounding=rounding), x
    eps, offset = _checked("rms_norm", x, weight, eps, offset, rounding)
    y, passed = _RMSNorm.apply(x, weight, eps, offset, rounding == "before_weight", True)
    remember(y, _rms_norm, x, weight, eps, offset, rounding)
    return y, passed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> tuple[Tensor, Tensor]:
    """RMS normalisation of `x + residual`, and that sum, with gradients for `x`, `residual` and `weight`.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        residual: [..., N].
        weight: [N], or None for no scale.
        eps: Added to the mean square.
        offset: Added to `weight`, as in `rms_norm`.
        rounding: Where the normalised value returns to the dtype of the sum, as in `rms_norm`.

    Returns:
        y [..., N], `rms_norm` of the sum, and the sum [..., N], rounded to the common dtype of `x` and `residual`.
        Either may be left unused.

    Raises:
        TypeError: `x`, `residual` or `weight` is no floating-point tensor.
        ValueError: `x` is a scalar, `residual` has another shape than `x`, `weight` is not of shape [N], one lies on
            another device, `rounding` is unknown, or `eps` is negative.

    Source: the residual stream of pre-norm transformers, Xiong et al., arXiv:2002.04745; the norm as in `rms_norm`.

    Example:
        >>> x, residual, weight = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.ones(64)
        >>> y, total = tigon.add_rms_norm(x, residual, weight)
        >>> torch.equal(total, x + residual)
        True
    """
    checks.tensor("add_rms_norm", residual=residual)
    checks.floating("add_rms_norm", residual=residual)
    eps, offset = _checked("add_rms_norm", x, weight, eps, offset, rounding)
    checks.shape("add_rms_norm", "residual", residual, x.shape)
    checks.same("add_rms_norm", "device", x=x, residual=residual)
    if not runs_kernels(x, residual, weight) or not 0 < x.shape[-1] <= WIDEST:
        y, total = add_rms_norm_reference(x, residual, weight, eps, offset=offset, rounding=rounding)
        remember(y, _rms_norm, total, weight, eps, offset, rounding)
        return y, total
    round_first = rounding == "before_weight"
    # Of two dtypes Triton may give the weight a layout of its own, and sum for that in another order.
    if not remembers() or (weight is not None and weight.dtype != torch.promote_types(x.dtype, residual.dtype)):
        return _AddRMSNorm.apply(x, residual, weight, eps, offset, round_first, False)
    y, total, statistics = _AddRMSNorm.apply(x, residual, weight, eps, offset, round_first, True)
    remember(y, norm_again, total, weight, statistics, offset, round_first)
    return y, total


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `rms_norm`: same arguments, same state dict.

    Args:
        normalized_shape: N, or a shape of one dimension.
        eps: Added to the mean square; None is the machine epsilon of fp32 (of fp64 for fp64 inputs), as in torch.
        elementwise_affine: Whether there is a weight.

    Example:
        >>> tigon.RMSNorm(64)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, **factory) -> None:
        if eps is not None:
            checks.number("RMSNorm", "eps", eps, 0.0)
        checks.norm_module("RMSNorm", normalized_shape, factory, elementwise_affine=elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)

    def forward(self, x: Tensor) -> Tensor:
        checks.features("RMSNorm", x, self.normalized_shape[0])
        eps = self.eps
        if eps is None:
            checks.floating("RMSNorm", x=x)
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        return rms_norm(x, self.weight, eps, rounding="after_weight")  # as torch rounds
