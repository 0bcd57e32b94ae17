r"""Linear layers with the same input as one node of autograd: y_i = x W_i^T + b_i.

    dx = sum_i dy_i W_i        each product adds to the previous one, in fp32 (beta = 1)
    dW_i = dy_i^T x,           db_i = sum_rows dy_i

Autograd would write each dy_i W_i and then add them one by one. The query, key and value projections of an attention
are such layers.

Shapes: T tokens, H hidden, O outputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime import checks
from tigon.runtime.autograd import keep_none_gradients
from tigon.runtime.compat.autograd import is_any_autocast_enabled
from tigon.runtime.compat.operators import reshape_without_view
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.op import Node
from tigon.runtime.products import multiply, multiply_by_weight
from tigon.runtime.stock import are_plain


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` as a tensor that is not a view."""
    if bias is None:
        return multiply_by_weight(x, weight)
    return reshape_without_view(torch.addmm(bias, x.flatten(0, -2), weight.t()), (*x.shape[:-1], weight.shape[0]))


class _Linears(Node):
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        # The parameters are W_0, b_0, W_1, b_1 and so on.
        weights, biases = parameters[::2], parameters[1::2]
        needs_x = any(ctx.needs_input_grad[1::2])
        ctx.save_for_backward(x if needs_x else None, *weights)
        ctx.shape = x.shape
        keep_none_gradients(ctx)
        return tuple([linear(x, w, b) for w, b in zip(weights, biases, strict=True)])

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if x is not None:
            x = x.flatten(0, -2)  # [T, H]
        needs_dx, *needs = ctx.needs_input_grad
        dx = None
        gradients: list[Tensor | None] = [None] * len(needs)
        for i, dy in enumerate(upstream):
            if dy is None:
                continue
            dy = dy.reshape(-1, dy.shape[-1])  # [T, O]
            if needs_dx:
                dx = multiply(dy, weights[i], total=dx)
            if needs[2 * i]:
                # These products have too few tiles for ping-pong kernels.
                gradients[2 * i] = torch.mm(dy.t(), x)
            if needs[2 * i + 1]:
                gradients[2 * i + 1] = dy.sum(0)
        return None if dx is None else dx.view(ctx.shape), *gradients


def check_layer(op: str, x: Tensor, layer: nn.Module) -> None:
    """Check the dtype and the device of the input of a plain layer. Any other layer may cast or move its input."""
    if are_plain((layer,)) and type(layer.weight) is nn.Parameter:
        checks.products(op, x, weight=layer.weight)


def supports_products(x: object, *parameters: Tensor | None) -> bool:
    """Return whether a node may compute products of x and the parameters: kernels run, all tensors have one device and
    dtype, and neither autocast nor torch.compile is active."""
    # While tensor parallelism gathers a tensor, the tensor has another type and no address for views.
    if type(x) not in PLAIN or not isinstance(x, Tensor) or torch.compiler.is_compiling():
        return False
    dtype, device = x.dtype, x.device
    for p in parameters:
        if p is not None and (p.dtype != dtype or p.device != device):
            return False
    if not runs_kernels(x, *parameters) or x.dim() < 2 or x.numel() == 0:
        return False
    # Autocast does not exist on the meta device.
    return x.is_meta or not is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type)


def plain_parameters(layers: Sequence[nn.Module]) -> list[Any] | None:
    """Return weight and bias of each layer, one after the other, or None if a layer computes more than its product."""
    if not are_plain(layers):
        return None
    parameters: list[Any] = []
    for layer in layers:
        # `nn.Module.__getattr__` takes four times as long as the table, in which FSDP1 stores no parameters.
        table = layer._parameters
        try:
            parameters += table["weight"], table["bias"]
        except KeyError:
            parameters += layer.weight, layer.bias
    return parameters


def linears(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return the outputs of the layers for x [..., H], or None if a layer is not plain or `x` is not supported."""
    if (parameters := plain_parameters(layers)) is None:
        return None
    return _Linears.apply(x, *parameters) if supports_products(x, *parameters) else None
