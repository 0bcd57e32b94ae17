"""The contracts that every op keeps: exact, nothing of the caller's is written, any shape, only what is needed."""

import pytest
import torch

from op_cases import (
    DTYPES,
    INTERPRETED,
    Case,
    as_list,
    assert_as_accurate_as_eager,
    every_case,
    outputs_and_gradients,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@every_case
def test_is_as_accurate_as_eager_code(case: Case, dtype: torch.dtype):
    assert_as_accurate_as_eager(
        case.run, case.reference, case.inputs(dtype), loss=case.workload.is_loss, terms=case.variant.terms
    )


@every_case
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in DTYPES[1:])], ids=str
)
def test_writes_nothing_of_the_callers(case: Case, dtype: torch.dtype):
    tensors = case.inputs(dtype)
    before = [x.detach().clone() for x in tensors]
    outputs = as_list(case.run(*tensors))
    kept = [y.detach().clone() for y in outputs]
    upstream = [torch.rand_like(y) for y in outputs]
    upstream_before = [dy.clone() for dy in upstream]
    torch.autograd.backward(outputs, upstream)
    for now, then in zip([*tensors, *outputs, *upstream], [*before, *kept, *upstream_before], strict=True):
        assert torch.equal(now, then)


@every_case
def test_a_second_backward_gives_the_same_gradients(case: Case):
    tensors = case.inputs()
    outputs = as_list(case.run(*tensors))
    wanted = [x for x in tensors if x.requires_grad]
    upstream = [torch.rand_like(y) for y in outputs]
    first = [g.clone() for g in torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)]
    # And one of other size between.
    torch.autograd.grad(outputs, wanted, [2 * dy for dy in upstream], retain_graph=True)
    again = torch.autograd.grad(outputs, wanted, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_case
def test_a_gradient_is_made_for_just_the_inputs_that_need_one(case: Case):
    full = outputs_and_gradients(case.run, case.inputs())[1]
    for i in range(len(full)):
        tensors = case.inputs()
        wanted = [x for x in tensors if x.requires_grad]
        for j, x in enumerate(wanted):
            x.requires_grad_(i == j)
        (alone,) = outputs_and_gradients(case.run, tensors)[1]
        assert torch.equal(alone, full[i]) or torch.allclose(alone, full[i], rtol=1e-5, atol=1e-6)


@every_case
def test_without_gradients_the_outputs_are_the_same(case: Case):
    tensors = case.inputs()
    expected, _ = outputs_and_gradients(case.run, tensors)
    with torch.no_grad():
        outputs = as_list(case.run(*tensors))
    for y, expected_y in zip(outputs, expected, strict=True):
        assert not y.requires_grad
        torch.testing.assert_close(y, expected_y.detach(), rtol=1e-6, atol=1e-6)


@every_case
def test_a_second_derivative_is_right_or_refused(case: Case):
    """Where the references run, torch differentiates twice; a kernel has no second derivative, and must say so."""

    def penalised(run) -> list[torch.Tensor]:
        tensors = case.inputs()
        wanted = [x for x in tensors if x.requires_grad]
        outputs = as_list(run(*tensors))
        total = sum(y.square().sum() for y in outputs)
        gradients = torch.autograd.grad(total, wanted, create_graph=True)
        return torch.autograd.grad(total + sum(g.square().sum() for g in gradients), wanted)

    expected = penalised(case.reference)
    try:
        got = penalised(case.run)
    except RuntimeError as error:
        if "no second derivative" not in str(error):
            raise
    else:
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _strided(x: torch.Tensor, step: int) -> torch.Tensor:
    """The same values, with gaps between rows (step 1) or between elements (step 2)."""
    if not x.is_floating_point() or x.dim() < 2:
        return x
    wide = x.detach().new_zeros(*x.shape[:-1], x.shape[-1] * 2 + 6)
    view = wide[..., : x.shape[-1] * step : step] if step == 2 else wide[..., 3 : 3 + x.shape[-1]]
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


@pytest.mark.parametrize("step", [1, 2], ids=["gaps between rows", "gaps between elements"])
@every_case
def test_strides_do_not_matter(case: Case, step: int):
    tensors = case.inputs()
    strided = [_strided(x, step) for x in tensors]
    expected, got = outputs_and_gradients(case.run, tensors), outputs_and_gradients(case.run, strided)
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_case
def test_upstream_gradients_may_be_expanded_or_transposed(case: Case):
    tensors = case.inputs()
    outputs = as_list(case.run(*tensors))
    wanted = [x for x in tensors if x.requires_grad]
    expanded = [y.new_tensor(0.5).expand(y.shape) for y in outputs]
    dense = [y.new_full(y.shape, 0.5) for y in outputs]
    turned = [dy.transpose(0, -1).contiguous().transpose(0, -1) if dy.dim() else dy for dy in dense]
    expected = torch.autograd.grad(outputs, wanted, dense, retain_graph=True)
    for upstream in (expanded, turned):
        got = torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@every_case
def test_zero_rows(case: Case):
    empty = case.without_rows()
    outputs, gradients = outputs_and_gradients(case.run, empty.inputs())
    expected = as_list(case.reference(*empty.inputs()))
    assert [y.shape for y in outputs] == [y.shape for y in expected]
    assert all((y == 0).all() for y in outputs)
    assert all((g == 0).all() for g in gradients)


@pytest.mark.thorough
@every_case
def test_compiles_without_a_graph_break(case: Case):
    torch._dynamo.reset()
    # On the CPU the point is the graph, not the code made of it; the interpreter needs eager kernels anyway.
    backend = "inductor" if torch.cuda.is_available() and not INTERPRETED else "aot_eager"
    compiled = torch.compile(case.run, fullgraph=True, backend=backend)
    for tensors in (case.inputs(), case.inputs(seed=3)):
        expected, got = outputs_and_gradients(case.run, tensors), outputs_and_gradients(compiled, tensors)
        for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_case
def test_is_the_same_from_run_to_run(case: Case):
    first, second = (outputs_and_gradients(case.run, case.inputs()) for _ in range(2))
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(a, b)
