"""Find the Python state that a call of a module can reach, beside its inputs and its tensors.

A recipe may take the place of a forward only if that forward is a function of its inputs, its tensors and of settings
that can be watched. `explore` starts at `type(module).forward` and follows the names in the bytecode: methods, helper
functions, globals, closures, attributes of the module and of objects such as a config. Code of torch and of the parts
of the standard library that only compute is trusted, and not entered. The result, a `Reach`, tells

    places       every place that the code reads: where it is, and the value that was found there
    writes       why a call may change something that outlives it: an assignment to an attribute, a counter, a log
    unwatchable  which values change without any sign: generators of random numbers, iterators, files
    fingerprint  the same state by value: equal for a copy of the module, in this process or in another one

The search is by name, so it finds more places than a call reads, and never fewer: if the code loads an attribute
`scale` of anything, then `scale` is watched on every object that the code can reach.
"""

import builtins
import collections
import contextlib
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.bytecode import UNDERSTANDS_BYTECODE, code_use, digest
from tigon.runtime.known_names import (
    FACTS_OF_TENSORS,
    IMPURE,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    MODES,
    MUTATORS,
    NEVER_CALLED,
    TRUSTED,
)

__all__ = ["Place", "Reach", "explore", "is_simple"]

CONTAINERS = (list, dict, set, collections.deque)
VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
SIMPLE = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice)
SIMPLE += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
# Attributes that every module has, and those that hooks of accelerate and tigon itself leave.
STATE = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward", "_replicate_for_data_parallel"}
MOST_PLACES = 128
MOST_FUNCTIONS = 64


def is_simple(value: object) -> bool:
    """Whether a value is immutable and is told by its value alone."""
    return type(value) in SIMPLE


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _is_trusted_function(function: types.FunctionType) -> bool:
    # Not `__module__`: functools.wraps gives a wrapper the module of the function that it wraps.
    return _package(function.__globals__.get("__name__")) in TRUSTED


# --- the search ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place that a call reads.

    `owner` is the object that holds it; None stands for the module itself, so that a place holds no module. `how` tells
    how it is read: "item" of a dict, "entry" of a subclass of dict, "attribute", "class" for an attribute of the
    module's class, "static" for what a class itself defines, "child" of a module, "element" of a list, "absent" for a
    name that must stay missing, "undefined" for one that no class may define, "type" of an object, "length", "members"
    of a set, "version" of a tensor.
    """

    owner: Any
    how: str
    name: Any
    value: Any
    path: str


@dataclass
class Reach:
    """The state that a call of one module can reach."""

    places: list[Place] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    unwatchable: list[str] = field(default_factory=list)
    fingerprint: tuple = ()
    containers: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    # Attributes that the code loads, of any object.
    names: frozenset[str] = frozenset()
    # Conditions whose other outcome no probe may have shown.
    decisions: list[str] = field(default_factory=list)
    # What `preserved` had to put back: the paths of places.
    disturbed: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Why a recipe must not take the place of this forward; None if it may."""
        if not UNDERSTANDS_BYTECODE:
            return "the bytecode of this version of Python is not known, so it cannot be told what its forward reads"
        if self.writes:
            return f"its forward {self.writes[0]}"
        if self.unwatchable:
            return f"its forward {self.unwatchable[0]}"
        if self.disturbed:
            return f"its forward changes {self.disturbed[0]}"
        if len(self.places) > MOST_PLACES:
            return f"its forward reads {len(self.places)} settings, too many to check in every call"
        return None

    @property
    def decision(self) -> str | None:
        """Where the forward takes one of two ways, by its input, so that probes may have seen one of them alone."""
        return f"its forward {self.decisions[0]}" if self.decisions else None

    def checker(self) -> Callable[[], bool]:
        """For a function: tells whether every place that it reads holds what it held."""
        check = self.check()

        def is_unchanged() -> bool:
            try:
                return check({}, type(None))
            except (KeyError, IndexError, AttributeError):
                return False

        return is_unchanged

    def check(self) -> Callable[[dict[str, Any], type], bool]:
        """A function of the module's `__dict__` and class that tells whether every place holds what it held.

        It compares by identity. It raises KeyError, IndexError or AttributeError where a place is gone.
        """
        return _checking(self.places)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Undo every change that the block makes to containers, objects, classes and globals that are reachable."""
        contents = [(container, _items(container)) for container in self.containers]
        states = [(each, dict(vars(each))) for each in self.objects]
        try:
            yield
        finally:
            for container, before in contents:
                if not _same_elements(container, before):
                    self.disturbed.append(next(p.path for p in self.places if p.owner is container))
                    container.clear()
                    container.update(before) if isinstance(container, (dict, set)) else container.extend(before)
            for each, before in states:
                if not _same_items(vars(each), before):
                    self.disturbed.append(next(p.path for p in self.places if p.owner is each))
                    vars(each).clear()
                    vars(each).update(before)
            for place in self.places:
                if type(place.owner) is dict and place.how == "item" and place.owner.get(place.name) is not place.value:
                    self.disturbed.append(place.path)
                    place.owner[place.name] = place.value
                elif place.how == "static" and vars(place.owner).get(place.name) is not place.value:
                    self.disturbed.append(place.path)
                    setattr(place.owner, place.name, place.value)


def _items(container: Any) -> list:
    """The elements of a container by identity, and those of a dict with their keys."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same_elements(container: Any, before: list) -> bool:
    """Whether a container holds the same objects; elements may be tensors, which have no truth."""
    now = _items(container)
    pairs = zip(now, before, strict=False)
    is_dict = isinstance(container, dict)
    return len(now) == len(before) and all(a is b or (is_dict and a[0] is b[0] and a[1] is b[1]) for a, b in pairs)


