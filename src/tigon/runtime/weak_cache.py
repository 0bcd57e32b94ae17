"""Cache results about a class, a function or a code object for as long as that object lives.

`functools.cache` never frees its arguments. A process that builds many models, each with its own classes, would
therefore keep all of these classes in memory, and everything that they refer to.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

Cached = TypeVar("Cached", bound=Callable)
_WEAK = type, types.FunctionType, types.CodeType


def weak_key(value: Any) -> Any:
    """Return a key that is equal for equal values and refers only weakly to their classes, functions and code."""
    if isinstance(value, tuple):
        return tuple(map(weak_key, value))
    return weakref.ref(value) if isinstance(value, _WEAK) else value


def cached_weakly(compute: Cached) -> Cached:
    """Cache the results of a function until its first argument, a class, a function or a code object, is freed. A
    result must not refer to that object, because it would then never be freed. The attribute `cache_clear` of the
    decorated function empties the cache."""
    results: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def look_up(owner: Any, *args: Any) -> Any:
        if (entries := results.get(owner)) is None:
            entries = results.setdefault(owner, {})
        key = weak_key(args) if args else args
        if key not in entries:
            entries[key] = compute(owner, *args)
        return entries[key]

    vars(look_up)["cache_clear"] = results.clear
    return cast(Cached, look_up)
