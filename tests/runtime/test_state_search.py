"""The state that a search finds does not depend on earlier searches, although it begins with their names."""

import gc
import weakref

import pytest
from torch import nn

from tigon.recognition.guards.guard import Guard
from tigon.runtime.state import reach
from tigon.runtime.state.reach import explore

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


class Settings:
    first, second = 1, 2


SETTINGS = Settings()


class Scale:
    def __call__(self, layer, x):
        return x * layer.factor


class ScaleAndShift:
    def __call__(self, layer, x):
        return x * layer.factor + layer.offset


class Shift:
    def __call__(self, layer, x):
        return x + layer.offset


class Count:
    def __call__(self, layer, x):
        return layer.count_down(x, 2)


class Double:
    def __call__(self, layer, x):
        return 2 * x


class Layer(nn.Module):
    """A layer that computes what its attribute `function` computes, perhaps by two methods that call each other."""

    def __init__(self, function):
        super().__init__()
        self.function, self.factor, self.offset = function, 2.0, 3.0

    def forward(self, x):
        return self.function(self, x)

    def count_down(self, x, n):
        return self.add_one(x, n - 1) if n else x

    def add_one(self, x, n):
        return self.count_down(x + 1, n)


def double(x):
    return 2 * x


def use_first(x):
    return x * SETTINGS.first


def use_second(x):
    return x * SETTINGS.second


def use_all_attributes(x):
    return x * len(vars(SETTINGS))


def use_a_string(x):
    return {"plain": x}["plain"]


class TableLayer(nn.Module):
    """A layer that selects a function from a table by a setting, and one from another table by a computed key."""

    def __init__(self, table, key="double", other=None):
        super().__init__()
        self.table, self.key, self.other = table, key, other or {"plain": double}
        self.norm, self.first, self.second = nn.LayerNorm(2), 5, 6

    def forward(self, x):
        return self.norm(self.other[sorted(self.other)[0]](self.table[self.key](x)))


@pytest.fixture(autouse=True)
def _forget_searches(monkeypatch):
    monkeypatch.setattr(reach, "_LAST_RESULTS", type(reach._LAST_RESULTS)())


@pytest.fixture
def count_passes(monkeypatch):
    """Return a function that explores a module, and returns the reach and the number of passes."""
    count, run = 0, reach._Search.run

    def watched(search):
        nonlocal count
        count += 1
        run(search)

    monkeypatch.setattr(reach._Search, "run", watched)

    def count_passes(module, **options):
        nonlocal count
        count = 0
        return explore(module, **options), count

    return count_passes


def _paths(found_reach):
    return sorted((place.path, place.how) for place in found_reach.places)


def test_the_second_search_of_a_class_has_one_pass(count_passes):
    first_reach, passes = count_passes(Layer(Scale()))
    assert passes > 2
    second_reach, passes = count_passes(Layer(Scale()))
    assert passes == 1
    assert second_reach.fingerprint == first_reach.fingerprint
    assert [place.path for place in second_reach.places] == [place.path for place in first_reach.places]


def test_each_set_of_options_has_its_own_names(count_passes):
    assert "self.factor" in [place.path for place in count_passes(Layer(Scale()))[0].places]
    other_reach, passes = count_passes(Layer(Scale()), live=("factor",))
    assert passes > 2
    assert "self.factor" not in [place.path for place in other_reach.places]


def test_each_function_has_its_own_names(count_passes):
    assert count_passes(use_first)[1] > 1
    assert count_passes(use_second)[1] > 1
    assert count_passes(use_first)[1] == 1


@pytest.mark.parametrize(
    ("other", "module"),
    [
        pytest.param(Layer(Scale()), Layer(Shift()), id="other names"),
        pytest.param(Layer(ScaleAndShift()), Layer(Shift()), id="fewer names"),
        pytest.param(
            TableLayer({"double": double, "other": use_a_string}),
            TableLayer({"double": double}, other={"first": use_first, "plain": double}),
            id="fewer strings",
        ),
        pytest.param(
            TableLayer({"double": double, "other": use_all_attributes}),
            TableLayer({"double": double, "other": use_first}),
            id="not all attributes",
        ),
        pytest.param(
            TableLayer({"double": double, "other": use_first}),
            TableLayer({"double": double, "other": use_second}),
            id="another entry of a table",
        ),
        pytest.param(Layer(Count()), Layer(Double()), id="methods that only call each other"),
        # The first layer begins with the string that selects from its other table, although its code does not use it.
        pytest.param(
            TableLayer({"double": double, "other": use_a_string}, other={"first": use_first, "plain": double}),
            TableLayer({"double": double}, other={"first": use_first, "plain": double}),
            id="a string of code that is not reached",
        ),
    ],
)
def test_earlier_searches_of_other_code_change_nothing(other, module):
    expected = explore(module)
    reach._LAST_RESULTS.clear()
    explore(other)
    actual = explore(module)
    assert _paths(actual) == _paths(expected)
    assert actual.fingerprint == expected.fingerprint
    assert actual.reason == expected.reason


def test_a_guard_holds_after_a_search_of_another_module():
    """An equal value is assigned, so the guard searches again."""
    explore(TableLayer({"double": double, "other": use_first}))
    module = TableLayer({"double": double, "other": use_second})
    guard = Guard(module)
    explore(TableLayer({"double": double, "other": use_second}, key="other"))
    module.table = dict(module.table)
    assert guard.holds(module)


def test_a_search_keeps_no_module_in_memory():
    module = Layer(Scale())
    references = [weakref.ref(module), weakref.ref(module.function)]
    explore(module)
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]
