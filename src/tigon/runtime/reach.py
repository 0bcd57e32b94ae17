"""Find the Python state that a call of a module can reach, besides its inputs and its tensors.

A recipe may replace a forward only if that forward is a function of its inputs, of its tensors and of settings that can
be watched. `explore` starts at `type(module).forward` and follows the names in the bytecode: methods, helper functions,
globals, closures, attributes of the module and of objects such as a config. It trusts torch and those parts of the
standard library that only compute, and does not read their code. The result is a `Reach` (tigon.runtime.places).

The search is by name, so it finds more places than a call reads, and never fewer: if the code loads an attribute
`scale` of anything, then `scale` is watched on every object that the code can reach.
"""

import builtins
import collections
import contextlib
import functools
import inspect
import itertools
import logging
import operator
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.bytecode import CodeUse, code_use, digest
from tigon.runtime.decisions import Inputs, decisions
from tigon.runtime.known_names import (
    FACTS_OF_TENSORS,
    IMPURE,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    MODES,
    MUTATORS,
    NEVER_CALLED,
    PROBED,
    TRUSTED,
    WRITING_OPERATORS,
)
from tigon.runtime.places import MOST_PLACES, REGISTERED, Place, Reach, bits_of, is_simple
from tigon.runtime.stock import CALLS_OF_INSTANCES

__all__ = ["explore"]

CONTAINERS = (list, dict, set, collections.deque)
VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
# Attributes that every module has, and attributes that accelerate's hooks and Tigon add. They are not settings.
STATE = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward", "_replicate_for_data_parallel"}
MOST_FUNCTIONS = 64
# Packages whose code, beside models of transformers, does not change what a module computes.
HELPERS = frozenset(("transformers", "accelerate", "deepspeed"))
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# A function that loads one of these attributes may reach the parameters of the module without naming them.
WAYS_TO_PARAMETERS = {"data", "parameters", "named_parameters", "buffers", "named_buffers", "state_dict"}
WAYS_TO_PARAMETERS |= {"get_parameter", "get_buffer", "_parameters", "_buffers"}
# These special methods of an object run only if the code does what the value says with some object.
TRIGGERS = {
    **dict.fromkeys(("__init__", "__new__", "__post_init__", "__replace__"), "construct"),
    **dict.fromkeys(("__setattr__", "__delattr__"), "store"),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "format"),
}
# dataclasses writes these methods. They read every field, but only if two objects are compared.
COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
OWN_OPERATORS = {"aten", "prims"}
# Objects of these types of torch hold nothing that a call changes.
CONSTANTS_OF_TORCH = (torch.finfo, torch.iinfo, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)
CONSTANTS_OF_TORCH += (torch.set_grad_enabled, torch.qscheme, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _is_trusted_function(function: types.FunctionType) -> bool:
    # `__module__` would mislead: functools.wraps gives a wrapper the module of the function that it wraps.
    return _package(function.__globals__.get("__name__")) in TRUSTED


# --- the search ------------------------------------------------------------------------------------


@dataclass
class _Uses:
    """What all functions that a search has read use together."""

    names: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    # What the code may do with any object, as in `CodeUse.operations`.
    operations: set[str] = field(default_factory=set)
    # Attributes whose type the code asks for.
    typed: set[str] = field(default_factory=set)
    # Names of attributes that may be missing.
    optional: set[str] = field(default_factory=set)
    # This is True if every attribute counts as read.
    all_names: bool = False

    def contains(self, other: "_Uses") -> bool:
        """Return True if `other` uses nothing more."""
        return self.joined(other) == self

    def joined(self, other: "_Uses") -> "_Uses":
        """Return the uses of both."""
        return _Uses(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(self)))


