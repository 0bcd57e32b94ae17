"""The launchers of `moe_mlp`: its forward, its first product and its backward, without autograd.

`tigon.ops.experts.moe_mlp` has the formulas. With `ExpertCopies.in_fp8`, the two products of forward, and those of
backward that are gradients of rows, run in FP8.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate; S = T K rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.experts.activation import NeededActivationGradients, activation_gradients
from tigon.ops.experts.arguments import ACTIVATIONS, ExpertOptions, ExpertParameters
from tigon.ops.experts.choice_order import Routing
from tigon.ops.experts.differentiated import add_bias, product
from tigon.ops.experts.fp8_products import (
    ExpertCopies,
    fp8_row_product,
    fp8_token_product,
    quantise_activated,
    quantise_rows,
)
from tigon.ops.experts.grouped_linear import group_sums, grouped_product, grouped_weight_gradient
from tigon.ops.experts.routing import combine, dot_products, spread, spread_weighted
from tigon.runtime.launch import launcher


class SavedExperts(NamedTuple):
    """The tensors that the forward saves for backward. One that no needed gradient depends on is None."""

    x: Tensor | None
    h: Tensor | None
    weights: Tensor
    up: Tensor | None
    down: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    routing: Routing


class NeededMoEGradients(NamedTuple):
    x: bool
    up: bool
    down: bool
    weights: bool
    up_bias: bool
    down_bias: bool


class MoEGradients(NamedTuple):
    x: Tensor | None
    up: Tensor | None
    down: Tensor | None
    weights: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def _inputs(x: Tensor, weights: Tensor, routing: Routing, dtype: torch.dtype, options: ExpertOptions) -> Tensor:
    """Return the inputs of the experts [S, H]."""
    return spread_weighted(x, weights, routing, dtype) if options.weight_inputs else spread(x, routing, dtype)


def _empty_first_product(x: Tensor, up: Tensor, routing: Routing, options: ExpertOptions) -> Tensor:
    return up.new_empty(routing.order.shape[0], up.shape[2 if options.transposed else 1])


@launcher(fake=_empty_first_product)
def moe_first_product(
    x: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, routing: Routing, options: ExpertOptions,
    copies: ExpertCopies,
) -> Tensor:  # fmt: skip
    """Return h [S, 2 I] or [S, I], with the bits that it has in `moe_forward`."""
    if not copies.in_fp8:
        return product(_inputs(x, weights, routing, up.dtype, options), up, up_bias, routing, options.transposed)
    factors = weights if options.weight_inputs else None
    return add_bias(
        fp8_token_product(x, factors, up, copies.up, routing, by_rows=not options.transposed), up_bias, routing
    )


def _empty_forward(
    x: Tensor, parameters: ExpertParameters, routing: Routing, options: ExpertOptions, saves_h: bool
) -> tuple[Tensor, Tensor | None]:
    return x.new_empty(x.shape), _empty_first_product(x, parameters.up, routing, options) if saves_h else None


@launcher(fake=_empty_forward)
def moe_forward(
    x: Tensor, weights: Tensor, parameters: ExpertParameters, routing: Routing, options: ExpertOptions, saves_h: bool,
    copies: ExpertCopies,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y [T, H] and, if backward needs it, h [S, 2 I] or [S, I]."""
    up, down, up_bias, down_bias = parameters
    h = moe_first_product(x, weights, up, up_bias, routing, options, copies)
    saved_h = h if saves_h else None
    if copies.in_fp8:
        rows = quantise_activated(h, options.kind)
        del h
        z = fp8_row_product(rows, down, copies.down, routing.ends, by_rows=not options.transposed)
        z = add_bias(z, down_bias, routing)
        del rows
    else:
        a = ACTIVATIONS[options.kind][0](h)
        del h
        z = product(a, down, down_bias, routing, options.transposed)
        del a
    return combine(z, None if options.weight_inputs else weights, routing, x.dtype), saved_h


