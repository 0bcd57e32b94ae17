"""Facts about code that other libraries may replace: who wrote a function, and whether torch's own still runs."""

import functools
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["calls_are_stock", "origin_of"]


def origin_of(function: Callable) -> str:
    """Return the name of the Python module that a function, or what a partial wraps, says that it belongs to."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _stock(function: object, file: str) -> object:
    """Return a function of torch if torch's own file defines it; None if it was replaced before this import."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.replace("\\", "/").endswith(file) else None


# Quantisation and adapter libraries replace these for all layers; then a layer's call is more than its product.
_FORWARD = _stock(nn.Linear.forward, "torch/nn/modules/linear.py")
_CALL = _stock(nn.Module.__call__, "torch/nn/modules/module.py")
_LINEAR = torch._C._nn.linear


def calls_are_stock() -> bool:
    """Return whether `nn.Linear.forward`, `nn.Module.__call__` and `F.linear` are those of torch."""
    return nn.Linear.forward is _FORWARD and nn.Module.__call__ is _CALL and torch.nn.functional.linear is _LINEAR