class _Search:
    """One pass over everything that is reachable, with the uses known so far."""

    def __init__(
        self, module: Any, live: frozenset[str], choices: frozenset[str], inputs: int | None, known: _Uses
    ) -> None:
        self.module, self.live, self.choices, self.inputs = module, live, choices, inputs
        self.names, self.strings, self.all_names = frozenset(known.names), known.strings, known.all_names
        self.known, self.uses = known, _Uses(all_names=known.all_names)
        self.reach = Reach()
        self.entries: list[tuple] = []
        self.numbers: dict[int, int] = {}
        # References to the numbered objects, so that no id is used a second time.
        self.references: list[Any] = []
        self.item_writes: list[tuple[str, str, frozenset[str]]] = []
        self.container_paths: list[tuple[str, Any]] = []
        # Functions whose code the search has read.
        self.functions: list[types.FunctionType] = []
        # Names of attributes that the code assigns.
        self.stored: set[str] = set()
        # Writes to tensors, and checks: both matter only together with what the rest of the search finds.
        self.tensor_writes: list[tuple[str, str, frozenset[str], frozenset[str]]] = []
        self.checks: list[str] = []
        self.catches = False
        # This is True while the search visits a class of which the code may construct objects.
        self.owns_input = False
        # Attributes of trusted Python modules that have a place already, as (id of the Python module, name).
        self.links: set[tuple[int, str]] = set()

    def run(self) -> None:
        if isinstance(self.module, nn.Module):
            self.visit_module(self.module, "self", None)
        else:
            self.entries.append(self.describe(self.module, getattr(self.module, "__name__", "it")))
        for method, where, names in self.item_writes:
            # `x[i] = y` and `x += y` usually write to a local tensor. They count as writes only if the function names a
            # reachable container.
            container_paths = [
                path
                for path, container in self.container_paths
                if hasattr(container, method)
                and (not method.startswith("__") or path.rpartition(".")[2].partition("[")[0] in names)
            ]
            if path := next(iter(container_paths), None):
                self.reach.writes.append(f"may write to {path}, by {method} {where}")
        self.reach.writes += self.writes_to_tensors()
        # Another module with weights raises as well for an input of another width.
        if self.catches or not isinstance(self.module, nn.Module) or not holds_tensors(self.module):
            self.reach.decisions += self.checks
        self.reach.fingerprint, self.reach.names = tuple(self.entries), self.names

    def writes_to_tensors(self) -> list[str]:
        """Return the reasons why the code may write to a tensor that outlives the call.

        `y.mul_(2)` usually writes to a local tensor. Such a method counts as a write if a tensor besides parameters is
        reachable, or if the expression before it names a tensor of the module or the way to its parameters.
        """
        tensors = _names_of_tensors(self.module) if isinstance(self.module, nn.Module) else set()
        outside = next((path for _, path in self.reach.tensors), None)
        last_names = {path.rpartition(".")[2].partition("[")[0] for _, path in self.reach.tensors}
        reasons = []
        for method, where, receiver, names in self.tensor_writes:
            if not (method.startswith("an option") or hasattr(Tensor, method) or hasattr(torch, method)):
                continue
            of_module = receiver & tensors or (receiver | names) & WAYS_TO_PARAMETERS
            if outside or of_module:
                target = outside if outside else "a parameter"
                reasons.append(f"may write to {target}, by {method} {where}")
        for method, where, names in self.item_writes:
            if last_names & names and hasattr(Tensor, method):
                reasons.append(f"may write to {outside}, by {method} {where}")
        return reasons

    # `describe` returns the part of the fingerprint for a value, and visits everything reachable from it.

    def place(self, owner: Any, how: str, name: Any, value: Any, path: str) -> None:
        described = self.describe(value, path)
        self.entries.append((path, how, described))
        self.reach.places.append(Place(owner, how, name, value, path))

    def number(self, value: Any) -> tuple[int, bool]:
        """Return the number of an object, and True if the search meets it for the first time."""
        is_new = id(value) not in self.numbers
        if is_new:
            self.numbers[id(value)] = len(self.numbers)
            self.references.append(value)
        return self.numbers[id(value)], is_new

    def describe(self, value: Any, path: str) -> Any:
        if is_simple(value):
            if isinstance(value, str):
                self.uses.strings.add(value)
            return type(value).__name__, repr(value)
        if isinstance(value, (tuple, frozenset)):
            items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
            if type(value) not in (tuple, frozenset) and _package(type(value).__module__) not in TRUSTED:
                # A NamedTuple may define methods, and another subclass may hold attributes.
                self.visit_subclass(value, path)
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

    def visit_subclass(self, value: tuple | frozenset, path: str) -> None:
        if self.number(value)[1]:
            self.visit_object(value, path)

    def identify(self, value: Any) -> str:
        """Return a name, equal in every process, for a value whose code is not read."""
        if isinstance(value, types.ModuleType):
            return value.__name__
        has_name = isinstance(value, type) or callable(value)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) if has_name else None
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
        """Visit the user's functions that a function of torch wraps, as a `torch.no_grad()` decorator does.

        They are in its closure, its defaults or its attributes.
        """
        values = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        values += [*(function.__defaults__ or ()), *vars(function).values()]
        for value in values:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self.entries.append((path, "holds", self.describe(value, f"{path}.__wrapped__")))
        # For the forward of a torch module, watch the torch functions that it calls.
        if function.__name__ == "forward":
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
        elif package == "torch":
            self.visit_object_of_torch(value, path)
        elif package in TRUSTED and not hasattr(value, "__dict__"):
            if isinstance(value, operator.methodcaller):
                self.reach.unwatchable.append(f"uses {path}, a methodcaller, which may call any method")
            self.entries.append((path, "opaque", _stable_repr(value)))
        elif package == "numpy":
            if hasattr(kind, "__setitem__"):
                self.reach.unwatchable.append(f"uses {path}, a numpy {kind.__name__}, whose values cannot be watched")
            else:
                self.entries.append((path, "numpy", repr(value)))
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self.visit_object(value, path)
        # What remains is a callable of compiled code.
        elif callable(value):
            self.entries.append((path, "opaque", repr(value)))
        else:
            self.reach.unwatchable.append(f"uses {path}, a {kind.__module__}.{kind.__name__}, which cannot be watched")

    def visit_object_of_torch(self, value: Any, path: str) -> None:
        """Accept objects of torch that are constants, and scripted functions that only compute."""
        self.entries.append((path, "opaque", _stable_repr(value)))
        if isinstance(value, torch.jit.ScriptFunction):
            if other := _other_statements(value):
                self.reach.unwatchable.append(f"calls {path}, a scripted function with {other}")
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.check_namespace(str(value), path)
        elif not isinstance(value, CONSTANTS_OF_TORCH):
            self.reach.unwatchable.append(
                f"uses {path}, a {type(value).__module__}.{type(value).__name__}, whose state cannot be watched"
            )

    def check_namespace(self, name: str, path: str) -> None:
        """Refuse an operator that is not one of torch's own: its code is not read."""
        if _package(name) not in OWN_OPERATORS:
            self.reach.unwatchable.append(f"calls {path}, an operator of {_package(name)}, whose code is not read")

    def visit_builtin(self, function: Any, path: str) -> None:
        owner, name = getattr(function, "__self__", None), function.__name__
        package = _package(getattr(function, "__module__", None) or getattr(owner, "__name__", None))
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and package not in TRUSTED:
            if name in MUTATORS:
                self.reach.writes.append(f"may write to {path}.__self__, by {name}")
            self.describe(owner, f"{path}.__self__")
        elif package in IMPURE or name in IMPURE_BUILTINS or (package == "_operator" and name in WRITING_OPERATORS):
            self.reach.writes.append(f"calls {name}, which does more than compute")
        elif package not in TRUSTED | {"numpy"}:
            self.reach.writes.append(f"calls {path}, a function of {package} that may write")
        else:
            self.check_torch(name, path)

    def check_torch(self, name: str, path: str) -> None:
        """Refuse a function of a trusted package that depends on more than its arguments."""
        if name in IMPURE_TORCH:
            self.reach.writes.append(f"calls {path}, which does more than compute")
        if name in MODES:
            self.reach.unwatchable.append(f"asks {path}, on which its result may depend")

    def visit_function(self, function: types.FunctionType, path: str) -> None:
        if len(self.functions) >= MOST_FUNCTIONS:
            self.reach.unwatchable.append(f"reaches more than {MOST_FUNCTIONS} functions, by {path}")
            return
        self.functions.append(function)
        use = code_use(function.__code__)
        self.note(use)
        where = lambda line: f"({function.__qualname__}, {os.path.basename(function.__code__.co_filename)}:{line})"
        # An attribute that a constructor gives to its new object is no lasting write. A constructor that is called by
        # its name may get any object.
        self.reach.writes += [f"writes {what} {where(line)}" for what, line in use.writes]
        # Helpers of transformers and hooks of engines choose between code paths that compute the same, and log
        # warnings. The models of transformers are read like user code.
        module = str(function.__globals__.get("__name__"))
        is_helper = _package(module) in HELPERS and not module.startswith("transformers.models.")
        if not is_helper:
            self.check_inputs(function, use, where)
        for name in sorted(use.imports):
            if name in sys.modules:
                self.describe(sys.modules[name], name)
            else:
                self.reach.writes.append(f"imports {name} {where(function.__code__.co_firstlineno)}")
        # The code of transformers looks up many names in configs. Nobody adds these to a module later, so they need no
        # watch.
        if _package(function.__globals__.get("__name__")) != "transformers":
            self.uses.optional |= use.optional
        if {"vars", "__dict__"} & (use.global_names | use.attributes) and use.item_writes:
            self.reach.writes.append(f"may write attributes by their dict {where(use.item_writes[0][1])}")
        names = use.attributes | use.global_names | frozenset(function.__code__.co_freevars)
        self.item_writes += [(method, where(line), names) for method, line in use.item_writes]
        self.tensor_writes += [(method, where(line), of, use.attributes) for method, line, of in use.tensor_writes]
        if "__init__" in use.attributes and function.__name__ not in CONSTRUCTORS:
            self.reach.writes.append(f"may write attributes, by __init__ {where(function.__code__.co_firstlineno)}")
        self.place(function, "attribute", "__code__", function.__code__, f"{path}.__code__")
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                self.place(function, "attribute", name, getattr(function, name), f"{path}.{name}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # `super` needs this cell. The bases of a class are visited with the class.
            if name == "__class__":
                continue
            # An empty cell raises ValueError.
            with contextlib.suppress(ValueError):
                self.place(cell, "attribute", "cell_contents", cell.cell_contents, f"{name} of {function.__qualname__}")
        # Names that are no identifiers come from tools that rewrite code, such as pytest.
        for name in sorted(filter(str.isidentifier, use.global_names)):
            if is_helper and isinstance(function.__globals__.get(name), logging.Logger):
                continue
            if name in function.__globals__:
                self.place(function.__globals__, "item", name, function.__globals__[name], name)
                for chain in sorted(chain for chain in use.chains if chain[0] == name):
                    self.visit_chain(function.__globals__[name], chain)
            elif hasattr(builtins, name) and name in IMPURE_BUILTINS:
                self.reach.writes.append(f"calls {name} {where(function.__code__.co_firstlineno)}")

    def note(self, use: CodeUse) -> None:
        """Add what a function uses to the uses of the whole search."""
        self.uses.names |= (use.attributes | use.stored) - {"__dict__", "__class__"}
        self.uses.strings |= use.strings
        self.uses.operations |= use.operations
        self.uses.typed |= use.typed
        self.uses.all_names |= use.reads_all_attributes
        self.stored |= use.stored

    def check_inputs(self, function: types.FunctionType, use: CodeUse, where: Callable[[int], str]) -> None:
        """Note how a function depends on its inputs besides their values."""
        facts = sorted(use.attributes & FACTS_OF_TENSORS)
        self.reach.unwatchable += [f"asks .{name}, on which its result may depend" for name in facts]
        lines, checks = decisions(function.__code__, self.inputs_of(function))
        self.reach.decisions += [f"decides by its input {where(line)}" for line in lines]
        self.checks += [f"decides by its input {where(line)}" for line in checks]
        self.catches |= use.catches
        for name, line in use.reads_of_arguments:
            if name is None or not hasattr(Tensor, name):
                what = "attributes by computed names" if name is None else f".{name}"
                self.reach.unprobed.append(f"reads {what} of its input, if there is one {where(line)}")

    def inputs_of(self, function: types.FunctionType) -> Inputs:
        """Return how the search's caller calls a function; any arguments are expected unless it is the forward."""
        is_forward = isinstance(self.module, nn.Module) and type(self.module).__dict__.get("forward") is function
        # A forward that is called by its name may get more arguments than the recipe passes.
        if self.inputs is None or not is_forward or "forward" in self.names:
            return Inputs(owns_input=self.owns_input)
        return Inputs(self.inputs, len(function.__defaults__ or ()))

    def visit_chain(self, value: Any, chain: tuple[str, ...]) -> None:
        """Watch each attribute in a chain such as `torch.nn.functional.silu`.

        In Python modules that are not trusted, every loaded name is watched (`visit_python_module`).
        """
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
            # A forward selects an entry by a key, which comes from an attribute or a constant.
            if keys := sorted(self.choices & dict.keys(container)):
                # These entries are not searched: the caller that passes `choices` knows what they compute.
                for key in keys:
                    value = dict.__getitem__(container, key)
                    self.reach.places.append(Place(container, "entry", key, value, f"{path}[{key!r}]"))
                    self.entries.append((path, key, self.identify(value)))
                return
            if keys := sorted(self.strings & dict.keys(container)):
                for key in keys:
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
        """Watch an entry as it is stored, because a subclass of dict may return something else from `[]`."""
        how = "item" if type(table) is dict else "entry"
        self.place(table, how, key, dict.__getitem__(table, key), f"{path}[{key!r}]")

    def visit_tensor(self, tensor: Tensor, path: str) -> None:
        """Watch the values of a small tensor that is no parameter or buffer of the module."""
        self.reach.tensors.append((tensor, path))
        bits = bits_of(tensor)
        if bits is None:
            self.reach.unwatchable.append(f"reads {path}, a tensor that is no parameter or buffer of the module")
            return
        self.reach.places.append(Place(tensor, "bits", None, bits, path))
        self.entries.append((path, str(tensor.dtype), tuple(tensor.shape), bits[2]))

    def visit_python_module(self, module: types.ModuleType, path: str) -> None:
        if _package(module.__name__) in IMPURE or module.__name__.startswith("numpy.random"):
            self.reach.unwatchable.append(f"uses {module.__name__}, which does more than compute from its inputs")
            return
        if isinstance(module, (type(torch.ops), type(torch.ops.aten))):
            self.visit_operators(module, path)
        if _package(module.__name__) in TRUSTED:
            return
        for name in sorted(self.names & vars(module).keys()):
            self.place(vars(module), "item", name, vars(module)[name], f"{path}.{name}")

    def visit_operators(self, operators: types.ModuleType, path: str) -> None:
        """Refuse `torch.ops` with a namespace that is not torch's own."""
        if operators is torch.ops:
            namespaces = {_namespace(name) for name in torch._C._dispatch_get_all_op_names()} & self.names
        else:
            namespaces = {operators.name}
        for namespace in sorted(namespaces - OWN_OPERATORS):
            self.check_namespace(namespace, f"{path}.{namespace}")

    def visit_class(self, cls: type, path: str) -> None:
        package = _package(cls.__module__)
        if package in IMPURE:
            self.reach.unwatchable.append(f"uses {cls.__module__}.{cls.__qualname__}")
        if package in IMPURE | TRUSTED and not issubclass(cls, nn.Module):
            return
        names = {*self.names, "forward", "__call__"}
        if issubclass(cls, torch.autograd.Function):
            names |= {"backward", "setup_context", "jvp", "vmap"}
        is_plain = not issubclass(cls, (nn.Module, BaseException, torch.autograd.Function))
        if is_plain:
            names |= _special_methods(cls)
            # An object of this class may hold a size of the input under such a name.
            if probed := sorted(PROBED & _names_of_fields(cls) & self.names):
                self.reach.decisions.append(f"reads .{probed[0]}, which {cls.__qualname__} defines too")
        before, self.owns_input = self.owns_input, is_plain
        self.visit_class_attributes(cls, sorted(names), path, cls)
        self.owns_input = before

    def visit_class_attributes(self, cls: type, names: list[str], path: str, owner: Any) -> None:
        """Watch those of the names that a class or one of its bases defines.

        `owner` is None for the class of the module itself.
        """
        bases = [base for base in cls.__mro__ if _package(base.__module__) not in TRUSTED]
        if issubclass(cls, nn.Module):
            bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
        for name in names:
            definers = [base for base in bases if name in vars(base)]
            if not definers:
                continue
            value = vars(definers[0])[name]
            # Read the attribute by normal lookup. A classmethod gives a new object at each lookup, so its stored
            # value is watched.
            attribute = getattr(cls, name, None)
            if attribute is getattr(cls, name, None) and name.isidentifier():
                how = "attribute" if owner is cls else "class"
                self.reach.places.append(Place(owner, how, name, attribute, f"{path}.{name}"))
                self.entries.append((path, name, self.describe(value, f"{definers[0].__qualname__}.{name}")))
            else:
                self.place(definers[0], "static", name, value, f"{definers[0].__qualname__}.{name}")
            # With `super`, the code may call the function that a base defines under the same name.
            if "super" in self.names:
                for base in definers[1:]:
                    self.place(base, "static", name, vars(base)[name], f"{base.__qualname__}.{name}")
        # `cls.name` also finds what a metaclass defines, such as a property, which may read anything.
        if (metaclass := type(cls)) is not type:
            special = {name for name in _special_methods(metaclass) if self.may_call(metaclass, name)}
            self.visit_class_attributes(metaclass, sorted(self.names | special), f"type({path})", cls)

    def attribute_names(self, attributes: dict[str, Any], skipped: frozenset[str]) -> list[str]:
        names = attributes.keys() if self.all_names else self.names & attributes.keys()
        return sorted(name for name in names if isinstance(name, str) and name not in skipped)

    def visit_object(self, value: Any, path: str) -> None:
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
        for name in names:
            self.place(attributes, "item", name, attributes[name], f"{path}.{name}")
        missing = sorted(self.names - attributes.keys() - self.live)
        slots = {s for base in kind.__mro__ for s in _slots(base)}
        for name in slots & self.names:
            with contextlib.suppress(AttributeError):
                self.place(value, "attribute", name, getattr(value, name), f"{path}.{name}")
        special = {name for name in _special_methods(kind) if self.may_call(kind, name)}
        before, self.owns_input = self.owns_input, False
        self.visit_class_attributes(kind, sorted({*missing, *special} - slots), path, value)
        self.owns_input = before
        if hasattr(value, "__dict__"):
            self.forbid(attributes, [n for n in missing if _defines(kind, n) or n in self.uses.optional], path)
            self.reach.places += [
                Place(value, "undefined", n, None, f"{path}.{n}")
                for n in missing
                if n in self.uses.optional and not hasattr(kind, n)
            ]

    def may_call(self, kind: type, name: str) -> bool:
        """Return True if the code may call a special method of an object that exists already."""
        if name in TRIGGERS:
            return TRIGGERS[name] in self.known.operations
        function = getattr(kind, name, None)
        by_dataclass = isinstance(function, types.FunctionType) and function.__code__.co_filename == "<string>"
        return not (name in COMPARISONS and by_dataclass) or "compare" in self.known.operations

    def forbid(self, attributes: dict[str, Any], names: list[str], path: str, owner: Any = "dict") -> None:
        """Watch that names which a class defines do not appear on the instance."""
        holder = attributes if owner == "dict" else owner
        self.reach.places += [Place(holder, "absent", name, None, f"{path}.{name}") for name in names]

    def visit_module(self, module: nn.Module, path: str, owner: nn.Module | None) -> None:
        """Visit the module itself if `owner` is None, otherwise a child without tensors, or a module in a list."""
        if isinstance(module, torch.jit.ScriptModule):
            self.reach.unwatchable.append(f"uses {path}, a scripted module, whose code is not read")
            return
        attributes, kind = vars(module), type(module)
        holder = None if owner is None else attributes
        skipped = frozenset((*STATE, *(self.live if owner is None else ())))
        # The code of torch's modules is not read, so all of their settings count.
        by_torch = owner is not None and _package(kind.__module__) in TRUSTED
        for name in sorted(attributes.keys() - skipped) if by_torch else self.attribute_names(attributes, skipped):
            # Engines exchange the tensors of parameters, so tensors are not watched, except those that the code itself
            # assigns.
            if not isinstance(attributes[name], Tensor):
                self.place(holder, "item", name, attributes[name], f"{path}.{name}")
            elif name in self.stored:
                self.reach.places.append(Place(holder, "item", name, attributes[name], f"{path}.{name}"))
        names = self.names.difference(attributes, *(attributes[t] for t in ("_parameters", "_buffers", "_modules")))
        special = {"forward", "__call__", "__getattr__", "__getattribute__", "_call_impl"}
        self.visit_class_attributes(kind, sorted(names | special), path, owner)
        # Names that the code assigns, but that are not set yet, are watched as absent too.
        inherited = [n for n in sorted(names - skipped) if n in self.stored or _defines(kind, n, nn.Module.__mro__)]
        self.forbid(attributes, inherited, path, owner=None if owner is None else "dict")
        if owner is not None:
            for name in ("forward", *CALLS_OF_INSTANCES):
                if name in attributes:
                    self.place(attributes, "item", name, attributes[name], f"{path}.{name}")
                else:
                    self.forbid(attributes, [name], path)
            # An op makes no such call, so torch's own calls must be those that the probes made.
            for name in ("__call__", "_call_impl"):
                self.place(module, "class", name, getattr(kind, name), f"{path}.{name}")
            hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            self.reach.places += [
                Place(attributes[hook], "length", None, len(attributes[hook]), f"{path}.{hook}") for hook in hooks
            ]
            # Engines put hooks that move tensors on every module. They are ignored, because this module has no tensor.
            self.entries += [(path, hook, len(_without_engine_hooks(attributes[hook]))) for hook in hooks]
            self.entries.append((path, "class", f"{kind.__module__}.{kind.__qualname__}"))
        self.visit_tables(attributes, path, owner)
        for name in sorted(self.uses.optional - attributes.keys() - skipped):
            if name.isidentifier() and not _has(module, name):
                self.reach.places += _places_of_absence(holder, owner, name, path)
            elif any(name in attributes[table] for table in REGISTERED):
                self.entries.append((f"{path}.{name}", "registered"))
        for name, child in attributes["_modules"].items():
            child_path = f"{path}.{name}"
            if owner is None and child is not None and holds_tensors(child):
                self.visit_child_with_tensors(child, name, child_path)
                continue
            self.entries.append((child_path, "child", child is None))
            modules = None if owner is None else attributes["_modules"]
            self.reach.places.append(Place(modules, "child", name, child, child_path))
            if child is not None:
                self.describe(child, child_path)

    def visit_tables(self, attributes: dict[str, Any], path: str, owner: nn.Module | None) -> None:
        """Watch that parameters and buffers that are None stay None; of a module in a list, also watch the others."""
        for table in REGISTERED[:2]:
            for name, tensor in attributes[table].items():
                if tensor is None and name not in self.live:
                    holder = None if owner is None else attributes
                    self.reach.places.append(Place(holder, "unset", name, table, f"{path}.{name}"))
                    self.entries.append((f"{path}.{name}", "unset"))
                elif tensor is not None and owner is not None:
                    self.describe(tensor, f"{path}.{name}")
        if owner is not None:
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    self.describe(value, f"{path}.{name}")

    def visit_child_with_tensors(self, child: nn.Module, name: str, path: str) -> None:
        """Note what the code reads of a child in whose place the probes put a plain linear layer."""
        attributes, known = vars(child), {*STATE, "in_features", "out_features"}
        if name in self.known.typed:
            self.reach.unprobed.append(f"asks for the type of {path}, or of a value computed by it")
        values = {n for n in attributes.keys() - known if self.all_names or n in self.names}
        defined = {n for n in self.names - known if _defines(type(child), n, _bases_of_torch(type(child)))}
        for each in sorted(values | defined):
            if not isinstance(attributes.get(each), Tensor):
                self.reach.unprobed.append(f"may read {path}.{each}, an attribute of a child with weights")
        # A name that no child has yet may appear on one, or another child may take this one's place.
        absent = [n for n in sorted(self.known.optional - known) if n.isidentifier() and not _has(child, n)]
        if absent:
            self.reach.places.append(Place(None, "child", name, child, path))
            self.entries.append((path, "child without", tuple(absent)))
        for each in absent:
            self.reach.places += _places_of_absence(attributes, child, each, path)


def _has(module: nn.Module, name: str) -> bool:
    """Return True if a module has an attribute. No property of the module runs, unlike in `hasattr`."""
    if any(name in vars(module)[table] for table in REGISTERED):
        return True
    return inspect.getattr_static(module, name, _has) is not _has


def _places_of_absence(holder: dict[str, Any] | None, owner: nn.Module | None, name: str, path: str) -> list[Place]:
    """Return the places where an attribute of a module may appear."""
    return [
        Place(holder, "absent", name, None, f"{path}.{name}"),
        Place(owner, "undefined", name, None, f"{path}.{name}"),
        Place(holder, "unregistered", name, None, f"{path}.{name}"),
    ]


def _bases_of_torch(cls: type) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if base is object or _package(base.__module__) == "torch")


