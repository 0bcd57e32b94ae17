"""Functions that rotate queries and keys are recognised by what they compute, and replaced for one instance alone."""

import dataclasses

import pytest
import torch
from torch import nn

from tigon.recognition.rope import recognise_rope
from tigon.recognition.rope_forms import FORMS
from tigon.recognition.rope_function import recognise_function


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


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return split_half(q, k, cos, sin)


class InterleavedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return interleaved(q, k, cos, sin)


class WideAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return in_fp32(q, k, cos, sin)


def with_doubled_cosine(q, k, cos, sin, unsqueeze_dim=1):
    return split_half(q, k, cos * 2, sin, unsqueeze_dim)


class OtherAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return with_doubled_cosine(q, k, cos, sin)


@pytest.mark.parametrize(
    ("attention", "name", "form"),
    [
        (Attention, "split_half", ("split_half", "halves", "promoted", False, False)),
        (InterleavedAttention, "interleaved", ("interleaved", "pairs", "promoted", False, False)),
        (WideAttention, "in_fp32", ("split_half", "halves", "fp32", False, False)),
    ],
    ids=["split half", "interleaved", "rounded once"],
)
def test_a_rope_is_recognised_by_what_it_computes(attention, name, form):
    ((name_in_file, recognised_form),) = recognise_rope(attention()).forms
    assert (name_in_file, dataclasses.astuple(recognised_form)) == (name, form)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("partial", [False, True], ids=["whole head", "a part"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_recognised_as_itself(form, partial, tensors):
    """No form is recognised as another one, so no two forms compute the same bits."""

    def both(q, k, cos, sin, unsqueeze_dim=1):
        width = cos.shape[-1] * (2 if form.table == "once" else 1)
        assert partial or width == q.shape[-1]
        return form(q, k, cos, sin, unsqueeze_dim, reference=True)

    def one(x, cos, sin, unsqueeze_dim=1):
        return both(x, None, cos, sin, unsqueeze_dim)[0]

    assert recognise_function(both if tensors == 2 else one) == dataclasses.replace(form, partial=partial)


def test_a_rope_with_other_angles_keeps_its_function():
    assert recognise_rope(OtherAttention()) == "with_doubled_cosine: computes another rotary embedding than the op"


def test_the_recipe_has_globals_of_its_own_and_the_file_keeps_its_function():
    recipe = recognise_rope(Attention())
    assert recipe.forward.__code__ is Attention.forward.__code__
    assert recipe.forward.__globals__["split_half"] is not split_half
    assert Attention.forward.__globals__["split_half"] is split_half


def test_arguments_that_the_op_does_not_take_go_to_the_stock_function():
    fused = recognise_rope(Attention()).forward.__globals__["split_half"]
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
