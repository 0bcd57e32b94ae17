r"""The MLPs of a mixture of experts (Shazeer et al., arXiv:1701.06538), each token through the K that it was sent to.

    y[t] = sum_k w[t, k] * act(x[t] U[e]^T + b[e]) D[e]^T + c[e],    e = index[t, k]

Rows are sorted by expert without waiting for the device, so that the products of an expert are one block of a grouped
product; `tigon.ops.routing` spreads the tokens and sums what comes back. An index of E or more is an expert of another
rank: it adds nothing.

Shapes: T tokens, K choices each, E experts, H hidden, I intermediate; S = T K rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tigon.ops import check
from tigon.ops.glu import geglu, geglu_reference, swiglu, swiglu_reference
from tigon.ops.grouped_linear import grouped_linear
from tigon.ops.relu2 import relu2, relu2_reference
from tigon.ops.routing import Routing, combine, route, spread

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


# --- public --------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool) -> Tensor:
    y = grouped_linear(x, weight if transposed else weight.mT, routing.ends)
    if bias is None:
        return y
    # The last bias's gradient counts the rows of no expert in: they must be 0, and the product leaves them unwritten.
    return y.add_(bias[routing.expert.clamp(max=bias.shape[0] - 1).long()]).masked_fill(routing.absent, 0.0)


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

    Products are in the dtype of the weights, sums over experts in fp32. In bf16 nothing waits for the device (compute
    capability 8.0, torch 2.10, sizes that are multiples of 8); otherwise each grouped product waits for the sizes.

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
    check.tensor(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    check.floating(op, x=x, up_proj=up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    check.floating(op, up_bias=up_bias, down_bias=down_bias)
    check.integer(op, top_k_index=top_k_index)
    if isinstance(activation, str):
        check.choice(op, "activation", activation, tuple(ACTIVATIONS))
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
    check.shape(op, "x", x, (x.shape[0], hidden))
    check.shape(op, "down_proj", down_proj, (experts, *down))
    check.shape(op, "top_k_index", top_k_index, (x.shape[0], top_k_index.shape[1]))
    check.shape(op, "top_k_weights", top_k_weights, top_k_index.shape)
    if up_bias is not None:
        check.shape(op, "up_bias", up_bias, (experts, width))
    if down_bias is not None:
        check.shape(op, "down_bias", down_bias, (experts, hidden))
    check.same(op, "dtype", up_proj=up_proj, down_proj=down_proj, up_bias=up_bias, down_bias=down_bias)
    check.same(op, "device", x=x, up_proj=up_proj, down_proj=down_proj, top_k_index=top_k_index)

    act = ACTIVATIONS[activation][0] if isinstance(activation, str) else activation
    routing = route(top_k_index, experts)
    h = spread(x, routing, up_proj.dtype)
    h = act(_linear(h, up_proj, up_bias, routing, transposed))
    h = _linear(h.to(down_proj.dtype), down_proj, down_bias, routing, transposed)
    return combine(h, top_k_weights, routing, x.dtype)
