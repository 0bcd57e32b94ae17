"""Check in every call that the state of a replaced module is the same as when the module was recognised.

A guard knows the state that a module's forward reads (`tigon.runtime.reach`): the forward of its class,
attributes, functions, objects such as a config, globals. One expression compares all of it by identity, so that a call
costs less than a microsecond. If anything differs, the guard reads the state again and compares it by value. A setting
that was assigned again with the same value passes, and so does a copy of the module. Another activation, a raised
dropout or another forward does not pass, and then the module runs the forward of its class.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from tigon.recognition.guards.graph_guard import guard_holds
from tigon.recognition.replacement import install
from tigon.runtime.reach.explore import explore


class Guard:
    """Checks that everything that a module's forward reads is as it was when the guard was constructed.

    `live` names the attributes that the recipe itself reads in every call, `choices` the keys by which the forward
    selects from a table of functions, and `searched` the children with tensors that the recipe reads instead of calling
    them. A copied or unpickled guard compares by value at its first call.
    """

    def __init__(
        self,
        module: nn.Module,
        live: tuple[str, ...] = (),
        choices: tuple[str, ...] = (),
        searched: tuple[str, ...] = (),
    ) -> None:
        self.live, self.choices, self.searched = live, choices, searched
        self.fingerprint = self._read_state(module)
        self.is_unchanged = True

    def _read_state(self, module: nn.Module) -> tuple | None:
        """Read the current state, use it for later comparisons by identity, and return its fingerprint.

        The result is None if the state cannot be watched.
        """
        reach = explore(module, self.live, self.choices, searched=self.searched)
        self.check = reach.check()
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.places = reach.places
        return None if reach.reason else reach.fingerprint

    def holds(self, module: nn.Module) -> bool:
        """Return True if everything that the forward reads is unchanged, by value."""
        if torch.compiler.is_dynamo_compiling():
            return guard_holds()
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

    def holds_for_graph(self, module: nn.Module | None, fingerprint: tuple) -> bool:
        """Return True if a graph that was traced for `fingerprint` may run.

        torch.compile calls this while it traces the module, and without the module before every run of the graph.
        """
        module = self.module() if module is None else module
        is_same = self.fingerprint is fingerprint or self.fingerprint == fingerprint
        return module is not None and is_same and self.holds(module)

    def owners(self, module: nn.Module) -> Iterator[int]:
        """Yield the ids of the objects that the forward reads. The caller looks for objects that Dynamo has changed."""
        yield id(module)
        for place in self.places:
            yield id(place.owner)
            yield id(place.value)

    def __reduce__(self) -> tuple:
        return _restore_guard, (self.fingerprint, self.live, self.choices, self.searched)


class GuardedRecipe(Protocol):
    """A recipe that needs a guard: its properties are the arguments of `Guard`."""

    @property
    def live(self) -> tuple[str, ...]: ...

    @property
    def choices(self) -> tuple[str, ...]: ...

    @property
    def searched(self) -> tuple[str, ...]: ...

    @property
    def __call__(self) -> Callable[..., Any]: ...


def install_guarded(module: nn.Module, recipe: GuardedRecipe) -> Callable[[], None]:
    """Install a recipe that replaces the forward as long as the guard holds. Return a function that uninstalls it."""
    return install(module, recipe, Guard(module, recipe.live, recipe.choices, recipe.searched))


def _never_holds(attributes: dict[str, Any], cls: type) -> bool:
    return False


def _no_module() -> None:
    return None


def _restore_guard(
    fingerprint: tuple | None, live: tuple[str, ...], choices: tuple[str, ...], searched: tuple[str, ...] = ()
) -> Guard:
    """Return a guard for a copied module. It compares by value at its first call."""
    guard = object.__new__(Guard)
    guard.fingerprint, guard.live, guard.choices, guard.searched = fingerprint, live, choices, searched
    guard.check, guard.module, guard.places, guard.is_unchanged = _never_holds, _no_module, [], True
    return guard
