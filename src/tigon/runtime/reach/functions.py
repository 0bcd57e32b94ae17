"""Visit the functions that a forward reaches: their code, defaults and closures, and the globals that they name.

`FunctionWalk` also holds the results of the whole walk.
"""

import builtins
import contextlib
import functools
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tigon.runtime.compat.operators import NAMESPACE_TYPES
from tigon.runtime.reach import known_names as known
from tigon.runtime.reach.code import CONSTRUCTORS, CodeFacts, code_facts
from tigon.runtime.reach.objects import is_trusted_function, package_of, wrapped_function
from tigon.runtime.reach.places import REGISTERED, Place, Reach

TABLES = {"vars", "__dict__", *REGISTERED}
# A forward that reaches more functions is refused, because each function takes time to read and to compare.
MAX_FUNCTIONS = 64


def _is_helper(function: types.FunctionType) -> bool:
    """Return True for a function of transformers or of an engine that belongs to no model."""
    module = str(function.__globals__.get("__name__"))
    return package_of(module) in ("transformers", "accelerate", "deepspeed") and ".models." not in module


def _locator(function: types.FunctionType) -> Callable[[int], str]:
    """Return a function that describes a line of a function to the user, as "(MLP.forward, model.py:7)"."""
    file = os.path.basename(function.__code__.co_filename)
    return lambda line: f"({function.__qualname__}, {file}:{line})"


def _has_flag(module: types.ModuleType, name: str) -> bool:
    """Return True if a Python module computes the value of an attribute, and it is no function or class."""
    try:
        value = getattr(module, name)
    except AttributeError:
        return False
    except Exception:
        # Some flags of torch raise an error if they contradict each other.
        return True
    return not isinstance(value, (types.ModuleType, type)) and not callable(value)


