"""A setting that changes after the patch is used in the next call, also in copies and in pickled modules."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from recognition import changes
from recognition.changes import CHANGES, LOOKED_UP, Pickled, with_setting
from recognition.modules import reason, variant
from tigon.recognition.guards.guard import Guard

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")


def guard_of(module: nn.Module) -> Guard:
    return vars(module)["forward"].guard


@pytest.fixture
def model() -> nn.ModuleList:
    """Return a list of one patched MLP."""
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    return model


# Half of the settings change in a copy.
@pytest.mark.parametrize(("setting", "is_copied"), [(setting, i % 4 > 1) for i, setting in enumerate(CHANGES)])
@pytest.mark.sampled(2)
def test_a_setting_that_changes_after_the_patch_is_used(setting, is_copied, undo_changes):
    mlp, change = with_setting(setting)
    model, x = nn.ModuleList([mlp]), torch.randn(2, 8, 16)
    assert [entry.part for entry in tigon.patch(model).replaced] == ["glu"]
    before = model[0](x)
    if is_copied:
        model = copy.deepcopy(model)
    change(model[0])
    expected = type(model[0]).forward(model[0], x)
    assert not torch.equal(expected, before), "the change changes nothing"
    assert torch.equal(model[0](x), expected)


@pytest.mark.parametrize("setting", LOOKED_UP)
@pytest.mark.sampled(3)
def test_a_forward_that_looks_attributes_up_stays_stock(setting, undo_changes):
    mlp, _ = with_setting(setting)
    assert "its forward looks up attributes by names that may be missing or computed" in reason(mlp)


@pytest.mark.parametrize("change", [lambda m: m.table.insert(0, 2.0), lambda m: setattr(changes, "SCALE", 2.0)])
def test_a_pickled_module_sees_changes(model, change, undo_changes):
    """A change between pickling and loading is used too."""
    data, x = pickle.dumps(model), torch.randn(2, 8, 16)
    model = pickle.loads(data)
    assert guard_of(model[0]).holds(model[0])
    change(model[0])
    assert not guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))
    model = pickle.loads(data)
    assert guard_of(model[0]).holds(model[0]) == (changes.SCALE == 1.0)


def test_the_op_runs_again_after_a_setting_is_put_back_and_other_settings_are_no_change(model):
    x = torch.randn(2, 8, 16)
    model[0].table[0] = 2.0
    assert not guard_of(model[0]).holds(model[0])
    model[0].table = [float("1.0")]
    assert guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))
    # The forward does not read these.
    model[0].note, model[0].log = "other", [1.0]
    check = guard_of(model[0]).check
    assert guard_of(model[0]).holds(model[0])
    assert guard_of(model[0]).check is check, "the state was read anew"


def test_a_forward_that_reads_hundreds_of_settings_stays_stock():
    mlp = variant("Table", act=lambda self, x: F.silu(x) * self.table[7])()
    mlp.table = [1.0] * 500
    assert reason(mlp) == "its forward reads self.table, which holds 500 elements, too many to check"
