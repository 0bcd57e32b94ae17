"""Visit the objects with attributes that a forward reaches: modules, classes, configs and Python modules."""

import contextlib
import enum
import types
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.compat.modules import CALL_IMPL, HOOK_TABLES, INSTANCE_CALLS, MODULE_ATTRIBUTES, REPLICATE
from tigon.runtime.engines import WRAPPER_ATTRIBUTES, is_hook_of_deepspeed
from tigon.runtime.reach.code import CONSTRUCTORS, code_facts
from tigon.runtime.reach.functions import FunctionWalk
from tigon.runtime.reach.known_names import COMPARISONS, CONVERSIONS, IMPURE, TRUSTED
from tigon.runtime.reach.objects import (
    bases_of_torch,
    defined_names,
    holds_tensors,
    is_evasion,
    is_trusted,
    names_in_torch,
    package_of,
    slots_of,
    special_methods,
)
from tigon.runtime.reach.places import REGISTERED, Place

# Attributes that every module has, and attributes that accelerate's hooks and Tigon add. They are not settings.
MODULE_STATE = {*MODULE_ATTRIBUTES, "forward", *WRAPPER_ATTRIBUTES, REPLICATE}
# These methods of an object run only when it is constructed, printed or written to.
RARELY_CALLED = {*CONSTRUCTORS, "__replace__", "__setattr__", "__delattr__", *CONVERSIONS}


