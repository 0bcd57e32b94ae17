"""A setting that changes after `torch.compile` compiles the module again, and the guard breaks no graph."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import tigon
from recognition.changes import CHANGES, Pickled, with_setting
from recognition.modules import MLP, Norm

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")

SCALE = 1.0


def double_the_forward(mlp: MLP) -> None:
    type(mlp).forward = lambda self, x: 2 * MLP.forward(self, x)


def compiled_outputs(setting: str, fullgraph: bool = False) -> list[Tensor]:
    """Return the output of a compiled module before and after a change, and then the output of its class."""
    torch.manual_seed(0)
    mlp, change = with_setting("child" if setting not in CHANGES else setting)
    if setting not in CHANGES:
        change = OTHER_CHANGES[setting]
    x = torch.randn(2, 8, 16)
    assert tigon.patch(nn.ModuleList([mlp]))
    torch.compiler.reset()
    compiled = torch.compile(mlp, backend="eager", fullgraph=fullgraph)
    before = compiled(x)
    change(mlp)
    after = compiled(x)
    return [before, after, type(mlp).forward(mlp, x)]


OTHER_CHANGES = {
    "forward of the class": double_the_forward,
    "hook of a child": lambda m: m.child.register_forward_hook(lambda m, args, y: 2 * y),
}


# Dynamo evaluates the guards, whatever the backend is.
@pytest.mark.parametrize("setting", [*CHANGES, *OTHER_CHANGES])
@pytest.mark.sampled(8)
def test_a_compiled_module_is_compiled_again_after_a_change(setting, undo_changes):
    before, after, expected = compiled_outputs(setting)
    assert not torch.equal(expected, before), "the change changes nothing"
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("setting", ["cell", "config"])
def test_the_guard_breaks_no_graph(setting, undo_changes):
    _, after, expected = compiled_outputs(setting, fullgraph=True)
    torch.testing.assert_close(after, expected)


@pytest.fixture
def compiled_norm():
    """Return a patched norm that reads a list and a global, and its compiled form."""
    norm = type("Compiled", (Norm,), {"compute": lambda self, x, w: Norm.compute(self, x, w) * self.table[0] * SCALE})()
    norm.table = [1.0, 3.0]
    assert tigon.patch(norm)
    torch.compiler.reset()
    return norm, torch.compile(norm, backend="eager", fullgraph=True)


def test_equal_settings_compile_once(compiled_norm, undo_changes):
    norm, compiled = compiled_norm
    x = torch.randn(4, 48)
    compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        norm.table = [float("1.0"), float("3.0")]
        compiled(x)
        norm.note = "what the forward does not read"
        compiled(x)


DUPLICATES = {"the module": lambda m: m, "a copy": copy.deepcopy, "a pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
@pytest.mark.sampled(2)
def test_a_graph_contains_the_recipe_until_a_setting_changes(duplicate, monkeypatch, undo_changes):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model = duplicate(model)
    calls = []
    replacement = vars(model[0])["forward"]
    recipe = replacement.recipe
    # Dynamo traces this function; the append is a side effect of every run of the graph.
    replacement.recipe = lambda module, x: calls.append(1) or type(recipe).__call__(recipe, module, x)
    torch.compiler.reset()
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    compiled(x), compiled(x)
    assert calls == [1, 1]
    model[0].table[0] = 2.0
    torch.testing.assert_close(compiled(x), Pickled.forward(model[0], x))
    assert calls == [1, 1], "the recipe ran after a change"
    model[0].table[0] = 1.0
    compiled(x)
    assert calls == [1, 1, 1], "the first graph runs again"


def test_a_change_inside_the_graph_is_used(undo_changes):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)

    def step(x: Tensor, scale: float) -> Tensor:
        model[0].table[0] = scale
        return model[0](x)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for scale in (2.0, 3.0):
        result = compiled(x, scale)
        model[0].table[0] = scale
        torch.testing.assert_close(result, Pickled.forward(model[0], x))
        model[0].table[0] = 1.0


def test_graphs_are_stock_where_dynamo_has_other_internals(monkeypatch, undo_changes):
    """The stock forward is exact, and Dynamo guards what it reads."""

    def fail(*_):
        raise AttributeError

    monkeypatch.setattr("tigon.recognition.guards.graph_guard.install_guard", fail)
    _, after, expected = compiled_outputs("list", fullgraph=True)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