def _same_items(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)


@functools.cache
def _compiled(source: str) -> Callable:
    return eval(source)


def _condition(place: Place, number: int) -> str:
    """An expression of `own` and `cls`, the module's attributes and class, of the owner o<n> and the value v<n>."""
    holder = "own" if place.owner is None else f"o{number}"
    value = f"v{number}"
    if place.how in ("item", "entry"):
        key = repr(place.name) if is_simple(place.name) else f"n{number}"
        return f"{holder}[{key}] is {value}" if place.how == "item" else f"entry({holder}, {key}) is {value}"
    if place.how == "element":
        return f"{holder}[{place.name}] is {value}"
    if place.how == "child":
        return f"{'own[' + repr('_modules') + ']' if place.owner is None else holder}[{place.name!r}] is {value}"
    return {
        "class": f"{'cls' if place.owner is None else f'type({holder})'}.{place.name} is {value}",
        "attribute": f"{holder}.{place.name} is {value}",
        "static": f"{holder}.__dict__[{place.name!r}] is {value}",
        "absent": f"{place.name!r} not in {holder}",
        "undefined": f"not hasattr({'cls' if place.owner is None else f'type({holder})'}, {place.name!r})",
        "type": f"type({holder}) is {value}",
        "length": f"len({holder}) == {value}",
        "members": f"{holder} == {value}",
        "version": f"{holder}._version == {value}",
    }[place.how]


def _checking(places: list[Place]) -> Callable[[dict[str, Any], type], bool]:
    """A function of a module's attributes and class that tells whether every place holds what it held."""
    names, values, conditions = ["entry"], [dict.__getitem__], []
    for number, place in enumerate(places):
        conditions.append(_condition(place, number))
        for letter, value in (("o", place.owner), ("v", place.value), ("n", place.name)):
            names.append(f"{letter}{number}")
            values.append(value)
    condition = " and ".join(conditions) or "True"
    return _compiled(f"lambda {', '.join(names)}: lambda own, cls: {condition}")(*values)


