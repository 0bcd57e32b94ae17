r"""Linear layers of one input, as one node: y_i = x W_i^T + b_i.

    dx = sum_i dy_i W_i        each product adds to the last, in fp32 (beta = 1)
    dW_i = dy_i^T x,           db_i = sum_rows dy_i

Autograd would write each dy_i W_i and add them up, one by one. Query, key and value of an attention are such layers.

Shapes: T tokens, H hidden, O outputs of a layer.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tigon.runtime import checks
from tigon.runtime.autograd import first_order, keep_none_gradients, without_autocast
from tigon.runtime.device import PLAIN, runs_kernels
from tigon.runtime.products import multiply
from tigon.runtime.stock import has_stock_call, linears_are_stock
from tigon.runtime.torch_private import any_global_hook, reshape_without_view

__all__ = ["check_layer", "input_gradient", "is_hooked", "is_plain", "linear", "linears", "takes_products"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, never a view of another tensor: of those that a node returns, autograd lets none be overwritten."""
    rows = x.flatten(0, -2)
    y = multiply(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return reshape_without_view(y, (*x.shape[:-1], len(weight)))


def input_gradient(dys: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor | None:
    """dys [T, O_i], weights [O_i, H] -> dx [T, H]."""
    dx = None
    for dy, weight in zip(dys, weights, strict=True):
        dx = multiply(dy, weight, onto=dx)
    return dx


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *parameters):  # W_0, b_0, W_1, b_1, ...
        weights, biases = parameters[::2], parameters[1::2]
        needs_x = any(ctx.needs_input_grad[1::2])
        ctx.save_for_backward(x if needs_x else None, *weights)
        ctx.shape = x.shape
        keep_none_gradients(ctx)
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        x = None if x is None else x.flatten(0, -2)  # [T, H]
        needs_dx, *needs = ctx.needs_input_grad
        given = {i: dy.reshape(-1, dy.shape[-1]) for i, dy in enumerate(dys) if dy is not None}  # [T, O]
        dx = input_gradient(given.values(), [weights[i] for i in given]) if needs_dx else None
        gradients = [None] * len(needs)
        for i, dy in given.items():
            gradients[2 * i] = torch.mm(dy.t(), x) if needs[2 * i] else None  # too few tiles for another kernel
            gradients[2 * i + 1] = dy.sum(0) if needs[2 * i + 1] else None
        return None if dx is None else dx.view(ctx.shape), *gradients


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its forward.

    It does if the module or every module has a hook, or if the call itself was replaced.
    """
    own = module.__dict__
    hooks = own["_forward_pre_hooks"], own["_forward_hooks"], own["_backward_pre_hooks"], own["_backward_hooks"]
    return any(hooks) or any_global_hook() or not has_stock_call(module)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer does nothing but the product of an `nn.Linear`: no hook, and torch's own forward."""
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and linears_are_stock() and not is_hooked(layer)


def check_layer(op: str, x: Tensor, layer: nn.Module) -> None:
    """Refuse an input that the product of an `nn.Linear` does not take. A layer that does more may cast or move it."""
    if is_plain(layer) and type(layer.weight) is nn.Parameter:
        checks.products(op, x, weight=layer.weight)


def takes_products(x: object, *parameters: Tensor | None) -> bool:
    """Whether products of x by these may be a node of Tigon's: kernels, one device and dtype, no autocast or trace."""
    return (
        type(x) in PLAIN  # of what tensor parallelism gathers, a view has no address yet
        and not torch.compiler.is_compiling()
        and all(p is None or (p.dtype == x.dtype and p.device == x.device) for p in parameters)
        and runs_kernels(x, *parameters)
        and x.dim() > 1
        and x.numel() > 0
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))  # meta has none
    )


def linears(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """What each layer gives for x [..., H], or None where one of them does more than its product, or could."""
    if not all(map(is_plain, layers)):
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    return _Linears.apply(x, *parameters) if takes_products(x, *parameters) else None
