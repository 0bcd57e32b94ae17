"""Recognise the loss that balances experts: a function of the module's file, which the forward of a model calls.

        aux_loss = load_balancing_loss_func(outputs.router_logits, self.num_experts, self.top_k, attention_mask)

A function with these arguments must agree with the op on random logits, with and without a mask: up to the order of
sums in fp32, and in bf16 the op must be as near to the exact loss. It runs itself for any other arguments.
"""

import functools
import inspect
import itertools
import logging
import types
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.experts.load_balancing import load_balancing_loss, load_balancing_loss_reference
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.parts.functions import FunctionsRecipe, FusedFunction, globals_of
from tigon.recognition.probing.standin import gradients, normal, probing, same_gradients
from tigon.recognition.rewriting.fused_statements import rewrite_forward
from tigon.runtime.compat.autograd import has_active_transform
from tigon.runtime.device import KERNEL_DTYPES, PLAIN
from tigon.runtime.reach.explore import explore
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

ARGUMENTS = ("num_experts", "top_k", "attention_mask")
LAYERS, BATCH, LENGTH, EXPERTS = 3, 2, 9, 7


class FusedRouterLoss(FusedFunction):
    """Runs `load_balancing_loss` in place of a function."""

    def compute(self, arguments: dict[str, Any]) -> Any:
        values = [arguments.get(name) for name in self.names]
        return load_balancing_loss(*values) if _accepts(*values) else None  # type: ignore[arg-type]


def _accepts(logits: Any, num_experts: Any, top_k: Any, mask: Any) -> bool:
    if not (type(logits) is tuple and logits and type(num_experts) is int and type(top_k) is int):
        return False
    if has_active_transform() or not 0 < top_k <= num_experts:
        return False
    for layer in logits:
        if type(layer) not in PLAIN or layer.dtype not in KERNEL_DTYPES or layer.device != logits[0].device:
            return False
        if layer.dim() != 2 or layer.shape[1] != num_experts:
            return False
    if mask is None:
        return True
    is_mask = type(mask) in PLAIN and mask.dim() == 2 and not mask.requires_grad and not mask.is_complex()
    return is_mask and all(layer.shape[0] == mask.numel() and layer.device == mask.device for layer in logits)


class RouterLossForward(FunctionsRecipe):
    """The stock forward of a class of models, with the op in place of functions that compute the loss of routers."""

    def fuse(self, form: Any, scope: dict[str, Any], name: str, guard: FunctionGuard) -> FusedFunction:
        return FusedRouterLoss(scope, name, form, guard)


def find_router_losses(cls: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return the names of the functions in the forward of a class that compute what the op computes, as forms."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, types.FunctionType):
        return ()
    functions = {name: value for name, value in globals_of(forward) if _computes_op(value)}
    is_exchangeable = isinstance(rewrite_forward(forward, functions), types.FunctionType)
    return tuple((name, "load_balancing_loss") for name in functions) if is_exchangeable else ()


def _computes_op(function: types.FunctionType) -> bool:
    """Return True if a function computes what the op computes."""
    parameters = tuple(inspect.signature(function).parameters)
    if len(parameters) != 1 + len(ARGUMENTS) or parameters[1:] != ARGUMENTS:
        return False
    reach = explore(function)
    if reach.reason:
        LOGGER.debug("%s is not replaced: %s", function.__qualname__, reach.reason)
        return False
    with reach.preserved():
        agrees = _compare(function, reach.fingerprint)
    return agrees and not reach.reason


@cached_weakly
def _compare(function: types.FunctionType, state: tuple) -> bool:
    """Compare a function with the op. `state` is the fingerprint of its reach."""
    try:
        with probing():
            return all(_agrees(function, *case) for case in _cases())
    except Exception:
        LOGGER.debug("%s cannot be run by itself", function.__qualname__, exc_info=True)
        return False


def _cases() -> list[tuple[int, int, Tensor | None]]:
    """Return the number of layers, the number of chosen experts, and the mask of each comparison."""
    padding = torch.ones(BATCH, LENGTH, dtype=torch.int64, device="cpu")
    padding[1, -3:] = 0
    masks = (None, padding, normal(3, BATCH, LENGTH).abs())
    return list(itertools.product((1, LAYERS), (1, 2), masks))


def _agrees(function: types.FunctionType, layers: int, top_k: int, mask: Tensor | None) -> bool:
    """Return True if a function has the losses and the gradients of the op."""
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        logits = tuple(normal(10 * seed + i, BATCH * LENGTH, EXPERTS, dtype=dtype) * 2 for i in range(layers))
        run = lambda f, x: f(x, EXPERTS, top_k, mask)
        stock, ours = (run(f, logits) for f in (function, load_balancing_loss))
        exact = run(load_balancing_loss_reference, tuple(x.double() for x in logits))
        if not isinstance(stock, Tensor) or (stock.dtype, stock.shape) != (ours.dtype, ours.shape):
            return False
        stock_error, our_error = ((y.double() - exact).abs() / exact for y in (stock, ours))
        # A softmax in bf16 makes some logits equal, and `topk` may choose any of them.
        if not (our_error < 1e-5 and stock_error < (1e-5 if dtype == torch.float32 else 0.2)):
            return False
    logits = tuple(normal(30 + i, BATCH * LENGTH, EXPERTS) * 2 for i in range(layers))
    stock_gradients, our_gradients = (
        gradients(functools.partial(run, f, logits), list(logits)) for f in (function, load_balancing_loss)
    )
    return same_gradients(our_gradients, stock_gradients)