class _Search:
    """One pass over everything that is reachable, with the attribute names known so far."""

    def __init__(
        self,
        module: nn.Module,
        live: frozenset[str],
        choices: frozenset[str],
        strings: frozenset[str],
        names: frozenset[str],
        all_names: bool,
    ) -> None:
        self.module, self.live, self.choices = module, live, choices
        self.strings, self.names, self.all_names = strings, names, all_names
        self.new_names: set[str] = set()
        self.new_strings: set[str] = set()
        self.wants_all = all_names
        self.reach = Reach()
        self.entries: list[tuple] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # objects whose ids are in use
        self.item_writes: list[tuple[str, str, frozenset[str]]] = []
        self.container_paths: list[tuple[str, Any]] = []
        self.functions: list[types.FunctionType] = []  # those that were entered
        self.optional: set[str] = set()  # attributes that may be missing
        self.stored: set[str] = set()  # attributes that the code assigns
        self.links: set[tuple[int, str]] = set()  # attributes of trusted Python modules that have a place already

    def run(self) -> None:
        if isinstance(self.module, nn.Module):
            self.visit_module(self.module, "self", None)
        else:
            self.entries.append(self.describe(self.module, getattr(self.module, "__name__", "it")))
        for method, where, names in self.item_writes:
            # `x[i] = y` and `x += y` mostly write to a local tensor: they count where the function names a container.
            written = [
                path
                for path, container in self.container_paths
                if hasattr(container, method)
                and (not method.startswith("__") or path.rpartition(".")[2].partition("[")[0] in names)
            ]
            if path := next(iter(written), None):
                self.reach.writes.append(f"may write to {path}, by {method} {where}")
        self.reach.fingerprint, self.reach.names = tuple(self.entries), self.names

    # Each `describe` returns what stands for a value in the fingerprint, and visits what can be reached from it.

    def place(self, owner: Any, how: str, name: Any, value: Any, path: str) -> None:
        described = self.describe(value, path)
        self.entries.append((path, how, described))
        self.reach.places.append(Place(owner, how, name, value, path))

    def number(self, value: Any) -> tuple[int, bool]:
        """The number of an object, and whether it is met for the first time."""
        known = id(value) in self.numbers
        if not known:
            self.numbers[id(value)] = len(self.numbers)
            self.alive.append(value)
        return self.numbers[id(value)], not known

    def describe(self, value: Any, path: str) -> Any:
        if is_simple(value):
            if isinstance(value, str):
                self.new_strings.add(value)
            return type(value).__name__, repr(value)
        if isinstance(value, (tuple, frozenset)):
            items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
            return type(value).__name__, tuple(self.describe(v, f"{path}[{i}]") for i, v in enumerate(items))
        if isinstance(value, types.FunctionType):
            return self.describe_function(value, path)
        if isinstance(value, types.MethodType):
            return "method", self.describe(value.__func__, path), self.describe(value.__self__, f"{path}.__self__")
        if isinstance(value, functools.partial):
            parts = value.func, value.args, tuple(sorted(value.keywords.items()))
            return "partial", *(self.describe(part, path) for part in parts)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value).__name__, self.describe(value.__func__, path)
        if isinstance(value, (property, functools.cached_property)):
            getter = value.fget if isinstance(value, property) else value.func
            if isinstance(value, functools.cached_property):
                self.reach.writes.append(f"computes {path} once, and stores it")
            return "property", self.describe(getter, path)
        number, is_new = self.number(value)
        if is_new:
            self.visit(value, path)
        return number, type(value).__qualname__, self.identify(value)

    def identify(self, value: Any) -> str:
        """A name for what is not entered: the same in every process."""
        if isinstance(value, types.ModuleType):
            return value.__name__
        named = isinstance(value, type) or callable(value)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) if named else None
        return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else ""

    def describe_function(self, function: types.FunctionType, path: str) -> Any:
        number, is_new = self.number(function)
        if is_new:
            if not _is_trusted_function(function):
                self.visit_function(function, path)
            else:
                self.check_torch(function.__name__, path)
                self.visit_trusted_function(function, path)
        return number, function.__module__, function.__qualname__, digest(function.__code__)

    def visit_trusted_function(self, function: types.FunctionType, path: str) -> None:
        """A function of torch may wrap one of the user's, as `torch.no_grad()` does: it is held in the closure."""
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        held += [*(function.__defaults__ or ()), *vars(function).values()]
        for value in held:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self.entries.append((path, "holds", self.describe(value, f"{path}.__wrapped__")))
        if function.__name__ == "forward":  # of a module of torch: the functions that it calls
            for chain in sorted(code_use(function.__code__).chains):
                if chain[0] in function.__globals__:
                    self.visit_chain(function.__globals__[chain[0]], chain)

    def visit(self, value: Any, path: str) -> None:
        kind = type(value)
        package = _package(kind.__module__)
        if isinstance(value, CONTAINERS):
            self.visit_container(value, path)
        elif isinstance(value, (collections.UserDict, collections.UserList)):
            self.visit_object(value, path)
            self.place(vars(value), "item", "data", value.data, f"{path}.data")
        elif isinstance(value, collections.ChainMap):
            self.visit_object(value, path)
            self.place(vars(value), "item", "maps", value.maps, f"{path}.maps")
        elif isinstance(value, VIEWS):
            self.reach.unwatchable.append(f"uses {path}, a {kind.__name__}, whose entries cannot be watched")
        elif isinstance(value, Tensor):
            self.visit_tensor(value, path)
        elif isinstance(value, nn.Module):
            self.visit_module(value, path, value)
        elif isinstance(value, types.ModuleType):
            self.visit_python_module(value, path)
        elif isinstance(value, type):
            self.visit_class(value, path)
        elif isinstance(value, torch.Generator) or package in IMPURE or kind.__module__.startswith("numpy.random"):
            self.reach.unwatchable.append(f"uses {path}, a {kind.__module__}.{kind.__name__}, which changes by itself")
        elif isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)):
            self.visit_builtin(value, path)
        elif hasattr(kind, "__next__") or isinstance(value, (bytearray, memoryview)):
            self.reach.unwatchable.append(f"uses {path}, a {kind.__name__}, whose state cannot be watched")
        elif _is_wrapper(value):
            wrapped = value.__wrapped__
            self.entries.append((path, "holds", self.describe(wrapped, f"{path}.__wrapped__")))
        elif package in ("torch", "logging") or (package in TRUSTED and not hasattr(value, "__dict__")):
            self.entries.append((path, "opaque", repr(value)))
        elif package == "numpy":
            if hasattr(kind, "__setitem__"):
                self.reach.unwatchable.append(f"uses {path}, a numpy {kind.__name__}, whose values cannot be watched")
            else:
                self.entries.append((path, "numpy", repr(value)))
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self.visit_object(value, path)
        elif callable(value):  # a function of another language
            self.entries.append((path, "opaque", repr(value)))
        else:
            self.reach.unwatchable.append(f"uses {path}, a {kind.__module__}.{kind.__name__}, which cannot be watched")

    def visit_builtin(self, function: Any, path: str) -> None:
        owner, name = getattr(function, "__self__", None), function.__name__
        package = _package(getattr(function, "__module__", None) or getattr(owner, "__name__", None))
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and package not in TRUSTED:
            if name in MUTATORS:
                self.reach.writes.append(f"may write to {path}.__self__, by {name}")
            self.describe(owner, f"{path}.__self__")
        elif package in IMPURE or name in IMPURE_BUILTINS:
            self.reach.writes.append(f"calls {name}, which does more than to compute")
        elif package not in TRUSTED | {"numpy"}:
            self.reach.writes.append(f"calls {path}, a function of {package} that may write")
        else:
            self.check_torch(name, path)

    def check_torch(self, name: str, path: str) -> None:
        """Refuse a function of a trusted package that depends on more than its arguments."""
        if name in IMPURE_TORCH:
            self.reach.writes.append(f"calls {path}, which does more than to compute")
        if name in MODES:
            self.reach.unwatchable.append(f"asks {path}, on which its result may depend")

    def visit_function(self, function: types.FunctionType, path: str) -> None:
        if len(self.functions) >= MOST_FUNCTIONS:
            self.reach.unwatchable.append(f"reaches more than {MOST_FUNCTIONS} functions, by {path}")
            return
        self.functions.append(function)
        use = code_use(function.__code__)
        self.new_names |= (use.attributes | use.stored) - {"__dict__", "__class__"}
        self.stored |= use.stored
        self.new_strings |= use.strings
        self.wants_all = self.wants_all or use.reads_all_attributes
        where = lambda line: f"({function.__qualname__}, {os.path.basename(function.__code__.co_filename)}:{line})"
        # What a constructor assigns belongs to the object that the forward makes.
        is_constructor = function.__name__ in ("__init__", "__new__", "__post_init__")
        writes = [(what, line) for what, line in use.writes if not (is_constructor and what.startswith("."))]
        self.reach.writes += [f"writes {what} {where(line)}" for what, line in writes]
        # Helpers of transformers choose between ways that compute the same; its models are read as the user's code is.
        module = str(function.__globals__.get("__name__"))
        if _package(module) != "transformers" or module.startswith("transformers.models."):
            asked = sorted(use.attributes & FACTS_OF_TENSORS)
            self.reach.unwatchable += [f"asks .{name}, on which its result may depend" for name in asked]
            self.reach.decisions += [f"decides by its input {where(line)}" for line in use.decisions]
        for name in sorted(use.imports):
            if name in sys.modules:
                self.describe(sys.modules[name], name)
            else:
                self.reach.writes.append(f"imports {name} {where(function.__code__.co_firstlineno)}")
        # transformers asks its configs for many names, which nobody adds to a module.
        if _package(function.__globals__.get("__name__")) != "transformers":
            self.optional |= use.optional
        if {"vars", "__dict__"} & (use.global_names | use.attributes) and use.item_writes:
            self.reach.writes.append(f"may write attributes by their dict {where(use.item_writes[0][1])}")
        used = use.attributes | use.global_names | frozenset(function.__code__.co_freevars)
        self.item_writes += [(method, where(line), used) for method, line in use.item_writes]
        self.place(function, "attribute", "__code__", function.__code__, f"{path}.__code__")
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                self.place(function, "attribute", name, getattr(function, name), f"{path}.{name}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":  # for `super`: the bases of a class are visited with the class
                continue
            with contextlib.suppress(ValueError):  # an empty cell
                self.place(cell, "attribute", "cell_contents", cell.cell_contents, f"{name} of {function.__qualname__}")
        # Names that are none are those of a tool that rewrites code, as pytest does.
        for name in sorted(filter(str.isidentifier, use.global_names)):
            if name in function.__globals__:
                self.place(function.__globals__, "item", name, function.__globals__[name], name)
                for chain in sorted(chain for chain in use.chains if chain[0] == name):
                    self.visit_chain(function.__globals__[name], chain)
            elif hasattr(builtins, name) and name in IMPURE_BUILTINS:
                self.reach.writes.append(f"calls {name} {where(function.__code__.co_firstlineno)}")

    def visit_chain(self, value: Any, chain: tuple[str, ...]) -> None:
        """Watch what `torch.nn.functional.silu` names; other Python modules are watched by every name."""
        for i, name in enumerate(chain[1:], 1):
            is_module = isinstance(value, types.ModuleType) and _package(value.__name__) in TRUSTED
            if not is_module or name not in vars(value):
                return
            if (id(value), name) not in self.links:
                self.links.add((id(value), name))
                self.place(vars(value), "item", name, vars(value)[name], ".".join(chain[: i + 1]))
            value = vars(value)[name]

    def visit_container(self, container: Any, path: str) -> None:
        if type(container) not in CONTAINERS:
            names = sorted(self.names | {"__getitem__", "__missing__", "__iter__", "__contains__", "__call__"})
            self.visit_class_attributes(type(container), names, path, container)
        if isinstance(container, dict) and _is_table_of_functions(container):
            # A forward takes one of these by a name: by an attribute or a constant of its own.
            if chosen := sorted(self.choices & dict.keys(container)):
                for key in chosen:  # each is taken as a whole: whoever passes `choices` knows what these compute
                    value = dict.__getitem__(container, key)
                    self.reach.places.append(Place(container, "entry", key, value, f"{path}[{key!r}]"))
                    self.entries.append((path, key, self.identify(value)))
                return
            if chosen := sorted(self.strings & dict.keys(container)):
                for key in chosen:
                    self.place_entry(container, key, path)
                return
        self.reach.containers.append(container)
        self.container_paths.append((path, container))
        self.reach.places.append(Place(container, "length", None, len(container), path))
        self.entries.append((path, "length", len(container)))
        if len(container) > MOST_PLACES:
            self.reach.unwatchable.append(f"reads {path}, which holds {len(container)} elements, too many to check")
        elif isinstance(container, set):
            self.reach.places.append(Place(container, "members", None, frozenset(container), path))
            self.entries.append((path, "members", tuple(sorted(map(repr, container)))))
        elif isinstance(container, dict):
            for key in list(dict.keys(container)):
                self.place_entry(container, key, path)
        else:
            for i, value in enumerate(container):
                self.place(container, "element", i, value, f"{path}[{i}]")

    def place_entry(self, table: dict, key: Any, path: str) -> None:
        """An entry as it is stored: a subclass of dict may make something else of it, by its code."""
        how = "item" if type(table) is dict else "entry"
        self.place(table, how, key, dict.__getitem__(table, key), f"{path}[{key!r}]")

    def visit_tensor(self, tensor: Tensor, path: str) -> None:
        small = tensor.device.type == "cpu" and tensor.numel() <= 64 and tensor.layout is torch.strided
        if not small:
            self.reach.unwatchable.append(f"reads {path}, a tensor that is no parameter or buffer of the module")
            return
        self.reach.places.append(Place(tensor, "version", None, tensor._version, path))
        self.entries.append((path, str(tensor.dtype), tuple(tensor.shape), repr(tensor.detach().flatten().tolist())))

    def visit_python_module(self, module: types.ModuleType, path: str) -> None:
        if _package(module.__name__) in IMPURE or module.__name__.startswith("numpy.random"):
            self.reach.unwatchable.append(f"uses {module.__name__}, whose results depend on more than its inputs")
            return
        if _package(module.__name__) in TRUSTED:
            return
        for name in sorted(self.names & vars(module).keys()):
            self.place(vars(module), "item", name, vars(module)[name], f"{path}.{name}")

    def visit_class(self, cls: type, path: str) -> None:
        package = _package(cls.__module__)
        if package in IMPURE:
            self.reach.unwatchable.append(f"uses {cls.__module__}.{cls.__qualname__}")
        if package in IMPURE | TRUSTED and not issubclass(cls, nn.Module):
            return
        names = {*self.names, "forward", "__call__"}
        if issubclass(cls, torch.autograd.Function):
            names.add("backward")
        elif not issubclass(cls, (nn.Module, BaseException)):
            names |= _special_methods(cls)
        self.visit_class_attributes(cls, sorted(names), path, cls)

    def visit_class_attributes(self, cls: type, names: list[str], path: str, owner: Any) -> None:
        """Names that a class or one of its bases defines; `owner` is None for the class of the module itself."""
        bases = [base for base in cls.__mro__ if _package(base.__module__) not in TRUSTED]
        if issubclass(cls, nn.Module):
            bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
        for name in names:
            defining = [base for base in bases if name in vars(base)]
            if not defining:
                continue
            value = vars(defining[0])[name]
            # As it is looked up, through every class in between; a classmethod is another object at each look.
            found = getattr(cls, name, None)
            if found is getattr(cls, name, None) and name.isidentifier():
                how = "attribute" if owner is cls else "class"
                self.reach.places.append(Place(owner, how, name, found, f"{path}.{name}"))
                self.entries.append((path, name, self.describe(value, f"{defining[0].__qualname__}.{name}")))
            else:
                self.place(defining[0], "static", name, value, f"{defining[0].__qualname__}.{name}")
            if "super" in self.names:  # the code may call what a base defines under the same name
                for base in defining[1:]:
                    self.place(base, "static", name, vars(base)[name], f"{base.__qualname__}.{name}")

    def attribute_names(self, own: dict[str, Any], skipped: frozenset[str]) -> list[str]:
        names = own.keys() if self.all_names else self.names & own.keys()
        return sorted(name for name in names if isinstance(name, str) and name not in skipped)

    def visit_object(self, value: Any, path: str) -> None:
        kind = type(value)
        own = vars(value) if hasattr(value, "__dict__") else {}
        self.reach.places.append(Place(value, "type", None, kind, path))
        self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))
        if own:
            self.reach.objects.append(value)
        names = self.attribute_names(own, self.live)
        aliases = own.get("attribute_map") or getattr(kind, "attribute_map", None)
        if isinstance(aliases, dict):  # a config that calls an attribute by another name
            names = sorted({*names, *(aliases[n] for n in self.names & aliases.keys() if aliases[n] in own)})
        for name in names:
            self.place(own, "item", name, own[name], f"{path}.{name}")
        missing = sorted(self.names - own.keys() - self.live)
        slots = {s for base in kind.__mro__ for s in _slots(base)}
        for name in slots & self.names:
            with contextlib.suppress(AttributeError):
                self.place(value, "attribute", name, getattr(value, name), f"{path}.{name}")
        self.visit_class_attributes(kind, sorted({*missing, *_special_methods(kind)} - slots), path, value)
        if hasattr(value, "__dict__"):
            self.forbid(own, [n for n in missing if _defines(kind, n) or n in self.optional], path)
            self.reach.places += [
                Place(value, "undefined", n, None, f"{path}.{n}")
                for n in missing
                if n in self.optional and not hasattr(kind, n)
            ]

    def forbid(self, own: dict[str, Any], names: list[str], path: str, owner: Any = "dict") -> None:
        """Names that come from a class, and must not appear on the instance."""
        holder = own if owner == "dict" else owner
        self.reach.places += [Place(holder, "absent", name, None, f"{path}.{name}") for name in names]

    def visit_module(self, module: nn.Module, path: str, owner: nn.Module | None) -> None:
        """The module itself, where `owner` is None, or a child of it that holds no tensor."""
        own, kind = vars(module), type(module)
        holder = None if owner is None else own
        skipped = frozenset((*STATE, *(self.live if owner is None else ())))
        # The code of torch's own modules is not read, so all of their settings count.
        by_torch = owner is not None and _package(kind.__module__) in TRUSTED
        for name in sorted(own.keys() - skipped) if by_torch else self.attribute_names(own, skipped):
            # Engines exchange the tensors of parameters; what the code itself assigns is its own.
            if not isinstance(own[name], Tensor):
                self.place(holder, "item", name, own[name], f"{path}.{name}")
            elif name in self.stored:
                self.reach.places.append(Place(holder, "item", name, own[name], f"{path}.{name}"))
        names = self.names - own.keys() - own["_parameters"].keys() - own["_buffers"].keys() - own["_modules"].keys()
        special = {"forward", "__call__", "__getattr__", "__getattribute__", "_call_impl"}
        self.visit_class_attributes(kind, sorted(names | special), path, owner)
        # Also what the code assigns and nobody has assigned yet.
        inherited = [n for n in sorted(names - skipped) if n in self.stored or _defines(kind, n, nn.Module.__mro__)]
        self.forbid(own, inherited, path, owner=None if owner is None else "dict")
        if owner is not None:
            if "forward" in own:
                self.place(own, "item", "forward", own["forward"], f"{path}.forward")
            else:
                self.forbid(own, ["forward"], path)
            hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            self.reach.places += [Place(own[hook], "length", None, len(own[hook]), f"{path}.{hook}") for hook in hooks]
            # Hooks that an engine puts on every module move tensors, and this module has none.
            self.entries += [(path, hook, len(_foreign(own[hook]))) for hook in hooks]
            self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))
        for name in sorted(self.optional - own.keys() - skipped):
            if name.isidentifier() and not hasattr(module, name):
                self.reach.places += [
                    Place(holder, "absent", name, None, f"{path}.{name}"),
                    Place(owner, "undefined", name, None, f"{path}.{name}"),
                ]
        for name, child in own["_modules"].items():
            if child is None or not holds_tensors(child):
                child_path = f"{path}.{name}"
                self.entries.append((child_path, "child", child is None))
                modules = None if owner is None else own["_modules"]
                self.reach.places.append(Place(modules, "child", name, child, child_path))
                if child is not None:
                    self.describe(child, child_path)


