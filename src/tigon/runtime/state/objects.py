"""Answer questions about one object or class without running its code: what defines a name, what holds a tensor.

The search for reachable state (`tigon.runtime.state.reach`) uses these functions. None of them follows a reference to
another object, except `holds_tensors`, which visits the descendants of a module.
"""

import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.state.bytecode import code_use
from tigon.runtime.state.known_names import NEVER_CALLED, TRUSTED
from tigon.runtime.state.places import REGISTERED
from tigon.runtime.stock import is_linear_of_zero

_CACHE_TYPE = type(functools.cache(len))


def package_of(name: str | None) -> str:
    """Return the package of a dotted name: "torch" for "torch.nn.functional"."""
    return (name or "").partition(".")[0]


# --- functions -------------------------------------------------------------------------------------


def is_trusted_function(function: types.FunctionType) -> bool:
    """Return True if a function was written in a package whose functions depend on their arguments alone.

    DeepSpeed's product for ZeRO-3 is trusted too. Its code reads and sets a global, the accelerator of the process.
    """
    # `__module__` would mislead: functools.wraps gives a wrapper the module of the function that it wraps.
    return package_of(function.__globals__.get("__name__")) in TRUSTED or is_linear_of_zero(function)


def is_wrapper(value: Any) -> bool:
    """Return True if a value is not a Python function but wraps code of the user, as `functools.lru_cache` does.

    Wrappers of transformers do not count, because they only check the versions of packages.
    """
    # The `__getattr__` of a user's object does not run.
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    if not isinstance(wrapped, types.FunctionType):
        # A cache may wrap a bound method or a callable object.
        return is_cache(value)
    return package_of(wrapped.__module__) not in TRUSTED | {"transformers"}


def is_cache(value: Any) -> bool:
    """Return True for a function that `functools.cache` or `functools.lru_cache` has made."""
    return isinstance(value, _CACHE_TYPE)


def is_filled(cell: types.CellType) -> bool:
    """Return True if a cell of a closure holds a value. An empty cell raises ValueError."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_table_of_functions(table: dict) -> bool:
    """Return True for a dict from strings to callables, or to tuples that begin with one, such as `ACT2FN`."""
    values = (v[0] if isinstance(v, tuple) and v else v for v in table.values())
    return all(isinstance(key, str) for key in table) and all(map(callable, values))


def find_impure_statement(function: torch.jit.ScriptFunction) -> str | None:
    """Return the kind of a statement in a scripted function that does more than compute; None if there is none."""
    # The stubs of torch declare this property as a method.
    graph: Any = function.inlined_graph
    kinds = {node.kind() for node in graph.nodes()}
    harmless = {
        "prim::Constant",
        "prim::TupleConstruct",
        "prim::TupleUnpack",
        "prim::ListConstruct",
        "prim::ListUnpack",
    }
    impure_kinds = (k for k in sorted(kinds - harmless) if not k.startswith("aten::") or k.endswith("_"))
    return next(impure_kinds, None)


def stable_repr(value: Any) -> str:
    """Return the `repr` of an object without its address, so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


# --- classes ---------------------------------------------------------------------------------------


def defined_names(cls: type, ignored_bases: tuple[type, ...] = (object,)) -> set[str]:
    """Return the names that a class or one of its bases defines."""
    return set().union(*(vars(base) for base in cls.__mro__ if base not in ignored_bases))


def bases_of_torch(cls: type) -> tuple[type, ...]:
    """Return `object` and those bases of a class that torch defines."""
    return tuple(base for base in cls.__mro__ if base is object or package_of(base.__module__) == "torch")


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names in `__slots__` of a class."""
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def special_methods(cls: type) -> set[str]:
    """Return the special methods that a user's class defines: operators, contexts, calls, descriptors."""
    # Configs of transformers look attributes up with special methods, which return the stored values.
    bases = [base for base in cls.__mro__ if package_of(base.__module__) not in TRUSTED | {"transformers"}]
    definitions = ((name, value) for base in bases for name, value in vars(base).items())
    # `__new__` is a static method.
    kinds = (types.FunctionType, property, staticmethod, classmethod)
    is_special = lambda name: name.startswith("__") and name.endswith("__") and name not in NEVER_CALLED
    return {name for name, value in definitions if is_special(name) and isinstance(value, kinds)}


def names_of_fields(cls: type) -> set[str]:
    """Return the names that a user's class or its constructor defines."""
    names: set[str] = set()
    for base in cls.__mro__:
        if package_of(base.__module__) not in TRUSTED:
            names |= {*vars(base), *vars(base).get("__annotations__", {}), *slots_of(base)}
            constructor = vars(base).get("__init__")
            if isinstance(constructor, types.FunctionType):
                # A write to an attribute is recorded with a leading dot.
                names |= {target[1:] for target, _ in code_use(constructor.__code__).constructor_writes}
    return names


# --- modules ---------------------------------------------------------------------------------------


def has_attribute(module: nn.Module, name: str) -> bool:
    """Return True if a module has an attribute. No property of the module runs, unlike in `hasattr`."""
    if any(name in vars(module)[table] for table in REGISTERED):
        return True
    missing = object()
    return inspect.getattr_static(module, name, missing) is not missing


def names_of_tensors(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters and buffers, and of its attributes that are tensors."""
    attributes = vars(module)
    plain = {name for name, value in attributes.items() if isinstance(value, Tensor)}
    return plain.union(*(attributes[table].keys() for table in REGISTERED[:2]))


def holds_tensors(module: nn.Module) -> bool:
    """Return True if a module or one of its descendants has a parameter, a buffer or a tensor as an attribute."""
    for each in module.modules():
        attributes = vars(each)
        tensors: Iterator[Any] = itertools.chain(attributes["_parameters"].values(), attributes["_buffers"].values())
        if any(t is not None for t in tensors) or any(isinstance(v, Tensor) for v in attributes.values()):
            return True
    return False
