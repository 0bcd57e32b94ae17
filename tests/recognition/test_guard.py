"""A setting that changes after the patch is used in the next call, also in copies and in pickled modules."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from recognition import changes
from recognition.changes import CHANGES, Pickled
from recognition.modules import MLP, variant
from tigon.recognition.guards.guard import Guard


def guard_of(module: nn.Module) -> Guard:
    return vars(module)["forward"].guard


@pytest.mark.parametrize("add_setting", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_copied", [False, True], ids=["the module", "a copy"])
@pytest.mark.sampled(2)
def test_a_setting_that_changes_after_the_patch_is_used(add_setting, is_copied, undo_changes):
    mlp, x = MLP(), torch.randn(2, 8, 16)
    mlp.__class__ = variant("Settings")
    act, change = add_setting(mlp)
    type(mlp).act = act
    model = nn.ModuleList([mlp])
    assert [entry.part for entry in tigon.patch(model).replaced] == ["glu"]
    before = model[0](x)
    if is_copied:
        model = copy.deepcopy(model)
    change(model[0])
    expected = type(model[0]).forward(model[0], x)
    assert not torch.equal(expected, before), "the change changes nothing"
    assert torch.equal(model[0](x), expected)


@pytest.mark.parametrize("change", [lambda m: m.table.insert(0, 2.0), lambda m: setattr(changes, "SCALE", 2.0)])
def test_a_pickled_module_sees_changes(change, undo_changes):
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model = pickle.loads(pickle.dumps(model))
    assert guard_of(model[0]).holds(model[0])
    change(model[0])
    assert not guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))


def test_a_change_between_pickling_and_loading_is_used(undo_changes):
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    data = pickle.dumps(model)
    changes.SCALE = 2.0
    model = pickle.loads(data)
    assert not guard_of(model[0]).holds(model[0])


def test_the_op_runs_again_after_a_setting_is_put_back():
    model, x = nn.ModuleList([Pickled()]), torch.randn(2, 8, 16)
    tigon.patch(model)
    model[0].table[0] = 2.0
    assert not guard_of(model[0]).holds(model[0])
    model[0].table = [1.0]
    assert guard_of(model[0]).holds(model[0])
    assert torch.equal(model[0](x), Pickled.forward(model[0], x))


def test_an_equal_setting_is_no_change():
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    model[0].table = [float("1.0")]
    assert guard_of(model[0]).holds(model[0])


def test_a_setting_that_the_forward_does_not_read_is_no_change():
    model = nn.ModuleList([Pickled()])
    tigon.patch(model)
    model[0].note, model[0].log = "other", [1.0]
    check = guard_of(model[0]).check
    assert guard_of(model[0]).holds(model[0])
    assert guard_of(model[0]).check is check, "the state was read anew"


def test_a_forward_that_reads_hundreds_of_settings_stays_stock():
    mlp = MLP()
    mlp.table = [1.0] * 500
    mlp.__class__ = variant("Table", act=lambda self, x: F.silu(x) * self.table[7])
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(nn.ModuleList([mlp])).left_alone
    assert entry.detail == "its forward reads self.table, which holds 500 elements, too many to check"
