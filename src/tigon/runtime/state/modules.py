"""Search what a torch module reaches: its settings, its class, its children, and parameters that must stay None."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.compat.modules import CALL_IMPL, HOOK_TABLES, INSTANCE_CALLS, MODULE_ATTRIBUTES, REPLICATE
from tigon.runtime.engines import WRAPPER_ATTRIBUTES, is_hook_of_deepspeed
from tigon.runtime.state.classes import ClassSearch
from tigon.runtime.state.known_names import TRUSTED
from tigon.runtime.state.objects import bases_of_torch, defined_names, has_attribute, holds_tensors, package_of
from tigon.runtime.state.places import REGISTERED, Place

# Attributes that every module has, and attributes that accelerate's hooks and Tigon add. They are not settings.
MODULE_STATE = {*MODULE_ATTRIBUTES, "forward", *WRAPPER_ATTRIBUTES, REPLICATE}


def _without_deepspeed(hooks: dict[int, Callable]) -> list[Callable]:
    """Return the hooks that DeepSpeed does not define."""
    return [hook for hook in hooks.values() if not is_hook_of_deepspeed(hook)]


def _places_of_absence(holder: dict[str, Any] | None, owner: nn.Module | None, name: str, path: str) -> list[Place]:
    """Return the places where an attribute of a module may appear."""
    return [
        Place(holder, "absent", name, None, f"{path}.{name}"),
        Place(owner, "undefined", name, None, f"{path}.{name}"),
        Place(holder, "unregistered", name, None, f"{path}.{name}"),
    ]


class ModuleSearch(ClassSearch):
    """The part of the search that visits torch modules."""

    def visit_module(self, module: nn.Module, path: str, owner: nn.Module | None) -> None:
        """Visit the module itself if `owner` is None, otherwise a child or a module in a list."""
        if isinstance(module, torch.jit.ScriptModule):
            self.reach.unwatchable.append(f"uses {path}, a scripted module, whose code is not read")
            return
        attributes = vars(module)
        skipped = frozenset((*MODULE_STATE, *(self.live if owner is None else ())))
        self.watch_settings(module, path, owner, skipped)
        self.watch_class(module, path, owner, skipped)
        if owner is not None:
            self.watch_call(module, path)
        self.watch_registered(attributes, path, owner)
        self.watch_optional_names(module, path, owner, skipped)
        self.visit_children(attributes, path, owner)

    def watch_settings(self, module: nn.Module, path: str, owner: nn.Module | None, skipped: frozenset[str]) -> None:
        """Watch the attributes that the code may read, except tensors."""
        attributes = vars(module)
        holder = None if owner is None else attributes
        # The code of torch's modules is not read, so all of their settings count.
        is_trusted = owner is not None and package_of(type(module).__module__) in TRUSTED
        names = sorted(attributes.keys() - skipped) if is_trusted else self.attribute_names(attributes, skipped)
        for name in names:
            # Engines exchange the tensors of parameters, so tensors are not watched, except those that the code itself
            # assigns.
            if not isinstance(attributes[name], Tensor):
                self.watch(holder, "item", name, attributes[name], f"{path}.{name}")
            elif name in self.stored_names:
                self.reach.places.append(Place(holder, "item", name, attributes[name], f"{path}.{name}"))

    def watch_class(self, module: nn.Module, path: str, owner: nn.Module | None, skipped: frozenset[str]) -> None:
        """Watch the names that the class defines, and that these names do not appear on the instance."""
        attributes, kind = vars(module), type(module)
        names = self.names.difference(attributes, *(attributes[table] for table in REGISTERED))
        special = {"forward", "__call__", "__getattr__", "__getattribute__", CALL_IMPL}
        self.visit_class_attributes(kind, sorted(names | special), path, owner)
        # Names that the code assigns, but that are not set yet, are watched as absent too.
        may_appear = self.stored_names | defined_names(kind, nn.Module.__mro__)
        absent_names = sorted((names - skipped) & may_appear)
        self.watch_absence(attributes, absent_names, path, owner=None if owner is None else "dict")

    def watch_call(self, module: nn.Module, path: str) -> None:
        """Watch whatever changes a call of a child (its forward, its hooks), because an op does not call the child."""
        attributes, kind = vars(module), type(module)
        for name in ("forward", *INSTANCE_CALLS):
            if name in attributes:
                self.watch(attributes, "item", name, attributes[name], f"{path}.{name}")
            else:
                self.watch_absence(attributes, [name], path)
        for name in ("__call__", *([CALL_IMPL] if hasattr(kind, CALL_IMPL) else [])):
            self.watch(module, "class", name, getattr(kind, name), f"{path}.{name}")
        for table in HOOK_TABLES:
            self.reach.places.append(
                Place(attributes[table], "length", None, len(attributes[table]), f"{path}.{table}")
            )
        # DeepSpeed puts hooks that move tensors on every module. They are ignored, because this module has no tensor.
        self.entries += [(path, table, len(_without_deepspeed(attributes[table]))) for table in HOOK_TABLES]
        self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))

    def watch_optional_names(
        self, module: nn.Module, path: str, owner: nn.Module | None, skipped: frozenset[str]
    ) -> None:
        """Watch that attributes which may be missing, and are missing now, do not appear."""
        attributes = vars(module)
        holder = None if owner is None else attributes
        for name in sorted(self.known_uses.optional - attributes.keys() - skipped):
            if name.isidentifier() and not has_attribute(module, name):
                self.reach.places += _places_of_absence(holder, owner, name, path)
            elif any(name in attributes[table] for table in REGISTERED):
                self.entries.append((f"{path}.{name}", "registered"))

    def is_searched(self, child: nn.Module | None) -> bool:
        """Return True for a child with tensors that the caller wants to be searched."""
        return any(child is each for each in self.searched_children)

    def visit_children(self, attributes: dict[str, Any], path: str, owner: nn.Module | None) -> None:
        """Visit the children without tensors, and the searched ones. Watch that they stay the same objects."""
        for name, child in attributes["_modules"].items():
            child_path = f"{path}.{name}"
            if owner is None and child is not None and holds_tensors(child) and not self.is_searched(child):
                self.visit_child_with_tensors(child, name, child_path)
                continue
            self.entries.append((child_path, "child", child is None))
            modules = None if owner is None else attributes["_modules"]
            self.reach.places.append(Place(modules, "child", name, child, child_path))
            if child is not None:
                self.describe(child, child_path)

    def watch_registered(self, attributes: dict[str, Any], path: str, owner: nn.Module | None) -> None:
        """Watch that parameters and buffers that are None stay None.

        The other tensors are watched too, except those of the module itself and of searched children.
        """
        has_fixed_tensors = owner is not None and not self.is_searched(owner)
        for table in REGISTERED[:2]:
            for name, tensor in attributes[table].items():
                if tensor is None and name not in self.live:
                    holder = None if owner is None else attributes
                    self.reach.places.append(Place(holder, "unset", name, table, f"{path}.{name}"))
                    self.entries.append((f"{path}.{name}", "unset"))
                elif tensor is not None and has_fixed_tensors:
                    self.describe(tensor, f"{path}.{name}")
        if has_fixed_tensors:
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    self.describe(value, f"{path}.{name}")

    def visit_child_with_tensors(self, child: nn.Module, name: str, path: str) -> None:
        """Record the attributes that the code reads of a child with weights.

        The probes replace this child by a plain linear layer, so they do not cover these reads.
        """
        attributes, ignored_names = vars(child), {*MODULE_STATE, "in_features", "out_features"}
        if name in self.known_uses.type_tested_names:
            self.reach.unprobed_reads.append(f"reads the type of {path}, or of a value computed by it")
        settings = {n for n in attributes.keys() - ignored_names if self.all_names or n in self.names}
        class_names = (self.names - ignored_names) & defined_names(type(child), bases_of_torch(type(child)))
        for each in sorted(settings | class_names):
            if not isinstance(attributes.get(each), Tensor):
                self.reach.unprobed_reads.append(f"may read {path}.{each}, an attribute of a child with weights")
        # A name that the child does not have may be added to it later, or another module may take the child's place.
        absent = [
            n
            for n in sorted(self.known_uses.optional - ignored_names)
            if n.isidentifier() and not has_attribute(child, n)
        ]
        if absent:
            self.reach.places.append(Place(None, "child", name, child, path))
            self.entries.append((path, "child without", tuple(absent)))
        for each in absent:
            self.reach.places += _places_of_absence(attributes, child, each, path)
