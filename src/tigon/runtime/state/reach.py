"""Find the Python state that a call of a module can reach, besides its inputs and its tensors.

`explore` starts at `type(module).forward` and follows the names in the bytecode: methods, helper functions, globals,
closures, attributes of the module and of objects such as a config. It trusts torch and those parts of the standard
library that only compute, and does not read their code. The result is a `Reach` (tigon.runtime.state.places).

The search is by name, so it finds more places than a call reads, and never fewer: if the code loads an attribute
`scale` of anything, then `scale` is watched on every object that the code can reach. A function that is found late may
load further names, so the search is repeated until it finds none. It begins with the names that the last search of the
same class has found. Their result is accepted only if the module reaches the same code.
"""

import collections
import functools
import operator
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.runtime.state.containers import CONTAINERS, ContainerSearch
from tigon.runtime.state.functions import FunctionSearch
from tigon.runtime.state.known_names import IMPURE, TRUSTED
from tigon.runtime.state.modules import ModuleSearch
from tigon.runtime.state.objects import holds_tensors, is_cache, is_wrapper, names_of_tensors, package_of, stable_repr
from tigon.runtime.state.places import Reach, is_simple
from tigon.runtime.state.record import Uses

# Views of dicts. Their entries cannot be compared.
VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
# A function that loads one of these attributes may reach the parameters of the module without naming them.
WAYS_TO_PARAMETERS = {"data", "parameters", "named_parameters", "buffers", "named_buffers", "state_dict"}
WAYS_TO_PARAMETERS |= {"get_parameter", "get_buffer", "_parameters", "_buffers"}


class _Result(NamedTuple):
    """The results of one pass, and the names that it began with."""

    known_uses: Uses
    reach: Reach
    # The code that the pass has read, and the names that this code uses.
    codes: frozenset[types.CodeType]
    uses: Uses

    def is_independent(self) -> bool:
        """Return True if the pass began with exactly the names that its code uses, or if the module is refused anyway.

        With other names, the places would depend on the modules that were searched before.
        """
        return self.known_uses == self.uses or self.reach.reason is not None


# For each class of modules, or each function, and each set of options, this holds the last result of a search from the
# start. Most layers of a class reach the same code, so one pass that begins with the names of that result usually finds
# everything. A search from the start takes up to ten passes.
_LAST_RESULTS: weakref.WeakKeyDictionary[Any, dict[tuple, _Result]] = weakref.WeakKeyDictionary()


