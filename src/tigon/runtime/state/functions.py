"""Search what a function reaches: its code, defaults and closure, the globals that it names, and what it writes."""

import builtins
import contextlib
import functools
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tigon.runtime.state.bytecode import CodeUse, code_use, digest
from tigon.runtime.state.decisions import FunctionInputs, find_decisions
from tigon.runtime.state.known_names import (
    FACTS_OF_TENSORS,
    IMPURE,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    MODES,
    MUTATORS,
    TRUSTED,
    WRITING_OPERATORS,
)
from tigon.runtime.state.objects import is_cache, is_filled, is_trusted_function, package_of
from tigon.runtime.state.record import Record

# A forward that reaches more functions is refused, because each function takes time to read and to compare.
MAX_FUNCTIONS = 64
# The code of these packages, except for the models of transformers, does not change what a module computes.
HELPERS = frozenset(("transformers", "accelerate", "deepspeed"))
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


def _is_helper(function: types.FunctionType) -> bool:
    """Return True for a helper of transformers or of an engine.

    Helpers choose between code paths that compute the same, and log warnings. The models of transformers are read like
    user code.
    """
    module = str(function.__globals__.get("__name__"))
    return package_of(module) in HELPERS and not module.startswith("transformers.models.")


def _make_locator(function: types.FunctionType) -> Callable[[int], str]:
    """Return a function that describes a line of a function to the user, as "(MLP.forward, model.py:7)"."""
    file = os.path.basename(function.__code__.co_filename)
    return lambda line: f"({function.__qualname__}, {file}:{line})"


