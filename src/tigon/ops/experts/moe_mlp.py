r"""The MLPs of a mixture of experts (Shazeer et al., arXiv:1701.06538), each token through the K that it was sent to.

    y[t] = sum_k w[t, k] * act(x[t] U[e]^T + b[e]) D[e]^T + c[e],    e = index[t, k]

Rows are sorted by expert without waiting for the device, so that the products of an expert are one block of a grouped
product; `tigon.ops.experts.routing` spreads the tokens and sums what comes back. An index of E or more is an expert of
another rank: it adds nothing.

Of the S = T K rows only h = x[t] U^T + b is kept for backward: [S, 2 I], beside x itself. For the row s of (t, k):

    da[s] = dy[t] D                              the weight w[t, k] comes after the product: dw needs da without it
    dh[s], (w a)[s], dw[t, k] = from da[s], h[s], w[t, k]      in one pass, `tigon.ops.experts.activation`
    dD = sum_s dy[t]^T (w a)[s]                  dc = sum_s w[t, k] dy[t]      and dw[t, k] += <dy[t], c>
    dU = sum_s dh[s]^T x[t]                      db = sum_s dh[s]
    dx[t] = sum_k dh[s] U

Each only where it is needed, by the same two products forward and four backward as by autograd; x and dy are spread
again for theirs. An activation of one's own is differentiated by autograd, which keeps what its parts save.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate; S = T K rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tigon.ops.experts.activation import activation_gradients
from tigon.ops.experts.grouped_linear import (
    group_sums,
    grouped_linear,
    grouped_product,
    grouped_weight_gradient,
    rows_of_groups,
)
from tigon.ops.experts.routing import Routing, combine, route, spread
from tigon.ops.mlps.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.mlps.relu2 import relu2, relu2_reference
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.launch import launcher

__all__ = ["ACTIVATIONS", "moe_mlp", "moe_mlp_reference"]

# The op, its reference, and how many features it takes for one that it gives: gate and up are packed as [gate | up].
ACTIVATIONS: dict[str, tuple[Callable, Callable, int]] = {
    "silu": (swiglu, swiglu_reference, 2),
    "gelu": (geglu, geglu_reference, 2),
    "gelu_tanh": (
        lambda x: geglu(x, approximate="tanh"),
        lambda x: geglu_reference(x, approximate="tanh"),
        2,
    ),
    "relu2": (relu2, relu2_reference, 1),
}


# --- reference -----------------------------------------------------------------------------------


def moe_mlp_reference(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    transposed: bool = False, activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:  # fmt: skip
    """Eager definition of `moe_mlp`, expert by expert; the tests' ground truth. It waits for the device."""
    act = ACTIVATIONS[activation][1] if isinstance(activation, str) else activation
    linear = lambda h, w, b, e: h @ (w[e] if transposed else w[e].T) + (0.0 if b is None else b[e])
    rows = x.new_zeros(*top_k_index.shape, x.shape[1], dtype=torch.result_type(down_proj, top_k_weights))
    for e in range(up_proj.shape[0]):
        token, k = torch.where(top_k_index == e)
        h = linear(act(linear(x[token].to(up_proj.dtype), up_proj, up_bias, e)), down_proj, down_bias, e)
        rows = rows.index_put((token, k), h * top_k_weights[token, k, None])
    return rows.sum(1).to(x.dtype)


# --- launchers (no autograd) ---------------------------------------------------------------------


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool) -> Tensor:
    y = grouped_product(x, weight if transposed else weight.mT, routing.ends)
    return y if bias is None else y.add_(bias[routing.group])


def _fake_forward(x, up, down, weights, up_bias, down_bias, slot, order, expert, ends, kind, transposed, keeps):
    h = up.new_empty(order.shape[0], up.shape[2 if transposed else 1]) if keeps else None
    return x.new_empty(x.shape), h