class _Search(FunctionSearch, ModuleSearch, ContainerSearch):
    """One pass over everything that is reachable from a module or a function."""

    def run(self) -> None:
        """Visit the module or the function, and decide which possible writes and checks prevent a replacement."""
        if isinstance(self.module, nn.Module):
            self.visit_module(self.module, "self", None)
        else:
            self.entries.append(self.describe(self.module, getattr(self.module, "__name__", "it")))
        containers = [(path, path.rpartition(".")[2].partition("[")[0], each) for path, each in self.container_paths]
        for method, location, names in self.item_writes:
            # `x[i] = y` and `x += y` usually write to a local tensor. They count as writes only if the function names a
            # reachable container.
            paths = (
                path
                for path, last_name, container in containers
                if (last_name in names or not method.startswith("__")) and hasattr(container, method)
            )
            if path := next(paths, None):
                self.reach.container_writes.append(f"may write to {path}, by {method} {location}")
        self.reach.writes += self.reach.container_writes
        self.reach.writes += self.writes_to_tensors()
        # A check of the width does not count if the product with a weight of the module raises an error as well for an
        # input of another width.
        if self.catches_exceptions or not isinstance(self.module, nn.Module) or not holds_tensors(self.module):
            self.reach.decisions += self.checks
        self.reach.fingerprint, self.reach.names = tuple(self.entries), self.names

    def writes_to_tensors(self) -> list[str]:
        """Return the reasons why the code may write to a tensor that outlives the call.

        `y.mul_(2)` usually writes to a local tensor. Such a method counts as a write if a tensor besides parameters is
        reachable, or if the expression before it names a tensor of the module or an attribute that leads to its
        parameters.
        """
        tensors = names_of_tensors(self.module) if isinstance(self.module, nn.Module) else set()
        outside_path = next((path for _, path in self.reach.tensors), None)
        last_names = {path.rpartition(".")[2].partition("[")[0] for _, path in self.reach.tensors}
        reasons = []
        for method, location, receiver, names in self.tensor_writes:
            if not (method.startswith("an option") or hasattr(Tensor, method) or hasattr(torch, method)):
                continue
            may_be_parameter = receiver & tensors or (receiver | names) & WAYS_TO_PARAMETERS
            if outside_path or may_be_parameter:
                target = outside_path if outside_path else "a parameter"
                reasons.append(f"may write to {target}, by {method} {location}")
        for method, location, names in self.item_writes:
            if last_names & names and hasattr(Tensor, method):
                reasons.append(f"may write to {outside_path}, by {method} {location}")
        return reasons

    def describe(self, value: Any, path: str) -> Any:
        """Return the part of the fingerprint that stands for a value, and visit everything reachable from it."""
        if is_simple(value):
            if isinstance(value, str):
                self.uses.strings.add(value)
            return type(value).__name__, repr(value)
        if isinstance(value, (tuple, frozenset)):
            items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
            if type(value) not in (tuple, frozenset) and package_of(type(value).__module__) not in TRUSTED:
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

    def visit(self, value: Any, path: str) -> None:
        """Visit a value that the search meets for the first time, by the method for values of its kind."""
        kind = type(value)
        package = package_of(kind.__module__)
        if isinstance(value, CONTAINERS):
            self.visit_container(value, path)
        elif isinstance(value, (collections.UserDict, collections.UserList)):
            self.visit_object(value, path)
            self.watch(vars(value), "item", "data", value.data, f"{path}.data")
        elif isinstance(value, collections.ChainMap):
            self.visit_object(value, path)
            self.watch(vars(value), "item", "maps", value.maps, f"{path}.maps")
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
        elif is_wrapper(value):
            wrapped = value.__wrapped__
            if self.executed is not None and is_cache(value):
                # The code of the function need not have run, and the cache may be cleared.
                self.reach.unwatchable.append(f"uses {path}, a cache, whose results cannot be watched")
            self.entries.append((path, "holds", self.describe(wrapped, f"{path}.__wrapped__")))
        elif package == "torch":
            self.visit_object_of_torch(value, path)
        elif package in TRUSTED and not hasattr(value, "__dict__"):
            if isinstance(value, operator.methodcaller):
                self.reach.unwatchable.append(f"uses {path}, a methodcaller, which may call any method")
            self.entries.append((path, "opaque", stable_repr(value)))
        elif package == "numpy":
            if hasattr(kind, "__setitem__"):
                self.reach.unwatchable.append(f"uses {path}, a numpy {kind.__name__}, whose values cannot be watched")
            else:
                self.entries.append((path, "numpy", repr(value)))
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self.visit_object(value, path)
        # The remaining callables are compiled code.
        elif callable(value):
            self.entries.append((path, "opaque", repr(value)))
        else:
            self.reach.unwatchable.append(f"uses {path}, a {kind.__module__}.{kind.__name__}, which cannot be watched")


def explore(
    module: nn.Module | types.FunctionType,
    live: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    inputs: int | None = None,
    searched: tuple[str, ...] = (),
    executed: frozenset[types.CodeType] | None = None,
) -> Reach:
    """Return the state that the forward of a module, or a function, can reach.

    `live` names attributes that the caller reads at every call; they are not watched. `choices` are the keys by which
    the forward selects from a table of functions. The search does not read the code of that table's entries. `inputs`
    is the number of positional arguments with which the forward is called; its other arguments have their defaults.

    Children that hold tensors are not searched: the recipe that replaces the forward calls them as the forward does.
    `searched` names the exceptions: children whose parameters or settings the recipe reads.

    With `executed`, the search reads only functions with this code. It is the code that one call has run. Every later
    call that finds the same state runs the same code, so the state that other functions read does not matter to it.
    """
    options = frozenset(("training", *live)), frozenset(choices), inputs, searched

    def run_pass(known_uses: Uses) -> _Result:
        search = _Search(module, *options, known_uses, executed)
        search.run()
        codes = frozenset(function.__code__ for function in search.functions)
        return _Result(known_uses, search.reach, codes, search.uses)

    last_results = _LAST_RESULTS.setdefault(module if isinstance(module, types.FunctionType) else type(module), {})
    if (last := last_results.get(options)) is not None:
        result = run_pass(last.known_uses)
        # If other code is reached, the module may not reach all of the code that used the known names.
        if (result.codes, result.uses) == (last.codes, last.uses) and result.is_independent():
            return result.reach
    result = run_pass(Uses())
    while not result.known_uses.contains(result.uses):
        result = run_pass(result.known_uses.union(result.uses))
    if result.known_uses != result.uses:
        # An early pass knows few strings, so it may read a table of functions as a whole. Then it finds names that the
        # last pass no longer needs.
        narrow_result = run_pass(result.uses)
        result = narrow_result if narrow_result.uses == result.uses else result
    # The reach would keep the objects that it refers to in memory.
    last_results[options] = result._replace(reach=Reach())
    return result.reach
