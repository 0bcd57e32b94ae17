"""A search for reachable state begins with the names of the last search of the same class, and finds the same."""

import pytest
import torch
from torch import nn

from tigon.runtime.state import reach
from tigon.runtime.state.reach import explore


class Scale:
    def __call__(self, layer, x):
        return x * layer.factor


class Shift:
    def __call__(self, layer, x):
        return x + layer.offset


class Layer(nn.Module):
    """A layer that computes what its attribute `function` computes."""

    def __init__(self, function):
        super().__init__()
        self.function, self.factor, self.offset = function, 2.0, 3.0

    def forward(self, x):
        return self.function(self, x)


@pytest.fixture
def passes(monkeypatch):
    """Forget earlier searches, and return a list that grows by one element for each pass."""
    monkeypatch.setattr(reach, "_LAST_RESULTS", type(reach._LAST_RESULTS)())
    modules, run = [], reach._Search.run
    monkeypatch.setattr(reach._Search, "run", lambda search: (modules.append(search.module), run(search))[1])
    return modules


def _paths(found):
    return sorted((place.path, place.how) for place in found.places)


def test_the_second_search_of_a_class_has_one_pass(passes):
    expected = explore(Layer(Scale()))
    count = len(passes)
    assert count > 2
    found = explore(Layer(Scale()))
    assert len(passes) == count + 1
    assert _paths(found) == _paths(expected)
    assert found.fingerprint == expected.fingerprint


def test_a_module_that_reaches_other_code_is_searched_from_the_start(passes):
    expected = explore(Layer(Shift()))
    assert "self.factor" not in dict(_paths(expected))
    reach._LAST_RESULTS.clear()
    assert "self.factor" in dict(_paths(explore(Layer(Scale()))))
    found = explore(Layer(Shift()))
    assert _paths(found) == _paths(expected)
    assert found.fingerprint == expected.fingerprint


def test_each_function_is_searched_by_itself(passes):
    def forward(x):
        return Scale()(Layer, x)

    assert "factor" in explore(forward).names
    assert "factor" not in explore(lambda x: torch.relu(x)).names
    count = len(passes)
    explore(forward)
    assert len(passes) == count + 1
