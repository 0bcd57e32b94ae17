"""Plans of nodes with adapters are found by the properties of the tensors, and hold none of them."""

import weakref

import pytest
import torch

from projection_cases import flatten
from tigon.ops.adapters.plan import find_plan, plan_gradients
from tigon.ops.adapters.projection import Adapter, Projection

pytestmark = pytest.mark.no_interpreter("The tests launch no kernel.")

X = torch.zeros(2, 8, dtype=torch.bfloat16)


def _make_layer(scaling: float = 1.0) -> Projection:
    adapter = Adapter(torch.zeros(4, 8, requires_grad=True), torch.zeros(6, 4, requires_grad=True), scaling)
    return Projection(torch.zeros(6, 8, dtype=torch.bfloat16), None, (adapter,))


def test_layers_of_one_form_share_a_plan_that_holds_no_tensor():
    first, second = _make_layer(), _make_layer()
    assert find_plan(X, [first]).plan is find_plan(X, [second]).plan
    assert find_plan(X, [_make_layer(2.0)]).plan is not find_plan(X, [second]).plan
    tensors = [weakref.ref(tensor) for tensor in flatten([first])]
    del first
    assert all(tensor() is None for tensor in tensors)


@pytest.mark.parametrize(("change", "is_supported"), [
    (lambda a: a.bfloat16(), True), (lambda a: a.t().contiguous().t(), True), (lambda a: a.flatten(), False),
    (lambda a: a[:3], False), (lambda a: a.double(), False), (lambda a: a.to("meta"), False),
    (lambda a: a.to_sparse(), False),
], ids=["dtype", "strides", "sharded", "shape", "fp64", "device", "layout"])  # fmt: skip
def test_exchanged_data_has_another_plan(change, is_supported):
    layer = _make_layer()
    before = find_plan(X, [layer]).plan
    after = find_plan(X, [layer._replace(adapters=(layer.adapters[0]._replace(a=change(layer.adapters[0].a)),))])
    assert (after is not None) == is_supported
    assert after is None or after.plan is not before


def test_gradients_that_are_not_needed_have_no_launch():
    plan = find_plan(X, [_make_layer(), _make_layer()]).plan
    nothing = plan_gradients(plan, plan, (False,) * 10, (0, 1))
    assert (nothing.weights, nothing.sums, nothing.needs_a, nothing.needs_b) == ((), (), False, False)
    only_b = plan_gradients(plan, plan, tuple(i == 8 for i in range(10)), (0, 1))
    assert [(a_run, b_run.indices) for a_run, b_run in only_b.sums] == [(None, (7,))]
