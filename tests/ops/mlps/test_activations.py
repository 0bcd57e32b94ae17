"""`gelu`, `relu2` and their kernels: accuracy for extreme values, strides, and what the ops save."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager, one_in, outputs_and_gradients, saved_tensors
from tigon.ops.mlps import activation_kernels
from tigon.ops.mlps.activations import gelu_reference, relu2_reference
from tigon.runtime.launch import Plan

inf, nan = math.inf, math.nan

APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh", "gelu_sigmoid": "sigmoid"}
OPS = {
    kind: (partial(tigon.gelu, approximate=a), partial(gelu_reference, approximate=a))
    for kind, a in APPROXIMATIONS.items()
}
OPS["relu2"] = tigon.relu2, relu2_reference
every_op = pytest.mark.parametrize(("op", "reference"), OPS.values(), ids=OPS)


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(DEVICE, dtype).requires_grad_()


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@one_in(2, kind=list(OPS), dtype=DTYPES, shape=[(1,), (5, 17), (2, 3, 64), (2, 1025)])
def test_activations_are_as_accurate_as_eager_code(kind, dtype, shape):
    op, reference = OPS[kind]
    x = _input(*shape, dtype=dtype)
    assert_as_accurate_as_eager(op, reference, [x])
    if kind == "relu2":
        # Both round once in the forward and once in the backward.
        results, expected = outputs_and_gradients(op, [x]), outputs_and_gradients(reference, [x])
        assert torch.equal(results[0][0], expected[0][0])
        assert torch.equal(results[1][0], expected[1][0])


@every_op
def test_activations_agree_with_eager_code_for_nan_infinity_and_zero(op, reference):
    x = torch.tensor([nan, inf, -inf, -0.0, 0.0, -1e4, 1e4, -30.0, 30.0, 1e-30], device=DEVICE)
    (y,), (dx,) = outputs_and_gradients(op, [x.clone().requires_grad_()])
    (expected,), (expected_dx,) = outputs_and_gradients(reference, [x.clone().requires_grad_()])
    # Eager code has NaN for some infinities.
    first = 1 if op is tigon.relu2 else 3
    torch.testing.assert_close(y[first:], expected[first:], rtol=4e-6, atol=1e-30)
    torch.testing.assert_close(dx[first:], expected_dx[first:], rtol=4e-6, atol=1e-30)
    assert y[0].isnan()


def test_the_gradient_of_relu2_is_zero_below_zero_for_any_upstream_gradient():
    x = torch.tensor([nan, -inf, inf, -0.0, 0.0, -1.0, 2.0, 1e30, 1e-30, -1.0, -1.0, 0.0], device=DEVICE)
    dy = torch.tensor([1.0, 1.0, 1.0, inf, 1.0, inf, inf, 1.0, 1.0, nan, 1.0, nan], device=DEVICE)
    x.requires_grad_()
    results = [torch.autograd.grad(function(x), x, dy)[0] for function in (tigon.relu2, relu2_reference)]
    torch.testing.assert_close(*results, rtol=1e-6, atol=0.0, equal_nan=True)


VIEWS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT, "permuted": lambda x: x.permute(2, 0, 1), "gaps between rows": lambda x: x[..., 5:37],
    "permuted, with gaps": lambda x: x[:, :3].permute(1, 2, 0), "expanded": lambda x: x[:, :1].expand(4, 5, 48),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch) -> list[tuple]:
    """Return a list to which each launch adds the width of its rows and its tensors."""
    calls, launch = [], Plan.launch

    def recorded(plan, *tensors):
        calls.append((plan.numbers[-2], tensors))
        launch(plan, *tensors)

    monkeypatch.setattr(Plan, "launch", recorded)
    return calls


@pytest.mark.kernels
@pytest.mark.parametrize("name", VIEWS)
def test_strided_inputs_are_accepted_and_dense_ones_are_not_copied(name, launches):
    x = VIEWS[name](_input(4, 5, 48)).detach().requires_grad_()
    y = tigon.relu2(x)
    dy = torch.ones_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = relu2_reference(x)
    torch.testing.assert_close([y, dx], [expected, *torch.autograd.grad(expected, x, dy)])
    (_, forward), (_, backward) = launches
    if name in ("permuted, with gaps", "expanded"):
        return
    assert [t.data_ptr() for t in forward if t is not None] == [x.data_ptr(), y.data_ptr()]
    assert [t.data_ptr() for t in backward[:2]] == [dy.data_ptr(), x.data_ptr()]


@pytest.mark.kernels
def test_dimensions_of_size_one_are_ignored_when_rows_are_formed(launches):
    """A program computes a block of a row, so each row of one feature would need its own program."""
    x = _input(6, 48, 1).transpose(0, 1)
    assert torch.equal(tigon.relu2(x), relu2_reference(x))
    assert launches[0][0] == 6 * 48, "one long row"


@pytest.mark.kernels
@every_op
def test_only_the_input_is_saved(op, reference):
    x = _input(4, 64)
    assert {t.data_ptr() for t in saved_tensors(lambda: op(x))} == {x.data_ptr()}


def test_the_result_may_be_written_in_place():
    x = _input(4, 64)
    (dx,) = torch.autograd.grad(tigon.relu2(x).mul_(2).sum(), x)
    torch.testing.assert_close(dx, 4 * F.relu(x.detach()))


@every_op
def test_scalars_and_rows_without_features_are_accepted(op, reference):
    x = torch.tensor(3.0, device=DEVICE)
    torch.testing.assert_close(op(x), reference(x))
    assert op(torch.randn(3, 0, device=DEVICE)).shape == (3, 0)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", [*OPS, "silu"])
def test_the_backward_of_mlps_recomputes_the_output_in_the_memory_of_its_inputs(kind):
    x, dy = _input(5, 48).detach(), _input(5, 48).detach() + 1
    leaf = x.clone().requires_grad_()
    y = F.silu(leaf) if kind == "silu" else OPS[kind][1](leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(activation_kernels.activation_forward(x, kind), y.detach())
    activation_kernels.activation_backward_into(dy, x, kind, x, dy)
    torch.testing.assert_close(x, dx)
    torch.testing.assert_close(dy, y.detach())


@pytest.mark.no_interpreter("The parameters do not depend on kernels.")
def test_relu2_module_has_the_parameters_of_transformers():
    nemotron = pytest.importorskip("transformers.models.nemotron.modeling_nemotron")
    config = nemotron.NemotronConfig(hidden_size=8, intermediate_size=24, mlp_bias=True)
    theirs, ours = nemotron.NemotronMLP(config).to(DEVICE), tigon.ReLU2MLP(8, 24, bias=True).to(DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert set(tigon.ReLU2MLP(8, 24).state_dict()) == {"up_proj.weight", "down_proj.weight"}
