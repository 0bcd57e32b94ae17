"""The level of memory with a number of layers."""

import pytest

import tigon
from tigon.memory.lean import recomputes_mlp


def layers_that_recompute(model, batch):
    """Return, for each layer, whether its MLP recomputes the gate and up projections."""
    flags = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_: flags.append(recomputes_mlp())) for layer in model.model.layers
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return flags


def test_the_first_layers_recompute_their_projections(make_model, batch, assert_same_step):
    model = make_model(num_hidden_layers=3)
    report = tigon.patch(model, memory="lean+mlp:2")
    assert "lean+mlp:2: backward recomputes" in str(report)
    assert "in the first 2 layers also those of the gate and up projections" in str(report)
    assert layers_that_recompute(model, batch) == [True, True, False]
    assert_same_step(model, make_model(num_hidden_layers=3), batch)
    report.restore()
    assert layers_that_recompute(model, batch) == [False] * 3


def test_a_later_level_replaces_that_of_the_layers(make_model, batch):
    model = make_model(num_hidden_layers=3)
    tigon.patch(model, memory="lean+mlp:2")
    tigon.patch(model, memory="lean+mlp:1")
    assert layers_that_recompute(model, batch) == [True, False, False]
    tigon.patch(model, memory="lean")
    assert layers_that_recompute(model, batch) == [False] * 3
    tigon.patch(model, memory="lean+mlp")
    assert layers_that_recompute(model, batch) == [True] * 3


def test_more_layers_than_the_model_has_are_refused(make_model):
    model = make_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"memory='lean\+mlp:4' is not possible .*: it has 3 layers"):
        tigon.patch(model, memory="lean+mlp:4")
