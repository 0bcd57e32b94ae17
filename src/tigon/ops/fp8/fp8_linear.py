r"""Linear layers whose products run in FP8: y_i = Q(x) Q(W_i)^T + b_i, for several layers of one input.

    dx = Q([dy_1 | dy_2 ...]) Q([W_1; W_2; ...])       one product: its sum is accumulated in fp32 and rounded once
    dW_i = Q(dy_i)^T Q(x)                              or in the dtype of x, without Q
    db_i = sum_rows dy_i

Q rounds a matrix to FP8 with scales that `tigon.ops.fp8.quantisation` computes from its values. The layers share scales
as one layer with all outputs would. x is quantised once, by rows for y and transposed for dW, and so is dy, by rows for
dx and transposed for dW.

The node saves the transposed FP8 copy of x, one byte for each value, if dW is a product in FP8. It saves x itself if dW
is not, and in `tigon.lean`, where x is often recomputed for nothing.

Forward products accumulate with fewer bits, which is faster on Hopper: their error is that of about 14 bits, and
rounding a factor to e4m3 keeps 4. Backward products accumulate in fp32, because dW sums over all tokens.

Shapes: T tokens, H inputs, O outputs of a layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import is_lean
from tigon.ops.fp8.formats import Factor, Fp8Options, check_options, check_sizes
from tigon.ops.fp8.products import emulate_fp8, multiply_fp8
from tigon.ops.fp8.quantisation import Layout, quantise, quantise_reference, quantise_tensor
from tigon.ops.fp8.weights import WeightCache, weight_rows, weight_transposed
from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.op import Node


class _Fp8LinearReference(Node):
    """y = Q(x) Q(W)^T [T, O] and its gradients, with each factor rounded and each product emulated in torch."""

    def forward(ctx: Any, x: Tensor, weight: Tensor, options: Fp8Options) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return emulate_fp8(_factor(x, options), _factor(weight, options), x.dtype)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), options = ctx.saved_tensors, ctx.options
        dx = emulate_fp8(_factor(dy, options), _factor(weight.t(), options), x.dtype)
        if not options.fp8_dw:
            return dx, torch.mm(dy.t(), x).to(weight.dtype)
        return dx, emulate_fp8(_factor(dy.t(), options), _factor(x.t(), options), weight.dtype)


def _factor(x: Tensor, options: Fp8Options) -> Factor:
    """Return a matrix as a factor of a product that sums along its rows."""
    layout = Layout(options.is_rowwise, True, False)
    return quantise_reference(x, layout).factors(layout).copy()


def fp8_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "tensorwise", fp8_dw: bool = True
) -> Tensor:
    """Compute `fp8_linear` in eager torch: the same rounding, and products in fp32."""
    y = _Fp8LinearReference.apply(x.reshape(-1, x.shape[-1]), weight, Fp8Options(recipe, fp8_dw))
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], len(weight))


def quantise_input(x: Tensor, options: Fp8Options, saves_transposed: bool) -> tuple[Factor, Factor | None]:
    """Return the FP8 copy of x [..., H] by rows for the products of forward, and the transposed one if it is saved."""
    copies = quantise_tensor(x, Layout(options.is_rowwise, True, saves_transposed))
    return copies.copy(), copies.transposed


def quantise_again(x: Any, options: Fp8Options, by_rows: bool) -> Factor:
    """Return the FP8 copy of the saved x [T, H] by rows, or the transposed one, in backward."""
    return quantise([x], Layout(options.is_rowwise, by_rows, not by_rows)).copy(by_rows)


def in_autocast_dtype(function: Callable) -> Callable:
    """Decorate a function of x and other arguments: it runs without autocast, on x in the dtype in which autocast
    computes products. Autocast leaves fp64 alone."""

    @functools.wraps(function)
    def run(x: Tensor, *args: Any) -> Any:
        device_type = x.device.type
        if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
            return function(x, *args)
        with torch.autocast(device_type, enabled=False):
            return function(x.to(torch.get_autocast_dtype(device_type)), *args)

    return run


class _Fp8Projections(Node):
    def forward(
        ctx: Any, x: Tensor, options: Fp8Options, cache: WeightCache | None, records: bool, *parameters: Any
    ) -> tuple[Tensor, ...]:
        # The parameters are W_0, b_0, W_1, b_1 and so on.
        weights, biases = parameters[::2], parameters[1::2]
        needs_dx = records and ctx.needs_input_grad[0]
        needs_dw = records and any(ctx.needs_input_grad[4::2])
        saves_x = needs_dw and (not options.fp8_dw or is_lean())
        x_rows, x_transposed = quantise_input(x, options, needs_dw and not saves_x)
        copies = weight_rows(cache, "projections", weights, options.is_rowwise, needs_dx)
        outputs, start = [], 0
        for weight, bias in zip(weights, biases, strict=True):
            stop = start + len(weight)
            y = multiply_fp8(x_rows, copies.rows_of(start, stop), x.dtype, bias, is_fast=True)
            outputs.append(reshape_without_view(y, (*x.shape[:-1], len(weight))))
            start = stop
        ctx.copies = copies if copies.transposed is not None else None
        saved_weights = weights if needs_dx and ctx.copies is None else (None,) * len(weights)
        ctx.save_for_backward(x if saves_x else None, *(x_transposed or (None, None)), *saved_weights)
        ctx.options, ctx.shape, ctx.dtype = options, x.shape, x.dtype
        ctx.widths, ctx.dtypes = [len(weight) for weight in weights], [p if p is None else p.dtype for p in parameters]
        keep_none_gradients(ctx)
        return tuple(outputs)

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        options, widths = ctx.options, ctx.widths
        x, values, scale, *weights = ctx.saved_tensors
        needs_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        needs_dw = any(needs[::2])
        count = ctx.shape[:-1].numel()
        like = next(dy for dy in upstream if dy is not None)
        dys = [
            like.new_zeros(count, width) if dy is None else dy.reshape(-1, width)
            for dy, width in zip(upstream, widths, strict=True)
        ]
        layout = Layout(options.is_rowwise, needs_dx, needs_dw and options.fp8_dw, True)
        dy_rows, dy_transposed = quantise_tensor(like, layout) if len(dys) == 1 else quantise(dys, layout)
        dx = None
        if dy_rows is not None:
            transposed = weight_transposed(ctx.copies, weights, options.is_rowwise)
            dx = multiply_fp8(dy_rows, transposed, ctx.dtype).view(ctx.shape)
        x = None if x is None else x.reshape(-1, ctx.shape[-1])
        x_transposed = None if values is None else Factor(values, scale)
        if dy_transposed is not None and x_transposed is None:
            x_transposed = quantise_again(x, options, by_rows=False)
        gradients: list[Tensor | None] = [None] * len(needs)
        start = 0
        for i, (dy, width) in enumerate(zip(dys, widths, strict=True)):
            stop = start + width
            if upstream[i] is not None and needs[2 * i]:
                gradients[2 * i] = weight_gradient(
                    dy, x, dy_transposed and dy_transposed.rows(start, stop), x_transposed, ctx.dtypes[2 * i]
                )
            if upstream[i] is not None and needs[2 * i + 1]:
                gradients[2 * i + 1] = dy.sum(0).to(ctx.dtypes[2 * i + 1])
            start = stop
        return dx, None, None, None, *gradients


def weight_gradient(
    dy: Any, x: Any, dy_transposed: Factor | None, x_transposed: Factor | None, dtype: torch.dtype
) -> Tensor:
    """Return dW [O, H], in FP8 if there are FP8 factors, and else from dy [T, O] and x [T, H]."""
    if dy_transposed is not None and x_transposed is not None:
        return multiply_fp8(dy_transposed, x_transposed, dtype)
    return torch.mm(dy.t(), x).to(dtype)


@in_autocast_dtype
def _project(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], options: Fp8Options,
    cache: WeightCache | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    pairs = list(zip(weights, biases, strict=True))
    if x.numel() == 0:
        # Without rows there is nothing to quantise. The gradients of the parameters are zero.
        return tuple(F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in pairs)
    cache = None if torch.compiler.is_compiling() else cache
    return _Fp8Projections.apply(x, options, cache, torch.is_grad_enabled(), *[p for pair in pairs for p in pair])


def _check(op: str, x: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor | None]) -> None:
    checks.tensor(op, x=x, **weights)
    checks.floating(op, x=x, **weights, **biases)
    for name, weight in weights.items():
        if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must have shape [O, H] with H of x {tuple(x.shape)}, got {tuple(weight.shape)}"
            )
    for (name, bias), weight in zip(biases.items(), weights.values(), strict=True):
        if bias is not None:
            checks.shape(op, name, bias, weight.shape[:1])
    checks.products(op, x, **weights, **{name: bias for name, bias in biases.items() if bias is not None})
    check_sizes(op, **weights)


def fp8_projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, recipe: str = "tensorwise",
    fp8_dw: bool = True, caches: WeightCache | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return x W_i^T + b_i for layers [O_i, H] of one input x [..., H], as one node whose products run in FP8. They
    share the scales of weights and of upstream gradients, as one layer with all outputs would. Biases are [O_i] or
    None, and results [..., O_i] in the dtype of x. `recipe`, `fp8_dw` and `caches` are those of `fp8_glu_mlp`."""
    op = "fp8_projections"
    if not weights or len(weights) != len(biases):
        raise ValueError(f"{op}: there must be one bias or None for each weight, got {len(weights)} and {len(biases)}")
    named_weights = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    _check(op, x, named_weights, {f"biases[{i}]": bias for i, bias in enumerate(biases)})
    check_options(op, recipe, fp8_dw)
    return _project(x, weights, biases, Fp8Options(recipe, fp8_dw), caches)


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "tensorwise", fp8_dw: bool = True
) -> Tensor:
    """Return x W^T + b, a linear layer whose three products run in FP8. All tensors get gradients.

    This op approximates: x, the weight and the upstream gradient are rounded to FP8, with scales that are computed from
    their values at each call. Sums are fp32. On a device without FP8 units (a CPU, a GPU before Ada), the rounding is
    the same and the products are emulated in fp32, which is slow and meant for tests.

    Args:
        x: [..., H], fp32 | bf16 | fp16, any strides. H must be a multiple of 16, the number of tokens need not be.
        weight: [O, H], like the weight of `nn.Linear`. O must be a multiple of 16.
        bias: [O] or None.
        recipe: "tensorwise" has one scale for each matrix and is fastest. "rowwise" has one for each row of a first
            factor and each column of a second one, so that outliers of a token or of a feature do not take bits from
            the others.
        fp8_dw: Whether the gradient of the weight is a product in FP8 too. It sums over all tokens, and is the product
            that FP8 changes most. With False it is a product in the dtype of x.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        TypeError: An argument is not a floating-point tensor, or an option has another type.
        ValueError: Shapes, devices or dtypes do not fit, H or O is no multiple of 16, or `recipe` is unknown.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.

    Example:
        >>> tigon.fp8_linear(torch.randn(3, 32), torch.randn(64, 32), recipe="rowwise").shape
        torch.Size([3, 64])
    """
    _check("fp8_linear", x, {"weight": weight}, {"bias": bias})
    check_options("fp8_linear", recipe, fp8_dw)
    return _project(x, [weight], [bias], Fp8Options(recipe, fp8_dw))[0]
