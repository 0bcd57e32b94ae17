r"""The MLPs of a mixture of experts (Shazeer et al., arXiv:1701.06538). Each token passes through K of them.

    y[t] = sum_k w[t, k] * act(x[t] U[e]^T + b[e]) D[e]^T + c[e],    e = index[t, k]

Rows are sorted by expert without waiting for the device, so the products of an expert are one block of a grouped
product. `tigon.ops.experts.routing` spreads the tokens and sums the results. An index below 0, or of E or more, is an
expert of another rank, and adds nothing.

The forward saves only x [T, H] and h = x[t] U^T + b, which is [S, 2 I] for the S = T K rows. In `lean(mlp=True)` it
saves only x, and backward repeats the product that computes h. For the row s of (t, k):

    da[s] = dy[t] D                              without the weight w[t, k], because dw needs da without it
    dh[s], (w a)[s], dw[t, k]                    one pass over da[s], h[s] and w[t, k]: `tigon.ops.experts.activation`
    dD = sum_s dy[t]^T (w a)[s]                  dc = sum_s w[t, k] dy[t]      and dw[t, k] += <dy[t], c>
    dU = sum_s dh[s]^T x[t]                      db = sum_s dh[s]
    dx[t] = sum_k dh[s] U

Each gradient is computed only if it is needed. There are as many grouped products as with autograd, two in the forward
and four in the backward.
x and dy are spread again for the products of backward. Llama 4 weighs the inputs of the experts instead of their
outputs: x[t] above becomes w[t, k] x[t], and w leaves the sum. Then dw[t, k] = <x[t], dh[s] U>, and dx[t] is the sum of
w[t, k] dh[s] U. If the activation is a function of the user, autograd differentiates it, and each operator of the
function saves its own tensors. `lean` then recomputes the rows of x, and `lean(mlp=True)` also h.

With `moe_mlp_in_fp8`, the products h, a D^T, dy D and dh U round their factors to FP8
(`tigon.ops.experts.fp8_products`). The op saves the same tensors.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate; S = T K rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.memory.lean import recomputes_mlp
from tigon.ops.experts.arguments import ACTIVATIONS, ExpertOptions, ExpertParameters, check_activated, check_experts
from tigon.ops.experts.choice_order import Routing, route
from tigon.ops.experts.differentiated import differentiated_product, first_product
from tigon.ops.experts.fp8_products import Fp8Source, find_copies
from tigon.ops.experts.moe_launchers import (
    NeededMoEGradients,
    SavedExperts,
    moe_backward,
    moe_first_product,
    moe_forward,
)
from tigon.ops.experts.routing import combine
from tigon.ops.fp8.formats import check_sizes
from tigon.ops.fp8.weights import WeightCache
from tigon.ops.mlps.gated_node import check_version, save_gated
from tigon.runtime import checks
from tigon.runtime.autograd import may_overwrite_saved
from tigon.runtime.op import Node


def moe_mlp_reference(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    transposed: bool = False, activation: str | Callable[[Tensor], Tensor] = "silu", weight_inputs: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `moe_mlp` in eager torch, expert by expert, for tests. This waits for the device."""
    act = ACTIVATIONS[activation][1] if isinstance(activation, str) else activation
    linear = lambda h, w, b, e: h @ (w[e] if transposed else w[e].T) + (0.0 if b is None else b[e])
    rows = x.new_zeros(*top_k_index.shape, x.shape[1], dtype=torch.result_type(down_proj, top_k_weights))
    for e in range(up_proj.shape[0]):
        token, k = torch.where(top_k_index == e)
        inputs, factors = x[token], top_k_weights[token, k, None]
        if weight_inputs:
            inputs, factors = inputs * factors, torch.ones_like(factors)
        h = linear(act(linear(inputs.to(up_proj.dtype), up_proj, up_bias, e)), down_proj, down_bias, e)
        rows = rows.index_put((token, k), h * factors)
    return rows.sum(1).to(x.dtype)