def _foreign(hooks: dict[int, Callable]) -> list[Callable]:
    return [hook for hook in hooks.values() if not str(getattr(hook, "__module__", "")).startswith("deepspeed.")]


def _is_table_of_functions(table: dict) -> bool:
    values = (v[0] if isinstance(v, tuple) and v else v for v in table.values())
    return all(isinstance(key, str) for key in table) and all(map(callable, values))


def _special_methods(cls: type) -> set[str]:
    """Return the special methods that a class of the user's defines: operators, contexts, calls, descriptors."""
    # Configs of transformers find their attributes by code of their own, which gives what is stored.
    bases = [base for base in cls.__mro__ if _package(base.__module__) not in TRUSTED | {"transformers"}]
    defined = ((name, value) for base in bases for name, value in vars(base).items())
    is_special = lambda name: name.startswith("__") and name.endswith("__") and name not in NEVER_CALLED
    return {name for name, value in defined if is_special(name) and isinstance(value, (types.FunctionType, property))}


def _is_wrapper(value: Any) -> bool:
    """Whether a value is no Python function and wraps one of the user's, as `functools.lru_cache` does.

    Those of transformers ask for versions of packages.
    """
    wrapped = getattr(value, "__wrapped__", None)
    return isinstance(wrapped, types.FunctionType) and _package(wrapped.__module__) not in TRUSTED | {"transformers"}


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _defines(cls: type, name: str, beside: tuple[type, ...] = (object,)) -> bool:
    return any(name in vars(base) for base in cls.__mro__ if base not in beside)


def holds_tensors(module: nn.Module) -> bool:
    """Whether a module or one of its children has a parameter, a buffer or a tensor as an attribute."""
    for each in module.modules():
        own = vars(each)
        tensors = itertools.chain(own["_parameters"].values(), own["_buffers"].values())
        if any(t is not None for t in tensors) or any(isinstance(v, Tensor) for v in own.values()):
            return True
    return False


def explore(module: nn.Module | types.FunctionType, live: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Reach:
    """The state that a module's forward can reach, or a function, without the attributes `live`.

    These are the ones that the caller reads by itself in every call.

    Children that hold tensors are not entered: whoever replaces the forward calls them as the forward does. `choices`
    are the names by which the forward chooses from a table of functions; other entries of that table are not entered.
    """
    skipped, names, strings, all_names = frozenset(("training", *live)), frozenset(), frozenset(), False
    while True:
        search = _Search(module, skipped, frozenset(choices), strings, names, all_names)
        search.run()
        if search.new_names <= names and search.new_strings <= strings and search.wants_all == all_names:
            return search.reach
        names, strings, all_names = names | search.new_names, strings | search.new_strings, search.wants_all
