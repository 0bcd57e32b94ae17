"""Describe the places that a forward reads, compare them all in one expression, and undo what a probe changes in them.

A place is, for example, the entry "scale" in the attributes of a module, with the value 2.0 that it had when the search
found it. For a forward that reads this attribute and a global `act`, the expression is

    lambda attributes, cls: attributes['scale'] is v0 and o1['act'] is v1
"""

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# Types whose values are immutable.
SIMPLE_TYPES: frozenset[type] = frozenset(
    (
        *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
# A forward that reads more places is refused, because every call compares all of them.
MAX_PLACES = 128
# The tables of a module in which `nn.Module` looks attributes up.
REGISTERED = "_parameters", "_buffers", "_modules"


def is_simple(value: object) -> bool:
    """Return True if a value is immutable, so that comparing it by value is enough."""
    return type(value) in SIMPLE_TYPES


@dataclass(frozen=True)
class Place:
    """A place that a call reads, with its value at the time of the search.

    `owner` is the object that holds the value. None stands for the module itself, so that a place does not refer to the
    module. `name` is the key, attribute or index, `path` describes the place to the user, and `how` says what must stay
    the same:

    | how            | what must stay the same |
    |----------------|---|
    | "item"         | the entry `name` of a dict |
    | "entry"        | the entry `name` of a subclass of dict, as it is stored |
    | "attribute"    | the attribute `name` of the owner |
    | "class"        | the attribute `name` of the owner's class |
    | "static"       | the entry `name` in the `__dict__` of a class |
    | "child"        | the child `name` of a torch module |
    | "element"      | the element with the index `name` of a list |
    | "absent"       | the dict has no key `name` |
    | "type"         | the type of the owner |
    | "mode"         | the owner, the `__dict__` of a child, is in the mode of the module |
    | "length"       | the number of elements of a container |
    | "members"      | the elements of a set |
    | "unset"        | the parameter or buffer `name` is None; `value` is the table that holds it |
    """

    owner: Any
    how: str
    name: Any
    value: Any
    path: str


@dataclass
class Reach:
    """The state that a call of one module can reach, and the reasons why its forward must not be replaced."""

    places: list[Place] = field(default_factory=list)
    # Reasons why a call may change something that outlives it: an assignment to an attribute, a log entry.
    writes: list[str] = field(default_factory=list)
    # Objects whose changes cannot be noticed by a comparison: generators of random numbers, iterators, files.
    unwatchable: list[str] = field(default_factory=list)
    # The state by value. It is equal for a copy of the module, in this process or in another one.
    fingerprint: tuple = ()
    # Containers, and objects and classes with attributes, which `preserved` restores, with their paths.
    containers: list[tuple[Any, str]] = field(default_factory=list)
    objects: list[tuple[Any, str]] = field(default_factory=list)
    # The code that a call may run.
    codes: list[types.CodeType] = field(default_factory=list)
    # Reads that no probe covers, such as the type of a child with weights, or attributes that may be missing.
    unprobed_reads: list[str] = field(default_factory=list)
    # The names of all attributes that the code loads from any object.
    names: frozenset[str] = frozenset()
    # The paths of the places that `preserved` had to restore.
    changed_paths: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Return the reason why a recipe must not replace this forward; None if it may."""
        if self.writes:
            return f"its forward {self.writes[0]}"
        if self.unwatchable:
            return f"its forward {self.unwatchable[0]}"
        if self.unprobed_reads:
            return f"its forward {self.unprobed_reads[0]}"
        if self.changed_paths:
            return f"its forward changes {self.changed_paths[0]}"
        if len(self.places) > MAX_PLACES:
            return f"its forward reads {len(self.places)} settings, too many to check in every call"
        return None

    @property
    def own_settings(self) -> set[str]:
        """Return the names of the module's own attributes that the code may read, except those that hold tensors."""
        return {place.name for place in self.places if place.owner is None and place.how == "item"}

    def check(self) -> Callable[[dict[str, Any], type], bool]:
        """Return a function of the module's `__dict__` and class, which returns True if every place is unchanged. For
        the reach of a Python function, the arguments are `{}` and `type(None)`. Values are compared by identity. The
        function raises KeyError, IndexError or AttributeError if a place no longer exists."""
        return build_check(self.places)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Undo every change that the block makes to reachable containers, objects, classes and globals."""
        contents = [(container, path, _items(container)) for container, path in self.containers]
        states = [(each, path, dict(vars(each))) for each, path in self.objects]
        try:
            yield
        finally:
            for container, path, elements in contents:
                if not _same_elements(container, elements):
                    self.changed_paths.append(path)
                    container.clear()
                    container.update(elements) if isinstance(container, (dict, set)) else container.extend(elements)
            for each, path, attributes in states:
                self.changed_paths += _restore_attributes(each, path, attributes)
            for place in self.places:
                if type(place.owner) is dict and place.how == "item" and place.owner.get(place.name) is not place.value:
                    self.changed_paths.append(place.path)
                    place.owner[place.name] = place.value
                elif type(place.owner) is types.CellType and place.owner.cell_contents is not place.value:
                    self.changed_paths.append(place.path)
                    place.owner.cell_contents = place.value


def _restore_attributes(owner: Any, path: str, before: dict[str, Any]) -> list[str]:
    """Give an object or a class the attributes that it had before, and return the paths of those that have changed."""
    now = vars(owner)
    names = [n for n in {**before, **now} if n not in now or n not in before or now[n] is not before[n]]
    for name in names:
        if not isinstance(owner, type):
            now.pop(name) if name not in before else now.update({name: before[name]})
        elif name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)
    return [f"{path}.{name}" for name in names]


def _items(container: Any) -> list:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same_elements(container: Any, before: list) -> bool:
    # Identity is compared, because `==` of tensors returns a tensor.
    now = _items(container)
    pairs = zip(now, before, strict=False)
    is_dict = isinstance(container, dict)
    return len(now) == len(before) and all(a is b or (is_dict and a[0] is b[0] and a[1] is b[1]) for a, b in pairs)


@functools.lru_cache(maxsize=1024)
def compile_expression(source: str) -> Callable:
    """Return the value of an expression. The modules of one kind have the same expression, which is compiled once."""
    return eval(source)


def _condition_source(place: Place, number: int) -> str:
    """Return the source of a condition that is True as long as a place holds its recorded value. In the source, o<n> is
    the owner, v<n> the recorded value and n<n> the name; `attributes` and `cls` belong to the module."""
    holder = "attributes" if place.owner is None else f"o{number}"
    value = f"v{number}"
    if place.how == "length" and place.value == 0 and type(place.owner) in (dict, list, collections.OrderedDict):
        # This takes half the time of a comparison, and a module has four tables of hooks, which are empty.
        return f"not {holder}"
    if place.how in ("item", "entry"):
        key = repr(place.name) if is_simple(place.name) else f"n{number}"
        return f"{holder}[{key}] is {value}" if place.how == "item" else f"entry({holder}, {key}) is {value}"
    if place.how == "element":
        return f"{holder}[{place.name}] is {value}"
    if place.how == "child":
        return f"{'attributes[' + repr('_modules') + ']' if place.owner is None else holder}[{place.name!r}] is {value}"
    return {
        "class": f"{'cls' if place.owner is None else f'type({holder})'}.{place.name} is {value}",
        "attribute": f"{holder}.{place.name} is {value}",
        "static": f"{holder}.__dict__[{place.name!r}] is {value}",
        "absent": f"{place.name!r} not in {holder}",
        "type": f"type({holder}) is {value}",
        "mode": f"{holder}['training'] is attributes['training']",
        "length": f"len({holder}) == {value}",
        "members": f"{holder} == {value}",
        "unset": f"{holder}[{place.value!r}][{place.name!r}] is None",
    }[place.how]


def build_check(places: list[Place]) -> Callable[[dict[str, Any], type], bool]:
    """Build a function (attributes, class) -> bool that returns True if every place holds its recorded value."""
    names, conditions, values = ["entry"], [], [dict.__getitem__]
    for number, place in enumerate(places):
        conditions.append(_condition_source(place, number))
        for letter, value in (("o", place.owner), ("v", place.value), ("n", place.name)):
            names.append(f"{letter}{number}")
            values.append(value)
    condition = " and ".join(conditions) or "True"
    return compile_expression(f"lambda {', '.join(names)}: lambda attributes, cls: {condition}")(*values)
