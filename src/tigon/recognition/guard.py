"""Check in every call that a replaced module is still what it was when it was recognised.

A guard knows the state that a module's forward reads (`tigon.runtime.reach`): the forward of its class, attributes,
functions, objects such as a config, globals. One expression compares all of it by identity, so that a call costs less
than a microsecond. Where something differs, the state is read anew and compared by value: the same setting assigned
again, or a copy of the module, is the same; another activation, a raised dropout or another forward is not, and then
the module runs the forward of its class.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.recognition.replacement import install, is_changed
from tigon.runtime.reach import Place, explore, is_simple

__all__ = ["Guard", "install_guarded"]


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
        self.settings = _settings(module, self.live, reach.places)
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
        for path, name, value in self.settings:
            owner = module
            for part in path.split(".") if path else ():
                owner = owner._modules.get(part)
            if getattr(owner, name, None) != value or (name == "__class__" and is_changed(owner)):
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


def _settings(module: nn.Module, live: tuple[str, ...], places: list[Place]) -> tuple[tuple[str, str, object], ...]:
    """Path of a child without tensors ("" for the module itself), name of a setting, value."""
    settings: list[tuple[str, str, object]] = []
    for place in places:
        path, _, name = place.path.removeprefix("self").removeprefix(".").rpartition(".")
        if place.how == "item" and place.owner is None and is_simple(place.value):
            settings.append(("", place.name, place.value))
        elif place.how == "child" and place.value is not None:
            settings.append((f"{path}.{name}" if path else name, "__class__", type(place.value)))
        elif place.how == "item" and is_simple(place.value) and path in dict(module.named_modules()):
            settings.append((path, place.name, place.value))
    return tuple(settings)


def _never(own: dict[str, Any], cls: type) -> bool:
    return False


def _restored(fingerprint: tuple | None, live: tuple[str, ...], choices: tuple[str, ...]) -> Guard:
    """A guard for the copy of a module, which is compared by value at its first call."""
    guard = object.__new__(Guard)
    guard.fingerprint, guard.live, guard.choices = fingerprint, live, choices
    guard.check, guard.module, guard.settings, guard.is_unchanged = _never, lambda: None, (), True
    return guard
