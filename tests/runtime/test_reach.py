"""The names that code uses lead to everything that it may read, in whatever order the walk finds them."""

import gc
import weakref

import pytest
from torch import nn

from tigon.recognition.guards.guard import Guard
from tigon.runtime.reach.code import code_facts
from tigon.runtime.reach.explore import explore

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


class Settings:
    first, second = 1, 2


SETTINGS = Settings()


def use_first(x):
    return x * SETTINGS.first


def double(x):
    return 2 * x


def use_a_string(x):
    return {"plain": x}["plain"]


class Layer(nn.Module):
    """A layer that selects a function from a table by a setting, and another one from a second table by a string."""

    def __init__(self, key="first", other=double):
        super().__init__()
        self.table, self.key = {"first": use_first, "double": double}, key
        self.other, self.unused = {"plain": other, "rare": use_first}, [1, 2]

    def forward(self, x):
        return self.other["plain"](self.table[self.key](x))


def paths(module) -> set[str]:
    return {place.path for place in explore(module).places}


def test_a_table_counts_only_with_the_keys_that_the_settings_and_the_code_hold():
    assert {"self.table['first']", "self.other['plain']", "SETTINGS.first"} <= paths(Layer())
    assert paths(Layer()).isdisjoint({"self.table['double']", "self.other['rare']", "self.unused", "SETTINGS.second"})
    assert "SETTINGS.first" not in paths(Layer("double"))


def test_a_table_without_a_known_key_counts_as_a_whole():
    assert {"self.table['first']", "self.table['double']"} <= paths(Layer(key=0))


def test_the_result_does_not_depend_on_earlier_searches():
    expected = explore(Layer())
    explore(Layer("double", use_a_string))
    assert explore(Layer()).fingerprint == expected.fingerprint


def test_a_guard_holds_after_an_equal_setting_is_assigned_and_fails_after_another():
    module = Layer()
    guard = Guard(module)
    module.table = dict(module.table)
    assert guard.holds(module)
    module.key = "double"
    assert not guard.holds(module)


def test_a_search_keeps_no_module_in_memory():
    module = Layer()
    reference = weakref.ref(module)
    gc.disable()
    try:
        explore(module)
        del module
        assert reference() is None
    finally:
        gc.enable()


# A use of `getattr`, whether it computes the name, and whether the attribute may be missing.
LOOKUPS = {
    "a sum": (lambda self, n: getattr(self, "a_" + n), True, True),
    "a call": (lambda self, n: getattr(self, "a_" + str(n)), True, True),
    "a variable": (lambda self, n: getattr(self, n, "default"), True, True),
    "an attribute": (lambda self, n: getattr(self, self.name), True, True),
    "an index": (lambda self, n: getattr(self, n["a"]), True, True),
    "an alias": (lambda self, n: list(map(getattr, [self], n)), True, True),
    "vars": (lambda self, n: vars(self)[n], True, False),
    "a constant": (lambda self, n: getattr(self, "a"), False, False),  # noqa: B009
    "a default": (lambda self, n: getattr(self.config, "a", self.b) + n, False, True),
    "hasattr": (lambda self, n: hasattr(self, "a"), False, True),
}


@pytest.mark.parametrize(("function", "computes_names", "may_miss"), LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_of_attributes_are_found(function, computes_names, may_miss):
    facts = code_facts(function.__code__)
    assert facts.computes_names == computes_names
    assert computes_names or facts.may_miss == may_miss


def writes(x, items):
    def inner():
        x.attribute = 1

    items[0] = x
    inner()
    items.append(x)


def test_writes_of_inner_functions_are_listed_with_their_lines():
    facts, line = code_facts(writes.__code__), writes.__code__.co_firstlineno
    assert facts.writes == ((".attribute", line + 2),)
    assert facts.item_writes == (("__setitem__", line + 4), ("append", line + 6))
