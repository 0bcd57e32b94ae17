"""Search what a class and an object with attributes reach: attributes, methods, properties and special methods."""

import contextlib
import enum
import types
from typing import Any

import torch
from torch import nn

from tigon.runtime.state.known_names import IMPURE, PROBED, TRUSTED
from tigon.runtime.state.objects import defined_names, names_of_fields, package_of, slots_of, special_methods
from tigon.runtime.state.places import Place
from tigon.runtime.state.record import Record

# These special methods of an object run only if the code applies the operation (see `CodeUse.operations`) to an object.
TRIGGERS = {
    **dict.fromkeys(("__init__", "__new__", "__post_init__", "__replace__"), "construct"),
    **dict.fromkeys(("__setattr__", "__delattr__"), "store"),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "format"),
}
# The module `dataclasses` generates these methods. They read every field, but run only if two objects are compared.
COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}


class ClassSearch(Record):
    """The part of the search that visits classes and objects."""

    def visit_class(self, cls: type, path: str) -> None:
        """Visit a class that the code names. The code may construct objects of it."""
        package = package_of(cls.__module__)
        if package in IMPURE:
            self.reach.unwatchable.append(f"uses {cls.__module__}.{cls.__qualname__}")
        if package in IMPURE | TRUSTED and not issubclass(cls, nn.Module):
            return
        names = {*self.names, "forward", "__call__"}
        if issubclass(cls, torch.autograd.Function):
            names |= {"backward", "setup_context", "jvp", "vmap"}
        is_plain = not issubclass(cls, (nn.Module, BaseException, torch.autograd.Function))
        if is_plain:
            names |= special_methods(cls)
            # An object of this class may hold a size of the input under such a name.
            if probed := sorted(PROBED & names_of_fields(cls) & self.names):
                self.reach.decisions.append(f"reads .{probed[0]}, which {cls.__qualname__} defines too")
        previous, self.self_holds_inputs = self.self_holds_inputs, is_plain
        self.visit_class_attributes(cls, sorted(names), path, cls)
        self.self_holds_inputs = previous

    def visit_class_attributes(self, cls: type, names: list[str], path: str, owner: Any) -> None:
        """Watch those of the names that a class or one of its bases defines.

        `owner` is None for the class of the module itself.
        """
        bases = [base for base in cls.__mro__ if package_of(base.__module__) not in TRUSTED]
        if issubclass(cls, nn.Module):
            bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
        defined = set().union(*map(vars, bases))
        for name in names:
            if name not in defined:
                continue
            definers = [base for base in bases if name in vars(base)]
            value = vars(definers[0])[name]
            # Read the attribute by normal lookup. A classmethod gives a new object at each lookup, so its stored
            # value is watched.
            attribute = getattr(cls, name, None)
            if attribute is getattr(cls, name, None) and name.isidentifier():
                how = "attribute" if owner is cls else "class"
                self.reach.places.append(Place(owner, how, name, attribute, f"{path}.{name}"))
                self.entries.append((path, name, self.describe(value, f"{definers[0].__qualname__}.{name}")))
            else:
                self.watch(definers[0], "static", name, value, f"{definers[0].__qualname__}.{name}")
            # With `super`, the code may call the function that a base defines under the same name.
            if "super" in self.names:
                for base in definers[1:]:
                    self.watch(base, "static", name, vars(base)[name], f"{base.__qualname__}.{name}")
        # `cls.name` also finds what a metaclass defines, such as a property, which may read anything.
        if (metaclass := type(cls)) is not type:
            special = {name for name in special_methods(metaclass) if self.may_call(metaclass, name)}
            self.visit_class_attributes(metaclass, sorted(self.names | special), f"type({path})", cls)

    def visit_object(self, value: Any, path: str) -> None:
        """Visit an object with attributes, such as a config: its attributes and what its class defines."""
        kind = type(value)
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        self.reach.places.append(Place(value, "type", None, kind, path))
        self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))
        if attributes:
            self.reach.objects.append(value)
        names = self.attribute_names(attributes, self.live)
        aliases = attributes.get("attribute_map") or getattr(kind, "attribute_map", None)
        # A config of transformers may store an attribute under another name.
        if isinstance(aliases, dict):
            names = sorted({*names, *(aliases[n] for n in self.names & aliases.keys() if aliases[n] in attributes)})
        if isinstance(value, enum.Enum):
            # The property `value` reads this attribute.
            names = sorted({*names, "_value_"})
        for name in names:
            self.watch(attributes, "item", name, attributes[name], f"{path}.{name}")
        missing = sorted(self.names - attributes.keys() - self.live)
        slots = {s for base in kind.__mro__ for s in slots_of(base)}
        for name in slots & self.names:
            with contextlib.suppress(AttributeError):
                self.watch(value, "attribute", name, getattr(value, name), f"{path}.{name}")
        special = {name for name in special_methods(kind) if self.may_call(kind, name)}
        previous, self.self_holds_inputs = self.self_holds_inputs, False
        self.visit_class_attributes(kind, sorted({*missing, *special} - slots), path, value)
        self.self_holds_inputs = previous
        if hasattr(value, "__dict__"):
            may_appear = defined_names(kind) | self.known_uses.optional
            self.watch_absence(attributes, [n for n in missing if n in may_appear], path)
            self.reach.places += [
                Place(value, "undefined", n, None, f"{path}.{n}")
                for n in missing
                if n in self.known_uses.optional and not hasattr(kind, n)
            ]

    def may_call(self, kind: type, name: str) -> bool:
        """Return True if the code may call a special method of an object that exists already."""
        if name in TRIGGERS:
            return TRIGGERS[name] in self.known_uses.operations
        function = getattr(kind, name, None)
        is_generated = isinstance(function, types.FunctionType) and function.__code__.co_filename == "<string>"
        return not (name in COMPARISONS and is_generated) or "compare" in self.known_uses.operations

    def visit_subclass(self, value: tuple | frozenset, path: str) -> None:
        """Visit a tuple or frozenset whose class the user wrote, as an object with attributes."""
        if self.number(value)[1]:
            self.visit_object(value, path)
