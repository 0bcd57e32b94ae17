"""Check in every call that a function, and all that it reads, is what it was when it was recognised."""

from collections.abc import Callable
from typing import Any

from tigon.recognition.graph_guard import add_guard_of_object, traces_a_graph
from tigon.runtime.reach import explore

__all__ = ["FunctionGuard"]


class FunctionGuard:
    """Tells whether a function is the one that was recognised, and reads what it read then.

    A call compares by identity. Where something differs, the state is read anew and compared by value, so the same
    function of another process, in an unpickled model, is the same, and one that was replaced before a copy is not.
    """

    def __init__(self, function: Callable) -> None:
        self.fingerprint = self._look(function)
        self.is_unchanged = True

    def _look(self, function: Any) -> tuple:
        """Read the state anew, and compare with it from now on."""
        reach = explore(function)
        self.function, self.check = function, reach.checker()
        return reach.fingerprint

    def holds(self, function: Any) -> bool:
        """Return True if `function` computes what the recognised function did.

        A graph that torch.compile traces now then compares the function before every run.
        """
        if function is not self.function or not self.check():
            self.is_unchanged = self._look(function) == self.fingerprint
        return self.is_unchanged and (not traces_a_graph() or add_guard_of_object(self))

    def holds_for_graph(self, _: Any, fingerprint: tuple) -> bool:
        """Return True if a graph that was traced for `fingerprint` may run."""
        if not self.check():
            self.is_unchanged = self._look(self.function) == self.fingerprint
        return self.is_unchanged and (self.fingerprint is fingerprint or self.fingerprint == fingerprint)

    def __reduce__(self):
        return _restored, (self.fingerprint,)


def _restored(fingerprint: tuple) -> FunctionGuard:
    """The guard of a copy, which compares by value at its first call."""
    guard = object.__new__(FunctionGuard)
    guard.fingerprint, guard.function, guard.is_unchanged = fingerprint, None, False
    return guard
