"""Facts about code that other libraries may replace: who wrote a function, and whether torch's own still runs.

`module(x)` runs `type(module).__call__`, which runs `module._compiled_call_impl` if it is set, and else
`module._call_impl`. That runs the hooks and `module.forward`. `nn.Module._wrapped_call_impl` is the function that
`__call__` was made of; torch does not look it up again.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["CALLS_OF_INSTANCES", "calls_are_stock", "has_stock_call", "linears_are_stock", "origin_of", "written_in"]

# Attributes of an instance that its call looks up and that hold no forward.
CALLS_OF_INSTANCES = "_call_impl", "_compiled_call_impl"


def origin_of(function: Callable) -> str:
    """Return the name of the Python module that a function, or what a partial wraps, says that it belongs to."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def written_in(function: Callable) -> str:
    """The Python module that a function's own code is in; `functools.wraps` gives it the name of what it wraps."""
    return getattr(function, "__globals__", {}).get("__name__") or origin_of(function)


def _stock(function: object, file: str) -> object:
    """Return a function of torch if torch's own file defines it; None if it was replaced before this import."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.replace("\\", "/").endswith(file) else None


# Quantisation and adapter libraries replace these for all layers; then a layer's call is more than its product.
_FORWARD = _stock(nn.Linear.forward, "torch/nn/modules/linear.py")
_CALL = _stock(nn.Module.__call__, "torch/nn/modules/module.py")
_CALL_IMPL = _stock(nn.Module._call_impl, "torch/nn/modules/module.py")
_LINEAR = torch._C._nn.linear


def linears_are_stock() -> bool:
    """Return whether `nn.Linear.forward` and `F.linear` are those of torch."""
    return nn.Linear.forward is _FORWARD and torch.nn.functional.linear is _LINEAR


def has_stock_call(module: nn.Module) -> bool:
    """Return whether a call of the module runs its hooks and its forward, and nothing else.

    This is False if `__call__` or `_call_impl` of its class is not that of torch, or if one of `CALLS_OF_INSTANCES` was
    assigned to the module.
    """
    cls, own = type(module), module.__dict__
    is_stock = cls.__call__ is _CALL and cls._call_impl is _CALL_IMPL
    return is_stock and "_call_impl" not in own and "_compiled_call_impl" not in own


def calls_are_stock(module: nn.Module) -> bool:
    """Return whether the module and every module in it has a stock call."""
    # These two have a `__call__` of their own, which raises.
    return all(has_stock_call(m) for m in module.modules() if not isinstance(m, (nn.ParameterDict, nn.ParameterList)))
