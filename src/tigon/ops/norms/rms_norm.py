r"""Root-mean-square normalisation of an input, or of a sum of two (Zhang and Sennrich, arXiv:1910.07467).

`add_rms_norm` normalises x + residual, and also returns the sum, which is the next residual. The gradient of the sum is
then added to dx, and dx is also the gradient of the residual. `kernels.py` has the kernels and the formulas.

Shapes: M = rows (all leading dimensions), N = features.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.memory.lean import recomputed_by_call, register_recomputation, registers_recomputations
from tigon.ops.norms.kernels import NeededNormGradients, NormOptions, norm_backward, norm_forward, recompute_norm
from tigon.ops.norms.norm_config import MAX_FEATURES
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.counters import zero_number
from tigon.runtime.device import runs_kernels
from tigon.runtime.maxima import attach_maximum, records_maxima
from tigon.runtime.op import Node

# The point at which x_hat is rounded to the dtype of x: before the multiplication by the weight in Llama, after it in
# Gemma and OLMo 2.
Rounding = Literal["before_weight", "after_weight"]


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, rounding: Rounding = "before_weight",
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute `rms_norm` in eager torch. The normalised value is rounded to `dtype`, by default that of x."""
    dtype = x.dtype if dtype is None else dtype
    x_hat = x if x.dtype == torch.float64 else x.float()
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(dtype)
    if rounding == "after_weight":
        return (x_hat * (offset + weight.to(x_hat.dtype))).to(dtype)
    if offset:
        return (x_hat.to(dtype).to(x_hat.dtype) * (offset + weight.to(x_hat.dtype))).to(
            torch.promote_types(dtype, weight.dtype)
        )
    return weight * x_hat.to(dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset, rounding=rounding), total


class _RMSNorm(Node):
    """Compute y of x, or of x + residual, and return the first `count` of y, the normalised tensor and the statistics.
    The kernel that computes the gradient of the normalised tensor adds the gradient of that output."""

    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, options: NormOptions, finds_maximum: bool,
        count: int,
    ) -> Any:  # fmt: skip
        y, total, statistics = norm_forward(x, residual, weight, None, options)
        ctx.save_for_backward(x if residual is None else total, weight, statistics)
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        ctx.offset, ctx.finds_maximum = options.offset, finds_maximum
        if count == 1:
            return y
        keep_none_gradients(ctx)
        if residual is None:
            total = x.detach()
            if not ctx.needs_input_grad[0]:
                ctx.mark_non_differentiable(total)
        if count == 2:
            return y, total
        ctx.mark_non_differentiable(statistics)
        return y, total, statistics

    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None, dstatistics: None = None
    ) -> tuple[Tensor | None, ...]:
        z, weight, statistics = ctx.saved_tensors
        needs_dx, needs_dresidual, needs_dw = ctx.needs_input_grad[:3]
        dz, dw = dtotal, None
        if dy is not None:
            needs_dz = needs_dx or needs_dresidual
            maximum = zero_number(z) if ctx.finds_maximum and needs_dz and records_maxima() else None
            needed = NeededNormGradients(needs_dz, weight.dtype if needs_dw else None, None)
            dz, dw, _ = norm_backward(dy, dtotal, z, weight, statistics, ctx.offset, needed, maximum)
            if maximum is not None:
                attach_maximum(dz, maximum)
        if dz is None:
            return None, None, dw
        # Both inputs get the same tensor, as the inputs of a sum do in eager code.
        x_dtype, residual_dtype = ctx.dtypes
        dx = dz if dz.dtype == x_dtype else dz.to(x_dtype)
        return dx, dz if dz.dtype == residual_dtype else dz.to(residual_dtype), dw


class _AddRMSNorm(_RMSNorm):
    """The node of a sum, which has its own name in a graph."""


def check_norm(
    op: str, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: Rounding
) -> tuple[float, float]:
    """Check the arguments that all RMS norms share, and return eps and offset as floats."""
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
    """Normalise the last dimension by its root mean square. `x` and `weight` get gradients.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        weight: [N], or None for no scale.
        eps: The number that is added to the mean square.
        offset: The number that is added to `weight`. It is 1.0 for Gemma, whose weights start at zero.
        rounding: Where the normalised value is rounded to `x.dtype`: before the multiplication by `weight` (Llama) or
            after it (Gemma, OLMo 2).

    Returns:
        [..., N] in `x.dtype`. With `rounding="before_weight"`, the dtype is the common dtype of `x` and `weight`, which
        is the dtype of their product.

    Raises:
        TypeError: `x` or `weight` is not a floating-point tensor, or `eps` or `offset` is not a number.
        ValueError: `x` is a scalar, `weight` does not have shape [N] or is on another device, `rounding` is unknown, or
            `eps` is negative.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Example:
        >>> x, weight = torch.randn(2, 5, 64), torch.ones(64)
        >>> tigon.rms_norm(x, weight).shape
        torch.Size([2, 5, 64])
    """
    eps, offset = check_norm("rms_norm", x, weight, eps, offset, rounding)
    return _rms_norm(x, weight, eps, offset, rounding, False)