class _MoEMLP(Node):
    def forward(
        ctx: Any, options: ExpertOptions, saves_h: bool, in_fp8: bool, cache: WeightCache | None, *tensors: Any
    ) -> Tensor:
        # The tensors are x, up, down, the weights of the router, the two biases, and those of the routing.
        x, up, down, weights, up_bias, down_bias, *matrices = tensors
        parameters, routing = ExpertParameters(up, down, up_bias, down_bias), Routing(*matrices)
        copies = find_copies(in_fp8, cache, up, down, by_rows=not options.transposed)
        y, h = moe_forward(x, weights, parameters, routing, options, saves_h, copies)
        needs = NeededMoEGradients(*ctx.needs_input_grad[4:10])
        needs_dweights_of_inputs = options.weight_inputs and needs.weights
        saved = SavedExperts(
            x=x if needs.up or needs_dweights_of_inputs or not saves_h else None, h=h if saves_h else None,
            weights=weights, up=up if needs.x or needs_dweights_of_inputs or not saves_h else None,
            down=down if needs.x or needs.up or needs.up_bias or needs.weights else None,
            up_bias=None if saves_h else up_bias,
            down_bias=down_bias if needs.weights and not options.weight_inputs else None, routing=routing,
        )  # fmt: skip
        ctx.is_compiled = torch.compiler.is_compiling()
        if ctx.is_compiled:
            ctx.save_for_backward(*saved[:-1], *routing)
        else:
            save_gated(ctx, h, saves_h, False, *saved[:-1], *routing)
        ctx.options, ctx.needs, ctx.in_fp8, ctx.cache = options, needs, in_fp8, cache
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, h, weights, up, down, up_bias, down_bias, *matrices = ctx.saved_tensors
        saved = SavedExperts(x, h, weights, up, down, up_bias, down_bias, Routing(*matrices))
        options, needs = ctx.options, ctx.needs
        # An operator in a compiled graph does not write to its inputs.
        overwrites_h = not ctx.is_compiled
        if h is None:
            copies = find_copies(ctx.in_fp8, ctx.cache, up, None, by_rows=not options.transposed)
            saved = saved._replace(h=moe_first_product(x, weights, up, up_bias, saved.routing, options, copies))
        elif overwrites_h:
            check_version("moe_mlp", ctx, h)
            overwrites_h = ctx.may_overwrite and may_overwrite_saved(h)
            if overwrites_h:
                # If this backward raises an error, another attempt must not read the overwritten tensor.
                torch.autograd.graph.increment_version(h)
        needs_dinputs = needs.x or (options.weight_inputs and needs.weights)
        copies = find_copies(ctx.in_fp8, ctx.cache, up if needs_dinputs else None, down, by_rows=options.transposed)
        return *(None,) * 4, *moe_backward(dy, saved, options, needs, overwrites_h, copies)


