"""Hold the results of one walk over everything that a forward may read, and add places to them."""

import types
from collections.abc import Callable
from typing import Any

from tigon.runtime.reach.code import CodeFacts
from tigon.runtime.reach.places import Place, Reach


class Record:
    """The results of one walk.

    `describe(value, path)` returns the part of the fingerprint that stands for the value, and visits the value once.
    `path` says how the code reaches the value, as "self.config.scale". An object with attributes becomes a holder. When
    the walk finds a new name, every holder visits its attribute of this name. A name with the prefix "'" is a string in
    the code.
    """

    def __init__(self, root: Any, live: tuple[str, ...], searched: tuple[str, ...]) -> None:
        self.root, self.live = root, frozenset(live)
        self.searched = [root._modules[name] for name in searched]
        self.reach = Reach()
        self.names: set[str] = set()
        self.entries: list[tuple] = []
        # The number of each visited object by its id, and references, so that no id is used a second time.
        self.numbers: dict[int, int] = {}
        self.references: list[Any] = []
        self.functions: list[tuple[CodeFacts, types.FunctionType]] = []
        # The functions that visit the attribute of a name, with the names that they have visited.
        self.holders: list[tuple[Callable[[str], None], set[str]]] = []
        self.tables: list[tuple[dict, str, set[str]]] = []
        self.overridden: list[tuple[type, str]] = []
        # Names of attributes that the code assigns.
        self.stored_names: set[str] = set()
        # The names and paths of the children whose code and settings are not searched.
        self.children_with_tensors: list[tuple[str, str]] = []
        # Names that are watched already, as (id of the owner, name).
        self.links: set[tuple[int, str]] = set()

    def describe(self, value: Any, path: str) -> Any:
        """Return the part of the fingerprint that stands for a value, and visit everything reachable from it."""
        raise NotImplementedError

    def watch(self, owner: Any, how: str, name: Any, value: Any, path: str) -> None:
        """Add a place to the reach, and its value to the fingerprint."""
        self.entries.append((path, how, self.describe(value, path)))
        self.reach.places.append(Place(owner, how, name, value, path))

    def watch_link(self, attributes: dict[str, Any], name: str, path: str) -> None:
        """Watch once the entry of a `__dict__` of a Python module, or that it has none."""
        if (id(attributes), name) not in self.links:
            self.links.add((id(attributes), name))
            if name in attributes:
                self.watch(attributes, "item", name, attributes[name], path)
            else:
                self.reach.places.append(Place(attributes, "absent", name, None, path))

    def refuse(self, reason: str) -> None:
        self.reach.unwatchable.append(reason)

    def number(self, value: Any) -> tuple[int, bool]:
        """Return the number of an object, and True if the walk meets it for the first time."""
        is_new = id(value) not in self.numbers
        if is_new:
            self.numbers[id(value)] = len(self.numbers)
            self.references.append(value)
        return self.numbers[id(value)], is_new