def rms_norm_of_layer(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float, rounding: Rounding, finds_maximum: bool = False
) -> Tensor:
    """Return `rms_norm` of checked arguments. With `finds_maximum`, backward finds the maximum of dx
    (`tigon.runtime.maxima`)."""
    return _rms_norm(x, weight, float(eps), offset, rounding, finds_maximum)


@recomputed_by_call
def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: Rounding, finds_maximum: bool
) -> Tensor:
    if not runs_kernels(x, weight) or not 0 < x.shape[-1] <= MAX_FEATURES:
        return rms_norm_reference(x, weight, eps, offset=offset, rounding=rounding)
    return _RMSNorm.apply(x, None, weight, NormOptions(eps, offset, rounding == "before_weight"), finds_maximum, 1)


def rms_norm_with_input(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float, rounding: Rounding, finds_maximum: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm_of_layer(x, ...)`, and x for use as the residual, whose gradient dx then contains."""
    if not runs_kernels(x, weight) or not 0 < x.shape[-1] <= MAX_FEATURES or torch.compiler.is_compiling():
        return _rms_norm(x, weight, float(eps), offset, rounding, False), x
    eps = float(eps)
    options = NormOptions(eps, offset, rounding == "before_weight")
    y, residual = _RMSNorm.apply(x, None, weight, options, finds_maximum, 2)
    register_recomputation(y, _rms_norm, x, weight, eps, offset, rounding, finds_maximum)
    return y, residual


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise `x + residual` by its root mean square, and return that sum too.

    `x`, `residual` and `weight` get gradients.

    Args:
        x, residual: [..., N], fp32 | bf16 | fp16, any strides.
        weight, eps, offset, rounding: As in `rms_norm`.

    Returns:
        y [..., N], which is `rms_norm` of the sum, and the sum [..., N], rounded to the common dtype of `x` and
        `residual`. Either may be left unused.

    Raises:
        TypeError: As in `rms_norm`, also for `residual`.
        ValueError: As in `rms_norm`, or `residual` has another shape or device than `x`.

    Source: the residual stream of pre-norm transformers, Xiong et al., arXiv:2002.04745; the norm as in `rms_norm`.

    Example:
        >>> x, residual, weight = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.ones(64)
        >>> y, total = tigon.add_rms_norm(x, residual, weight)
        >>> torch.equal(total, x + residual)
        True
    """
    checks.tensor("add_rms_norm", residual=residual)
    checks.floating("add_rms_norm", residual=residual)
    eps, offset = check_norm("add_rms_norm", x, weight, eps, offset, rounding)
    checks.shape("add_rms_norm", "residual", residual, x.shape)
    checks.same("add_rms_norm", "device", x=x, residual=residual)
    return add_rms_norm_of_layer(x, residual, weight, eps, offset=offset, rounding=rounding)


def add_rms_norm_of_layer(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, offset: float, rounding: Rounding,
    finds_maximum: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `add_rms_norm` of checked arguments. With `finds_maximum`, backward finds the maximum of the gradient of
    the sum."""
    eps = float(eps)
    if not runs_kernels(x, residual, weight) or not 0 < x.shape[-1] <= MAX_FEATURES:
        y, total = add_rms_norm_reference(x, residual, weight, eps, offset=offset, rounding=rounding)
        register_recomputation(y, _rms_norm, total, weight, eps, offset, rounding, False)
        return y, total
    round_first = rounding == "before_weight"
    arguments = x, residual, weight, NormOptions(eps, offset, round_first), finds_maximum
    # If the weight has another dtype than the sum, Triton may choose another layout, and so another order of summation.
    if not registers_recomputations() or (
        weight is not None and weight.dtype != torch.promote_types(x.dtype, residual.dtype)
    ):
        return _AddRMSNorm.apply(*arguments, 2)
    y, total, statistics = _AddRMSNorm.apply(*arguments, 3)
    register_recomputation(y, recompute_norm, total, weight, statistics, offset, round_first)
    return y, total


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `rms_norm`, with the same arguments and the same state dict.

    Args:
        normalized_shape: N, or a shape of one dimension.
        eps: The number that is added to the mean square. None is the machine epsilon of fp32 (of fp64 for fp64 inputs),
            as in torch.
        elementwise_affine: Whether the module has a weight.
        factory: The `device` and the `dtype` of the weight.

    Raises:
        TypeError: An argument has another type. The forward raises it if its input is not a floating-point tensor.
        ValueError: `eps` is negative, `normalized_shape` has several dimensions, or `factory` has another option or an
            unknown device. The forward raises it if its input does not end in N features.

    Example:
        >>> tigon.RMSNorm(64)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        **factory: Any,
    ) -> None:
        if eps is not None:
            checks.number("RMSNorm", "eps", eps, 0.0)
        checks.norm_module("RMSNorm", normalized_shape, factory, elementwise_affine=elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return `rms_norm` of x [..., N]."""
        checks.features("RMSNorm", x, self.normalized_shape[0])
        eps = self.eps
        if eps is None:
            checks.floating("RMSNorm", x=x)
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        # The module of torch also rounds after the multiplication by the weight.
        return rms_norm(x, self.weight, eps, rounding="after_weight")
