"""Functions that turn queries and keys are recognised by what they compute, and replaced for one instance alone."""

import dataclasses

import pytest
import torch
from torch import nn

from tigon.recognition.rope import recognise_rope
from tigon.recognition.rope_forms import FORMS
from tigon.recognition.rope_function import recognise_function


def split_half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turn = lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turn = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


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


def with_more_angles(q, k, cos, sin, unsqueeze_dim=1):
    return split_half(q, k, cos * 2, sin, unsqueeze_dim)


class OtherAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return with_more_angles(q, k, cos, sin)


@pytest.mark.parametrize(
    ("attention", "name", "form"),
    [
        (Attention, "split_half", ("split_half", "halves", "promoted", False, False)),
        (InterleavedAttention, "interleaved", ("interleaved", "pairs", "promoted", False, False)),
        (WideAttention, "in_fp32", ("split_half", "halves", "fp32", False, False)),
    ],
    ids=["split half", "interleaved", "rounded once"],
)
def test_a_rope_is_found_by_what_it_computes(attention, name, form):
    ((found, has),) = recognise_rope(attention()).forms
    assert (found, dataclasses.astuple(has)) == (name, form)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("partial", [False, True], ids=["whole head", "a part"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_recognised_as_itself(form, partial, tensors):
    """And as no other: two forms with the same bits would be one too many."""

    def both(q, k, cos, sin, unsqueeze_dim=1):
        width = cos.shape[-1] * (2 if form.table == "once" else 1)
        assert partial or width == q.shape[-1]
        return form(q, k, cos, sin, unsqueeze_dim, reference=True)

    def one(x, cos, sin, unsqueeze_dim=1):
        return both(x, None, cos, sin, unsqueeze_dim)[0]

    assert recognise_function(both if tensors == 2 else one) == dataclasses.replace(form, partial=partial)


def test_another_rope_is_left_alone():
    assert recognise_rope(OtherAttention()) == "with_more_angles: computes another rotary embedding than the op"


def test_the_replaced_attention_reads_its_own_scope_and_no_other():
    found = recognise_rope(Attention())
    assert found.forward.__code__ is Attention.forward.__code__
    assert found.forward.__globals__["split_half"] is not split_half
    assert Attention.forward.__globals__["split_half"] is split_half


def test_arguments_that_the_op_does_not_take_go_to_the_stock_function():
    turn = recognise_rope(Attention()).forward.__globals__["split_half"]
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(5, 8)
    for given, wanted in zip(turn(q, k, angles, angles, 0), split_half(q, k, angles, angles, 0), strict=True):
        assert torch.equal(given, wanted)
    with pytest.raises(RuntimeError):  # tables of half the head: an error of the stock function, not a guess
        turn(q, k, torch.randn(2, 5, 4), torch.randn(2, 5, 4))


def test_another_forward_of_the_class(monkeypatch):
    """Given after the patch, it is the one that runs."""
    found = recognise_rope(Attention())
    monkeypatch.setattr(Attention, "forward", lambda self, q, k, cos, sin: q)
    q, k, cos, sin = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert found(Attention(), q, k, cos, sin) is q
