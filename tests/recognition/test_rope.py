"""Functions that rotate queries and keys are recognised by what they compute, and replaced for one instance alone."""

import dataclasses

import pytest
import torch
from torch import nn

import tigon
from recognition.modules import define
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.parts.rope import FusedComplexRope, recognise_rope
from tigon.recognition.parts.rope_forms import FORMS, ComplexForm, Form, RopeCall, _find_form, recognise_function
from tigon.recognition.probing.standin import probing


def split_half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotate = lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotate = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def in_fp32(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.to(q.dtype) for x in split_half(q.float(), k.float(), cos, sin, unsqueeze_dim))


def with_doubled_cosine(q, k, cos, sin, unsqueeze_dim=1):
    return split_half(q, k, cos * 2, sin, unsqueeze_dim)


def frozen_keys(q, k, cos, sin, unsqueeze_dim=1):
    return split_half(q, k.detach(), cos, sin, unsqueeze_dim)


def calling(name: str) -> type[nn.Module]:
    """Return a class whose forward calls this function of this file."""
    forward = define(f"return {name}(q, k, cos, sin)", globals(), "self, q, k, cos, sin")
    return type("Attention", (nn.Module,), {"forward": forward, "__module__": __name__})


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return split_half(q, k, cos, sin)


class InterleavedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return interleaved(q, k, cos, sin)


class WideAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return in_fp32(q, k, cos, sin)


ATTENTIONS = {
    Attention: ("split_half", ("split_half", "halves", "promoted", False, False)),
    InterleavedAttention: ("interleaved", ("interleaved", "pairs", "promoted", False, False)),
    WideAttention: ("in_fp32", ("split_half", "halves", "fp32", False, False)),
}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_rope_is_recognised_by_what_it_computes(attention):
    ((name_in_file, form),) = recognise_rope(attention()).forms
    assert (name_in_file, dataclasses.astuple(form)) == ATTENTIONS[attention]


@pytest.mark.parametrize("name", ["with_doubled_cosine", "frozen_keys"])
def test_a_rope_with_other_angles_or_gradients_keeps_its_function(name):
    assert recognise_rope(calling(name)()) == f"{name}: computes another rotary embedding than the op"


@pytest.mark.parametrize(("partial", "tensors"), [(False, 2), (True, 1)], ids=["whole head", "a part of one tensor"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.sampled(4)
def test_every_form_is_recognised_as_itself(form, partial, tensors):
    """No form is recognised as another one, so no two forms compute the same bits."""

    def both(q, k, cos, sin, unsqueeze_dim=1):
        width = cos.shape[-1] * (2 if form.table == "once" else 1)
        assert partial or width == q.shape[-1]
        return form(q, k, cos, sin, unsqueeze_dim, reference=True)

    def one(x, cos, sin, unsqueeze_dim=1):
        return both(x, None, cos, sin, unsqueeze_dim)[0]

    function = both if tensors == 2 else one
    with probing():
        recognised_form = _find_form(function, RopeCall.of(function))
    assert recognised_form == dataclasses.replace(form, partial=partial)


def test_the_recipe_calls_a_function_of_its_own_and_the_file_keeps_its_function():
    recipe = recognise_rope(Attention())
    assert recipe.forward.__code__.co_freevars == ("_tigon_function_split_half_",)
    assert recipe.forward.__globals__ is Attention.forward.__globals__
    assert Attention.forward.__globals__["split_half"] is split_half


def assigns_in_a_loop(self, q, k, cos, sin):
    rotated = split_half(q, k, cos, sin)
    return [split_half for split_half in rotated]  # noqa: C416


def assigns_by_a_function(self, q, k, cos, sin):
    def inner():
        def split_half():
            return 2.0

        return split_half()

    return split_half(q, k, cos, sin)[0] * inner()


def assigns_by_an_import(self, q, k, cos, sin):
    def inner():
        import math as split_half

        return split_half.pi

    return split_half(q, k, cos, sin)[0] * inner()


def assigns_by_a_pattern(self, q, k, cos, sin):
    def inner(x):
        match x:
            case split_half:
                return split_half

    return inner(split_half(q, k, cos, sin))


ASSIGNMENTS = [assigns_in_a_loop, assigns_by_a_function, assigns_by_an_import, assigns_by_a_pattern]


@pytest.mark.parametrize("forward", ASSIGNMENTS)
def test_a_forward_that_assigns_the_name_of_the_function_keeps_its_function(forward):
    attention = type("Attention", (nn.Module,), {"forward": forward})()
    assert recognise_rope(attention) == "its forward assigns to split_half, which is also a global"


def test_arguments_that_the_op_does_not_take_go_to_the_stock_function():
    fused = recognise_rope(Attention()).functions["split_half"]
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(5, 8)
    for result, expected in zip(fused(q, k, angles, angles, 0), split_half(q, k, angles, angles, 0), strict=True):
        assert torch.equal(result, expected)
    # For tables of half the head, the stock function raises an error.
    with pytest.raises(RuntimeError):
        fused(q, k, torch.randn(2, 5, 4), torch.randn(2, 5, 4))


def test_a_forward_that_the_class_gets_after_the_patch_runs(monkeypatch):
    recipe = recognise_rope(Attention())
    monkeypatch.setattr(Attention, "forward", lambda self, q, k, cos, sin: q)
    q, k, cos, sin = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert recipe(Attention(), q, k, cos, sin) is q


BROADCAST = {
    "one angle": ((2, 4, 5, 8), (2, 2, 5, 8), (1, 1, 8), (1, 1, 8)),
    "more tables": ((1, 4, 5, 8), (1, 2, 5, 8), (2, 5, 8), (2, 5, 8)),
    "one batch of keys": ((2, 4, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)),
    "one key": ((2, 4, 5, 8), (2, 2, 1, 8), (1, 1, 8), (1, 1, 8)),
    "sin of another shape": ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 8), (1, 1, 8)),
    "sin of another dtype": ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 8), (1, 5, 8)),
}


