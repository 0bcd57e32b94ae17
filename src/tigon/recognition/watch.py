"""What a recipe takes for granted beside tensors, looked at again in every call.

A module may be changed after it was recognised: another activation put in its place, a dropout raised, a multiplier
set. Then it runs its own forward.
"""

import functools
import inspect
import types
from collections.abc import Iterator

from torch import nn

from tigon.recognition.replacement import is_changed
from tigon.recognition.standin import without_parameters

__all__ = ["Watched", "names_used", "still", "watch"]

# Path of a child ("" is the module itself), name of an attribute, value.
Watched = tuple[tuple[str, str, object], ...]

SIMPLE = (int, float, str, bool, type(None))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@functools.cache
def names_used(cls: type[nn.Module]) -> frozenset[str]:
    """What the methods of a module's class name, without those of `nn.Module`."""
    own = (value for base in cls.__mro__ if base not in nn.Module.__mro__ for value in vars(base).values())
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in own if callable(f))
    return frozenset(name for code in codes if code for name in _names(code))


def watch(module: nn.Module, live: tuple[str | float | None, ...] = ()) -> Watched:
    """The settings that the module's code reads, but those in `live`, which the recipe reads itself.

    Of children without parameters (an activation, a dropout) also the classes. Those with parameters are called anyway.
    """
    found: list[tuple[str, str, object]] = []
    bare = [(name, child) for name, child in module._modules.items() if child is not None and without_parameters(child)]
    for path, each in [("", module), *(pair for name, child in bare for pair in child.named_modules(prefix=name))]:
        found += [(path, "__class__", type(each))] if path else []
        settings = ((name, value) for name, value in vars(each).items() if type(value) in SIMPLE)
        used = names_used(type(each)) - {"training", *live}
        found += [(path, name, value) for name, value in settings if name in used]
    return tuple(found)


def still(module: nn.Module, watched: Watched) -> bool:
    """Whether all is as it was, and the children that a recipe does without have no hooks and no other forward."""
    for path, name, value in watched:
        owner = module
        for part in path.split(".") if path else ():
            owner = owner._modules.get(part)
        if getattr(owner, name, None) != value or (name == "__class__" and is_changed(owner)):
            return False
    return True
