"""The levels of memory as values, and their names."""

import copy
import pickle

import pytest
import torch

import tigon
from tigon import Memory
from tigon.memory.levels import MEMORY, check_memory, parse_memory

NAMES = {
    "default": Memory(), "lean": Memory("lean"), "lean+mlp": Memory("lean", mlp=True),
    "lean+mlp:1": Memory("lean", mlp=1), "checkpoint+offload": Memory("checkpoint", offload=True),
    "checkpoint+attention:3": Memory("checkpoint", attention=3),
    "checkpoint+attention+offload:5": Memory("checkpoint", attention=True, offload=5),
    "checkpoint+attention:3+offload:5": Memory("checkpoint", attention=3, offload=5),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_level_prints_the_name_that_stands_for_it(name):
    memory = NAMES[name]
    assert str(memory) == name
    assert parse_memory(name) == parse_memory(memory) == memory
    assert hash(memory) == hash(parse_memory(name))
    assert copy.deepcopy(memory) == pickle.loads(pickle.dumps(memory)) == memory
    assert eval(repr(memory)) == memory


def test_one_layer_is_not_all_layers():
    assert Memory("lean", mlp=True) != Memory("lean", mlp=1)
    assert len({parse_memory(name) for name in (*NAMES, *MEMORY)}) == len({*NAMES, *MEMORY})


def test_offload_is_another_name():
    assert parse_memory("offload") == Memory("checkpoint", attention=True, offload=True)


@pytest.mark.parametrize(
    "name",
    ["lean+mlp:0", "lean+mlp:", "lean:2", "lean+mlp:2 ", "lean+mlp:-1", "lean+mlp:02", "lean+mlp+mlp", "", "lean+",
     "lean+level", "offload:2", "checkpoint+attention:0", "checkpoint:2", "checkpoint+offload+attention", "attention",
     "lean+attention", "checkpoint+attention+attention", "checkpoint+attention:", "checkpoint+attention:2:3", 3, None],
)  # fmt: skip
def test_other_names_are_refused(name):
    assert parse_memory(name) is None
    with pytest.raises(
        ValueError, match=r"^op: memory must be one of 'default', .*a tigon.Memory; .*'lean\+mlp:4'\), got"
    ):
        check_memory("op", name)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"level": "offload"}, ValueError, "level must be .*'checkpoint'.*, got 'offload'"),
    ({"level": "lean", "offload": True}, ValueError, "offload needs level='checkpoint', got level='lean'"),
    ({"level": "checkpoint", "mlp": 2}, ValueError, "mlp needs level='lean', got level='checkpoint'"),
    ({"attention": True}, ValueError, "attention needs level='checkpoint', got level='default'"),
    ({"level": "lean", "mlp": 0}, ValueError, "mlp must be at least 1 layer, got 0"),
    ({"level": "lean", "mlp": "2"}, TypeError, "mlp must be True, False or a number of layers, got '2'"),
])  # fmt: skip
def test_impossible_combinations_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"^Memory: {message}"):
        Memory(**arguments)


def test_a_value_is_as_good_as_its_name():
    model = torch.nn.Sequential(tigon.RMSNorm(8))
    with pytest.raises(ValueError, match="memory='checkpoint' is not possible for this Sequential"):
        tigon.patch(model, memory=Memory("checkpoint"))
    report = tigon.patch(model, memory=Memory("lean"))
    assert str(report) == str(tigon.patch(torch.nn.Sequential(tigon.RMSNorm(8)), memory="lean"))