@pytest.mark.parametrize("case", BROADCAST)
def test_arguments_that_broadcast_or_differ_in_dtype_go_to_the_stock_function(case):
    model, (*inputs, sin) = Attention(), (torch.randn(shape) for shape in BROADCAST[case])
    inputs.append(sin.double() if "dtype" in case else sin)
    expected = model(*inputs)
    with tigon.patched(model) as report:
        assert [entry.part for entry in report.replaced] == ["rope"]
        assert all(torch.equal(a, b) for a, b in zip(model(*inputs), expected, strict=True))


def multiply_shared(xq, xk, freqs_cis):
    """Heads in dimension 2, as in Llama 4."""
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    results = (torch.view_as_real(x * freqs_cis[:, :, None, :]).flatten(3) for x in (xq_, xk_))
    return tuple(y.type_as(x) for x, y in zip((xq, xk), results, strict=True))


def multiply_transposed(xq, xk, freqs_cis):
    """Heads in dimension 1, as in DeepSeek V2."""
    results = multiply_shared(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis)
    return tuple(x.transpose(1, 2) for x in results)


COMPLEX_FORMS = {
    multiply_shared: ComplexForm(heads=2, has_batch=True),
    multiply_transposed: ComplexForm(heads=1, has_batch=True),
}
DIFFERENT = "computes another rotary embedding than the op"
OTHER_PRODUCTS = {
    "conjugate": lambda xq, xk, freqs_cis: multiply_shared(xq, xk, freqs_cis.conj()),
    "queries only": lambda xq, xk, freqs_cis: (multiply_shared(xq, xk, freqs_cis)[0], xk),
    "bf16": lambda xq, xk, freqs_cis: tuple(x.bfloat16().type_as(x) for x in multiply_shared(xq, xk, freqs_cis)),
    "detached": lambda xq, xk, freqs_cis: multiply_shared(xq.detach() + 0 * xq, xk, freqs_cis),
}


def test_products_with_a_complex_table_are_recognised_and_other_functions_of_one_are_not():
    assert {function: recognise_function(function) for function in COMPLEX_FORMS} == COMPLEX_FORMS
    assert {recognise_function(function) for function in OTHER_PRODUCTS.values()} == {DIFFERENT}


@pytest.mark.parametrize("function", [multiply_shared, multiply_transposed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_op_gives_the_results_of_a_complex_product(function, batch, dtype):
    shape = (2, 5, 3, 8) if function is multiply_shared else (2, 3, 5, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    table = torch.polar(torch.ones(batch, 5, 4), torch.randn(batch, 5, 4, generator=generator))
    fused = FusedComplexRope({"f": function}, "f", recognise_function(function), FunctionGuard(function))
    assert fused.form.accepts(q, k, table)
    results = []
    for run in (function, fused):
        ys = run(q, k, freqs_cis=table)
        results.append([*ys, *torch.autograd.grad(sum(y.float().square().sum() for y in ys), (q, k))])
    for ours, expected in zip(results[1], results[0], strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, table: (q, k, table.conj()),
        lambda q, k, table: (q, k, table.to(torch.complex128)),
        lambda q, k, table: (q, k, table[:, :, :2]),
        lambda q, k, table: (q, k[:1], table),
        lambda q, k, table: (q, k, table.clone().requires_grad_()),
        lambda q, k, table: (q[0], k[0], table),
    ],
    ids=["conjugate", "double", "part of the head", "other batch", "table with gradient", "three dimensions"],
)
def test_other_arguments_run_the_stock_function(change):
    arguments = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8), torch.randn(1, 5, 4, dtype=torch.complex64)
    form = recognise_function(multiply_shared)
    assert form.accepts(*arguments)
    assert not form.accepts(*change(*arguments))


def turn_pairs(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3).type_as(x)


ROPE_DECISIONS = {
    "fp16": lambda q, cos: q.dtype == torch.float16,
    "a length": lambda q, cos: q.shape[2] > 4096,
    "a batch": lambda q, cos: q.shape[0] > 64,
    "a width": lambda q, cos: q.shape[-1] == 64,
    "a length in bf16": lambda q, cos: q.dtype == torch.bfloat16 and cos.shape[1] > 4096,
    "gradients": lambda q, cos: q.requires_grad and q.shape[2] > 4096,
    "an attribute of tensors": lambda q, cos: getattr(q, "temperature", None) is not None,
    "a maximum": lambda q, cos: max(0, q.shape[2] - 4096),
    "a quotient": lambda q, cos: q.shape[2] // 4096,
}


@pytest.mark.parametrize("decision", ROPE_DECISIONS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_a_rope_that_decides_by_its_input_keeps_its_function(decision, is_complex):
    decide = ROPE_DECISIONS[decision]

    def turn(q, k, cos, sin, unsqueeze_dim=1):
        return split_half(q * (1 + decide(q, cos)), k, cos, sin, unsqueeze_dim)

    def turn_complex(q, k, freqs_cis):
        return turn_pairs(q * (1 + decide(q, freqs_cis)), freqs_cis), turn_pairs(k, freqs_cis)

    assert isinstance(recognise_function(turn_complex if is_complex else turn), str)


def test_a_rope_without_decisions_is_recognised():
    def turn_complex(q, k, freqs_cis):
        return turn_pairs(q, freqs_cis), turn_pairs(k, freqs_cis)

    assert all(isinstance(recognise_function(f), Form | ComplexForm) for f in (split_half, turn_complex))