def moe_mlp(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None, transposed: bool = False,
    activation: str | Callable[[Tensor], Tensor] = "silu", weight_inputs: bool = False,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the MLPs of K experts for each token. All tensors but the indices get gradients.

    The op saves only `x` and the result of the first product, [T K, 2 I], for backward. In `tigon.lean(mlp=True)` it
    saves only `x`, and backward repeats the first product. If `activation` is a function, each operator of the function
    also saves its own tensors.

    Products are in the dtype of the experts' weights, and sums over experts in fp32. The host never waits for the
    device if the dtype is bf16, the compute capability is 8.0 or higher, torch is 2.10 or newer, and the sizes are
    multiples of 8. Otherwise each grouped product waits for the sizes of the groups.

    Args:
        x: [T, H], fp32 | bf16 | fp16.
        up_proj: [E, 2 I, H], with gate and up packed as [gate | up], or [E, I, H] for an activation without a gate.
        down_proj: [E, H, I].
        top_k_index: [T, K] integers. An index below 0, or of E or more, is an expert of another rank.
        top_k_weights: [T, K] in any floating-point dtype.
        up_bias, down_bias: [E, 2 I] and [E, H], or None.
        transposed: Whether the weights are [E, H, 2 I] and [E, I, H].
        activation: "silu", "gelu" or "gelu_tanh" (the gates of `swiglu` and `geglu`), "relu2" (no gate), or a function
            from [S, 2 I] to [S, I] that computes each row separately.
        weight_inputs: Whether `top_k_weights` multiply the inputs of the experts (Llama 4) instead of their outputs.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        TypeError: An argument is not a tensor or has another dtype, or `activation` is neither a str nor a function.
        ValueError: Shapes do not fit, devices differ, the experts' parameters differ in dtype, or `activation` is
            unknown.

    Source: Shazeer et al., "Outrageously Large Neural Networks", arXiv:1701.06538.

    Example:
        >>> x, up, down = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
        >>> weights, index = torch.rand(5, 4).topk(2)
        >>> tigon.moe_mlp(x, up, down, index, weights).shape
        torch.Size([5, 8])
    """
    parameters = ExpertParameters(up_proj, down_proj, up_bias, down_bias)
    call = _ExpertCall("moe_mlp", activation, transposed, weight_inputs, False, None)
    return _run(call, x, parameters, top_k_index, top_k_weights)


def moe_mlp_in_fp8(
    x: Tensor, parameters: ExpertParameters, top_k_index: Tensor, top_k_weights: Tensor, *, transposed: bool = False,
    activation: str | Callable[[Tensor], Tensor] = "silu", cache: WeightCache | None = None,
) -> Tensor:  # fmt: skip
    """Return `moe_mlp` with its forward products and those of dX in FP8, with a scale for each row of a factor. The
    gradients of the weights are not rounded to FP8. H, I and the width of the first product are multiples of 16.
    `cache` holds the FP8 copies "up" and "down" of these weights only; without it, each product makes its copy and
    frees it. Where torch has no grouped FP8 products, they are emulated, and the host waits."""
    cache = None if torch.compiler.is_compiling() else cache
    call = _ExpertCall("moe_mlp_in_fp8", activation, transposed, False, True, cache)
    return _run(call, x, parameters, top_k_index, top_k_weights)


class _ExpertCall(NamedTuple):
    """The options of a call of `moe_mlp`, or of `moe_mlp_in_fp8` if `in_fp8` is True."""

    op: str
    activation: str | Callable[[Tensor], Tensor]
    transposed: bool
    weight_inputs: bool
    in_fp8: bool
    cache: WeightCache | None


def _run(
    call: _ExpertCall, x: Tensor, parameters: ExpertParameters, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    op, activation, transposed, weight_inputs, in_fp8, cache = call
    sizes = check_experts(op, x, parameters, top_k_index, top_k_weights, transposed, activation)
    checks.flag(op, weight_inputs=weight_inputs)
    routing = route(top_k_index, sizes.experts)
    up, down, up_bias, down_bias = parameters
    # Without rows or experts there is nothing to quantise.
    in_fp8 = in_fp8 and top_k_index.numel() > 0 and sizes.experts > 0
    if in_fp8:
        check_sizes(op, up_proj=up[0], down_proj=down[0])
    if isinstance(activation, str):
        options = ExpertOptions(activation, transposed, weight_inputs)
        tensors = x, up, down, top_k_weights, up_bias, down_bias
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in tensors):
            return _MoEMLP.apply(options, not recomputes_mlp(), in_fp8, cache, *tensors, *routing)
        copies = find_copies(in_fp8, cache, up, down, by_rows=not transposed)
        return moe_forward(x, top_k_weights, parameters, routing, options, False, copies)[0]
    up_fp8, down_fp8 = (Fp8Source(name, cache) if in_fp8 else None for name in ("up", "down"))
    h = activation(first_product(x, top_k_weights, up, up_bias, routing, transposed, weight_inputs, up_fp8))
    h = check_activated(op, h, (top_k_index.numel(), sizes.inner))
    h = differentiated_product(h.to(down.dtype), down, down_bias, routing, transposed, down_fp8)
    return combine(h, None if weight_inputs else top_k_weights, routing, x.dtype)
