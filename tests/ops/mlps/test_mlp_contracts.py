"""What the nodes of MLPs and of several linear layers guarantee, at every level of memory."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tigon
from mlp_cases import HIDDEN, INNER, LEVELS, OUT, assert_equal, gradients_of, run_at
from op_cases import DEVICE, DTYPES, one_in
from tigon.ops.mlps.projections import linears


class Op(NamedTuple):
    """An op of x [..., HIDDEN] and parameters of these shapes, which returns one tensor, and the name of its node."""

    run: Callable
    shapes: tuple[tuple[int, ...], ...]
    node: str


def _linears(x: Tensor, *parameters: nn.Parameter) -> Tensor:
    """Return the outputs of two layers, one of which has a bias, side by side."""
    first, second = nn.Linear(HIDDEN, INNER, bias=False, device=DEVICE), nn.Linear(HIDDEN, OUT, device=DEVICE)
    first.weight, second.weight, second.bias = parameters
    outputs = linears(x, (first, second))
    assert outputs is not None
    return torch.cat(outputs, -1)


GATED = ((INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER))
OPS = {
    "silu": Op(tigon.glu_mlp, GATED, "GLUMLP"),
    "gelu": Op(lambda *t: tigon.glu_mlp(*t, activation="gelu"), GATED, "GLUMLP"),
    "gelu_tanh": Op(lambda *t: tigon.glu_mlp(*t, activation="gelu_tanh"), GATED, "GLUMLP"),
    "two layers, gelu": Op(tigon.mlp, ((INNER, HIDDEN), (OUT, INNER), (INNER,), (OUT,)), "MLP"),
    "two layers, relu2": Op(lambda *t: tigon.mlp(*t, activation="relu2"), ((INNER, HIDDEN), (OUT, INNER)), "MLP"),
    "linear layers": Op(_linears, ((INNER, HIDDEN), (OUT, HIDDEN), (OUT,)), "Linears"),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def _leaves(op: Op, *leading: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return x and the parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*leading, HIDDEN), *op.shapes
    make = lambda shape: torch.randn(shape, generator=generator) * (1.0 if len(shape) > 2 else shape[-1] ** -0.5)
    return [nn.Parameter(make(shape).to(DEVICE, dtype)) for shape in shapes]


def _step(op: Op, level: str, leaves: list[Tensor]) -> list[Tensor]:
    return gradients_of(run_at(level, op.run, *leaves), leaves)


@pytest.mark.kernels
@one_in(4, op=OPS, level=LEVELS[1:], dtype=DTYPES)
def test_every_level_has_the_bits_of_the_default_level(op, level, dtype):
    leaves = _leaves(op, 2, 9, dtype=dtype)
    assert_equal(_step(op, level, leaves), _step(op, "default", leaves))


@pytest.mark.kernels
@one_in(13, op=OPS, level=LEVELS, frozen=[{0}, {1}, {2}, {-1}, {0, 1, 2}, {0, -1}, {1, 2, -1}, {1, 2}])
def test_frozen_inputs_do_not_change_the_other_gradients(op, level, frozen):
    leaves = _leaves(op, 2, 9)
    y, *gradients = _step(op, "default", leaves)
    frozen = {i % len(leaves) for i in frozen}
    for i in frozen:
        leaves[i].requires_grad_(False)
    expected = [y, *(gradient for i, gradient in enumerate(gradients) if i not in frozen)]
    if len(expected) > 1:
        torch.testing.assert_close(_step(op, level, leaves), expected)


@pytest.mark.kernels
@one_in(4, op=OPS, level=LEVELS)
def test_a_second_backward_gives_the_same_gradients(op, level):
    """The first backward does not overwrite the saved tensors. Under autocast, the second one has the same bits."""
    leaves = _leaves(op, 2, 9)
    loss = run_at(level, op.run, *leaves).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        second = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_equal(first, second)
    assert_equal(first, torch.autograd.grad(loss, leaves))


@pytest.mark.kernels
@every_op
def test_a_second_derivative_is_refused(op):
    leaves = _leaves(op, 5)
    with pytest.raises(RuntimeError, match=f"tigon: {op.node} has no second derivative"):
        torch.autograd.grad(op.run(*leaves).sum(), leaves, create_graph=True)


@pytest.mark.kernels
@every_op
def test_upstream_gradients_may_be_expanded_or_transposed(op):
    leaves = _leaves(op, 4, 7)
    y = op.run(*leaves)
    dense = torch.full_like(y, 0.5)
    expected = torch.autograd.grad(y, leaves, dense, retain_graph=True)
    for dy in (y.new_tensor(0.5).expand(y.shape), dense.transpose(0, -1).contiguous().transpose(0, -1)):
        for a, b in zip(torch.autograd.grad(y, leaves, dy, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@every_op
def test_the_result_may_be_written_in_place(op):
    """Models run `hidden = mlp(hidden); hidden += residual`."""
    if op.run is _linears:
        pytest.skip("the outputs are joined; test_projections.py writes them in place")
    leaves = _leaves(op, 2, 5)
    expected = torch.autograd.grad((op.run(*leaves) * 2).square().sum(), leaves)
    assert_equal(torch.autograd.grad(op.run(*leaves).mul_(2).square().sum(), leaves), expected)
