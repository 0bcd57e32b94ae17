"""Everything that a captured call has read on the host, and would not read again when it is replayed.

A replay reads the values of tensors at their addresses. It does not see that a module has another tensor, mode,
setting, child, hook or forward than at the time of the capture. `ModelState` therefore records the attributes of all
modules and of their configurations, and compares them before each replay.
"""

import dataclasses
import operator
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from tigon.recognition.replacement import Replacement
from tigon.runtime.autograd import version_of

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_CODE = (FunctionType, BuiltinFunctionType, type)


def _copy(x: Any, empty: list[Any]) -> Any:
    """Return a copy of a container, and of the containers in it. Other objects are returned themselves. Empty
    containers are returned themselves and added to `empty`: most tables of a module are empty, and a comparison of an
    object with itself takes no time."""
    if type(x) not in _CONTAINERS:
        return x
    if not x:
        empty.append(x)
        return x
    if isinstance(x, dict):
        return {key: _copy(value, empty) for key, value in x.items()}
    return type(x)(_copy(value, empty) for value in x)


class _WeakCopy:
    """An object that equals a method, or a replaced forward, without a reference to it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, x: Any) -> None:
        self.reference: Any = weakref.WeakMethod(x) if isinstance(x, MethodType) else weakref.ref(x)

    def __eq__(self, other: object) -> bool:
        return bool(self.reference() == other)


class ModelState:
    """The recorded state of a model. The attributes of each module are compared with a copy, in C: an attribute is
    unchanged if it is the same object, or if it is equal, as numbers and containers may be."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.tensors = [*model.parameters(), *model.buffers()]
        self.facts = self._read_tensors()
        # Two tensors of one element may be equal.
        tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
        items = [(table, name, x) for table in tables for name, x in table.items()]
        self.single = [(table, name, x) for table, name, x in items if x is not None and x.numel() == 1]
        self.modules = [*map(weakref.ref, model.modules())]
        self.classes = self._read_classes()
        # The functions and classes that the code of the modules finds among the globals of its file.
        files = {sys.modules[cls.__module__] for cls in self.classes[0] if cls.__module__ in sys.modules}
        tables = [*map(vars, files), vars(nn.functional)]
        self.names_of_code = [(table, [name for name, x in table.items() if isinstance(x, _CODE)]) for table in tables]
        self.code = self._read_code()
        names, attributes = zip(*_attributes(model), strict=True)
        self.names: tuple[str, ...] = names
        # The model refers to this state, so a reference to its own attributes would be a cycle.
        self.others: tuple[dict[str, Any], ...] = attributes[1:]
        self.empty: list[Any] = []
        self.copies = [_copy(now, self.empty) for now in attributes]
        methods = {k: _WeakCopy(x) for k, x in self.copies[0].items() if isinstance(x, (Replacement, MethodType))}
        self.copies[0].update(methods)
        replacements = [x for now in attributes for x in now.values() if isinstance(x, Replacement)]
        self.replacements = [*map(weakref.ref, replacements)]
        self.recipes = self._read_recipes()

    def _read_classes(self) -> tuple[list[type], list[Any]]:
        """Return the classes of all modules, and how these classes are called."""
        classes = [type(reference()) for reference in self.modules]
        return classes, [(getattr(cls, "forward", None), cls.__call__) for cls in {*classes}]

    def _read_code(self) -> list[list[Any]]:
        return [[*map(table.get, names)] for table, names in self.names_of_code]

    def _read_recipes(self) -> list[int]:
        return [id(getattr(reference(), "recipe", None)) for reference in self.replacements]

    def _attributes(self) -> list[dict[str, Any]]:
        return [vars(self.modules[0]()), *self.others]

    def _read_tensors(self) -> list[tuple]:
        """Return the facts about the tensors of the model that a graph depends on."""
        # Tigon may hold a copy of a frozen weight in another format. Other tensors are read at each replay.
        is_frozen = lambda x: isinstance(x, nn.Parameter) and not x.requires_grad
        return [(x.data_ptr(), x.requires_grad, version_of(x) if is_frozen(x) else 0) for x in self.tensors]

    def tensor_versions(self) -> list[int]:
        """Return how often each tensor of the model was changed in place."""
        return [version_of(x) for x in self.tensors]

    def changed_tensor(self) -> str | None:
        """Return what has changed about the tensors of the model, or None. A replay reads and writes their memory."""
        is_same = all(table.get(name) is x for table, name, x in self.single) and self._read_tensors() == self.facts
        return None if is_same else "a parameter or a buffer"

    def change(self) -> str | None:
        """Return what has changed since the capture, or None."""
        if (change := self.changed_tensor()) is not None:
            return change
        if self._read_recipes() != self.recipes:
            return "a forward"
        if self._read_classes() != self.classes:
            return "a class"
        if self._read_code() != self.code:
            return "a function that a forward may call"
        try:
            if not any(self.empty) and all(map(operator.eq, self.copies, self._attributes())):
                return None
        except Exception:
            # Two tensors that are not the same have no comparison that is true or false.
            return self._find_change()
        return self._find_change()

    def _find_change(self) -> str:
        """Return the first attribute that has changed."""
        for name, copy, now in zip(self.names, self.copies, self._attributes(), strict=True):
            for key in copy.keys() | now.keys():
                if key not in copy or key not in now or not _is_same(copy[key], now[key]):
                    return f"{name}.{key}"
        return "an empty list, dict or table of hooks"

    def restore(self) -> None:
        """Give the attributes that have changed their recorded values."""
        for container in filter(None, self.empty):
            container.clear()
        for copy, now in zip(self.copies, self._attributes(), strict=True):
            for key in now.keys() - copy.keys():
                del now[key]
            changed = {k: x for k, x in copy.items() if k not in now or not _is_same(x, now[k])}
            now.update({k: _copy(x, self.empty) for k, x in changed.items() if not isinstance(x, _WeakCopy)})


def _is_same(x: Any, y: Any) -> bool:
    try:
        return x is y or bool(x == y)
    except Exception:
        return False


def _attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the attributes of the modules of a model, and of the objects that hold their settings."""
    configurations: dict[int, Any] = {}
    for name, module in model.named_modules():
        yield name or type(module).__name__, vars(module)
        for key, x in vars(module).items():
            holds_settings = (
                key == "config" or isinstance(x, (SimpleNamespace, Namespace)) or dataclasses.is_dataclass(x)
            )
            if holds_settings and hasattr(x, "__dict__") and not isinstance(x, type):
                configurations[id(x)] = x
    for config in configurations.values():
        yield type(config).__name__, vars(config)