class FunctionWalk:
    """The results of one walk. `describe(value, path)` returns the part of the fingerprint that stands for the value,
    and visits the value once. `path` says how the code reaches the value, as "self.config.scale". An object with
    attributes becomes a holder. When the walk finds a new name, every holder visits its attribute of this name. A name
    with the prefix "'" is a string in the code."""

    def __init__(self, root: Any, live: tuple[str, ...], searched: tuple[str, ...]) -> None:
        self.root, self.live = root, frozenset(live)
        self.searched = [root._modules[name] for name in searched]
        self.reach = Reach()
        self.names: set[str] = set()
        self.entries: list[tuple] = []
        # The number of each visited object by its id, and references, so that no id is used a second time.
        self.numbers: dict[int, int] = {}
        self.references: list[Any] = []
        self.functions: list[tuple[CodeFacts, types.FunctionType]] = []
        # The functions that visit the attribute of a name, with the names that they have visited.
        self.holders: list[tuple[Callable[[str], None], set[str]]] = []
        self.tables: list[tuple[dict, str, set[str]]] = []
        self.overridden: list[tuple[type, str]] = []
        self.stored_names: set[str] = set()
        self.children_with_tensors: list[tuple[str, str]] = []
        # Pairs (id of the owner, name) that are watched already.
        self.links: set[tuple[int, str]] = set()

    def describe(self, value: Any, path: str) -> Any:
        """Return the part of the fingerprint that stands for a value, and visit everything reachable from it."""
        raise NotImplementedError

    def watch(self, owner: Any, how: str, name: Any, value: Any, path: str) -> None:
        """Add a place to the reach, and its value to the fingerprint."""
        self.entries.append((path, how, self.describe(value, path)))
        self.reach.places.append(Place(owner, how, name, value, path))

    def watch_link(self, attributes: dict[str, Any], name: str, path: str) -> None:
        """Watch once the entry of a `__dict__` of a Python module, or that it has none."""
        if (id(attributes), name) not in self.links:
            self.links.add((id(attributes), name))
            if name in attributes:
                self.watch(attributes, "item", name, attributes[name], path)
            else:
                self.reach.places.append(Place(attributes, "absent", name, None, path))

    def refuse(self, reason: str) -> None:
        self.reach.unwatchable.append(reason)

    def number(self, value: Any) -> tuple[int, bool]:
        """Return the number of an object, and True if the walk meets it for the first time."""
        is_new = id(value) not in self.numbers
        if is_new:
            self.numbers[id(value)] = len(self.numbers)
            self.references.append(value)
        return self.numbers[id(value)], is_new

    def visit_function(self, function: types.FunctionType, path: str) -> None:
        """Read the code of a function. Watch its code, its defaults, its closure and the globals that it names."""
        if is_trusted_function(function):
            self.visit_trusted_function(function, path)
            return
        if len(self.functions) >= MAX_FUNCTIONS:
            self.refuse(f"reaches more than {MAX_FUNCTIONS} functions, by {path}")
            return
        facts = code_facts(function.__code__)
        self.functions.append((facts, function))
        self.names |= (facts.attributes | (facts.global_names & {"super"})) - {"__dict__", "__class__"}
        self.names |= {f"'{each}" for each in facts.strings}
        # Code of transformers looks up many names in configs. No code adds these names to a module later.
        is_known = package_of(function.__globals__.get("__name__")) == "transformers"
        if facts.computes_names or (facts.may_miss and not is_known):
            place = _locator(function)(function.__code__.co_firstlineno)
            self.reach.unprobed_reads.append(f"looks up attributes by names that may be missing or computed {place}")
        self.stored_names |= facts.stored_names
        self.add_reasons(facts, function)
        self.watch(function, "attribute", "__code__", function.__code__, f"{path}.__code__")
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                self.watch(function, "attribute", name, getattr(function, name), f"{path}.{name}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # `super` needs the cell `__class__`, whose class is visited anyway. An empty cell raises ValueError.
            with contextlib.suppress(ValueError):
                if name != "__class__":
                    self.watch(cell, "attribute", "cell_contents", cell.cell_contents, f"{name} of {function.__name__}")
        # Names that are no identifiers come from tools that rewrite code, such as pytest.
        for name in sorted(filter(str.isidentifier, facts.global_names)):
            value = function.__globals__.get(name)
            if name in self.live and isinstance(value, types.FunctionType) and _is_helper(value):
                continue
            if name in function.__globals__ and not (isinstance(value, logging.Logger) and _is_helper(function)):
                self.watch_link(function.__globals__, name, name)
                self.visit_links(value, facts, name)
            elif name not in function.__globals__:
                # A global may appear later, and may hide a builtin.
                self.watch_link(function.__globals__, name, name)

    def add_reasons(self, facts: CodeFacts, function: types.FunctionType) -> None:
        """Add the reasons for which the code of a function alone prevents a replacement."""
        code, reach = function.__code__, self.reach
        locate = _locator(function)
        place, used = locate(code.co_firstlineno), facts.attributes | facts.global_names
        impure_builtins = (known.IMPURE_BUILTINS & facts.global_names) - function.__globals__.keys()
        reach.writes += [f"writes {target} {locate(line)}" for target, line in facts.writes]
        reach.writes += [f"calls {name} {place}" for name in sorted(impure_builtins) if hasattr(builtins, name)]
        reach.writes += [f"sets a mode of torch, by {name} {place}" for name in sorted(known.MODE_SETTERS & used)]
        # Code that calls `__init__` by its name may pass any object to it.
        if "__init__" in facts.attributes and function.__name__ not in CONSTRUCTORS:
            reach.writes.append(f"may write attributes, by __init__ {place}")
        for name in sorted(facts.attributes & known.FACTS_OF_TENSORS):
            self.refuse(f"reads .{name}, on which its result may depend")
        for name in sorted(used & known.EVASIONS):
            self.refuse(f"uses {name}, with which it may hide how it decides by its input")
        for name in sorted(facts.imports):
            if name in sys.modules:
                self.describe(sys.modules[name], name)
            else:
                reach.writes.append(f"imports {name} {place}")

    def add_tests_of_types(self) -> None:
        """Refuse code that tests the type of an object and names a child with weights, whose type no probe has."""
        for facts, _ in self.functions:
            for name, path in self.children_with_tensors:
                if facts.tests_types and name in facts.attributes:
                    self.reach.unprobed_reads.append(f"reads the type of {path}, or of a value computed by it")

    def add_decisions(self) -> None:
        """Refuse code that may decide by its input in a way that no probe shows."""
        has_conditions = any(facts.has_conditions for facts, _ in self.functions)
        names_number = bool({id(int), id(float), id(bool)} & self.numbers.keys())
        for facts, function in self.functions:
            # Code of transformers passes devices on. The types of its models are tested one by one.
            is_known = package_of(function.__globals__.get("__name__")) == "transformers"
            may_compare = not is_known and (has_conditions or bool(facts.attributes & {"type", "get"}))
            by_device = "device" in facts.attributes and (may_compare or bool(facts.strings & known.DEVICES))
            by_device &= not _is_helper(function)
            # In a run with symbolic sizes, a size is no int.
            by_type = facts.tests_types and (names_number or {"int", "float", "bool"} & facts.global_names)
            if by_device or by_type or facts.catches_errors or function.__name__ == "__exit__":
                place = _locator(function)(function.__code__.co_firstlineno)
                self.reach.unprobed_reads.append(f"decides by its input {place}")

    def add_item_writes(self) -> None:
        """Add `x.append(y)` and `x[i] = y` as writes if the code can reach a container that has such a method. `x[i] =
        y` and `x += y` usually write to a local tensor, so the function must also name the container."""
        containers = [(path, path.rpartition(".")[2].partition("[")[0], each) for each, path in self.reach.containers]
        uses_dict = any(TABLES & (facts.attributes | facts.global_names) for facts, _ in self.functions)
        for facts, function in self.functions:
            if uses_dict and facts.item_writes:
                place = _locator(function)(facts.item_writes[0][1])
                self.reach.writes.append(f"may write attributes by their dict {place}")
            names = facts.attributes | facts.global_names | {*function.__code__.co_freevars}
            for method, line in facts.item_writes:
                is_operator = method not in known.MUTATORS or method.startswith("__")
                for path, name, container in containers:
                    if name in names if is_operator else hasattr(container, method):
                        self.reach.writes.append(f"may write to {path}, by {method} {_locator(function)(line)}")
                        break

    def visit_trusted_function(self, function: types.FunctionType, path: str) -> None:
        """Visit the user's functions that a function of torch wraps, as a `torch.no_grad()` decorator does."""
        self.refuse_impure_torch(function.__name__, path)
        values: list[Any] = [*(function.__defaults__ or ()), *vars(function).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                values.append(cell.cell_contents)
        for value in values:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or wrapped_function(value):
                self.entries.append((path, "holds", self.describe(value, f"{path}.__wrapped__")))
        # For the forward of a torch module, watch the torch functions that it calls.
        if function.__name__ == "forward":
            facts = code_facts(function.__code__)
            for name in sorted(facts.global_names & function.__globals__.keys()):
                self.visit_links(function.__globals__[name], facts, name)

    def visit_builtin(self, function: Any, path: str) -> None:
        """Refuse a function of compiled code that may write. Describe the object that a bound method belongs to."""
        owner, name = getattr(function, "__self__", None), function.__name__
        package = package_of(getattr(function, "__module__", None) or getattr(owner, "__name__", None))
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and package not in known.TRUSTED:
            if name in known.MUTATORS:
                self.reach.writes.append(f"may write to {path}.__self__, by {name}")
            self.describe(owner, f"{path}.__self__")
        elif (
            package in known.IMPURE
            or name in known.IMPURE_BUILTINS
            or (package == "_operator" and name in known.WRITING_OPERATORS)
        ):
            self.reach.writes.append(f"calls {name}, which does more than compute")
        elif package not in known.TRUSTED | {"numpy"}:
            self.reach.writes.append(f"calls {path}, a function of {package} that may write")
        elif package == "builtins" and name in known.GETTERS:
            self.refuse(f"uses {name} by the name {path}")
        else:
            self.refuse_impure_torch(name, path)

    def refuse_impure_torch(self, name: str, path: str) -> None:
        """Refuse a function of a trusted package that depends on more than its arguments."""
        if name in known.IMPURE_TORCH:
            self.reach.writes.append(f"calls {path}, which does more than compute")
        if name in known.MODES | known.EVASIONS:
            self.refuse(f"reads {path}, on which its result may depend")

    def visit_links(self, module: Any, facts: CodeFacts, path: str) -> None:
        """Watch the attributes of a trusted Python module, such as torch, that one function may read."""
        if not isinstance(module, types.ModuleType) or package_of(module.__name__) not in known.TRUSTED:
            return
        if isinstance(module, NAMESPACE_TYPES):
            self.refuse(f"calls operators of {path}, whose code is not read")
            return
        attributes = vars(module)
        for name in sorted(facts.attributes & attributes.keys()):
            value = attributes[name]
            if value is module or value is torch.classes or (id(attributes), name) in self.links:
                continue
            # The name may be that of an attribute of another object.
            if package_of(type(value).__module__) in known.IMPURE:
                continue
            self.watch_link(attributes, name, f"{path}.{name}")
            self.visit_links(value, facts, f"{path}.{name}")
        # Modules such as `torch.backends.cudnn` compute the values of their flags.
        for name in sorted(facts.attributes - attributes.keys()) if type(module) is not types.ModuleType else ():
            if not hasattr(types.ModuleType, name) and _has_flag(module, name):
                self.refuse(f"reads {path}.{name}, a flag that cannot be watched")
