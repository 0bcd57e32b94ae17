"""Check in every call that a function, and everything that it reads, is as it was when it was recognised."""

from collections.abc import Callable
from typing import Any

from tigon.recognition.guards.graph_guard import add_guard_of_object
from tigon.runtime.compat.graphs import is_tracing
from tigon.runtime.reach.explore import explore


class FunctionGuard:
    """Compares a function, and the state that it reads, with those that were recognised.

    `holds` compares by identity first. If anything differs, the guard reads the state again and compares it by value.
    So the guard of an unpickled model also accepts the same function in another process. It does not accept a function
    that was replaced before the model was copied.
    """

    def __init__(self, function: Callable) -> None:
        self.fingerprint = self._read_state(function)
        self.is_unchanged = True

    def _read_state(self, function: Any) -> tuple:
        """Read the current state, use it for later comparisons by identity, and return its fingerprint."""
        reach = explore(function)
        self.function, self.check = function, reach.check()
        return reach.fingerprint

    def is_same(self, function: Any) -> bool:
        """Return True if `function` computes what the recognised function computed, in a call that is not traced."""
        try:
            if function is self.function and self.check({}, type(None)):
                return self.is_unchanged
        except (KeyError, IndexError, AttributeError):
            pass
        self.is_unchanged = self._read_state(function) == self.fingerprint
        return self.is_unchanged

    def holds(self, function: Any) -> bool:
        """Return `is_same(function)`.

        If torch.compile traces a graph now, the graph gets a guard that compares the function before every run.
        """
        return self.is_same(function) and (not is_tracing() or add_guard_of_object(self))

    def holds_for_graph(self, _: Any, fingerprint: tuple) -> bool:
        """Return True if a graph that was traced for `fingerprint` may run."""
        return self.is_same(self.function) and (self.fingerprint is fingerprint or self.fingerprint == fingerprint)

    def __reduce__(self) -> tuple:
        return _restore_guard, (self.fingerprint,)


def _restore_guard(fingerprint: tuple) -> FunctionGuard:
    """Return the guard of a copy. It compares by value at its first call."""
    guard = object.__new__(FunctionGuard)
    guard.fingerprint, guard.function, guard.is_unchanged = fingerprint, None, False
    return guard
