"""FP8 training as eager code computes it: each factor is rounded, and its product is computed from the rounded values.

This is written independently of the package. The scale of a rowwise factor belongs to the outputs of its product, so
both factors are rounded along the dimension that the product sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def rounded(x: Tensor, recipe: str, dim: int) -> Tensor:
    """Return x with the rounding errors of FP8 in fp64; `dim` is the dimension that the product sums."""
    x = x.detach().float()
    amax = x.abs().amax(dim, keepdim=True) if recipe == "rowwise" else x.abs().amax()
    # A row of zeros has no scale. Tokens without a label have such gradients.
    amax = amax.clamp(min=2.0**-100)
    # torch computes a number divided by a tensor as a product with the rounded inverse, which moves values that lie
    # between two FP8 numbers, as many products of bf16 values do. The division of two tensors is rounded once.
    largest = torch.full_like(amax, torch.finfo(E4M3).max)
    return (x * (largest / amax)).to(E4M3).double() * (amax / largest).double()


class Linear(torch.autograd.Function):
    """y = x W^T with rounded factors."""

    @staticmethod
    def forward(ctx, x, weight, recipe, fp8_dw):
        ctx.save_for_backward(x, weight)
        ctx.options = recipe, fp8_dw
        return (rounded(x, recipe, 1) @ rounded(weight, recipe, 1).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x, weight), (recipe, fp8_dw) = ctx.saved_tensors, ctx.options
        dx = rounded(dy, recipe, 1) @ rounded(weight, recipe, 0)
        if fp8_dw:
            dw = rounded(dy, recipe, 0).t() @ rounded(x, recipe, 0)
        else:
            dw = dy.double().t() @ x.double()
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, fp8_dw: bool) -> Tensor:
    """Compute `fp8_linear` in eager code."""
    y = Linear.apply(x.reshape(-1, x.shape[-1]), weight, recipe, fp8_dw)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], -1)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def glu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kind: str, recipe: str, fp8_dw: bool) -> Tensor:
    """Compute `fp8_glu_mlp` in eager code. gate and up are one layer."""
    both = linear(x, torch.cat((gate, up)), None, recipe, fp8_dw)
    g, u = both.chunk(2, -1)
    return linear(ACTIVATIONS[kind](g) * u, down, None, recipe, fp8_dw)


def experts(
    x: Tensor, up: Tensor, down: Tensor, index: Tensor, weights: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, transposed: bool = False, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Compute experts in FP8 in eager code: each expert is two rowwise layers whose dW are not in FP8."""
    act = {"relu2": lambda h: F.relu(h).square()}.get(activation) or (
        lambda h: ACTIVATIONS[activation](h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
    )
    rows = x.new_zeros(*index.shape, x.shape[1], dtype=torch.promote_types(x.dtype, weights.dtype))
    for e in range(len(up)):
        token, k = torch.where(index == e)
        first, second = (w[e].t() if transposed else w[e] for w in (up, down))
        biases = [None if b is None else b[e] for b in (up_bias, down_bias)]
        if len(token):
            h = linear(x[token], first, biases[0], "rowwise", False)
            z = linear(act(h), second, biases[1], "rowwise", False)
            rows = rows.index_put((token, k), z * weights[token, k, None])
    return rows.sum(1).to(x.dtype)
