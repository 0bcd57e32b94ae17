"""Helpers that the autograd functions of all ops share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.torch_private.autograd import keeps_graph

__all__ = ["first_order", "keep_none_gradients", "may_overwrite_saved", "without_autocast"]


def first_order(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function that has no second derivative, and refuse `create_graph=True`.

    torch's `once_differentiable` raises only if the upstream gradient itself needs a gradient. With it, a penalty on
    the gradient of a plain loss would be a constant, without any error.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = type(ctx).__name__.strip("_").removesuffix("Backward")
            raise RuntimeError(f"tigon: {name} has no second derivative, so it refuses create_graph=True")
        return backward(ctx, *gradients)

    return call


def without_autocast(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function, and switch autocast off while it runs.

    Its products then have the dtypes of the saved tensors, also if the caller runs backward in a block of autocast.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> Any:
        device_type = next((x.device.type for x in gradients if x is not None), "meta")
        if device_type == "meta" or not torch.is_autocast_enabled(device_type):
            return backward(ctx, *gradients)
        with torch.autocast(device_type, enabled=False):
            return backward(ctx, *gradients)

    return call


def may_overwrite_saved(x: Tensor) -> bool:
    """Return whether a backward pass may overwrite the tensors that its forward saved, which are on the device of `x`.

    It may not if autograd retains its graph. It may not while a CUDA graph is captured either, because the captured
    backward may be replayed without its forward.
    """
    return not keeps_graph() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def keep_none_gradients(ctx: Any) -> None:
    """Let backward receive None, not zeros, for an output that has no upstream gradient. Call this in a forward.

    Not every version of `torch.compile` supports `set_materialize_grads`, so backward receives zeros in compiled code.
    """
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)
