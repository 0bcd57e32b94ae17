"""Answer questions about one object or class without running its code: what defines a name, what holds a tensor."""

import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tigon.runtime.reach.code import code_facts
from tigon.runtime.reach.known_names import EVASIONS, NEVER_CALLED, TRUSTED
from tigon.runtime.stock import is_linear_of_zero

_CACHE_TYPE = type(functools.cache(len))


def package_of(name: str | None) -> str:
    """Return the package of a dotted name: "torch" for "torch.nn.functional"."""
    return (name or "").partition(".")[0]


def is_trusted(cls: type) -> bool:
    """Return True if a class was written in a package whose functions depend on their arguments alone."""
    return package_of(cls.__module__) in TRUSTED


def is_evasion(cls: type) -> bool:
    """Return True if a class is one of those in `EVASIONS`, or derives from one."""
    return any(base.__name__ in EVASIONS and is_trusted(base) for base in cls.__mro__)


def is_trusted_function(function: types.FunctionType) -> bool:
    """Return True if a function was written in a package whose functions depend on their arguments alone. DeepSpeed's
    product for ZeRO-3 is trusted too. Its code reads and sets a global, the accelerator of the process."""
    # `__module__` would mislead: functools.wraps gives a wrapper the module of the function that it wraps.
    return package_of(function.__globals__.get("__name__")) in TRUSTED or is_linear_of_zero(function)


def wrapped_function(value: Any) -> Any:
    """Return the function that an object wraps, such as a function of `functools.cache`, or None. Wrappers of
    transformers do not count, because they only check the versions of packages."""
    # The `__getattr__` of a user's object does not run.
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    is_own = isinstance(wrapped, types.FunctionType) and package_of(wrapped.__module__) not in TRUSTED | {
        "transformers"
    }
    # A cache may wrap a bound method or a callable object.
    return value.__wrapped__ if is_own or isinstance(value, _CACHE_TYPE) else None


def is_table_of_functions(table: dict) -> bool:
    """Return True for a dict from strings to callables, or to tuples that begin with one, such as `ACT2FN`."""
    values = (v[0] if isinstance(v, tuple) and v else v for v in table.values())
    return bool(table) and all(isinstance(key, str) for key in table) and all(map(callable, values))


def stable_repr(value: Any) -> str:
    """Return the `repr` of an object without its address, so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def defined_names(cls: type, ignored_bases: tuple[type, ...] = (object,)) -> set[str]:
    """Return the names that a class or one of its bases defines."""
    return set().union(*(vars(base) for base in cls.__mro__ if base not in ignored_bases))


def bases_of_torch(cls: type) -> tuple[type, ...]:
    """Return `object` and those bases of a class that torch defines."""
    return tuple(base for base in cls.__mro__ if base is object or package_of(base.__module__) == "torch")


def names_in_torch(cls: type[nn.Module]) -> set[str]:
    """Return the names of the attributes that the forwards of torch in the bases of a class read."""
    bases = set(bases_of_torch(cls)) - {*nn.Module.__mro__}
    codes = [getattr(vars(base).get("forward"), "__code__", None) for base in bases]
    return {name for code in codes if code is not None for name in code_facts(code).attributes}


def slots_of(cls: type) -> set[str]:
    """Return the names in `__slots__` of a class and of its bases."""
    slots = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    return {name for each in slots for name in ((each,) if isinstance(each, str) else each)}


def special_methods(cls: type) -> set[str]:
    """Return the special methods that a user's class defines: operators, contexts, calls, descriptors. Methods that the
    module `dataclasses` generates do not count, because they read every field. `HolderWalk` visits them if the code
    compares objects or makes text of them."""
    # Configs of transformers look attributes up with special methods, which return the stored values.
    bases = [base for base in cls.__mro__ if package_of(base.__module__) not in TRUSTED | {"transformers"}]
    definitions = ((name, getattr(value, "__func__", value)) for base in bases for name, value in vars(base).items())
    is_special = lambda name: name.startswith("__") and name.endswith("__") and name not in NEVER_CALLED
    is_written = lambda f: isinstance(f, types.FunctionType) and f.__code__.co_filename != "<string>"
    return {name for name, f in definitions if is_special(name) and (is_written(f) or isinstance(f, property))}


def holds_tensors(module: nn.Module) -> bool:
    """Return True if a module or one of its descendants has a parameter, a buffer or a tensor as an attribute."""
    for each in module.modules():
        attributes = vars(each)
        tensors: Iterator[Any] = itertools.chain(attributes["_parameters"].values(), attributes["_buffers"].values())
        if any(t is not None for t in tensors) or any(isinstance(v, Tensor) for v in attributes.values()):
            return True
    return False
