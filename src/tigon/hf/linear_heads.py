"""The linear layer that computes the logits of a causal language model: the head itself, or one inside a wrapper.

An adapter library may put the head and copies of it into a wrapper, and `resize_token_embeddings` replaces the head by
a larger or smaller one. Each call therefore reads the size of the vocabulary from the weight of the layer that it uses.
"""

import copy
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts.adapters import AdapterRecipe
from tigon.recognition.probing.standin import (
    BF16,
    FP32,
    gradients,
    is_linear,
    normal,
    own_tensors,
    same_bits,
    same_gradients,
    stand_in,
)
from tigon.recognition.replacement import find_replacement, foreign_forward
from tigon.runtime.compat.modules import MODULE_ATTRIBUTES
from tigon.runtime.engines import full_shape

LOGGER = logging.getLogger("tigon")


def head_size(head: Any) -> tuple[int, int]:
    """Return the size of the vocabulary and the hidden size. They are the sizes of the head's weight. If it has no such
    shape, because it is quantised or an engine has flattened it, they are `out_features` and `in_features` of the
    layer. Otherwise these attributes may be wrong: PEFT swaps them in a head whose weight it ties to a trained
    embedding."""
    # `head.weight` would make ZeRO-3 gather the weight.
    weight = head._parameters.get("weight")
    shape = () if weight is None else full_shape(weight)
    if len(shape) == 2 and 0 not in shape and weight.is_floating_point():
        return shape[0], shape[1]
    return head.out_features, head.in_features


def linear_heads(head: nn.Module) -> list[nn.Module]:
    """Return the head itself, or the largest linear layers inside a wrapper, which are the head and its copies."""
    leaves = [m for m in head.modules() if not m._modules and is_linear(m)]
    sizes = [head_size(m) for m in leaves]
    return [m for m, size in zip(leaves, sizes, strict=True) if size == max(sizes)] if head._modules else [head]


def leaves_of(head: Any, x: Tensor) -> list[Tensor]:
    """Return the tensors that a linear head computes its output from: its input, weight and bias."""
    return [x, head.weight] if head.bias is None else [x, head.weight, head.bias]


def computes_linear(head: nn.Module) -> bool:
    """Return whether the head computes x W^T + b from its parameters `weight` and `bias`, and the gradients of this."""
    if head._modules or set(own_tensors(head)) != {"weight", "bias"}:
        return False
    if not is_linear(head):
        return False
    linear = lambda module, x: nn.functional.linear(x, module.weight, module.bias)
    for dtype, training in itertools.product((FP32, BF16), (True, False)):
        tensors = {"weight": normal(0, 7, 3, dtype=dtype)}
        tensors |= {} if head.bias is None else {"bias": normal(1, 7, dtype=dtype)}
        outcomes = []
        for forward in (type(head).forward, linear):
            twin, x = stand_in(head, tensors, training=training), normal(2, 2, 5, 3, dtype=dtype)
            run = functools.partial(forward, twin, x)
            outcomes.append((run(), gradients(run, leaves_of(twin, x))))
        (y, head_gradients), (expected, linear_gradients) = outcomes
        if not same_bits(y, expected) or not same_gradients(head_gradients, linear_gradients):
            return False
    return True


def adopt_heads(head: nn.Module, recipe: Any) -> bool:
    """Install the recipe on `nn.Linear` layers that replace the recognised head; return whether there was one."""
    layers = [m for m in linear_heads(head) if type(m) is nn.Linear and find_replacement(m) is None]
    layers = [m for m in layers if not foreign_forward(m)]
    for layer in layers:
        install_guarded(layer, recipe)
    return bool(layers)


class _HeadCall:
    """The output of a head inside a stand-in of its wrapper: the head and its argument."""

    def __init__(self, head: nn.Module, argument: object) -> None:
        self.head, self.argument = head, argument


def called_head(module: nn.Module, is_head: Callable[[nn.Module], bool]) -> nn.Module | None:
    """Return the head if a call of `module` only calls this head; None if it does more. The head may be `module`
    itself. It may also be inside a wrapper of an adapter library, which chooses in every call between the head and its
    copies. This choice is read from a run of the wrapper's forward on a stand-in argument."""
    if is_head(module):
        return module
    if not module._modules or torch.compiler.is_compiling():
        return None

    def twin(m: nn.Module) -> Any:
        if is_head(m):
            return lambda x: _HeadCall(m, x)
        containers = {
            k: copy.copy(v) for k, v in vars(m).items() if type(v) in (list, dict, set) and k not in MODULE_ATTRIBUTES
        }
        children: dict[str, Any] = {name: child and twin(child) for name, child in m._modules.items()}
        return stand_in(m, {}, children, **containers)

    argument, replacement = object(), find_replacement(module)
    # A layer with adapters runs its own forward if none of them is active.
    runs_own_forward = replacement is not None and isinstance(replacement.recipe, AdapterRecipe)
    try:
        result = (
            None if not runs_own_forward and foreign_forward(module) else type(module).forward(twin(module), argument)
        )
    except Exception:
        # The wrapper computes something, so it does more than call the head.
        LOGGER.debug("the wrapper %s of a head does more than call it", type(module).__name__, exc_info=True)
        return None
    return result.head if type(result) is _HeadCall and result.argument is argument else None
