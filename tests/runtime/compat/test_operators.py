"""The private names of torch about operators give known answers, and Tigon works, or refuses clearly, without them."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tigon.runtime.compat import names, operators

pytestmark = pytest.mark.no_interpreter("The test launches no kernel.")


def test_dispatch_modes_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    assert operators.dispatch_modes() == 0
    with FlopCounterMode(display=False):
        assert operators.dispatch_modes() == 1


def test_function_modes_are_counted():
    from torch.overrides import TorchFunctionMode

    assert operators.function_modes() == 0
    with TorchFunctionMode():
        assert operators.function_modes() == 1
        assert operators.any_changing_mode()


def test_a_default_device_changes_no_results():
    assert not operators.any_changing_mode()
    with torch.device("cpu"):
        assert operators.function_modes() == 1
        assert not operators.any_changing_mode()


def test_reshaped_tensor_is_no_view():
    x = torch.ones(6)
    y = operators.reshape_without_view(x, (2, 3))
    assert y.shape == (2, 3)
    assert y._base is None
    assert y.data_ptr() == x.data_ptr()


def test_operators_that_write_to_an_argument_are_recognised():
    assert operators.is_in_place(torch.ops.aten.add_.Tensor)
    assert not operators.is_in_place(torch.ops.aten.add.Tensor)
    assert operators.is_in_place(torch.ops.higher_order.cond), "an operator without a schema counts as one that writes"


def test_the_schema_of_an_operator_names_its_arguments():
    schema = operators.schema_of(torch.ops.aten.mul.Scalar)
    assert schema.name == "aten::mul"
    assert [(argument.name, str(argument.type)) for argument in schema.arguments] == [
        ("self", "Tensor"), ("other", "number"),
    ]  # fmt: skip
    assert operators.schema_of(torch.ops.higher_order.cond) is None


def test_the_process_group_of_a_name_is_found(tmp_path):
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("The test needs a process group of its own.")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        assert operators.process_group_of(dist.group.WORLD.group_name) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_read_of_one_value_is_an_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).item()
    assert operators.read_scalar.default in calls


def test_operators_and_namespaces_have_the_known_types():
    assert isinstance(torch.ops.prims, operators.NAMESPACE_TYPES)
    assert not isinstance(torch.nn, operators.NAMESPACE_TYPES)


def test_any_mode_may_change_results_if_the_modes_are_not_listed(monkeypatch, import_again):
    monkeypatch.delattr(torch.overrides, "_get_current_function_mode_stack")
    module = import_again(operators)
    assert not module.any_changing_mode()
    with torch.device("cpu"):
        assert module.any_changing_mode()


MODES = "_len_torch_dispatch_stack", "_len_torch_function_stack"


@pytest.mark.parametrize("name", ["_cuda_getCurrentRawStream", "_cuda_getDevice", *MODES])
def test_public_function_replaces_a_missing_one(monkeypatch, import_again, name):
    monkeypatch.delattr(torch._C, name, raising=False)
    module = import_again(operators)
    assert names.missing == {}
    assert module.dispatch_modes() == (1 if name == MODES[0] else 0)
    assert module.function_modes() == (1 if name == MODES[1] else 0)


@pytest.mark.thorough
def test_torch_computes_the_step_if_init_group_differs():
    """`tigon.AdamW` decides at import, so another process changes torch before the import."""
    program = """
import torch
stock = torch.optim.AdamW._init_group
torch.optim.AdamW._init_group = lambda self, group, *lists: stock(self, group, *lists)
import tigon
assert "_init_group" not in vars(tigon.AdamW)
weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
for cls, w in zip((tigon.AdamW, torch.optim.AdamW), weights):
    (w * w).sum().backward()
    cls([w], lr=0.1).step()
assert torch.equal(*weights)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