class FunctionSearch(Record):
    """The part of the search that visits functions."""

    def describe_function(self, function: types.FunctionType, path: str) -> Any:
        """Return the part of the fingerprint that stands for a function, and visit the function."""
        number, is_new = self.number(function)
        if is_new:
            if not is_trusted_function(function):
                if self.executed is None or function.__code__ in self.executed:
                    self.visit_function(function, path)
            else:
                self.refuse_impure_torch(function.__name__, path)
                self.visit_trusted_function(function, path)
        return number, function.__module__, function.__qualname__, digest(function.__code__)

    # --- trusted functions -------------------------------------------------------------------------

    def visit_trusted_function(self, function: types.FunctionType, path: str) -> None:
        """Visit the user's functions that a function of torch wraps, as a `torch.no_grad()` decorator does.

        They are in its closure, its defaults or its attributes.
        """
        values = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        values += [*(function.__defaults__ or ()), *vars(function).values()]
        for value in values:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or is_cache(value):
                self.entries.append((path, "holds", self.describe(value, f"{path}.__wrapped__")))
        # For the forward of a torch module, watch the torch functions that it calls.
        if function.__name__ == "forward":
            for chain in sorted(code_use(function.__code__).chains):
                if chain[0] in function.__globals__:
                    self.visit_chain(function.__globals__[chain[0]], chain)

    def visit_builtin(self, function: Any, path: str) -> None:
        """Refuse a function of compiled code that may write. Describe the object that a bound method belongs to."""
        owner, name = getattr(function, "__self__", None), function.__name__
        package = package_of(getattr(function, "__module__", None) or getattr(owner, "__name__", None))
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and package not in TRUSTED:
            if name in MUTATORS:
                self.reach.writes.append(f"may write to {path}.__self__, by {name}")
            self.describe(owner, f"{path}.__self__")
        elif package in IMPURE or name in IMPURE_BUILTINS or (package == "_operator" and name in WRITING_OPERATORS):
            self.reach.writes.append(f"calls {name}, which does more than compute")
        elif package not in TRUSTED | {"numpy"}:
            self.reach.writes.append(f"calls {path}, a function of {package} that may write")
        else:
            self.refuse_impure_torch(name, path)

    def refuse_impure_torch(self, name: str, path: str) -> None:
        """Refuse a function of a trusted package that depends on more than its arguments."""
        if name in IMPURE_TORCH:
            self.reach.writes.append(f"calls {path}, which does more than compute")
        if name in MODES:
            self.reach.unwatchable.append(f"reads {path}, on which its result may depend")

    # --- functions of the user -----------------------------------------------------------------------

    def visit_function(self, function: types.FunctionType, path: str) -> None:
        """Read the code of a function. Watch its code, its defaults, its closure and the globals that it names."""
        if len(self.functions) >= MAX_FUNCTIONS:
            self.reach.unwatchable.append(f"reaches more than {MAX_FUNCTIONS} functions, by {path}")
            return
        self.functions.append(function)
        use = code_use(function.__code__)
        self.add_uses(use)
        locate = _make_locator(function)
        # `use.writes` does not contain the attributes that a constructor gives to its new object, because these are no
        # lasting writes.
        self.reach.writes += [f"writes {target} {locate(line)}" for target, line in use.writes]
        if not _is_helper(function):
            self.add_decisions(function, use, locate)
        self.visit_imports(function, use, locate)
        # The code of transformers looks up many names in configs. No code adds these names to a module later, so they
        # are not watched.
        if package_of(function.__globals__.get("__name__")) != "transformers":
            self.uses.optional |= use.optional
        self.add_possible_writes(function, use, locate)
        self.watch_parts(function, path)
        self.visit_globals(function, use, locate)

    def add_uses(self, use: CodeUse) -> None:
        """Add what a function uses to the uses of the whole search."""
        self.uses.names |= (use.attributes | use.stored_names) - {"__dict__", "__class__"}
        self.uses.strings |= use.strings
        self.uses.operations |= use.operations
        self.uses.type_tested_names |= use.type_tested_names
        self.uses.all_names |= use.reads_all_attributes
        self.stored_names |= use.stored_names

    def add_decisions(self, function: types.FunctionType, use: CodeUse, locate: Callable[[int], str]) -> None:
        """Record conditions on the inputs of a function, and reads of attributes that the probes do not cover."""
        facts = sorted(use.attributes & FACTS_OF_TENSORS)
        self.reach.unwatchable += [f"reads .{name}, on which its result may depend" for name in facts]
        lines, checks = find_decisions(function.__code__, self.inputs_of(function))
        self.reach.decisions += [f"decides by its input {locate(line)}" for line in lines]
        self.checks += [f"decides by its input {locate(line)}" for line in checks]
        self.catches_exceptions |= use.catches_exceptions
        for name, line in use.reads_of_arguments:
            if name is None or not hasattr(Tensor, name):
                one_attribute = f"the attribute .{name} of its input, which may not have it"
                attributes = one_attribute if name is not None else "attributes of its input by computed names"
                self.reach.unprobed_reads.append(f"reads {attributes} {locate(line)}")

    def inputs_of(self, function: types.FunctionType) -> FunctionInputs:
        """Return the arguments with which a function is called. They are known only for the forward of the module."""
        is_forward = isinstance(self.module, nn.Module) and type(self.module).__dict__.get("forward") is function
        # A forward that is called by its name may get more arguments than the recipe passes.
        if self.inputs is None or not is_forward or "forward" in self.names:
            return FunctionInputs(self_holds_inputs=self.self_holds_inputs)
        return FunctionInputs(self.inputs, len(function.__defaults__ or ()))

    def visit_imports(self, function: types.FunctionType, use: CodeUse, locate: Callable[[int], str]) -> None:
        """Visit the Python modules that a function imports. An import that runs new code is a write."""
        for name in sorted(use.imports):
            if name in sys.modules:
                self.describe(sys.modules[name], name)
            else:
                self.reach.writes.append(f"imports {name} {locate(function.__code__.co_firstlineno)}")

    def add_possible_writes(self, function: types.FunctionType, use: CodeUse, locate: Callable[[int], str]) -> None:
        """Record writes to items and to tensors, which matter only if the search reaches such an object."""
        if {"vars", "__dict__"} & (use.global_names | use.attributes) and use.item_writes:
            self.reach.writes.append(f"may write attributes by their dict {locate(use.item_writes[0][1])}")
        names = use.attributes | use.global_names | frozenset(function.__code__.co_freevars)
        self.item_writes += [(method, locate(line), names) for method, line in use.item_writes]
        self.tensor_writes += [
            (method, locate(line), receiver, use.attributes) for method, line, receiver in use.tensor_writes
        ]
        # Code that calls `__init__` by its name may pass any object to it.
        if "__init__" in use.attributes and function.__name__ not in CONSTRUCTORS:
            self.reach.writes.append(f"may write attributes, by __init__ {locate(function.__code__.co_firstlineno)}")

    def watch_parts(self, function: types.FunctionType, path: str) -> None:
        """Watch the code, the defaults and the closure of a function."""
        self.watch(function, "attribute", "__code__", function.__code__, f"{path}.__code__")
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                self.watch(function, "attribute", name, getattr(function, name), f"{path}.{name}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # `super` needs this cell. The bases of a class are visited with the class.
            if name == "__class__":
                continue
            # An empty cell raises ValueError.
            with contextlib.suppress(ValueError):
                self.watch(cell, "attribute", "cell_contents", cell.cell_contents, f"{name} of {function.__qualname__}")

    def visit_globals(self, function: types.FunctionType, use: CodeUse, locate: Callable[[int], str]) -> None:
        """Watch the globals that a function names, and the attributes of Python modules that it reads by them."""
        # Names that are no identifiers come from tools that rewrite code, such as pytest.
        for name in sorted(filter(str.isidentifier, use.global_names)):
            if _is_helper(function) and isinstance(function.__globals__.get(name), logging.Logger):
                continue
            if name in function.__globals__:
                self.watch(function.__globals__, "item", name, function.__globals__[name], name)
                for chain in sorted(chain for chain in use.chains if chain[0] == name):
                    self.visit_chain(function.__globals__[name], chain)
                continue
            if hasattr(builtins, name) and name in IMPURE_BUILTINS:
                self.reach.writes.append(f"calls {name} {locate(function.__code__.co_firstlineno)}")
            # A global may appear later, and may hide a builtin.
            self.watch_missing_link(function.__globals__, name, name)

    def visit_chain(self, value: Any, chain: tuple[str, ...]) -> None:
        """Watch each attribute in a chain such as `torch.nn.functional.silu`.

        In Python modules that are not trusted, every loaded name is watched (`ContainerSearch.visit_python_module`).
        """
        for i, name in enumerate(chain[1:], 1):
            is_module = isinstance(value, types.ModuleType) and package_of(value.__name__) in TRUSTED
            if not is_module:
                return
            path = ".".join(chain[: i + 1])
            if name not in vars(value):
                # The module may be imported or the attribute may be set later. Modules of other types may compute
                # the attribute, and `visit_python_module` refuses it.
                if type(value) is types.ModuleType:
                    self.watch_missing_link(vars(value), name, path)
                return
            self.watch_link(vars(value), name, path)
            value = vars(value)[name]
