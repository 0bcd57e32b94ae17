"""Helpers that the autograd functions of all ops share."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.compat.autograd import is_any_autocast_enabled, keeps_graph, saved_tensor_hooks


def without_autocast(function: Callable) -> Callable:
    """Decorate a function of tensors, such as the backward of an autograd function: autocast is off while it runs. The
    first tensor among its arguments, or in a tuple among them, says on which device. Its operations then compute in the
    dtypes of its tensors. This matters if the caller runs the backward pass in a block of autocast, and for operators
    such as `torch.cat`, which refuse fp16 tensors under autocast to bf16."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not is_any_autocast_enabled():
            return function(*args, **kwargs)
        tuples = [x if isinstance(x, tuple) else (x,) for x in (*args, *kwargs.values())]
        device_type = next((x.device.type for part in tuples for x in part if isinstance(x, Tensor)), "meta")
        if device_type == "meta" or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return call


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of x along its last dimension. Use this in place of `chunk` in eager code with gradients.
    The backward of `chunk` joins the gradients by `torch.cat`, which refuses fp16 tensors under autocast to bf16."""
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def may_overwrite_saved(x: Tensor) -> bool:
    """Return whether a backward pass may overwrite the tensors that its forward saved, which are on the device of `x`.
    It may not if autograd retains its graph. It may not while a CUDA graph is captured either, because the captured
    backward may be replayed without its forward."""
    return not keeps_graph() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def version_of(x: Tensor) -> int:
    """Return how often a tensor was written to, or 0 for an inference tensor, which has no counter."""
    return 0 if x.is_inference() else x._version


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager:
    """Return a context in which autograd saves tensors as they are, unseen by hooks of checkpoints and offloading."""
    if torch.compiler.is_compiling() or saved_tensor_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def modified_in_place(x: Tensor, version: int) -> RuntimeError:
    """Return torch's error for a saved tensor that is no longer at its saved version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
    )


def keep_none_gradients(ctx: Any) -> None:
    """Let backward receive None, not zeros, for an output that has no upstream gradient. Call this in a forward. Not
    every version of `torch.compile` supports `set_materialize_grads`, so backward receives zeros in compiled code."""
    if not torch.compiler.is_dynamo_compiling():
        ctx.set_materialize_grads(False)
