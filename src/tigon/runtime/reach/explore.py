"""Find everything that the forward of a module, or a function, may read."""

import collections
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.reach.code import digest, nested_codes
from tigon.runtime.reach.holders import HolderWalk
from tigon.runtime.reach.known_names import IMPURE, TRUSTED
from tigon.runtime.reach.objects import is_table_of_functions, is_trusted, package_of, stable_repr, wrapped_function
from tigon.runtime.reach.places import MAX_PLACES, Place, Reach, is_simple

CONTAINERS = (list, dict, set, collections.deque)
# Nothing shows that an object of these types changes, or that it writes.
UNWATCHABLE = (
    operator.methodcaller,
    operator.attrgetter,
    operator.itemgetter,
    types.MappingProxyType,
    types.CellType,
    bytearray,
)


class _Walk(HolderWalk):
    """One walk over everything that is reachable from a module or a function."""

    def run(self) -> Reach:
        if isinstance(self.root, nn.Module):
            self.visit_module(self.root, "self", None)
        else:
            self.entries.append(self.describe(self.root, getattr(self.root, "__name__", "it")))
        while self.visit_new_names() or self.visit_late():
            pass
        self.add_item_writes()
        self.add_tests_of_types()
        self.add_decisions()
        reach = self.reach
        reach.fingerprint = tuple(self.entries)
        reach.names = frozenset(name for name in self.names if name.isidentifier())
        reach.codes = [code for _, function in self.functions for code in nested_codes(function.__code__)]
        return reach

    def visit_new_names(self) -> bool:
        """Let every holder visit the names that it has not seen; return True if there were any."""
        has_new = False
        for visit, seen in self.holders:
            new = self.names - seen
            seen |= new
            has_new |= bool(new)
            for name in sorted(new):
                visit(name)
        return has_new

    def visit_late(self) -> bool:
        """Visit what only the names of the whole walk can decide; return True if there was anything."""
        late_tables = [(table, path) for table, path, keys in self.tables if not keys]
        self.tables = [each for each in self.tables if each[2]]
        for table, path in late_tables:
            self.visit_elements(table, path)
        overridden, self.overridden = (self.overridden, []) if "super" in self.names else ([], self.overridden)
        for base, name in overridden:
            self.watch(base, "static", name, vars(base)[name], f"{base.__qualname__}.{name}")
        return bool(late_tables or overridden)

    def describe(self, value: Any, path: str) -> Any:
        """Return the part of the fingerprint that stands for a value, and visit everything reachable from it."""
        if is_simple(value):
            if isinstance(value, str):
                self.names.add(f"'{value}")
            return type(value).__name__, repr(value)
        if isinstance(value, (tuple, frozenset)):
            items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
            if type(value) not in (tuple, frozenset) and not is_trusted(type(value)) and self.number(value)[1]:
                # A NamedTuple may define methods, and another subclass may hold attributes.
                self.visit_object(value, path)
            return type(value).__name__, tuple(self.describe(v, f"{path}[{i}]") for i, v in enumerate(items))
        if isinstance(value, types.MethodType):
            return "method", self.describe(value.__func__, path), self.describe(value.__self__, f"{path}.__self__")
        if isinstance(value, functools.partial):
            parts = value.func, value.args, tuple(sorted(value.keywords.items()))
            return "partial", *(self.describe(part, path) for part in parts)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value).__name__, self.describe(value.__func__, path)
        if isinstance(value, functools.cached_property):
            self.reach.writes.append(f"computes {path} once, and stores it")
        if isinstance(value, (property, functools.cached_property)):
            return "property", self.describe(value.fget if isinstance(value, property) else value.func, path)
        number, is_new = self.number(value)
        if isinstance(value, types.FunctionType):
            if is_new:
                self.visit_function(value, path)
            return number, value.__module__, value.__qualname__, digest(value.__code__)
        if is_new:
            self.visit(value, path)
        name = getattr(value, "__qualname__", None) if isinstance(value, type) or callable(value) else None
        name = value.__name__ if isinstance(value, types.ModuleType) else name
        return number, type(value).__qualname__, f"{getattr(value, '__module__', None)}.{name}" if name else ""

    def visit(self, value: Any, path: str) -> None:
        """Visit a value that the walk meets for the first time, by the method for values of its kind."""
        kind = type(value)
        package = package_of(kind.__module__)
        if isinstance(value, CONTAINERS):
            self.visit_container(value, path)
        elif isinstance(value, Tensor):
            self.refuse(f"reads {path}, a tensor that is no parameter or buffer of the module")
        elif isinstance(value, nn.Module):
            self.visit_module(value, path, value)
        elif isinstance(value, types.ModuleType):
            self.visit_python_module(value, path)
        elif isinstance(value, type):
            self.visit_class(value, path)
        elif isinstance(value, torch.Generator) or package in IMPURE or kind.__module__.startswith("numpy.random"):
            self.refuse(f"uses {path}, a {kind.__module__}.{kind.__name__}, which changes by itself")
        elif isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)):
            self.visit_builtin(value, path)
        elif (wrapped := wrapped_function(value)) is not None:
            self.entries.append((path, "holds", self.describe(wrapped, f"{path}.__wrapped__")))
        elif package in TRUSTED - {"torch"} and not hasattr(value, "__dict__") and not hasattr(kind, "__next__"):
            if isinstance(value, UNWATCHABLE) or "view" in kind.__name__:
                self.refuse(f"uses {path}, a {kind.__name__}, which cannot be watched")
            self.entries.append((path, "opaque", stable_repr(value)))
        elif package not in ("torch", "numpy") and (hasattr(value, "__dict__") or hasattr(kind, "__slots__")):
            self.visit_object(value, path)
        else:
            self.refuse(f"uses {path}, a {kind.__module__}.{kind.__name__}, whose state cannot be watched")

    def visit_container(self, container: Any, path: str) -> None:
        """Watch the elements of a list, a dict, a set or a deque, or the entries that may be selected from a table."""
        if type(container) not in CONTAINERS:
            for name in ("__getitem__", "__missing__", "__iter__", "__contains__", "__call__"):
                self.visit_class_attribute(type(container), name, path, container)
            visit = lambda name: self.visit_class_attribute(type(container), name, path, container)
            self.holders.append((visit, set()))
        if not (isinstance(container, dict) and is_table_of_functions(container)):
            self.visit_elements(container, path)
        else:
            # A forward selects an entry by a key, which comes from an attribute or a constant.
            selected: set[str] = set()

            def select(name: str) -> None:
                if name[0] == "'" and name[1:] in dict.keys(container):
                    selected.add(name[1:])
                    self.watch_entry(container, name[1:], path)

            self.tables.append((container, path, selected))
            self.holders.append((select, set()))

    def visit_elements(self, container: Any, path: str) -> None:
        self.reach.containers.append((container, path))
        self.reach.places.append(Place(container, "length", None, len(container), path))
        self.entries.append((path, "length", len(container)))
        if len(container) > MAX_PLACES:
            self.refuse(f"reads {path}, which holds {len(container)} elements, too many to check")
        elif isinstance(container, set):
            self.reach.places.append(Place(container, "members", None, frozenset(container), path))
            self.entries.append((path, "members", tuple(sorted(map(repr, container)))))
        elif isinstance(container, dict):
            for key in list(dict.keys(container)):
                self.watch_entry(container, key, path)
        else:
            for i, value in enumerate(container):
                self.watch(container, "element", i, value, f"{path}[{i}]")

    def watch_entry(self, table: dict, key: Any, path: str) -> None:
        """Watch an entry as it is stored, because a subclass of dict may return something else from `[]`."""
        how = "item" if type(table) is dict else "entry"
        self.watch(table, how, key, dict.__getitem__(table, key), f"{path}[{key!r}]")


def explore(
    module: nn.Module | Callable,
    live: tuple[str, ...] = (),
    searched: tuple[str, ...] = (),
    texts: tuple[str, ...] = (),
) -> Reach:
    """Return the state that the forward of a module, or a function, can reach. `live` names attributes that the caller
    reads at every call; they are not watched. For a function, `live` names functions of transformers, which answer
    questions whose answer the caller knows at every call. Children that hold tensors are not searched: the recipe that
    replaces the forward calls them as the forward does. `searched` names the exceptions: children whose parameters or
    settings the recipe reads. `texts` are the strings that calls of a function pass to it, such as the name of an
    activation, which may select entries of tables."""
    walk = _Walk(module, ("training", *live), searched)
    walk.names |= {f"'{text}" for text in texts}
    try:
        return walk.run()
    finally:
        # The holders refer to the walk, and this cycle would keep the module in memory.
        walk.holders.clear()
        walk.tables.clear()
