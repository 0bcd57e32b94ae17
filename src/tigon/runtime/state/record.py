"""Hold the results of one search for reachable state, and add places to them.

A search visits each reachable value once. `describe(value, path)` returns the part of the fingerprint that stands for
the value, and visits everything reachable from it. `path` says how the code reaches the value, as "self.config.scale",
for messages to the user. Each subclass of `Record` visits values of some kinds.
"""

import types
from dataclasses import dataclass, field, fields
from typing import Any

from tigon.runtime.state.places import Place, Reach


@dataclass
class Uses:
    """The names that the functions of a search use."""

    # Attributes of any object that the code loads or stores.
    names: set[str] = field(default_factory=set)
    # Strings in the code and in settings, which may be keys of a table of functions.
    strings: set[str] = field(default_factory=set)
    # Operations that the code may apply to any object, as in `CodeUse.operations`.
    operations: set[str] = field(default_factory=set)
    # Attributes whose type the code reads.
    type_tested_names: set[str] = field(default_factory=set)
    # Names of attributes that may be missing.
    optional: set[str] = field(default_factory=set)
    # True if every attribute counts as read.
    all_names: bool = False

    def contains(self, other: "Uses") -> bool:
        """Return True if these uses contain every name of `other`."""
        return self.union(other) == self

    def union(self, other: "Uses") -> "Uses":
        """Return the names that are in these uses or in `other`."""
        return Uses(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(self)))


class Record:
    """The results of one pass over everything that is reachable.

    `known_uses` holds the uses of earlier passes, which decide which attributes this pass reads. `uses` collects the
    uses of this pass. Some of them may be new.
    """

    def __init__(
        self,
        module: Any,
        live: frozenset[str],
        choices: frozenset[str],
        inputs: int | None,
        searched: tuple[str, ...],
        known_uses: Uses,
        executed: frozenset[types.CodeType] | None = None,
    ) -> None:
        self.module, self.live, self.choices, self.inputs = module, live, choices, inputs
        # The children with tensors that are searched too.
        self.searched_children = [module._modules[name] for name in searched]
        self.names, self.strings, self.all_names = frozenset(known_uses.names), known_uses.strings, known_uses.all_names
        # The code that the search reads. None stands for the code of every function that it finds.
        self.executed = executed
        self.known_uses, self.uses = known_uses, Uses()
        self.reach = Reach()
        # The parts of the fingerprint. It is a tuple that compares the state by value.
        self.entries: list[tuple] = []
        # The number of each visited object, by its id.
        self.numbers: dict[int, int] = {}
        # References to the numbered objects, so that no id is used a second time.
        self.references: list[Any] = []
        # Functions whose code the search has read.
        self.functions: list[types.FunctionType] = []
        # Names of attributes that the code assigns.
        self.stored_names: set[str] = set()
        # Reachable containers, with their paths.
        self.container_paths: list[tuple[str, Any]] = []
        # Whether an item of the next three lists prevents a replacement depends on the other results of the search.
        # Writes to items, as (method, place in the source, names in the function).
        self.item_writes: list[tuple[str, str, frozenset[str]]] = []
        # Writes to tensors, as (method, place in the source, names before the method, attributes of the function).
        self.tensor_writes: list[tuple[str, str, frozenset[str], frozenset[str]]] = []
        # Conditions on the width of an input that only raise an exception.
        self.checks: list[str] = []
        # True if a function catches exceptions.
        self.catches_exceptions = False
        # True while the search visits a class whose objects the code may construct from inputs.
        self.self_holds_inputs = False
        # Attributes of trusted Python modules, and missing names of any Python module, that are watched already, as
        # (id of the `__dict__` of the Python module, name).
        self.links: set[tuple[int, str]] = set()

    def describe(self, value: Any, path: str) -> Any:
        """Return the part of the fingerprint that stands for a value, and visit everything reachable from it."""
        raise NotImplementedError

    def watch(self, owner: Any, how: str, name: Any, value: Any, path: str) -> None:
        """Add a place to the reach, and its value to the fingerprint."""
        description = self.describe(value, path)
        self.entries.append((path, how, description))
        self.reach.places.append(Place(owner, how, name, value, path))

    def watch_link(self, attributes: dict[str, Any], name: str, path: str) -> None:
        """Watch a name in the `__dict__` of a Python module once, from however many functions it is read."""
        if (id(attributes), name) not in self.links:
            self.links.add((id(attributes), name))
            self.watch(attributes, "item", name, attributes[name], path)

    def watch_missing_link(self, attributes: dict[str, Any], name: str, path: str) -> None:
        """Watch once that a name does not appear in the `__dict__` of a Python module."""
        if (id(attributes), name) not in self.links:
            self.links.add((id(attributes), name))
            self.reach.places.append(Place(attributes, "absent", name, None, path))

    def watch_absence(self, attributes: dict[str, Any], names: list[str], path: str, owner: Any = "dict") -> None:
        """Watch that names which a class defines do not appear in the `__dict__` of an instance.

        `owner` is that of the places: None for the module of the search, or "dict" for `attributes` itself.
        """
        holder = attributes if owner == "dict" else owner
        self.reach.places += [Place(holder, "absent", name, None, f"{path}.{name}") for name in names]

    def number(self, value: Any) -> tuple[int, bool]:
        """Return the number of an object, and True if the search meets it for the first time."""
        is_new = id(value) not in self.numbers
        if is_new:
            self.numbers[id(value)] = len(self.numbers)
            self.references.append(value)
        return self.numbers[id(value)], is_new

    def attribute_names(self, attributes: dict[str, Any], skipped: frozenset[str]) -> list[str]:
        """Return the names of the attributes that the code may read."""
        names = attributes.keys() if self.all_names else self.names & attributes.keys()
        return sorted(name for name in names if isinstance(name, str) and name not in skipped)

    def identify(self, value: Any) -> str:
        """Return a name, equal in every process, for a value whose code is not read."""
        if isinstance(value, types.ModuleType):
            return value.__name__
        has_name = isinstance(value, type) or callable(value)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) if has_name else None
        return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else ""
