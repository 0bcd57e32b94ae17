"""`gelu` and the kernels of the MLPs without a gate: accuracy for extreme values, and what the op saves."""

import math

import pytest
import torch
import torch.nn.functional as F

import tigon
from op_cases import DEVICE, DTYPES, assert_as_accurate_as_eager
from tigon.ops.mlps.gelu import activation_backward_into, activation_forward, gelu_reference

APPROXIMATIONS = ["none", "tanh", "sigmoid"]


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(DEVICE, dtype).requires_grad_()


def _new_gelu(x):
    """The approximation as GPT-2 writes it: a rounding after every operation."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("shape", [(1,), (5, 17), (2, 1025)], ids=str)
def test_gelu_is_as_accurate_as_eager_code(shape, approximate, dtype):
    assert_as_accurate_as_eager(
        lambda x: tigon.gelu(x, approximate), lambda x: gelu_reference(x, approximate), [_input(*shape, dtype=dtype)]
    )


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_is_as_accurate_as_the_operations_that_it_replaces(dtype):
    assert_as_accurate_as_eager(lambda x: tigon.gelu(x, "tanh"), _new_gelu, [_input(7, 96, dtype=dtype)])


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gelu_agrees_with_eager_code_for_nan_infinity_and_zero(approximate):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([nan, inf, -inf, -0.0, 0.0, -1e4, 1e4, -30.0, 30.0, 1e-30], device=DEVICE)
    results = []
    for function in (tigon.gelu, gelu_reference):
        leaf = x.clone().requires_grad_()
        y = function(leaf, approximate)
        results.append((y, *torch.autograd.grad(y.sum(), leaf)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result[3:], expected[3:], rtol=4e-6, atol=1e-30)
        assert result[0].isnan()


@pytest.mark.kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x[..., 5:37], lambda x: x[:, ::2]])
def test_gelu_accepts_strided_input(view):
    assert_as_accurate_as_eager(lambda x: tigon.gelu(view(x)), lambda x: F.gelu(view(x)), [_input(4, 6, 48)])


@pytest.mark.kernels
def test_gelu_saves_only_its_input():
    x, saved_tensors = _input(4, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_tensors.append(t) or t, lambda t: t):
        tigon.gelu(x, "tanh")
    assert {t.data_ptr() for t in saved_tensors} == {x.data_ptr()}


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu2"])
def test_the_backward_of_mlps_recomputes_the_output_in_the_memory_of_its_inputs(kind):
    x, dy = _input(5, 48).detach(), _input(5, 48).detach() + 1
    leaf = x.clone().requires_grad_()
    functions = {"silu": F.silu, "relu2": lambda x: F.relu(x).square()}
    names = {"gelu": "none", "gelu_tanh": "tanh", "gelu_sigmoid": "sigmoid"}
    y = functions[kind](leaf) if kind in functions else gelu_reference(leaf, names[kind])
    (dx,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(activation_forward(x, kind), y.detach())
    activation_backward_into(dy, x, kind, x, dy)
    torch.testing.assert_close(x, dx)
    torch.testing.assert_close(dy, y.detach())


@pytest.mark.no_interpreter("It checks arguments before any kernel is launched.")
def test_gelu_refuses_bad_input():
    with pytest.raises(ValueError, match="gelu: approximate must be one of .*, got 'erf'"):
        tigon.gelu(torch.ones(3, device=DEVICE), approximate="erf")
    with pytest.raises(TypeError, match="gelu: x must be a float32, bfloat16 or float16 tensor, got torch.int64"):
        tigon.gelu(torch.ones(3, dtype=torch.int64, device=DEVICE))
