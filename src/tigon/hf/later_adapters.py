"""Install the recipe for adapters on layers that a library adds after the patch.

`peft.get_peft_model(model, config)`, and trainers that call it, exchange linear layers for layers that have adapters.
If the model was patched before, no recipe is installed on the new layers. Therefore, at each call, the body of a
patched model compares the children of its modules with those at the previous call. This takes about 1 us for each
module that has linear layers. If a new child is a layer with adapters, its recipe is installed before it runs.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.hf.report import Report
from tigon.recognition.adapters import AdapterRecipe, install_adapters, recognise_adapters
from tigon.recognition.kind import kind_of
from tigon.recognition.replacement import exchange, find_replacement, foreign_forward, install
from tigon.recognition.standin import is_linear

__all__ = ["watch_children"]

LOGGER = logging.getLogger("tigon")


class _Parent:
    """A module with linear layers, and the ids of its children when they were last compared."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, weakref.ref(module)
        self.ids = _ids_of_children(module)

    def new_children(self) -> dict[str, nn.Module]:
        """Return the children that were added since the last comparison, by their full names."""
        module = self.module()
        if module is None or (ids := _ids_of_children(module)) == self.ids:
            return {}
        old_ids, self.ids = {*self.ids}, ids
        children = {name: m for name, m in module._modules.items() if m is not None and id(m) not in old_ids}
        return {f"{self.name}.{name}" if self.name else name: child for name, child in children.items()}


def _ids_of_children(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, module._modules.values()))


class AdapterWatch:
    """Recipe for the body of a model: install recipes on new layers that have adapters, then run the body's forward.

    `inner` is the recipe that the body had before, or None for the forward of its class.
    """

    def __init__(self, parents: list[_Parent], report: Report | None, inner: Callable | None) -> None:
        # A copy of the body does not know its modules, so it compares nothing.
        self.parents, self.report, self.inner = parents, report, inner
        # What recognition returned, by the kind of the module.
        self.results: dict[tuple, Any] = {}

    def __reduce__(self) -> tuple:
        return AdapterWatch, ([], None, self.inner)

    def __call__(self, body: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for parent in self.parents:
                if children := parent.new_children():
                    self.install_recipes(children)
        return (self.inner or type(body).forward)(body, *args, **kwargs)

    def install_recipes(self, children: dict[str, nn.Module]) -> None:
        """Install a recipe on each child that is a layer with adapters. Modules of one kind are recognised once."""
        for name, child in children.items():
            if find_replacement(child) is not None or foreign_forward(child):
                continue
            kind = kind_of(child)
            if kind not in self.results:
                self.results[kind] = recognise_adapters(child)
            recipe = self.results[kind]
            if isinstance(recipe, AdapterRecipe) and self.report is not None:
                self.report.undo.append(install_adapters(child, recipe))
                self.report.add("adapters", type(child).__name__, True, f"{recipe}, added after the patch", name)
                LOGGER.info("%s was added after the patch, and its adapters are computed by an op", name)


def watch_children(model: nn.Module, report: Report) -> Callable[[], None]:
    """Let the body of a model install recipes on layers that get adapters later; return a function to undo this."""
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or body is model:
        return lambda: None
    parents = [_Parent(name, module) for name, module in body.named_modules() if any(map(is_linear, module.children()))]
    replacement = find_replacement(body)
    recipe = AdapterWatch(parents, report, None if replacement is None else replacement.recipe)
    if replacement is not None:
        return exchange(replacement, recipe)
    return (lambda: None) if foreign_forward(body) else install(body, recipe)
