"""Find the module that defines a function, and check whether other libraries have replaced code of torch.

`module(x)` runs `type(module).__call__`, which runs `module._compiled_call_impl` if it is set, and else
`module._call_impl`. That runs the hooks and `module.forward`. torch defines `__call__` as the function
`nn.Module._wrapped_call_impl` once, and does not look up this name again.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tigon.runtime.compat.modules import CALL_IMPL, COMPILED_CALL_IMPL, GLOBAL_HOOKS, call_impl, has_hooks
from tigon.runtime.compat.operators import native_linear


def origin_of(function: Callable) -> str:
    """Return the `__module__` of a function, or of the function in a `partial`, or else of the object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def written_in(function: Callable) -> str:
    """Return the name of the Python module with the code of a function. `functools.wraps` copies a foreign
    `__module__`."""
    return getattr(function, "__globals__", {}).get("__name__") or origin_of(function)


def _stock_or_none(function: object, file: str) -> object:
    """Return `function` if its code is in `file` of torch; None if it was replaced before this import."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.replace("\\", "/").endswith(file) else None


# Quantisation and adapter libraries replace these functions for all layers. The call of a layer then computes more than
# its product.
_FORWARD = _stock_or_none(nn.Linear.forward, "torch/nn/modules/linear.py")
_CALL = _stock_or_none(nn.Module.__call__, "torch/nn/modules/module.py")
# If the function was replaced before this import, no class has this object, so no call counts as torch's own.
_CALL_IMPL = _stock_or_none(call_impl, "torch/nn/modules/module.py") or object()


_DROPOUT = _stock_or_none(F.dropout, "torch/nn/functional.py")
_DROPOUT_FORWARD = _stock_or_none(nn.Dropout.forward, "torch/nn/modules/dropout.py")
_IDENTITY_FORWARD = _stock_or_none(nn.Identity.forward, "torch/nn/modules/linear.py")


def is_linear_of_zero(function: Callable) -> bool:
    """Return True for the function that `deepspeed.zero.Init` assigns to `F.linear` for the rest of the process. It
    computes the same product and the same gradients as torch's, and backward gathers a sharded weight again. Seen in
    DeepSpeed 0.19. Under another name it counts as unknown code, so heads, adapters and fused projections stay
    stock."""
    return (written_in(function), getattr(function, "__name__", "")) == (
        "deepspeed.runtime.zero.linear",
        "zero3_linear_wrap",
    )


def linears_are_stock() -> bool:
    """Return True if `nn.Linear.forward` is that of torch, and `F.linear` is that of torch or of DeepSpeed's ZeRO-3."""
    linear = torch.nn.functional.linear
    return nn.Linear.forward is _FORWARD and (linear is native_linear or is_linear_of_zero(linear))


def dropouts_are_stock() -> bool:
    """Return True if `F.dropout` and the forwards of `nn.Dropout` and `nn.Identity` are those of torch."""
    is_stock = nn.Dropout.forward is _DROPOUT_FORWARD and nn.Identity.forward is _IDENTITY_FORWARD
    return is_stock and F.dropout is _DROPOUT


def has_stock_call(module: nn.Module) -> bool:
    """Return True if a call of the module runs its hooks and its forward, and nothing else. This is False if `__call__`
    or `_call_impl` of its class is not that of torch, or if one of `INSTANCE_CALLS` of `compat.modules` was assigned to
    the module."""
    cls, attributes = type(module), module.__dict__
    is_stock = cls.__call__ is _CALL and getattr(cls, CALL_IMPL, None) is _CALL_IMPL
    return is_stock and CALL_IMPL not in attributes and COMPILED_CALL_IMPL not in attributes


def does_more_than_forward(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its forward. It does if the module has a hook, if a hook is
    registered for all modules, or if the call itself was replaced. This is one function without further calls, because
    a patched model asks it about most of its layers at every call."""
    cls, attributes = type(module), module.__dict__
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or any(GLOBAL_HOOKS)
        or cls.__call__ is not _CALL
        or getattr(cls, CALL_IMPL, None) is not _CALL_IMPL
        or CALL_IMPL in attributes
        or COMPILED_CALL_IMPL in attributes
    )


def runs_forward_only(module: nn.Module) -> bool:
    """Return whether a call of the module runs the forward of its class, and no hook but those of all modules."""
    return not has_hooks(module) and has_stock_call(module) and "forward" not in module.__dict__


def are_plain(layers: Iterable[Any]) -> bool:
    """Return whether each layer only computes the product of an `nn.Linear`: no hooks, and the forward of torch."""
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in layer.__dict__ or does_more_than_forward(layer):
            return False
    return linears_are_stock()


def calls_are_stock(module: nn.Module) -> bool:
    """Return True if the module and every module in it has a stock call."""
    # The classes ParameterDict and ParameterList define a `__call__` that raises.
    return all(has_stock_call(m) for m in module.modules() if not isinstance(m, (nn.ParameterDict, nn.ParameterList)))