def _names_of_tensors(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters and buffers, and of its attributes that are tensors."""
    attributes = vars(module)
    plain = {name for name, value in attributes.items() if isinstance(value, Tensor)}
    return plain.union(*(attributes[table].keys() for table in REGISTERED[:2]))


def _names_of_fields(cls: type) -> set[str]:
    """Return the names that a user's class or its constructor defines."""
    names: set[str] = set()
    for base in cls.__mro__:
        if _package(base.__module__) not in TRUSTED:
            names |= {*vars(base), *vars(base).get("__annotations__", {}), *_slots(base)}
            constructor = vars(base).get("__init__")
            if isinstance(constructor, types.FunctionType):
                names |= {what[1:] for what, _ in code_use(constructor.__code__).own_writes}
    return names


def _namespace(operator_name: str) -> str:
    return operator_name.partition("::")[0]


def _other_statements(function: torch.jit.ScriptFunction) -> str | None:
    """Return the kind of a statement in a scripted function that does more than compute; None if there is none."""
    graph = function.inlined_graph
    kinds = {node.kind() for node in graph.nodes()}
    harmless = {
        "prim::Constant",
        "prim::TupleConstruct",
        "prim::TupleUnpack",
        "prim::ListConstruct",
        "prim::ListUnpack",
    }
    other = (k for k in sorted(kinds - harmless) if not k.startswith("aten::") or k.endswith("_"))
    return next(other, None)


def _stable_repr(value: Any) -> str:
    """Return the `repr` of an object without its address, so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _without_engine_hooks(hooks: dict[int, Callable]) -> list[Callable]:
    return [hook for hook in hooks.values() if not str(getattr(hook, "__module__", "")).startswith("deepspeed.")]


def _is_table_of_functions(table: dict) -> bool:
    values = (v[0] if isinstance(v, tuple) and v else v for v in table.values())
    return all(isinstance(key, str) for key in table) and all(map(callable, values))


def _special_methods(cls: type) -> set[str]:
    """Return the special methods that a user's class defines: operators, contexts, calls, descriptors."""
    # Configs of transformers look attributes up with special methods, which return the stored values.
    bases = [base for base in cls.__mro__ if _package(base.__module__) not in TRUSTED | {"transformers"}]
    defined = ((name, value) for base in bases for name, value in vars(base).items())
    # `__new__` is a static method.
    kinds = (types.FunctionType, property, staticmethod, classmethod)
    is_special = lambda name: name.startswith("__") and name.endswith("__") and name not in NEVER_CALLED
    return {name for name, value in defined if is_special(name) and isinstance(value, kinds)}


def _is_wrapper(value: Any) -> bool:
    """Return True if a value is not a Python function but wraps a user's function, as `functools.lru_cache` does.

    Wrappers of transformers do not count, because they only check the versions of packages.
    """
    # The `__getattr__` of a user's object does not run.
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
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


def _defines(cls: type, name: str, ignored_bases: tuple[type, ...] = (object,)) -> bool:
    return any(name in vars(base) for base in cls.__mro__ if base not in ignored_bases)


def holds_tensors(module: nn.Module) -> bool:
    """Return True if a module or one of its descendants has a parameter, a buffer or a tensor as an attribute."""
    for each in module.modules():
        attributes = vars(each)
        tensors = itertools.chain(attributes["_parameters"].values(), attributes["_buffers"].values())
        if any(t is not None for t in tensors) or any(isinstance(v, Tensor) for v in attributes.values()):
            return True
    return False


def explore(
    module: nn.Module | types.FunctionType,
    live: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    inputs: int | None = None,
) -> Reach:
    """Return the state that the forward of a module, or a function, can reach.

    `live` names attributes that the caller reads at every call; they are not watched. `choices` are the keys by which
    the forward selects from a table of functions. The search does not read the code of that table's entries. `inputs`
    is the number of positional arguments with which the forward is called; its other arguments have their defaults.

    Children that hold tensors are not searched: the recipe that replaces the forward calls them as the forward does.
    """
    skipped, known = frozenset(("training", *live)), _Uses()
    while True:
        search = _Search(module, skipped, frozenset(choices), inputs, known)
        search.run()
        if known.contains(search.uses):
            return search.reach
        known = known.joined(search.uses)
