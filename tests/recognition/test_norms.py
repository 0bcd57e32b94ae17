"""Norms are recognised by what they compute, whatever they are called; what differs is left alone, with a reason."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.recognition.glu import recognise_glu
from tigon.recognition.norm_recipes import LayerNormRecipe, RMSNormRecipe
from tigon.recognition.norms import recognise_norm
from tigon.recognition.relu2 import recognise_relu2
from tigon.recognition.rope import recognise_rope


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
    assert recognise_norm(AnyNorm(compute)) == RMSNormRecipe("tiny", "scale", offset, rounding, gated=False)


def test_a_norm_without_weight():
    norm = AnyNorm(lambda x, w, eps: x_hat(x, eps).to(x.dtype), weight=False)
    assert recognise_norm(norm) == RMSNormRecipe("tiny", None, 0.0, "before_weight", gated=False)


def test_torch_rms_norm_is_one():
    found = recognise_norm(nn.RMSNorm(48, eps=1e-5))
    assert isinstance(found, RMSNormRecipe)
    assert found.eps == "eps"


def test_a_warning_of_torch_during_a_probe_is_not_shown():
    def compute(x, w, eps):
        F.softmax(x.detach())  # warns that it has to choose a dimension
        return w * x_hat(x, eps).to(x.dtype)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert isinstance(recognise_norm(AnyNorm(compute)), RMSNormRecipe)
    assert not said


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w, eps: w * (x_hat(x, 0.0)).to(x.dtype),
        lambda x, w, eps: w * (1.001 * x_hat(x, eps)).to(x.dtype),
        lambda x, w, eps: w * F.dropout(x_hat(x, eps), 0.1).to(x.dtype),
        lambda x, w, eps: w * x_hat(x - x.mean(-1, keepdim=True), eps).to(x.dtype),
        lambda x, w, eps: w * x_hat(x.clamp(-50, 50), eps).to(x.dtype),
        lambda x, w, eps: w * x_hat(torch.cat((x[..., :24], x[..., :24]), -1), eps).to(x.dtype),
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
    assert recognise_norm(AnyNorm(compute)) in (
        "computes something else than rms_norm or layer_norm",
        "its forward draws random numbers",
    )


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluating"])
def test_a_norm_that_acts_otherwise_in_one_mode_is_refused_in_both(mode):
    class Moody(AnyNorm):
        def forward(self, x):
            return super().forward(x) * (0.5 if self.training is mode else 1.0)

    norm = Moody(lambda x, w, eps: w * x_hat(x, eps).to(x.dtype))
    assert recognise_norm(norm) == recognise_norm(norm.eval()) == "computes something else than rms_norm or layer_norm"


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
    assert recognise_norm(norm) == RMSNormRecipe("tiny", "scale", 0.0, "before_weight", gated=True)
    with tigon.patched(norm):
        given = torch.autograd.grad(norm(x, gate).square().sum(), (x, gate, norm.scale))
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gate_before_the_norm_is_not_taken_for_a_norm_without_gate():
    assert recognise_norm(GatedNorm(gate_then_norm)) == "computes something else than rms_norm or layer_norm"


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
    assert isinstance(found, LayerNormRecipe)
    assert (found.weight, found.bias, found.eps) == (weight, bias, eps)


def test_a_layer_norm_over_two_dimensions_is_left_alone():
    assert recognise_norm(nn.LayerNorm((4, 12))) is None


# --- other modules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), nn.Embedding(4, 4), nn.Dropout(0.1), nn.SiLU(), nn.LeakyReLU(0.01), nn.ModuleList()],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_are_neither_norms_nor_mlps_nor_ropes(module):
    for recognise in (recognise_norm, recognise_glu, recognise_relu2, recognise_rope):
        assert recognise(module) is None


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
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(norm).left_alone
    assert "already replaced (by" in entry.detail