class HolderWalk(FunctionWalk):
    """The part of the walk that visits objects with attributes."""

    def visit_module(self, module: nn.Module, path: str, owner: nn.Module | None) -> None:
        """Visit the module itself if `owner` is None, otherwise a child or a module in a list."""
        if isinstance(module, torch.jit.ScriptModule):
            self.refuse(f"uses {path}, a scripted module, whose code is not read")
            return
        attributes, kind = vars(module), type(module)
        holder = None if owner is None else attributes
        skipped = MODULE_STATE | (self.live if owner is None else set())
        bases = nn.Module.__mro__
        defined = defined_names(kind, bases)

        def visit(name: str) -> None:
            if name == "training" and owner is not None and isinstance(self.root, nn.Module):
                self.reach.places.append(Place(attributes, "mode", name, None, f"{path}.{name}"))
                if module.training != self.root.training:
                    self.refuse(f"reads {path}.training, and the module itself is in the other mode")
            elif name in skipped or name[0] == "'":
                return
            elif name in attributes:
                # Engines exchange the tensors of parameters, so tensors are not watched.
                if not isinstance(attributes[name], Tensor):
                    self.watch(holder, "item", name, attributes[name], f"{path}.{name}")
            elif not any(name in attributes[table] for table in REGISTERED):
                self.visit_class_attribute(kind, name, path, owner)
                if name in defined or name in self.stored_names:
                    self.reach.places.append(Place(holder, "absent", name, None, f"{path}.{name}"))

        self.visit_class_attributes(
            kind, {"forward", "__call__", "__getattr__", "__getattribute__", CALL_IMPL}, path, owner
        )
        seen = names_in_torch(kind)
        if owner is not None:
            self.watch_call(module, path)
            # The code of torch's modules is not read, so all of their settings count.
            seen |= attributes.keys() - skipped if package_of(kind.__module__) in TRUSTED else set()
        for name in sorted(seen):
            visit(name)
        self.holders.append((visit, seen))
        self.watch_registered(attributes, path, owner)
        self.visit_children(attributes, path, owner)

    def watch_call(self, module: nn.Module, path: str) -> None:
        """Watch whatever changes a call of a child (its forward, its hooks), because an op does not call the child."""
        attributes, kind = vars(module), type(module)
        for name in ("forward", *INSTANCE_CALLS):
            if name in attributes:
                self.watch(attributes, "item", name, attributes[name], f"{path}.{name}")
            else:
                self.reach.places.append(Place(attributes, "absent", name, None, f"{path}.{name}"))
        for name in ("__call__", *([CALL_IMPL] if hasattr(kind, CALL_IMPL) else [])):
            self.watch(module, "class", name, getattr(kind, name), f"{path}.{name}")
        for table in HOOK_TABLES:
            hooks = attributes[table]
            self.reach.places.append(Place(hooks, "length", None, len(hooks), f"{path}.{table}"))
            # DeepSpeed puts hooks that move tensors on every module. They are ignored: this module has no tensor.
            self.entries.append((path, table, sum(not is_hook_of_deepspeed(hook) for hook in hooks.values())))
        self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))

    def watch_registered(self, attributes: dict[str, Any], path: str, owner: nn.Module | None) -> None:
        """Watch that parameters and buffers that are None stay None. Other tensors are watched too, except those of the
        module itself and of searched children."""
        has_fixed_tensors = owner is not None and not any(owner is each for each in self.searched)
        for table in REGISTERED[:2]:
            for name, tensor in attributes[table].items():
                if tensor is None and (owner is not None or name not in self.live):
                    holder = None if owner is None else attributes
                    self.reach.places.append(Place(holder, "unset", name, table, f"{path}.{name}"))
                    self.entries.append((f"{path}.{name}", "unset"))
                elif tensor is not None and has_fixed_tensors:
                    self.describe(tensor, f"{path}.{name}")
        if has_fixed_tensors:
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    self.describe(value, f"{path}.{name}")

    def visit_children(self, attributes: dict[str, Any], path: str, owner: nn.Module | None) -> None:
        """Visit the children without tensors, and the searched ones. Watch that they stay the same objects."""
        children = attributes["_modules"]
        for name, child in children.items():
            child_path = f"{path}.{name}"
            is_searched = any(child is each for each in self.searched)
            if owner is None and child is not None and holds_tensors(child) and not is_searched:
                self.visit_child_with_tensors(child, name, child_path)
                continue
            self.entries.append((child_path, "child", child is None))
            self.reach.places.append(Place(None if owner is None else children, "child", name, child, child_path))
            if child is not None:
                self.describe(child, child_path)

    def visit_child_with_tensors(self, child: nn.Module, child_name: str, path: str) -> None:
        """Refuse code that reads attributes of a child with weights, or its type. The probes replace this child by a
        plain linear layer, so they do not cover these reads."""
        attributes, ignored = vars(child), {*MODULE_STATE, "in_features", "out_features"}
        defined = defined_names(type(child), bases_of_torch(type(child)))
        self.children_with_tensors.append((child_name, path))

        def visit(name: str) -> None:
            if name in (attributes.keys() | defined) - ignored and not isinstance(attributes.get(name), Tensor):
                self.reach.unprobed_reads.append(f"may read {path}.{name}, an attribute of a child with weights")

        self.holders.append((visit, set()))

    def visit_class(self, cls: type, path: str) -> None:
        """Visit a class that the code names. The code may construct objects of it."""
        package = package_of(cls.__module__)
        if package in IMPURE or is_evasion(cls):
            self.refuse(f"uses {cls.__module__}.{cls.__qualname__}")
        if package in IMPURE | TRUSTED and not issubclass(cls, nn.Module):
            return
        names = {"forward", "__call__"}
        if issubclass(cls, torch.autograd.Function):
            names |= {"backward", "setup_context", "jvp", "vmap"}
            # The runs with symbolic sizes have no backward pass.
            code = getattr(cls.backward, "__code__", None)
            if package not in TRUSTED and code is not None and code_facts(code).has_conditions:
                self.reach.unprobed_reads.append(f"decides by its input ({path}.backward)")
        elif not issubclass(cls, (nn.Module, BaseException)):
            names |= special_methods(cls)
        if package not in TRUSTED:
            self.reach.objects.append((cls, path))
        self.visit_class_attributes(cls, names, path, cls)
        self.holders.append((lambda name: self.visit_class_attribute(cls, name, path, cls), set()))

    def visit_class_attributes(self, cls: type, names: set[str], path: str, owner: Any) -> None:
        """Watch those of the names that a class defines, and the special methods of its metaclass."""
        for name in sorted(names):
            self.visit_class_attribute(cls, name, path, owner)
        for name in sorted(special_methods(type(cls)) - RARELY_CALLED) if type(cls) is not type else ():
            self.visit_class_attribute(type(cls), name, f"type({path})", cls)

    def visit_class_attribute(self, cls: type, name: str, path: str, owner: Any) -> None:
        """Watch a name that a class or one of its bases defines. `owner` is None for the class of the module itself."""
        if issubclass(cls, nn.Module):
            bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
        else:
            bases = [base for base in cls.__mro__ if not is_trusted(base)]
        if type(cls) is not type:
            # `cls.name` also finds what a metaclass defines, such as a property, which may read anything.
            self.visit_class_attribute(type(cls), name, f"type({path})", cls)
        definers = [base for base in bases if name in vars(base)]
        # The comparisons and texts of configs of transformers read every attribute.
        is_late = name in COMPARISONS | CONVERSIONS
        if not definers or (is_late and package_of(definers[0].__module__) == "transformers"):
            return
        value = vars(definers[0])[name]
        # Read the attribute by normal lookup. A classmethod gives a new object at each lookup, so its stored value is
        # watched.
        attribute = getattr(cls, name, None)
        if attribute is getattr(cls, name, None) and name.isidentifier():
            how = "attribute" if owner is cls else "class"
            self.reach.places.append(Place(owner, how, name, attribute, f"{path}.{name}"))
            self.entries.append((path, name, self.describe(value, f"{definers[0].__qualname__}.{name}")))
        else:
            self.watch(definers[0], "static", name, value, f"{definers[0].__qualname__}.{name}")
        # With `super`, the code may call the function that a base defines under the same name.
        self.overridden += [(base, name) for base in definers[1:]]

    def visit_object(self, value: Any, path: str) -> None:
        """Visit an object with attributes, such as a config: its attributes and what its class defines."""
        kind = type(value)
        if is_evasion(kind):
            self.refuse(f"uses {path}, a {kind.__qualname__}")
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        slots, defined = slots_of(kind), defined_names(kind)
        self.reach.places.append(Place(value, "type", None, kind, path))
        self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))
        if attributes:
            self.reach.objects.append((value, path))
        # A config of transformers may store an attribute under another name.
        aliases = attributes.get("attribute_map") or getattr(kind, "attribute_map", None)
        aliases = aliases if isinstance(aliases, dict) else {}

        def visit(name: str) -> None:
            if name[0] == "'":
                return
            if (stored := aliases.get(name, name)) in attributes:
                self.watch(attributes, "item", stored, attributes[stored], f"{path}.{stored}")
            elif name in slots:
                with contextlib.suppress(AttributeError):
                    self.watch(value, "attribute", name, getattr(value, name), f"{path}.{name}")
            else:
                self.visit_class_attribute(kind, name, path, value)
                if name in defined - COMPARISONS - CONVERSIONS and hasattr(value, "__dict__"):
                    self.reach.places.append(Place(attributes, "absent", name, None, f"{path}.{name}"))

        self.visit_class_attributes(kind, special_methods(kind) - RARELY_CALLED - slots, path, value)
        seen: set[str] = set()
        # The code of trusted packages is not read, so all attributes of their objects count.
        if is_trusted(kind) or isinstance(value, enum.Enum):
            seen |= {name for name in attributes if isinstance(name, str)}
            for name in sorted(seen):
                visit(name)
        self.holders.append((visit, seen))

    def visit_python_module(self, module: types.ModuleType, path: str) -> None:
        """Watch the names of a Python module that the code loads. For a trusted module, `visit_links` does this."""
        if package_of(module.__name__) in IMPURE or module.__name__.startswith("numpy.random"):
            self.refuse(f"uses {module.__name__}, which does more than compute from its inputs")
        elif package_of(module.__name__) not in TRUSTED:
            attributes = vars(module)

            def visit(name: str) -> None:
                if name in attributes:
                    self.watch_link(attributes, name, f"{path}.{name}")

            self.holders.append((visit, set()))
