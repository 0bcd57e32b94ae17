"""Check in every call that the state of a replaced module is the same as when the module was recognised.

A guard knows the state that a module's forward reads (`tigon.runtime.reach`): the forward of its class, attributes,
functions, objects such as a config, globals. One expression compares all of it by identity, so that a call costs less
than a microsecond. If anything differs, the guard reads the state again and compares it by value. A setting that was
assigned again with the same value passes, and so does a copy of the module. Another activation, a raised dropout or
another forward does not pass, and then the module runs the forward of its class.
"""

import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from tigon.recognition.replacement import install, is_changed
from tigon.runtime.places import Place, is_simple
from tigon.runtime.reach import explore

__all__ = ["Guard", "install_guarded"]

FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Guard:
    """Checks that everything that a module's forward reads is as it was when the guard was made.

    `live` names the attributes that the recipe itself reads in every call, and `choices` the keys by which the forward
    selects from a table of functions. A copied or unpickled guard compares by value at its first call.
    """

    def __init__(self, module: nn.Module, live: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> None:
        self.live, self.choices = live, choices
        self.fingerprint = self._read_state(module)
        self.is_unchanged = True

    def _read_state(self, module: nn.Module) -> tuple | None:
        """Read the current state and use it for later comparisons by identity.

        Return its fingerprint, or None if it cannot be watched.
        """
        reach = explore(module, self.live, self.choices)
        self.check = reach.check()
        self.module = weakref.ref(module)
        self.settings = _settings(module, reach.places)
        return None if reach.reason else reach.fingerprint

    def holds(self, module: nn.Module) -> bool:
        """Return True if everything that the forward reads is unchanged, by value."""
        if torch.compiler.is_compiling():
            return self._settings_hold(module) and self._holds_for_graph()
        try:
            if self.check(module.__dict__, type(module)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        return self._compare(module)

    def _compare(self, module: nn.Module) -> bool:
        fingerprint = self._read_state(module)
        self.is_unchanged = fingerprint is not None and fingerprint == self.fingerprint
        return self.is_unchanged

    def _settings_hold(self, module: nn.Module) -> bool:
        """Compare what torch.compile can trace, so that a change becomes a guard of the graph and recompiles it."""
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
        """Compare everything. torch.compile calls this once per graph and treats the result as a constant."""
        module = self.module()
        try:
            if module is not None and self.check(module.__dict__, type(module)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        return module is not None and self._compare(module)

    def __reduce__(self):
        return _restore_guard, (self.fingerprint, self.live, self.choices)


def install_guarded(module: nn.Module, recipe: Callable) -> Callable[[], None]:
    """Install a recipe that replaces the forward as long as the guard holds."""
    return install(module, recipe, Guard(module, recipe.live, recipe.choices))


class Setting(NamedTuple):
    """An attribute that a compiler can read: `name` of the object that `path` reaches from the module or `root`."""

    root: ModuleType | None
    path: tuple[str, ...]
    name: str
    value: Any
    is_simple: bool


def _settings(module: nn.Module, places: list[Place]) -> tuple[Setting, ...]:
    """Return the settings that `_settings_hold` compares: simple values and functions in attributes or globals."""
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
        if _leads_to_value(module, setting):
            settings[setting.root, setting.path, setting.name] = setting
    return tuple(settings.values())


def _module_of(place: Place) -> ModuleType | None:
    """Return the Python module if a place is one of its globals, otherwise None."""
    root = sys.modules.get(place.owner.get("__name__")) if type(place.owner) is dict else None
    return root if root is not None and vars(root) is place.owner else None


def _leads_to_value(module: nn.Module, setting: Setting) -> bool:
    """Return True if the attributes that a setting names lead to its value; a path may lead elsewhere by chance."""
    owner = module if setting.root is None else setting.root
    for part in setting.path:
        owner = getattr(owner, part, None)
    value = type(owner) if setting.name == "__class__" else getattr(owner, setting.name, None)
    return value is setting.value


def _never_holds(own: dict[str, Any], cls: type) -> bool:
    return False


def _restore_guard(fingerprint: tuple | None, live: tuple[str, ...], choices: tuple[str, ...]) -> Guard:
    """Return a guard for a copied module. It compares by value at its first call."""
    guard = object.__new__(Guard)
    guard.fingerprint, guard.live, guard.choices = fingerprint, live, choices
    guard.check, guard.module, guard.settings, guard.is_unchanged = _never_holds, lambda: None, (), True
    return guard