@launcher(fake=_fake_forward)
def moe_forward(
    x: Tensor, up: Tensor, down: Tensor, weights: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    slot: Tensor, order: Tensor, expert: Tensor, ends: Tensor, kind: str, transposed: bool, keeps: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> y [T, H] and, for backward, h [S, 2 I] or None."""
    routing = Routing(slot, order, expert, ends)
    h = _product(spread(x, routing, up.dtype), up, up_bias, routing, transposed)
    a = ACTIVATIONS[kind][0](h)
    h = h if keeps else None
    z = _product(a, down, down_bias, routing, transposed)
    del a
    return combine(z, weights, routing, x.dtype), h


def _fake_backward(
    dy, x, h, up, down, weights, down_bias, slot, order, expert, ends, kind, transposed, needs
):  # fmt: skip
    (experts,), hidden, width = ends.shape, dy.shape[1], h.shape[1]
    inner = width // ACTIVATIONS[kind][2]
    shapes = (width, hidden), (hidden, inner)
    up, down = (h.new_empty(experts, *(s[::-1] if transposed else s)) for s in shapes)
    made = dy.new_empty(dy.shape), up, down, torch.empty_like(weights, memory_format=torch.contiguous_format)
    made += h.new_empty(experts, width), h.new_empty(experts, hidden)
    return tuple(g if need else None for g, need in zip(made, needs, strict=True))


@launcher(fake=_fake_backward)
def moe_backward(
    dy: Tensor, x: Tensor | None, h: Tensor, up: Tensor | None, down: Tensor | None, weights: Tensor,
    down_bias: Tensor | None, slot: Tensor, order: Tensor, expert: Tensor, ends: Tensor, kind: str, transposed: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> gradients of x, up, down, weights, up_bias, down_bias, None where not needed; and inputs for these alone."""
    routing = Routing(slot, order, expert, ends)
    needs_x, needs_up, needs_down, needs_weights, needs_up_bias, needs_down_bias = needs
    needs_dh = needs_x or needs_up or needs_up_bias
    of_weight = lambda a, b: grouped_weight_gradient(*((b, a) if transposed else (a, b)), ends)
    dx = dup = ddown = dweights = dup_bias = ddown_bias = da = None

    rows = spread(dy, routing, h.dtype)  # [S, H]
    if needs_dh or needs_weights:
        da = grouped_product(rows, down.mT if transposed else down, ends)  # [S, I]
    if needs_down_bias:
        ddown_bias = group_sums(rows, ends, weights.flatten()[order])
    if not needs_down:
        del rows
    if da is not None or needs_down:
        exact = weights if down_bias is None else weights.to(_wide(weights))
        dh, wa, dweights = activation_gradients(h, da, exact, routing, kind, needs_dh, needs_down, needs_weights)
    del da
    if dweights is not None and down_bias is not None:
        dweights = (dweights + _products_with_bias(dy, down_bias, routing)).to(weights.dtype)
    if needs_down:
        ddown = of_weight(rows, wa)
        del rows, wa
    if needs_up_bias:
        dup_bias = group_sums(dh, ends)
    if needs_up:
        dup = of_weight(dh, spread(x, routing, h.dtype))
    if needs_x:
        dx = combine(grouped_product(dh, up.mT if transposed else up, ends), None, routing, dy.dtype)
    return dx, dup, ddown, dweights, dup_bias, ddown_bias


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _products_with_bias(dy: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """dy [T, H], bias [E, H] -> [T, K]: dy[t] . bias[e] of each choice, 0 of an expert that is not here."""
    wide = _wide(bias)
    products = dy.new_empty(dy.shape[0], bias.shape[0], dtype=wide)
    torch.mm(dy.to(wide), bias.to(wide).T, out=products)  # into it, because autocast would round the result
    absent = routing.slot >= routing.ends[-1]
    return products.gather(1, routing.group[routing.slot]).masked_fill(absent, 0.0)


# --- autograd ------------------------------------------------------------------------------------


class _MoEMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down, weights, up_bias, down_bias, slot, order, expert, ends, kind, transposed):
        routing = slot, order, expert, ends
        y, h = moe_forward(x, up, down, weights, up_bias, down_bias, *routing, kind, transposed, True)
        needs_x, needs_up, _, needs_weights, needs_up_bias, _ = needs = ctx.needs_input_grad[:6]
        ctx.save_for_backward(
            x if needs_up else None,
            h,
            up if needs_x else None,
            down if needs_x or needs_up or needs_up_bias or needs_weights else None,
            weights,
            down_bias if needs_weights else None,
            *routing,
        )
        ctx.options = kind, transposed, list(needs)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        gradients = moe_backward(dy, *ctx.saved_tensors, *ctx.options)
        return *(g if need else None for g, need in zip(gradients, ctx.options[2], strict=True)), *[None] * 6


# --- public --------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool) -> Tensor:
    y = grouped_linear(x, weight if transposed else weight.mT, routing.ends)
    return y if bias is None else y.add_(rows_of_groups(bias, routing.group, routing.ends))


def moe_mlp(
    x: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    activation: str | Callable[[Tensor], Tensor] = "silu",
) -> Tensor:
    """The weighted sum of the MLPs of K experts for each token, with gradients for all but the indices.

    For backward it keeps `x` and the result of the first product, [T K, 2 I], alone; with an activation of one's own,
    what autograd keeps. Products are in the dtype of the weights, sums over experts in fp32. In bf16 nothing waits for
    the device (compute capability 8.0, torch 2.10, sizes that are multiples of 8); otherwise each grouped product waits
    for the sizes.

    Args:
        x: [T, H], fp32 | bf16 | fp16.
        up_proj: [E, 2 I, H], gate and up packed as [gate | up]; [E, I, H] for an activation without a gate.
        down_proj: [E, H, I].
        top_k_index: [T, K] integers; E and more for experts that are not here.
        top_k_weights: [T, K], of any floating-point dtype.
        up_bias, down_bias: [E, 2 I] and [E, H], or None.
        transposed: The weights are [E, H, 2 I] and [E, I, H].
        activation: "silu", "gelu", "gelu_tanh" (gates of `swiglu` and `geglu`), "relu2" (no gate), or a function of
            [S, 2 I] -> [S, I] that treats each row by itself.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        TypeError: An argument is no tensor, or of no dtype listed.
        ValueError: Shapes do not fit, or devices differ, or `activation` is unknown.

    Source: Shazeer et al., "Outrageously Large Neural Networks", arXiv:1701.06538.

    Example:
        >>> x, up, down = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
        >>> weights, index = torch.rand(5, 4).topk(2)
        >>> tigon.moe_mlp(x, up, down, index, weights).shape
        torch.Size([5, 8])
    """
    op = "moe_mlp"
    checks.tensor(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    checks.floating(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    checks.floating(op, up_bias=up_bias, down_bias=down_bias)
    checks.integer(op, top_k_index=top_k_index)
    checks.flag(op, transposed=transposed)
    if isinstance(activation, str):
        checks.choice(op, "activation", activation, tuple(ACTIVATIONS))
    elif not callable(activation):
        raise TypeError(f"{op}: activation must be a str or a function, got {type(activation).__name__}")
    if x.dim() != 2 or up_proj.dim() != 3 or down_proj.dim() != 3 or top_k_index.dim() != 2:
        shapes = ", ".join(str(tuple(y.shape)) for y in (x, up_proj, down_proj, top_k_index))
        raise ValueError(
            f"{op}: x, up_proj, down_proj and top_k_index must be [T, H], 3-D, 3-D and [T, K], got {shapes}"
        )
    experts, hidden, width = up_proj.shape if transposed else up_proj.mT.shape
    inner = (
        width // ACTIVATIONS[activation][2] if isinstance(activation, str) else down_proj.shape[1 if transposed else 2]
    )
    down = (inner, hidden) if transposed else (hidden, inner)
    checks.shape(op, "x", x, (x.shape[0], hidden))
    checks.shape(op, "down_proj", down_proj, (experts, *down))
    checks.shape(op, "top_k_index", top_k_index, (x.shape[0], top_k_index.shape[1]))
    checks.shape(op, "top_k_weights", top_k_weights, top_k_index.shape)
    if up_bias is not None:
        checks.shape(op, "up_bias", up_bias, (experts, width))
    if down_bias is not None:
        checks.shape(op, "down_bias", down_bias, (experts, hidden))
    checks.same(op, "dtype", up_proj=up_proj, down_proj=down_proj, up_bias=up_bias, down_bias=down_bias)
    checks.same(
        op, "device", x=x, up_proj=up_proj, down_proj=down_proj, top_k_index=top_k_index, top_k_weights=top_k_weights,
        up_bias=up_bias, down_bias=down_bias,
    )  # fmt: skip

    routing = route(top_k_index, experts)
    if isinstance(activation, str):
        tensors = x, up_proj, down_proj, top_k_weights, up_bias, down_bias
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in tensors):
            return _MoEMLP.apply(*tensors, *routing, activation, transposed)
        return moe_forward(*tensors, *routing, activation, transposed, False)[0]
    h = spread(x, routing, up_proj.dtype)
    h = activation(_linear(h, up_proj, up_bias, routing, transposed))
    checks.tensor(op, **{"the result of activation": h})
    checks.shape(op, "the result of activation", h, (top_k_index.numel(), inner))
    h = _linear(h.to(down_proj.dtype), down_proj, down_bias, routing, transposed)
    return combine(h, top_k_weights, routing, x.dtype)
