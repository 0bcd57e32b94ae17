"""What every op in FP8 guarantees: gradients that are needed, any strides, empty inputs, autocast, graphs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_cases import MODES, RECIPES, assert_same, randn, same_node, step
from op_cases import DEVICE, INTERPRETED, one_in
from tigon.ops.experts.arguments import ExpertParameters
from tigon.ops.experts.moe_mlp import moe_mlp_in_fp8
from tigon.ops.fp8.fp8_glu_mlp import fp8_glu_mlp
from tigon.ops.fp8.fp8_linear import fp8_linear
from tigon.ops.mlps.glu_mlp import glu_mlp_reference

HIDDEN, INNER = 32, 64


class Op(NamedTuple):
    """An op of x [..., HIDDEN] and parameters of these shapes, the same in the dtype of x, and the name of its node."""

    run: Callable
    # None for experts, which are compared with eager code in their own file.
    exact: Callable | None
    shapes: tuple[tuple[int, ...], ...]
    node: str


EXPERTS = 3


def _experts(x: Tensor, up: Tensor, down: Tensor, activation: str | Callable = "silu", **_: object) -> Tensor:
    """Return the sum over two experts of each token, the same in every call."""
    rows = x.reshape(-1, HIDDEN)
    index = torch.arange(2 * len(rows), device=x.device).view(-1, 2) % EXPERTS
    weights = torch.linspace(0.2, 0.9, index.numel(), device=x.device).view(-1, 2)
    y = moe_mlp_in_fp8(rows, ExpertParameters(up, down, None, None), index, weights, activation=activation)
    return y.view(*x.shape[:-1], HIDDEN)


def _gate(h: Tensor) -> Tensor:
    """Return a gate of alternating columns, which is no activation with a name."""
    return F.silu(h[:, ::2]) * h[:, 1::2]


GATED, STACKS = (
    ((INNER, HIDDEN), (INNER, HIDDEN), (48, INNER)), ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)),
)  # fmt: skip
OPS = {
    "linear": Op(fp8_linear, F.linear, ((48, HIDDEN), (48,)), "Fp8Projections"),
    "gated MLP": Op(fp8_glu_mlp, glu_mlp_reference, GATED, "Fp8GLUMLP"),
}
# The node of experts is the same in the interpreter, where a kernel takes seconds.
if not INTERPRETED:
    OPS["experts"] = Op(_experts, None, STACKS, "")
    OPS["experts with a function"] = Op(partial(_experts, activation=_gate), None, STACKS, "")
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def _leaves(op: Op, *leading: int) -> list[Tensor]:
    """Return x and the parameters."""
    scales = [shape[-1] ** -0.5 if len(shape) > 1 else 1.0 for shape in op.shapes]
    parameters = (
        randn(*s, seed=i + 1, scale=scale) for i, (s, scale) in enumerate(zip(op.shapes, scales, strict=True))
    )
    tensors = randn(*leading, HIDDEN), *parameters
    return [x.requires_grad_() for x in tensors]


@one_in(4, op=OPS, needed=[{0}, {1}, {2}, {-1}, {0, 1}, {1, -1}, {0, -1}], recipe=RECIPES, fp8_dw=MODES)
@pytest.mark.sampled(in_interpreter=3)
def test_each_gradient_depends_on_its_own_requires_grad(op, needed, recipe, fp8_dw):
    leaves, options = _leaves(op, 7), {"recipe": recipe, "fp8_dw": fp8_dw}
    needed = {i % len(leaves) for i in needed}
    expected = step(op.run, leaves, **options)[1:]
    for i, x in enumerate(leaves):
        x.requires_grad_(i in needed)
    gradients = step(op.run, leaves, **options)[1:]
    for gradient, i in zip(gradients, sorted(needed), strict=True):
        # In one case dgate and dup are rounded to the dtype before they are quantised, which moves some values to the
        # next FP8 number. The error must be smaller than that of the quantisation itself, which is 0.037.
        assert (gradient - expected[i]).norm() < 0.03 * expected[i].norm()


VIEWS = {
    "transposed": lambda x: x.transpose(0, 1), "gaps between rows": lambda x: x[:, 1:5],
    "one row for all": lambda x: x[:, :1].expand(-1, 6, -1),
    "gaps between features": lambda x: torch.cat((x, x), -1).view(*x.shape, 2)[..., 0],
}  # fmt: skip


@one_in(4, op=OPS, view=VIEWS, recipe=RECIPES, fp8_dw=MODES)
@pytest.mark.sampled(in_interpreter=3)
def test_strides_do_not_matter(op, view, recipe, fp8_dw):
    x, *parameters = _leaves(op, 4, 7)
    stored = [p if p.dim() == 1 else p.detach().mT.contiguous().mT.requires_grad_() for p in parameters]
    x, options = view(x.detach()), {"recipe": recipe, "fp8_dw": fp8_dw}
    expected = step(op.run, [x.contiguous().requires_grad_(), *parameters], **options)
    assert_same(step(op.run, [x.requires_grad_(), *stored], **options), expected)


@same_node
@every_op
@pytest.mark.parametrize("recipe", RECIPES)
def test_upstream_gradients_may_be_expanded_or_transposed(op, recipe):
    leaves = _leaves(op, 8, 16)
    y = op.run(*leaves, recipe=recipe)
    dense = torch.full_like(y, 0.5)
    expected = torch.autograd.grad(y, leaves, dense, retain_graph=True)
    for dy in (y.new_tensor(0.5).expand(y.shape), dense.transpose(0, -1).contiguous().transpose(0, -1)):
        assert_same(torch.autograd.grad(y, leaves, dy, retain_graph=True), expected)


@one_in(1, op=OPS, fp8_dw=MODES)
def test_without_rows_the_output_is_empty_and_gradients_are_zero(op, fp8_dw):
    leaves = _leaves(op, 2, 0)
    y = op.run(*leaves, fp8_dw=fp8_dw)
    assert y.shape[:2] == (2, 0)
    assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), leaves))


@same_node
@one_in(1, op=OPS, fp8_dw=MODES)
def test_a_second_backward_gives_the_same_bits_and_a_second_derivative_is_refused(op, fp8_dw):
    leaves = _leaves(op, 7)
    y = op.run(*leaves, fp8_dw=fp8_dw)
    first, second = (torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match=f"{op.node}.* has no second derivative"):
        torch.autograd.grad(y.sum(), leaves, create_graph=True)


@pytest.mark.no_interpreter("The interpreter computes no products of bf16.")
@one_in(1, op={name: op for name, op in OPS.items() if op.exact}, recipe=RECIPES, fp8_dw=MODES)
def test_autocast_has_the_dtype_and_the_values_of_a_cast_input(op, recipe, fp8_dw):
    leaves = [x.detach().float().requires_grad_() for x in _leaves(op, 7)]
    exact = step(op.exact, leaves)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = op.run(*leaves, recipe=recipe, fp8_dw=fp8_dw)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y, leaves, randn(*y.shape, seed=7).to(y.dtype))
    assert all(g.dtype == torch.float32 for g in gradients)
    for a, b in zip([y, *gradients], exact, strict=True):
        assert (a - b).norm() < 0.15 * b.norm()


@pytest.mark.thorough
@pytest.mark.no_interpreter("The interpreter needs eager kernels.")
@pytest.mark.parametrize(("recipe", "fp8_dw"), zip(RECIPES, MODES.values(), strict=True), ids=RECIPES)
@every_op
def test_a_compiled_graph_has_no_break(op, recipe, fp8_dw):
    torch._dynamo.reset()
    leaves, run = _leaves(op, 7), lambda *t: op.run(*t, recipe=recipe, fp8_dw=fp8_dw)
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    assert_same(step(compiled, leaves), step(run, leaves))
