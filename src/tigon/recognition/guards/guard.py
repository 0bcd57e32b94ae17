"""Check in every call that the state of a replaced module or function is the same as when it was recognised.

A guard knows the state that a forward reads (`tigon.runtime.reach`): the forward of its class, attributes, functions,
objects such as a config, globals. One expression compares all of it by identity, so that a call costs less than a
microsecond. If anything differs, the guard reads the state again and compares it by value. A setting that was assigned
again with the same value passes, and so does a copy of the module. Another activation, a raised dropout or another
forward does not pass, and then the module runs the forward of its class.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tigon.recognition.guards.graph_guard import add_guard_of_object, guard_holds
from tigon.recognition.replacement import install
from tigon.runtime.compat.graphs import is_tracing
from tigon.runtime.reach.explore import explore


class Guard:
    """Checks that everything that a module's forward reads is as it was when the guard was constructed. `live`,
    `searched` and `texts` are arguments of `explore`: attributes that the recipe itself reads in every call, children
    with tensors that the recipe reads instead of calling them, and strings that calls pass. A copied or unpickled guard
    compares by value at its first call."""

    def __init__(
        self, subject: Any, live: tuple[str, ...] = (), searched: tuple[str, ...] = (), texts: tuple[str, ...] = ()
    ) -> None:
        self.live, self.searched, self.texts = live, searched, texts
        self.fingerprint = self._read_state(subject)
        self.is_unchanged = True

    def _read_state(self, subject: Any) -> tuple | None:
        """Read the current state, use it for later comparisons by identity, and return its fingerprint. It is None if
        the state of a module cannot be watched."""
        reach = explore(subject, self.live, self.searched, self.texts)
        self.check, self.places = reach.check(), reach.places
        self.subject: Callable[[], Any] = weakref.ref(subject)
        return None if reach.reason and isinstance(subject, nn.Module) else reach.fingerprint

    def is_same(self, subject: Any) -> bool:
        """Return True if everything that the forward reads is unchanged, by value, in a call that is not traced."""
        try:
            if self.check(subject.__dict__, type(subject)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        return self._compare(subject)

    def _compare(self, subject: Any) -> bool:
        fingerprint = self._read_state(subject)
        self.is_unchanged = fingerprint is not None and fingerprint == self.fingerprint
        return self.is_unchanged

    def holds(self, module: nn.Module) -> bool:
        """Return `is_same(module)`. A graph that torch.compile traces gets a guard that compares before every run."""
        return guard_holds() if torch.compiler.is_dynamo_compiling() else self.is_same(module)

    def holds_for_graph(self, subject: Any, fingerprint: tuple) -> bool:
        """Return True if a graph traced for `fingerprint` may run. Dynamo calls this while it traces the module, and
        before each run of the graph, where `subject` is None."""
        subject = self.subject() if subject is None else subject
        is_same = self.fingerprint is fingerprint or self.fingerprint == fingerprint
        return subject is not None and is_same and self.is_same(subject)

    def owners(self, module: nn.Module) -> Iterator[int]:
        """Yield the ids of the objects that the forward reads. The caller looks for objects that Dynamo has changed."""
        yield id(module)
        for place in self.places:
            yield id(place.owner)
            yield id(place.value)

    def __reduce__(self) -> tuple:
        return _restore_guard, (type(self), self.fingerprint, self.live, self.searched, self.texts)


class FunctionGuard(Guard):
    """Compares a function, and the state that it reads, with those that were recognised. The guard of an unpickled
    model also accepts the same function in another process. It does not accept a function that was replaced before the
    model was copied."""

    function: Any = None

    def _read_state(self, subject: Any) -> tuple | None:
        self.function = subject
        return super()._read_state(subject)

    def is_same(self, subject: Any) -> bool:
        return super().is_same(subject) if subject is self.function else self._compare(subject)

    def holds(self, module: Any) -> bool:
        return self.is_same(module) and (not is_tracing() or add_guard_of_object(self))


def install_guarded(module: nn.Module, recipe: Any) -> Callable[[], None]:
    """Install a recipe that replaces the forward as long as its guard holds. Return a function that uninstalls it."""
    return install(module, recipe, Guard(module, getattr(recipe, "live", ()), getattr(recipe, "searched", ())))


def _restore_guard(
    cls: type[Guard], fingerprint: tuple | None, live: tuple[str, ...], searched: tuple, texts: tuple[str, ...]
) -> Guard:
    """Return the guard of a copy. It compares by value at its first call."""
    guard = object.__new__(cls)
    guard.fingerprint, guard.live, guard.searched, guard.texts = fingerprint, live, searched, texts
    guard.check, guard.subject = lambda attributes, cls: False, lambda: None
    guard.places, guard.is_unchanged = [], True
    return guard
