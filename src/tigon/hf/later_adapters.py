"""Install the recipe for adapters on layers that a library adds after the patch.

`peft.get_peft_model(model, config)`, and trainers that call it, exchange linear layers and experts for modules that
have adapters. If the model was patched before, no recipe is installed on the new modules. Therefore, at each call, the
body of a patched model compares the children of its modules with those at the previous call. This takes about 1 us for
each module that has linear layers or experts. If a new child has adapters, its recipe is installed before it runs.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.hf.report import ModuleOutcomes, Outcome, Report
from tigon.recognition.parts.adapters import (
    AdapterRecipe,
    install_adapters,
    recognise_adapters,
    replaced_modules,
    uninstall_adapters,
)
from tigon.recognition.parts.expert_adapters import ExpertAdapterRecipe
from tigon.recognition.parts.experts import is_experts
from tigon.recognition.probing.kind import kind_of
from tigon.recognition.probing.standin import is_linear
from tigon.recognition.replacement import exchange, find_replacement, foreign_forward, install, installed_recipe

LOGGER = logging.getLogger("tigon")


class _Parent:
    """A module with linear layers or experts, and the ids of its children when they were last compared."""

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


def _may_get_adapters(module: nn.Module) -> bool:
    """Return True for modules that a library wraps to add adapters: linear layers, and experts."""
    return is_linear(module) or is_experts(module)


def _ids_of_children(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, module._modules.values()))


class AdapterWatch:
    """Recipe for the body of a model: install recipes on new layers that have adapters, then run the body's forward.

    `inner` is the recipe that the body had before, or None for the forward of its class. The references to the report
    and to replaced modules are weak, so removed adapters and deleted models are freed.
    """

    def __init__(self, parents: list[_Parent], report: Report | None, inner: Callable | None) -> None:
        # A copy of the body does not know its modules, so it compares nothing.
        self.parents, self.inner = parents, inner
        self.report: Callable[[], Report | None] = (lambda: None) if report is None else weakref.ref(report)
        self.replaced_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The results of recognition, by the kind of the module.
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
            recipe = self.recognise(child)
            if not isinstance(recipe, (AdapterRecipe, ExpertAdapterRecipe)):
                continue
            install_adapters(child, recipe)
            self.replaced_modules.update(replaced_modules(child, recipe))
            if (report := self.report()) is not None:
                detail = f"{recipe}, added after the patch"
                report.add("adapters", type(child).__name__, True, detail, name)
                report.outcomes[name] = ModuleOutcomes(
                    type(child).__name__, [Outcome("adapters", f"replaced: {detail}")]
                )
            LOGGER.info("%s was added after the patch, and its adapters are computed by an op", name)

    def restore(self) -> None:
        """Give the modules that were replaced later the forwards of their classes back."""
        for module in [*self.replaced_modules]:
            uninstall_adapters(module)

    def recognise(self, child: nn.Module) -> Any:
        """Return the result of recognition. The attributes of a module may be objects that raise when they are read."""
        try:
            kind = kind_of(child)
            if kind not in self.results:
                self.results[kind] = recognise_adapters(child)
            return self.results[kind]
        except Exception:
            LOGGER.debug("a %s that was added after the patch cannot be read", type(child).__name__, exc_info=True)
            return None


def watch_children(model: nn.Module, report: Report, root: nn.Module) -> Callable[[], None]:
    """Let the body of a model install recipes on layers that get adapters later; return a function to undo this."""
    # The attribute of another library's class may raise anything.
    with contextlib.suppress(Exception):
        body = model.base_model
        if isinstance(body, nn.Module) and body is not model:
            return _watch_body(body, report, root)
    return lambda: None


def _watch_body(body: nn.Module, report: Report, root: nn.Module) -> Callable[[], None]:
    # Do not watch linear layers with adapters, nor their submodules. A further adapter only adds plain linear layers
    # inside such a layer, and these need no recipe.
    adapted_layers = [module for module in body.modules() if isinstance(installed_recipe(module), AdapterRecipe)]
    watched = {*body.modules()} - {part for layer in adapted_layers for part in layer.modules()}
    # The names are those in the model that was patched, as everywhere in its report.
    named_modules = [(name, module) for name, module in root.named_modules() if module in watched]
    parents = [
        _Parent(name, module) for name, module in named_modules if any(map(_may_get_adapters, module.children()))
    ]
    replacement = find_replacement(body)
    if replacement is None and foreign_forward(body):
        return lambda: None
    recipe = AdapterWatch(parents, report, None if replacement is None else replacement.recipe)
    undo = install(body, recipe) if replacement is None else exchange(replacement, recipe)

    def restore() -> None:
        recipe.restore()
        undo()

    return restore
