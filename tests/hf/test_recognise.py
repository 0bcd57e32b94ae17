"""Recognition by behaviour: what computes what an op computes is found whatever it is called, what differs is not."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.hf.recognise import (
    GLU,
    LayerNorm,
    ReLU2,
    RMSNorm,
    recognise_glu,
    recognise_norm,
    recognise_relu2,
)
from tigon.hf.rope import FORMS, recognise_function, recognise_rope


class AnyNorm(nn.Module):
    """A norm written as nobody names it; `compute(x, weight, tiny)` is its forward."""

    def __init__(self, compute, weight: bool = True, tiny: float = 1e-5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48)) if weight else None
        self.tiny, self.unrelated, self.compute = tiny, 0.02, compute

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.compute(signal, self.scale, self.tiny)


def x_hat(x, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("compute", "offset", "rounding"),
    [
        (lambda x, w, eps: w * x_hat(x, eps).to(x.dtype), 0.0, "before_weight"),
        (lambda x, w, eps: (w.float() * x_hat(x, eps)).to(x.dtype), 0.0, "after_weight"),
        (lambda x, w, eps: (x_hat(x, eps) * (1.0 + w.float())).type_as(x), 1.0, "after_weight"),
    ],
    ids=["Llama", "OLMo 2", "Gemma"],
)
def test_norms_are_told_apart_by_their_bits(compute, offset, rounding):
    assert recognise_norm(AnyNorm(compute)) == RMSNorm("tiny", "scale", offset, rounding, gated=False)


def test_a_norm_without_weight():
    norm = AnyNorm(lambda x, w, eps: x_hat(x, eps).to(x.dtype), weight=False)
    assert recognise_norm(norm) == RMSNorm("tiny", None, 0.0, "before_weight", gated=False)


def test_torch_rms_norm_is_one():
    found = recognise_norm(nn.RMSNorm(48, eps=1e-5))
    assert isinstance(found, RMSNorm)
    assert found.eps == "eps"


def test_what_a_module_warns_of_when_probed_is_no_news_to_the_user():
    def compute(x, w, eps):
        warnings.warn("slow path", stacklevel=1)
        return w * x_hat(x, eps).to(x.dtype)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert isinstance(recognise_norm(AnyNorm(compute)), RMSNorm)
    assert not said


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w, eps: w * (x_hat(x, 0.0)).to(x.dtype),
        lambda x, w, eps: w * (1.001 * x_hat(x, eps)).to(x.dtype),
        lambda x, w, eps: w * F.dropout(x_hat(x, eps), 0.1).to(x.dtype),
        lambda x, w, eps: w * x_hat(x - x.mean(-1, keepdim=True), eps).to(x.dtype),
        lambda x, w, eps: w * x_hat(x.clamp(-50, 50), eps).to(x.dtype),
        lambda x, w, eps: w * x_hat(x[..., :24].repeat(1, 2), eps).to(x.dtype),
        lambda x, w, eps: w * x_hat(x, eps),
        lambda x, w, eps: (w * x_hat(x, eps).to(x.dtype)).float(),
        lambda x, w, eps: (2.0 + w) * x_hat(x, eps).to(x.dtype),
    ],
    ids=[
        "no epsilon",
        "multiplier",
        "dropout",
        "centred",
        "clamped",
        "part",
        "wider product",
        "wider result",
        "offset 2",
    ],
)
def test_what_differs_from_an_rms_norm_is_refused_with_a_reason(compute):
    assert recognise_norm(AnyNorm(compute)) == "computes something else than a norm"


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluating"])
def test_a_norm_that_acts_otherwise_in_one_mode_is_refused_in_both(mode):
    class Moody(AnyNorm):
        def forward(self, x):
            return super().forward(x) * (0.5 if self.training is mode else 1.0)

    norm = Moody(lambda x, w, eps: w * x_hat(x, eps).to(x.dtype))
    assert recognise_norm(norm) == recognise_norm(norm.eval()) == "computes something else than a norm"


def test_a_norm_that_cannot_run_alone_says_why():
    def compute(x, w, eps):
        raise OSError("no such kernel")

    assert recognise_norm(AnyNorm(compute)) == "cannot be run by itself (OSError: no such kernel)"


class GatedNorm(AnyNorm):
    def forward(self, signal, gate=None):
        return self.compute(signal, self.scale, self.tiny, gate)


def norm_then_gate(x, w, eps, gate):
    return (w * x_hat(x, eps).to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def gate_then_norm(x, w, eps, gate=None):
    x = x if gate is None else x * F.silu(gate.float())
    return w * x_hat(x, eps).to(w.dtype)


def test_a_gate_after_the_norm_is_found():
    norm = GatedNorm(norm_then_gate)
    x, gate = torch.randn(3, 48, requires_grad=True), torch.randn(3, 48, requires_grad=True)
    expected = torch.autograd.grad(norm(x, gate).square().sum(), (x, gate, norm.scale))
    assert recognise_norm(norm) == RMSNorm("tiny", "scale", 0.0, "before_weight", gated=True)
    with tigon.patched(norm):
        given = torch.autograd.grad(norm(x, gate).square().sum(), (x, gate, norm.scale))
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gate_before_the_norm_is_not_taken_for_a_norm_without_gate():
    assert recognise_norm(GatedNorm(gate_then_norm)) == "computes something else than a norm"


# --- layer norms ---------------------------------------------------------------------------------


class Centred(AnyNorm):
    """Written out in steps."""

    def __init__(self) -> None:
        super().__init__(lambda x, w, eps: (w.float() * x_hat(x.float() - x.float().mean(-1, True), eps)).to(x.dtype))


class Constant(nn.Module):
    """A norm without weights whose epsilon stands in its code."""

    def forward(self, x):
        return F.layer_norm(x.float(), (48,), eps=1e-5).to(x.dtype)


class ConstantNorm(Constant):
    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (48,)


@pytest.mark.parametrize(
    ("norm", "weight", "bias", "eps"),
    [
        (nn.LayerNorm(48, eps=1e-3), "weight", "bias", "eps"),
        (nn.LayerNorm(48, bias=False), "weight", None, "eps"),
        (nn.LayerNorm(48, elementwise_affine=False), None, None, "eps"),
        (Centred(), "scale", None, "tiny"),
        (ConstantNorm(), None, None, 1e-5),
    ],
    ids=["torch", "without bias", "without weight", "in steps", "epsilon in the code"],
)
def test_layer_norms_are_found(norm, weight, bias, eps):
    found = recognise_norm(norm)
    assert isinstance(found, LayerNorm)
    assert (found.weight, found.bias, found.eps) == (weight, bias, eps)


def test_a_layer_norm_over_two_dimensions_is_left_alone():
    assert recognise_norm(nn.LayerNorm((4, 12))) is None


# --- other modules -------------------------------------------------------------------------------


class Squared(nn.Module):
    def forward(self, x):
        return torch.square(F.relu(x))


def test_a_squared_relu_is_found():
    assert recognise_relu2(Squared()) == ReLU2()


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), nn.Embedding(4, 4), nn.Dropout(0.1), nn.SiLU(), nn.LeakyReLU(0.01), nn.ModuleList()],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_are_neither_norms_nor_mlps_nor_ropes(module):
    for recognise in (recognise_norm, recognise_glu, recognise_relu2, recognise_rope):
        assert recognise(module) is None


# --- gated MLPs ----------------------------------------------------------------------------------


class Split(nn.Module):
    """w1, w3 and w2 as some models have them; declared in another order than they are used."""

    def __init__(self, act=F.silu, bias: bool = False, hidden: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.w2 = nn.Linear(inner, hidden, bias=bias)
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w3 = nn.Linear(hidden, inner, bias=bias)
        self.act, self.multiplier = act, 1.0

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x) * self.multiplier)


class Packed(nn.Module):
    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.both, self.out, self.inner = nn.Linear(16, 64), nn.Linear(32, 16), 32
        self.gate_first = gate_first

    def forward(self, x):
        first, second = self.both(x).split(self.inner, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.out(F.silu(gate) * up)


@pytest.mark.parametrize(
    ("act", "kind"),
    [(F.silu, "swiglu"), (F.gelu, "geglu"), (lambda x: F.gelu(x, approximate="tanh"), "geglu (tanh)")],
    ids=["silu", "gelu", "gelu tanh"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("inner", [32, 16], ids=["wide", "square"])
def test_a_gated_mlp_is_found_under_any_names(act, kind, bias, inner):
    assert recognise_glu(Split(act, bias, inner=inner)) == GLU(kind, "w1", "w3", "w2")


def test_a_packed_mlp_whose_code_names_its_size():
    assert recognise_glu(Packed()) == GLU("swiglu", "both", None, "out")


def test_children_of_other_classes_need_only_say_their_sizes():
    class Quantised(nn.Module):
        def __init__(self, features_in, features_out):
            super().__init__()
            self.in_features, self.out_features = features_in, features_out

        def forward(self, x):
            raise AssertionError("recognition must not run the big children")

    mlp = Split()
    mlp.w1, mlp.w3, mlp.w2 = Quantised(16, 32), Quantised(16, 32), Quantised(32, 16)
    assert recognise_glu(mlp) == GLU("swiglu", "w1", "w3", "w2")


@pytest.mark.parametrize(
    "act", [F.relu, torch.sigmoid, F.gelu, lambda x: F.silu(x) * 1.0001], ids=["relu", "sigmoid", "gelu", "near"]
)
def test_gates_are_compared_bit_for_bit(act):
    class Doubled(Split):
        def forward(self, x):
            return super().forward(x) * 2

    assert recognise_glu(Doubled(act)) == "computes something else than silu, gelu or gelu-tanh gates"


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: setattr(mlp, "multiplier", 0.7),
        lambda mlp: setattr(mlp, "act", nn.Sequential(nn.SiLU(), nn.Dropout(0.1))),
        lambda mlp: setattr(mlp, "act", lambda x: F.silu(x.masked_fill(x < x.mean(), 0))),
    ],
    ids=["multiplier", "dropout", "sparsity"],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_what_a_gated_mlp_does_beside_is_not_lost(change, training):
    mlp = Split()
    change(mlp)
    mlp.train(training)
    assert recognise_glu(mlp) == "computes something else than silu, gelu or gelu-tanh gates"


def test_a_norm_inside_is_named():
    mlp = Split()
    mlp.inner_norm = nn.RMSNorm(32)
    assert recognise_glu(mlp) == "has more state than a gated MLP (inner_norm)"


def test_a_packed_mlp_with_up_before_gate_is_left_alone():
    assert recognise_glu(Packed(gate_first=False)) == "computes something else than silu, gelu or gelu-tanh gates"


# --- rope ----------------------------------------------------------------------------------------


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


# --- forwards that are not the author's ----------------------------------------------------------


def replaced_on_the_instance(norm):
    norm.forward = lambda x: x


def replaced_on_the_class(norm):
    type(norm).forward = F.silu


@pytest.mark.parametrize("replace", [replaced_on_the_instance, replaced_on_the_class], ids=["instance", "class"])
def test_what_another_library_replaced_is_left_alone_and_named(replace):
    class Norm(AnyNorm):
        def forward(self, x):
            return super().forward(x)

    norm = Norm(lambda x, w, eps: w * x_hat(x, eps).to(x.dtype))
    with tigon.patched(norm) as report:
        assert not report.left_alone
    replace(norm)
    with pytest.warns(UserWarning, match="nothing was recognised"):
        (entry,) = tigon.patch(norm).left_alone
    assert "already replaced (by" in entry.detail