def _empty_backward(dy: Tensor, saved: SavedExperts, options: ExpertOptions, needs: NeededMoEGradients) -> MoEGradients:
    h: Any = saved.h
    (experts,), hidden, width = saved.routing.ends.shape, dy.shape[1], h.shape[1]
    inner = width // ACTIVATIONS[options.kind][2]
    up_shape, down_shape = (width, hidden), (hidden, inner)
    if options.transposed:
        up_shape, down_shape = up_shape[::-1], down_shape[::-1]
    return MoEGradients(
        x=dy.new_empty(dy.shape) if needs.x else None,
        up=h.new_empty(experts, *up_shape) if needs.up else None,
        down=h.new_empty(experts, *down_shape) if needs.down else None,
        weights=torch.empty_like(saved.weights, memory_format=torch.contiguous_format) if needs.weights else None,
        up_bias=h.new_empty(experts, width) if needs.up_bias else None,
        down_bias=h.new_empty(experts, hidden) if needs.down_bias else None,
    )


@launcher(fake=_empty_backward)
def moe_backward(
    dy: Tensor, saved: SavedExperts, options: ExpertOptions, needs: NeededMoEGradients, overwrites_h: bool,
    copies: ExpertCopies,
) -> MoEGradients:  # fmt: skip
    """Return the gradients that are needed, from dy [T, H] and what the forward saved, with h. With `overwrites_h`, the
    kernel writes the gradient of h into its memory."""
    tensors: Any = saved
    x, h, weights, up, down, _, down_bias, routing = tensors
    ends, transposed, weight_inputs = routing.ends, options.transposed, options.weight_inputs
    needs_dinputs = needs.x or (weight_inputs and needs.weights)
    needs_dh = needs_dinputs or needs.up or needs.up_bias
    # The weights that multiply the outputs of the experts.
    output_weights = torch.ones_like(weights) if weight_inputs else weights
    gradient_of_weight = lambda inputs, doutputs: grouped_weight_gradient(
        *((inputs, doutputs) if transposed else (doutputs, inputs)), ends
    )
    dx = dup = ddown = dweights = dup_bias = ddown_bias = da = dh = wa = None
    rows: Any = None

    needs_dweights = needs.weights and not weight_inputs
    needs_da = needs_dh or needs_dweights
    if copies.in_fp8 and needs_da:
        da = fp8_token_product(dy, None, down, copies.down, routing, by_rows=transposed)  # [S, I]
    if not copies.in_fp8 or needs.down or needs.down_bias:
        rows = spread(dy, routing, h.dtype)  # [S, H]
    if not copies.in_fp8 and needs_da:
        da = grouped_product(rows, down.mT if transposed else down, ends)  # [S, I]
    if needs.down_bias:
        ddown_bias = group_sums(rows, ends, output_weights.flatten()[routing.order])
    if not needs.down:
        rows = None
    if da is not None or needs.down:
        # The products with the bias are added to dw before it is rounded.
        factors = output_weights if down_bias is None else output_weights.to(_wide_dtype(weights))
        activation_needs = NeededActivationGradients(needs_dh, needs.down, needs_dweights)
        dh, wa, dweights = activation_gradients(h, da, factors, routing, options.kind, activation_needs, overwrites_h)
    del da
    if dweights is not None and down_bias is not None:
        dweights = (dweights + _products_with_bias(dy, down_bias, routing)).to(weights.dtype)
    if wa is not None:
        ddown = gradient_of_weight(wa, rows)
        rows = wa = None
    if dh is not None and needs.up_bias:
        dup_bias = group_sums(dh, ends)
    if dh is not None and needs.up:
        dup = gradient_of_weight(_inputs(x, weights, routing, h.dtype, options), dh)
    if dh is not None and needs_dinputs:
        if copies.in_fp8:
            dinputs = fp8_row_product(quantise_rows(dh), up, copies.up, ends, by_rows=transposed)  # [S, H]
        else:
            dinputs = grouped_product(dh, up.mT if transposed else up, ends)
        if needs.x:
            dx = combine(dinputs, weights if weight_inputs else None, routing, dy.dtype)
        if weight_inputs and needs.weights:
            dweights = dot_products(x, dinputs, weights, routing)
    return MoEGradients(dx, dup, ddown, dweights, dup_bias, ddown_bias)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _products_with_bias(dy: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """Return dy[t] . bias[e] [T, K] for each choice, from dy [T, H] and bias [E, H]; 0 for experts of other ranks."""
    wide_dtype = _wide_dtype(bias)
    products = dy.new_empty(dy.shape[0], bias.shape[0], dtype=wide_dtype)
    # Autocast would round the result of a product without `out`.
    torch.mm(dy.to(wide_dtype), bias.to(wide_dtype).T, out=products)
    absent = routing.slot >= routing.ends[-1]
    return products.gather(1, routing.group[routing.slot]).masked_fill(absent, 0.0)
