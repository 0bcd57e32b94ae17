"""Group modules into kinds, so that recognition runs once for each kind: modules of one kind compute the same."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tigon.recognition.probing.standin import own_tensors
from tigon.recognition.replacement import is_changed
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.holders import MODULE_STATE

LOGGER = logging.getLogger("tigon")


def kinds_of(modules: Iterable[nn.Module]) -> dict[nn.Module, Any]:
    """Number the modules; those of one kind share a number. A module that cannot be read is its own kind."""
    numbers: dict[tuple, int] = {}
    kinds: dict[nn.Module, Any] = {}

    def number(module: nn.Module) -> Any:
        if module not in kinds:
            try:
                kinds[module] = numbers.setdefault(kind_of(module, number), len(numbers))
            except Exception:
                LOGGER.debug("the state of a %s cannot be read", type(module).__name__, exc_info=True)
                kinds[module] = module
        return kinds[module]

    return {module: number(module) for module in modules}


def kind_of(module: nn.Module, kind_of_child: Callable[[nn.Module], Any] | None = None) -> tuple:
    """Return everything that recognition depends on. A model with many layers has few kinds."""
    kind_of_child = kind_of_child or kind_of
    settings = [(name, value) for name, value in vars(module).items() if name not in MODULE_STATE]
    if type(module).__module__.startswith("peft."):
        # PEFT stores the arguments of its constructor in a layer. The name among them would make each layer a kind.
        without = lambda value: {k: v for k, v in value.items() if k != "target_name"} if type(value) is dict else value
        settings = [(name, without(value)) for name, value in settings]
    attributes = tuple((name, _describe(value)) for name, value in settings)
    tensors = own_tensors(module).items()
    shapes = tuple((k, None if t is None else full_shape(t)) for k, t in tensors)
    children = tuple((k, None if child is None else kind_of_child(child)) for k, child in module._modules.items())
    return type(module), attributes, shapes, children, is_changed(module)


def _describe(value: Any) -> tuple:
    """Return the type of a value, as 1 equals True, and the value if it is or holds simple values, else its id."""
    if isinstance(value, (int, float, str, bool, type(None), torch.device, torch.dtype)):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_describe, value))
    if type(value) is dict:
        return type(value), tuple((_describe(key), _describe(item)) for key, item in value.items())
    return type(value), id(value)
