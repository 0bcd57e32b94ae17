"""The places that a forward reads, and one expression that compares them all.

`tigon.runtime.reach` finds them. A `Reach` holds what it has found, and tells

    places       every place that the code reads: where it is, and the value that was found there
    writes       why a call may change something that outlives it: an assignment to an attribute, a counter, a log
    unwatchable  which values change without any sign: generators of random numbers, iterators, files
    decisions    where the code takes one of two ways, by its input
    fingerprint  the same state by value: equal for a copy of the module, in this process or in another one
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tigon.runtime.bytecode import UNDERSTANDS_BYTECODE

__all__ = ["MOST_PLACES", "Place", "Reach", "is_simple"]

SIMPLE = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice)
SIMPLE += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
MOST_PLACES = 128


def is_simple(value: object) -> bool:
    """Return True if a value is immutable and is told by its value alone."""
    return type(value) in SIMPLE


@dataclass(frozen=True)
class Place:
    """A place that a call reads.

    `owner` is the object that holds it; None stands for the module itself, so that a place holds no module. `how` tells
    how it is read: "item" of a dict, "entry" of a subclass of dict, "attribute", "class" for an attribute of the
    module's class, "static" for what a class itself defines, "child" of a module, "element" of a list, "absent" for a
    name that must stay missing, "undefined" for one that no class may define, "type" of an object, "length", "members"
    of a set, "version" of a tensor.
    """

    owner: Any
    how: str
    name: Any
    value: Any
    path: str


@dataclass
class Reach:
    """The state that a call of one module can reach."""

    places: list[Place] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    unwatchable: list[str] = field(default_factory=list)
    fingerprint: tuple = ()
    containers: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    # Attributes that the code loads, of any object.
    names: frozenset[str] = frozenset()
    # Conditions whose other outcome no probe may have shown.
    decisions: list[str] = field(default_factory=list)
    # What `preserved` had to put back: the paths of places.
    disturbed: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Why a recipe must not take the place of this forward; None if it may."""
        if not UNDERSTANDS_BYTECODE:
            return "the bytecode of this version of Python is not known, so it cannot be told what its forward reads"
        if self.writes:
            return f"its forward {self.writes[0]}"
        if self.unwatchable:
            return f"its forward {self.unwatchable[0]}"
        if self.disturbed:
            return f"its forward changes {self.disturbed[0]}"
        if len(self.places) > MOST_PLACES:
            return f"its forward reads {len(self.places)} settings, too many to check in every call"
        return None

    @property
    def decision(self) -> str | None:
        """Where the forward takes one of two ways, by its input, so that probes may have seen one of them alone."""
        return f"its forward {self.decisions[0]}" if self.decisions else None

    def checker(self) -> Callable[[], bool]:
        """For a function: tells whether every place that it reads holds what it held."""
        check = self.check()

        def is_unchanged() -> bool:
            try:
                return check({}, type(None))
            except (KeyError, IndexError, AttributeError):
                return False

        return is_unchanged

    def check(self) -> Callable[[dict[str, Any], type], bool]:
        """A function of the module's `__dict__` and class that tells whether every place holds what it held.

        It compares by identity. It raises KeyError, IndexError or AttributeError where a place is gone.
        """
        return _checking(self.places)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Undo every change that the block makes to containers, objects, classes and globals that are reachable."""
        contents = [(container, _items(container)) for container in self.containers]
        states = [(each, dict(vars(each))) for each in self.objects]
        try:
            yield
        finally:
            for container, before in contents:
                if not _same_elements(container, before):
                    self.disturbed.append(next(p.path for p in self.places if p.owner is container))
                    container.clear()
                    container.update(before) if isinstance(container, (dict, set)) else container.extend(before)
            for each, before in states:
                if not _same_items(vars(each), before):
                    self.disturbed.append(next(p.path for p in self.places if p.owner is each))
                    vars(each).clear()
                    vars(each).update(before)
            for place in self.places:
                if type(place.owner) is dict and place.how == "item" and place.owner.get(place.name) is not place.value:
                    self.disturbed.append(place.path)
                    place.owner[place.name] = place.value
                elif place.how == "static" and vars(place.owner).get(place.name) is not place.value:
                    self.disturbed.append(place.path)
                    setattr(place.owner, place.name, place.value)


def _items(container: Any) -> list:
    """The elements of a container by identity, and those of a dict with their keys."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same_elements(container: Any, before: list) -> bool:
    """Return True if a container holds the same objects; elements may be tensors, which cannot be compared by `==`."""
    now = _items(container)
    pairs = zip(now, before, strict=False)
    is_dict = isinstance(container, dict)
    return len(now) == len(before) and all(a is b or (is_dict and a[0] is b[0] and a[1] is b[1]) for a, b in pairs)


def _same_items(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)


@functools.cache
def _compiled(source: str) -> Callable:
    return eval(source)


def _condition(place: Place, number: int) -> str:
    """An expression of `own` and `cls`, the module's attributes and class, of the owner o<n> and the value v<n>."""
    holder = "own" if place.owner is None else f"o{number}"
    value = f"v{number}"
    if place.how in ("item", "entry"):
        key = repr(place.name) if is_simple(place.name) else f"n{number}"
        return f"{holder}[{key}] is {value}" if place.how == "item" else f"entry({holder}, {key}) is {value}"
    if place.how == "element":
        return f"{holder}[{place.name}] is {value}"
    if place.how == "child":
        return f"{'own[' + repr('_modules') + ']' if place.owner is None else holder}[{place.name!r}] is {value}"
    return {
        "class": f"{'cls' if place.owner is None else f'type({holder})'}.{place.name} is {value}",
        "attribute": f"{holder}.{place.name} is {value}",
        "static": f"{holder}.__dict__[{place.name!r}] is {value}",
        "absent": f"{place.name!r} not in {holder}",
        "undefined": f"not hasattr({'cls' if place.owner is None else f'type({holder})'}, {place.name!r})",
        "type": f"type({holder}) is {value}",
        "length": f"len({holder}) == {value}",
        "members": f"{holder} == {value}",
        "version": f"{holder}._version == {value}",
    }[place.how]


def _checking(places: list[Place]) -> Callable[[dict[str, Any], type], bool]:
    """A function of a module's attributes and class that tells whether every place holds what it held."""
    names, values, conditions = ["entry"], [dict.__getitem__], []
    for number, place in enumerate(places):
        conditions.append(_condition(place, number))
        for letter, value in (("o", place.owner), ("v", place.value), ("n", place.name)):
            names.append(f"{letter}{number}")
            values.append(value)
    condition = " and ".join(conditions) or "True"
    return _compiled(f"lambda {', '.join(names)}: lambda own, cls: {condition}")(*values)
