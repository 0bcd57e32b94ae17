"""What the autograd functions of all ops share."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tigon.runtime.torch_private import keeps_graph

__all__ = ["first_order", "frees_saved", "leave_absent", "without_autocast"]


def first_order(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function that has no second derivative: `create_graph=True` is refused.

    torch's `once_differentiable` raises only where the incoming gradient itself needs a gradient: a penalty on the
    gradient of a plain loss would silently be a constant.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = type(ctx).__name__.strip("_").removesuffix("Backward")
            raise RuntimeError(f"tigon: {name} has no second derivative, so it refuses create_graph=True")
        return backward(ctx, *gradients)

    return call


def without_autocast(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function that never runs under autocast: nor do its products then, if the
    caller takes gradients in a block of it.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        kind = next((x.device.type for x in gradients if x is not None), "meta")
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return backward(ctx, *gradients)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *gradients)

    return call


def frees_saved(x: Tensor) -> bool:
    """In the backward of an autograd function: whether what it saved, as x, is let go after it and may be overwritten.

    Not where the graph is retained, and not in a CUDA graph, whose backward may be replayed alone.
    """
    return not keeps_graph() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def leave_absent(ctx) -> None:
    """In the forward of an autograd function: gradients of outputs that nothing was computed from stay None.

    Not under `torch.compile`, which does not know the method in every version, and makes zeros of them.
    """
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)
