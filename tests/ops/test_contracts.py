"""Every op is accurate, does not write to tensors of the caller, and computes only the gradients that are needed."""

import pytest
import torch

from op_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    Case,
    as_list,
    assert_as_accurate_as_eager,
    every_case,
    every_op,
    outputs_and_gradients,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
@pytest.mark.sampled(2, in_interpreter=7)
def test_an_op_is_as_accurate_as_eager_code(case: Case, dtype: torch.dtype):
    assert_as_accurate_as_eager(
        case.run, case.reference, case.inputs(dtype), loss=case.workload.is_loss, term_size=case.variant.term_size
    )


@every_op
def test_an_op_depends_on_its_inputs_alone_and_writes_nothing_of_the_caller(case: Case):
    """A second backward, a second run and a run without gradients have the same results."""
    tensors = case.inputs()
    before = [x.detach().clone() for x in tensors]
    outputs = as_list(case.run(*tensors))
    leaves = [x for x in tensors if x.requires_grad]
    upstream = [torch.rand_like(y) for y in outputs]
    copies = [x.detach().clone() for x in (*outputs, *upstream)]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    # A backward pass with other upstream gradients runs between the two.
    torch.autograd.grad(outputs, leaves, [2 * dy for dy in upstream], retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for tensor, copy in zip([*tensors, *outputs, *upstream], [*before, *copies], strict=True):
        assert torch.equal(tensor, copy)
    other = case.inputs()
    outputs = as_list(case.run(*other))
    again = torch.autograd.grad(outputs, [x for x in other if x.requires_grad], upstream)
    assert all(torch.equal(a, b) for a, b in zip([*outputs, *again], [*copies[: len(outputs)], *first], strict=True))
    with torch.no_grad():
        for y, expected in zip(as_list(case.run(*tensors)), outputs, strict=True):
            assert not y.requires_grad
            torch.testing.assert_close(y, expected.detach(), rtol=1e-6, atol=1e-6)


@every_op
def test_only_the_inputs_that_need_a_gradient_get_one(case: Case):
    full = outputs_and_gradients(case.run, case.inputs())[1]
    # In the interpreter, each op has many launches, and all kernels compute the other gradients in the same way.
    for i in {0, len(full) - 1} if INTERPRETED else range(len(full)):
        tensors = case.inputs()
        leaves = [x for x in tensors if x.requires_grad]
        for j, x in enumerate(leaves):
            x.requires_grad_(i == j)
        (gradient,) = outputs_and_gradients(case.run, tensors)[1]
        assert torch.equal(gradient, full[i]) or torch.allclose(gradient, full[i], rtol=1e-5, atol=1e-6)


@every_op
def test_a_second_derivative_is_right_or_refused(case: Case):
    """torch differentiates the references twice. A kernel has no second derivative, and must raise an error for it."""

    def penalised(run) -> list[torch.Tensor]:
        tensors = case.inputs()
        leaves = [x for x in tensors if x.requires_grad]
        outputs = as_list(run(*tensors))
        total = sum(y.square().sum() for y in outputs)
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(total + sum(g.square().sum() for g in gradients), leaves)

    expected = penalised(case.reference)
    try:
        actual = penalised(case.run)
    except RuntimeError as error:
        if "no second derivative" not in str(error):
            raise
    else:
        for a, b in zip(actual, expected, strict=True):
            # A small element may be the difference of terms that are as large as the largest element.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


def _strided(x: torch.Tensor, step: int) -> torch.Tensor:
    """Return the same values with gaps between rows (step 1) or between elements (step 2)."""
    if not x.is_floating_point() or x.dim() < 2:
        return x
    wide = x.detach().new_zeros(*x.shape[:-1], x.shape[-1] * 2 + 6)
    view = wide[..., : x.shape[-1] * step : step] if step == 2 else wide[..., 3 : 3 + x.shape[-1]]
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


@pytest.mark.parametrize(
    "step", [1, pytest.param(2, marks=pytest.mark.thorough_in_interpreter)], ids=["gaps of rows", "gaps of elements"]
)
@every_op
def test_strides_of_the_inputs_do_not_matter(case: Case, step: int):
    tensors = case.inputs()
    strided = [_strided(x, step) for x in tensors]
    expected, actual = outputs_and_gradients(case.run, tensors), outputs_and_gradients(case.run, strided)
    torch.testing.assert_close([*actual[0], *actual[1]], [*expected[0], *expected[1]], rtol=1e-5, atol=1e-6)


def _with_gaps(x: torch.Tensor) -> torch.Tensor:
    """Return a view with the values of x, between whose rows are values that nobody may read."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


LAYOUTS = {
    "expanded": lambda dy: dy.flatten()[0].expand(dy.shape),
    "transposed": lambda dy: dy.transpose(0, -1).contiguous().transpose(0, -1) if dy.dim() else dy,
    "gaps": lambda dy: _with_gaps(dy) if dy.dim() else dy,
}


@every_op
def test_upstream_gradients_may_have_any_layout(case: Case):
    tensors = case.inputs()
    outputs = as_list(case.run(*tensors))
    leaves = [x for x in tensors if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    # `lora_linear` computes fp32 in eager code, where cuBLAS adds in another order for another layout.
    is_cublas = case.name.startswith("lora_linear") and DEVICE == "cuda"
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if is_cublas else {"rtol": 1e-6, "atol": 1e-6}
    for layout in LAYOUTS.values():
        upstream = [layout(dy) for dy in values]
        expected = torch.autograd.grad(outputs, leaves, [dy.contiguous() for dy in upstream], retain_graph=True)
        actual = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
        torch.testing.assert_close(actual, expected, **tolerance)


@every_op
def test_zero_rows_give_empty_outputs_and_zero_gradients(case: Case):
    empty = case.without_rows()
    outputs, gradients = outputs_and_gradients(case.run, empty.inputs())
    expected = as_list(case.reference(*empty.inputs()))
    assert [y.shape for y in outputs] == [y.shape for y in expected]
    assert all((y == 0).all() for y in outputs)
    assert all((g == 0).all() for g in gradients)


@pytest.mark.thorough
@every_op
def test_an_op_compiles_without_a_graph_break(case: Case):
    torch._dynamo.reset()
    # On a CPU the test is about the graph and not about the code, and the interpreter needs eager kernels.
    backend = "inductor" if torch.cuda.is_available() and not INTERPRETED else "aot_eager"
    compiled = torch.compile(case.run, fullgraph=True, backend=backend)
    for tensors in (case.inputs(), case.inputs(seed=3)):
        expected, actual = outputs_and_gradients(case.run, tensors), outputs_and_gradients(compiled, tensors)
        torch.testing.assert_close([*actual[0], *actual[1]], [*expected[0], *expected[1]], rtol=1e-5, atol=1e-6)
