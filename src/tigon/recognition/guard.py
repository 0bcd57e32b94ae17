"""Check in every call that a replaced module is still what it was when it was recognised.

A guard knows the state that a module's forward reads (`tigon.runtime.reach`): the forward of its class, attributes,
functions, objects such as a config, globals. One expression compares all of it by identity, so that a call costs less
than a microsecond. Where something differs, the state is read anew and compared by value: the same setting assigned
again, or a copy of the module, is the same; another activation, a raised dropout or another forward is not, and then
the module runs the forward of its class.
"""

import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from tigon.recognition.replacement import install, is_changed
from tigon.runtime.reach import Place, explore, is_simple

__all__ = ["Guard", "install_guarded"]

FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Guard:
    """Tells whether a module's forward still reads what it read when the guard was made.

    `live` are attributes that the recipe reads by itself in every call, and `choices` the names by which it chooses
    from a table of functions. A copied or unpickled guard compares by value at its first call.
    """

    def __init__(self, module: nn.Module, live: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> None:
        self.live, self.choices = live, choices
        self.fingerprint = self._look(module)
        self.is_unchanged = True

    def _look(self, module: nn.Module) -> tuple | None:
        """Read the state anew, and compare with it from now on; None if it cannot be watched."""
        reach = explore(module, self.live, self.choices)
        self.check = reach.check()
        self.module = weakref.ref(module)
        self.settings = _settings(module, reach.places)
        return None if reach.reason else reach.fingerprint

    def holds(self, module: nn.Module) -> bool:
        """Whether all is as it was."""
        if torch.compiler.is_compiling():
            return self._still_set(module) and self._holds_for_graph()
        try:
            if self.check(module.__dict__, type(module)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        return self._compare(module)

    def _compare(self, module: nn.Module) -> bool:
        fingerprint = self._look(module)
        self.is_unchanged = fingerprint is not None and fingerprint == self.fingerprint
        return self.is_unchanged

    def _still_set(self, module: nn.Module) -> bool:
        """The part of the check that a compiler can follow, so that it compiles again after a change."""
        for setting in self.settings:
            owner = module if setting.root is None else setting.root
            for part in setting.path:
                owner = getattr(owner, part, None)
            if setting.name == "__class__":
                if type(owner) is not setting.value or is_changed(owner):
                    return False
                continue
            value = getattr(owner, setting.name, None)
            if (value != setting.value) if setting.is_simple else (value is not setting.value):
                return False
        return True

    @torch._dynamo.assume_constant_result
    def _holds_for_graph(self) -> bool:
        """The whole check, once for each graph."""
        module = self.module()
        try:
            if module is not None and self.check(module.__dict__, type(module)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        return module is not None and self._compare(module)

    def __reduce__(self):
        return _restored, (self.fingerprint, self.live, self.choices)


def install_guarded(module: nn.Module, recipe: Callable) -> Callable[[], None]:
    """Install a recipe that takes the place of a forward, as long as the module is what it was."""
    return install(module, recipe, Guard(module, recipe.live, recipe.choices))


class Setting(NamedTuple):
    """A place that a compiler can read: attribute `name` of what `path` leads to, from the module or from `root`."""

    root: ModuleType | None
    path: tuple[str, ...]
    name: str
    value: Any
    is_simple: bool


def _settings(module: nn.Module, places: list[Place]) -> tuple[Setting, ...]:
    """Return what `Guard._still_set` compares: simple values and functions that attributes or globals hold."""
    settings = {}
    for place in places:
        *path, name = place.path.split(".")
        if place.how == "child" and place.value is not None:
            setting = Setting(None, (*path[1:], name), "__class__", type(place.value), False)
        elif place.how in ("item", "class") and (is_simple(place.value) or isinstance(place.value, FUNCTIONS)):
            root = None if path[:1] == ["self"] else _module_of(place)
            if root is None and path[:1] != ["self"]:
                continue
            setting = Setting(root, tuple(path[1:]) if root is None else (), name, place.value, is_simple(place.value))
        else:
            continue
        if _leads_there(module, setting):
            settings[setting.root, setting.path, setting.name] = setting
    return tuple(settings.values())


def _module_of(place: Place) -> ModuleType | None:
    """Return the Python module whose global a place is."""
    root = sys.modules.get(place.owner.get("__name__")) if type(place.owner) is dict else None
    return root if root is not None and vars(root) is place.owner else None


def _leads_there(module: nn.Module, setting: Setting) -> bool:
    """Return True if the attributes that a setting names hold its value; a path may name something else by chance."""
    owner = module if setting.root is None else setting.root
    for part in setting.path:
        owner = getattr(owner, part, None)
    value = type(owner) if setting.name == "__class__" else getattr(owner, setting.name, None)
    return value is setting.value


def _never(own: dict[str, Any], cls: type) -> bool:
    return False


def _restored(fingerprint: tuple | None, live: tuple[str, ...], choices: tuple[str, ...]) -> Guard:
    """A guard for the copy of a module, which is compared by value at its first call."""
    guard = object.__new__(Guard)
    guard.fingerprint, guard.live, guard.choices = fingerprint, live, choices
    guard.check, guard.module, guard.settings, guard.is_unchanged = _never, lambda: None, (), True
    return guard
