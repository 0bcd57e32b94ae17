"""The private names of torch about modules give known answers, and Tigon works, or refuses clearly, without them."""

import pytest
import torch
from torch import nn

from runtime.compat.layers import Layer
from tigon.runtime.compat import modules

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


def test_a_call_runs_call_impl_or_an_attribute_of_the_instance():
    assert nn.Module._call_impl is modules.call_impl
    layer, x = Layer(), torch.ones(2)
    for name in modules.INSTANCE_CALLS:
        setattr(layer, name, lambda x: "replaced")
        assert layer(x) == "replaced"
        delattr(layer, name)
    assert torch.equal(layer(x), 2 * x)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_global_hooks_are_seen(kind):
    assert not modules.any_global_hook()
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *args: None)
    assert modules.any_global_hook()
    handle.remove()
    assert not modules.any_global_hook()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_each_hook_of_a_module_is_in_one_table(kind):
    module = nn.Linear(2, 2)
    assert not any(getattr(module, table) for table in modules.HOOK_TABLES)
    getattr(module, f"register_{kind}_hook")(lambda *args: None)
    assert [len(getattr(module, table)) for table in modules.HOOK_TABLES if getattr(module, table)] == [1]


def test_a_module_has_tables_of_its_tensors_and_children():
    """Other files read these tables directly; see the docstring of `compat`."""
    module = nn.BatchNorm1d(2)
    module.child = child = nn.Linear(2, 2)
    assert list(module._parameters) == ["weight", "bias"]
    assert list(module._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert module._modules == {"child": child}
    tables = {"_parameters", "_buffers", "_modules", *modules.HOOK_TABLES}
    assert tables | {"training"} <= modules.MODULE_ATTRIBUTES
    assert not {"weight", "eps", "forward"} & modules.MODULE_ATTRIBUTES


def test_a_replica_of_data_parallel_is_recognised():
    module = nn.Linear(2, 2)
    assert not modules.is_replica(module)
    assert modules.is_replica(getattr(module, modules.REPLICATE)())


def test_missing_global_hooks_count_as_a_hook(monkeypatch, import_again):
    monkeypatch.delattr(nn.modules.module, "_global_forward_hooks")
    assert import_again(modules).any_global_hook()


def test_a_call_never_counts_as_stock_without_call_impl(monkeypatch, import_again):
    monkeypatch.delattr(nn.Module, "_call_impl")
    assert import_again(modules).call_impl is None
