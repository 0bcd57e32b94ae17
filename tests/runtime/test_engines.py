"""The table of engines recognises real hooks of the installed engines, and answers two questions about each hook."""

import functools
import importlib
import importlib.util
import inspect

import pytest
import torch
from torch import nn

from tigon.recognition.replacement import foreign_forward
from tigon.runtime.engines import (
    HOOK_ORIGINS,
    ORIGINAL_FORWARD,
    WRAPPED_FORWARD,
    WRAPPER_ATTRIBUTES,
    forward_slot,
    full_shape,
    is_hook_of_deepspeed,
    keeps_values,
    may_run_twice,
)

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


def hook_of(module: str):
    """Return a hook that the Python module of this name defines."""
    hook = lambda *args: None
    hook.__module__ = module
    return hook


@pytest.mark.parametrize(("module", "values", "twice"), [
    ("torch.distributed.fsdp._fully_shard._fsdp_state", True, True), ("torch.utils.flop_counter", True, False),
    ("torch.ao.quantization.quantize", False, False), ("deepspeed.runtime.zero.parameter_offload", True, True),
    ("accelerate.hooks", True, True), ("transformers.distributed.tensor_parallel", True, True),
    ("transformers.integrations.tensor_parallel", True, True), ("transformers.integrations.neftune", False, False),
    ("transformers.utils.output_capturing", False, True),
    ("transformers.models.llama.modeling_llama", False, False), ("torchvision.ops", False, False),
    ("__main__", False, False),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda hook: hook, functools.partial], ids=["function", "partial"])
def test_each_hook_has_both_answers(module, values, twice, wrap):
    hook = wrap(hook_of(module))
    assert (keeps_values(hook), may_run_twice(hook)) == (values, twice)


def test_only_hooks_of_deepspeed_are_its_own():
    assert is_hook_of_deepspeed(hook_of("deepspeed.runtime.engine"))
    assert not is_hook_of_deepspeed(hook_of("accelerate.hooks"))


@pytest.mark.parametrize("prefix", [origin.prefix.rstrip(".") for origin in HOOK_ORIGINS])
def test_each_prefix_names_a_package_of_the_installed_engine(prefix):
    pytest.importorskip(prefix.partition(".")[0])
    assert importlib.util.find_spec(prefix) is not None


def test_the_hook_of_neftune_is_known_to_change_values():
    neftune = pytest.importorskip("transformers.integrations.neftune")
    hook = neftune.neftune_post_forward_hook
    assert not keeps_values(hook)
    assert not may_run_twice(hook)


def test_accelerate_sets_the_known_attributes():
    hooks = pytest.importorskip("accelerate.hooks")
    accelerate = pytest.importorskip("accelerate")
    layer = nn.Linear(4, 4)
    before = vars(layer).keys() | {"forward"}
    assert forward_slot(layer) == "forward"
    forward = layer.forward
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    assert vars(layer).keys() - before == set(WRAPPER_ATTRIBUTES) - {ORIGINAL_FORWARD}
    assert forward_slot(layer) == WRAPPED_FORWARD
    assert getattr(layer, forward_slot(layer)) == forward
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(layer)
    assert vars(layer).keys() - before == {*WRAPPER_ATTRIBUTES, "_is_accelerate_prepared"}


def test_a_wrapper_with_other_attributes_counts_as_a_replaced_forward(monkeypatch):
    """The module then stays stock."""
    hooks = pytest.importorskip("accelerate.hooks")
    layer = nn.Linear(4, 4)
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    # Another accelerate would store the forward of the class under a name that Tigon does not know.
    layer.another_name = vars(layer).pop(WRAPPED_FORWARD)
    assert "its forward was already replaced (by accelerate" in foreign_forward(layer)


def test_the_shape_of_a_parameter_of_zero_is_that_of_the_whole():
    parameter = nn.Parameter(torch.empty(0))
    assert full_shape(parameter) == (0,)
    parameter.ds_shape = torch.Size((4, 2))
    assert full_shape(parameter) == (4, 2)


@pytest.mark.deepspeed
def test_zero_sets_the_shape_of_the_whole_parameter():
    zero = pytest.importorskip("deepspeed.runtime.zero.partition_parameters")
    assert "ds_shape" in inspect.getsource(zero)
