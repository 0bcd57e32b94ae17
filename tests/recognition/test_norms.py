"""Norms are recognised by what they compute, whatever their names. Other modules keep their forward, with a reason."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.recognition.parts.activations import recognise_relu2
from tigon.recognition.parts.mlps import recognise_glu
from tigon.recognition.parts.norm_recipes import Gate, LayerNormRecipe, RMSNormRecipe
from tigon.recognition.parts.norms import recognise_norm
from tigon.recognition.parts.rope import recognise_rope
from tigon.recognition.replacement import installed_recipe

DIFFERENT = "computes something else than rms_norm or layer_norm"


class AnyNorm(nn.Module):
    """A norm with unusual names. `compute(x, weight, tiny)` is its forward."""

    def __init__(self, compute, weight: bool = True, tiny: float = 1e-5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48)) if weight else None
        self.tiny, self.unrelated, self.compute = tiny, 0.02, compute

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.compute(signal, self.scale, self.tiny)


def x_hat(x, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


FORMS = {
    "Llama": (lambda x, w, eps: w * x_hat(x, eps).to(x.dtype), 0.0, "before_weight"),
    "OLMo 2": (lambda x, w, eps: (w.float() * x_hat(x, eps)).to(x.dtype), 0.0, "after_weight"),
    "Gemma": (lambda x, w, eps: (x_hat(x, eps) * (1.0 + w.float())).type_as(x), 1.0, "after_weight"),
    "no weight": (lambda x, w, eps: x_hat(x, eps).to(x.dtype), 0.0, "before_weight"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_bits_show_offset_and_rounding_of_a_norm(name):
    compute, offset, rounding = FORMS[name]
    weight = None if name == "no weight" else "scale"
    recipe = RMSNormRecipe(1e-5, weight, offset, rounding)
    assert recognise_norm(AnyNorm(compute, weight=weight is not None)) == recipe
    of_torch = recognise_norm(nn.RMSNorm(48, eps=1e-5))
    assert isinstance(of_torch, RMSNormRecipe)
    assert of_torch.eps == 1e-5


def test_a_warning_of_torch_during_a_probe_is_not_shown():
    def compute(x, w, eps):
        # This call warns that it has to choose a dimension.
        F.softmax(x.detach())
        return w * x_hat(x, eps).to(x.dtype)

    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        assert isinstance(recognise_norm(AnyNorm(compute)), RMSNormRecipe)
    assert not messages


def rms(x, w, eps):
    return w * x_hat(x, eps).to(x.dtype)


def rstd(x, eps):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def fails(x, w, eps):
    raise OSError("no such kernel")


RANDOM = "its forward draws random numbers"
IMPOSTORS = {
    "no epsilon": (lambda x, w, eps: rms(x, w, 0.0), DIFFERENT),
    "multiplier": (lambda x, w, eps: w * (1.001 * x_hat(x, eps)).to(x.dtype), DIFFERENT),
    "dropout": (lambda x, w, eps: w * F.dropout(x_hat(x, eps), 0.1).to(x.dtype), RANDOM),
    "centred": (lambda x, w, eps: rms(x - x.mean(-1, keepdim=True), w, eps), DIFFERENT),
    "clamped": (lambda x, w, eps: rms(x.clamp(-50, 50), w, eps), DIFFERENT),
    "clamped late": (lambda x, w, eps: rms(x.clamp(-5e4, 5e4), w, eps), DIFFERENT),
    "part": (lambda x, w, eps: rms(torch.cat((x[..., :24], x[..., :24]), -1), w, eps), DIFFERENT),
    "wider product": (lambda x, w, eps: w * x_hat(x, eps), DIFFERENT),
    "wider result": (lambda x, w, eps: rms(x, w, eps).float(), DIFFERENT),
    "offset 2": (lambda x, w, eps: rms(x, 2.0 + w, eps), DIFFERENT),
    "rstd detached": (lambda x, w, eps: w * (x.float() * rstd(x, eps).detach()).to(x.dtype), DIFFERENT),
    "weight detached": (lambda x, w, eps: rms(x, w.detach(), eps), DIFFERENT),
    "rows swapped": (
        lambda x, w, eps: rms(x.flip(-2), w, eps) if x.dim() != 3 else rms(x.transpose(-2, -3), w, eps).transpose(
            -2, -3), DIFFERENT,
    ),
    "four dimensions": (lambda x, w, eps: rms(x, w, eps) if x.dim() < 4 else rms(x, w, eps).flip(1), DIFFERENT),
    "fp16": (lambda x, w, eps: rms(x, w, eps) * (2.0 if x.dtype == torch.float16 else 1.0), DIFFERENT),
    "an error": (fails, "cannot be run by itself (OSError: no such kernel)"),
}  # fmt: skip


@pytest.mark.parametrize(("compute", "detail"), IMPOSTORS.values(), ids=IMPOSTORS)
def test_a_norm_that_differs_from_an_rms_norm_is_refused_with_a_reason(compute, detail):
    assert recognise_norm(AnyNorm(compute)) == detail


def each_head(x, w, eps):
    y = x_hat(x.unflatten(-1, (-1, 48)), eps).to(x.dtype)
    return (y if w is None else w * y).flatten(-2)


def test_a_norm_of_each_head_is_no_norm_of_the_whole_width():
    """With a weight and an input as wide as the weight, such a module computes a plain norm."""
    norm = AnyNorm(each_head, weight=False)
    norm.head_dim = 48
    assert recognise_norm(norm) == DIFFERENT
    norm, x = AnyNorm(each_head), torch.randn(3, 4 * 48)
    expected = norm(x)
    with tigon.patched(norm):
        assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluating"])
def test_a_norm_that_computes_something_else_in_one_mode_is_refused_in_both(mode):
    class DependsOnMode(AnyNorm):
        def forward(self, x):
            return super().forward(x) * (0.5 if self.training is mode else 1.0)

    norm = DependsOnMode(lambda x, w, eps: w * x_hat(x, eps).to(x.dtype))
    assert recognise_norm(norm) == recognise_norm(norm.eval()) == DIFFERENT


class GatedNorm(AnyNorm):
    def forward(self, signal, gate=None):
        return self.compute(signal, self.scale, self.tiny, gate)


GATED = {
    "norm, then silu": (
        lambda x, w, eps, g: (rms(x, w, eps) * F.silu(g.float())).to(x.dtype), "before_weight", Gate(),
    ),
    "norm, then sigmoid": (
        lambda x, w, eps, g: (w.float() * x_hat(x, eps) * torch.sigmoid(g.float())).to(x.dtype), "after_weight",
        Gate("sigmoid"),
    ),
    "silu, then norm": (
        lambda x, w, eps, g=None: w * x_hat(x.float() if g is None else x.float() * F.silu(g.float()), eps).to(x.dtype),
        "before_weight", Gate(gate_first=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("compute", "rounding", "gate"), GATED.values(), ids=GATED)
def test_gated_norms_are_recognised(compute, rounding, gate):
    norm = GatedNorm(compute)
    inputs = torch.randn(3, 48, requires_grad=True), torch.randn(3, 48, requires_grad=True), norm.scale
    expected = torch.autograd.grad(norm(*inputs[:2]).square().sum(), inputs)
    assert recognise_norm(norm) == RMSNormRecipe(1e-5, "scale", 0.0, rounding, gate)
    with tigon.patched(norm):
        results = torch.autograd.grad(norm(*inputs[:2]).square().sum(), inputs)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)


class GroupedNorm(GatedNorm):
    def __init__(self, size):
        super().__init__(None)
        self.size = size

    def forward(self, signal, gate):
        z = signal.float() * F.silu(gate.float())
        z = x_hat(z.unflatten(-1, (-1, self.size)), self.tiny).flatten(-2)
        return self.scale * z.to(signal.dtype)


def test_a_gated_norm_of_groups_is_recognised_and_the_size_of_a_group_is_watched():
    norm = GroupedNorm(12)
    assert recognise_norm(norm) == RMSNormRecipe(1e-5, "scale", 0.0, "before_weight", Gate("silu", True, 12))
    x, gate = torch.randn(3, 48), torch.randn(3, 48)
    with tigon.patched(norm):
        assert torch.equal(norm(x, gate), GroupedNorm.forward(norm, x, gate))
        norm.size = 16
        assert torch.equal(norm(x, gate), GroupedNorm.forward(norm, x, gate))


def test_a_norm_with_another_gate_or_a_weight_of_one_element_is_refused():
    norm = AnyNorm(rms)
    norm.scale = nn.Parameter(torch.ones(1))
    assert recognise_norm(norm) == "has a weight of one element"
    norm_then_tanh = lambda x, w, eps, gate: (rms(x, w, eps) * torch.tanh(gate.float())).to(x.dtype)
    assert recognise_norm(GatedNorm(norm_then_tanh)) == DIFFERENT


def in_steps(x, w, eps):
    return (w.float() * x_hat(x.float() - x.float().mean(-1, True), eps)).to(x.dtype)


class ConstantNorm(nn.Module):
    """A norm without weights, whose epsilon is a constant of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (48,)

    def forward(self, x):
        return F.layer_norm(x.float(), (48,), eps=1e-5).to(x.dtype)


# For an input of another dtype, torch's kernel rounds a few values of a wide norm in thousands differently.
LAYER_NORMS = {
    "torch": (nn.LayerNorm(48, eps=1e-3), "weight", "bias", 1e-3),
    "wide": (nn.LayerNorm(4096), "weight", "bias", 1e-5),
    "without bias": (nn.LayerNorm(48, bias=False), "weight", None, 1e-5),
    "without weight": (nn.LayerNorm(48, elementwise_affine=False), None, None, 1e-5),
    "in steps": (AnyNorm(in_steps), "scale", None, 1e-5),
    "epsilon in the code": (ConstantNorm(), None, None, 1e-5),
}


@pytest.mark.parametrize(("norm", "weight", "bias", "eps"), LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_layer_norms_are_recognised(norm, weight, bias, eps):
    recipe = recognise_norm(norm)
    assert isinstance(recipe, LayerNormRecipe)
    assert (recipe.weight, recipe.bias, recipe.eps) == (weight, bias, eps)


OTHERS = nn.LayerNorm((4, 12)), nn.Linear(4, 4), nn.Dropout(0.1), nn.SiLU(), nn.LeakyReLU(0.01), nn.ModuleList()


@pytest.mark.parametrize("module", OTHERS, ids=lambda m: type(m).__name__)
def test_other_modules_are_neither_norms_nor_mlps_nor_ropes(module):
    for recognise in (recognise_norm, recognise_glu, recognise_relu2, recognise_rope):
        assert recognise(module) is None


REPLACEMENTS = {
    "instance": lambda norm: setattr(norm, "forward", lambda x: x),
    "class": lambda norm: setattr(type(norm), "forward", F.silu),
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_the_reason_names_the_library_that_replaced_a_forward(replace):
    class Norm(AnyNorm):
        def forward(self, x):
            return super().forward(x)

    norm = Norm(rms)
    with tigon.patched(norm) as report:
        assert not report.left_alone
    replace(norm)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(norm).left_alone
    assert "already replaced (by" in entry.detail


def with_epsilon(expression: str, **attributes: Any) -> nn.Module:
    """Return an RMS norm whose forward computes epsilon by this expression, and which has these attributes."""
    source = f"""
class Norm(nn.Module):
    def forward(self, x):
        dtype, epsilon = x.dtype, {expression}
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype)
"""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": __name__}
    exec(source, scope)
    norm = scope["Norm"]()
    norm.weight = nn.Parameter(torch.rand(48) + 0.5)
    vars(norm).update(attributes)
    return norm


TWO = {"other": 1e-6, "eps": 1e-6}
# The expression for epsilon, and the attributes.
EPSILONS: dict[str, tuple[str, dict[str, Any]]] = {
    "not read": ("self.eps", TWO),
    "in a branch": ("self.other if self.flag else self.eps", {**TWO, "flag": False}),
    "without effect": ("self.eps + 0 * self.other", TWO),
    "by its name": ("getattr(self, 'eps')", TWO),
    "constant": ("1e-6", TWO),
    "in a list": ("self.numbers[0]", {"numbers": [1e-6], "other": 1e-6}),
    "constant in one mode": ("self.eps if self.training else 1e-6", {"eps": 1e-6}),
    "constant in half precision": ("self.eps if x.dtype == torch.float32 else 1e-6", {"eps": 1e-6}),
    "constant for gradients": ("1e-6 if x.requires_grad else self.eps", {"eps": 1e-6}),
    "larger": ("max(self.eps, self.other)", TWO),
    "smaller": ("min(self.eps, self.other)", TWO),
    "mean": ("(self.eps + self.other) / 2", TWO),
    "mode": ("self.other if self.training else self.eps", TWO),
    "dtype": ("self.eps if x.dtype == torch.float32 else self.other", TWO),
    "dimensions": ("self.eps if x.dim() == 3 else self.other", TWO),
    "gradients": ("self.eps if x.requires_grad else self.other", TWO),
}


def assert_changes_have_their_stock_effect(norm: nn.Module, attributes: dict[str, Any]) -> None:
    """Change each attribute, and compare the patched norm with its class for every kind of input."""
    dtypes, shapes = (torch.float32, torch.bfloat16), ((3, 48), (2, 3, 48))
    for name, old in attributes.items():
        for value in (0.5, 1e-9):
            setattr(norm, name, [value] if isinstance(old, list) else value)
            for training, dtype, shape, needs_grad in itertools.product((True, False), dtypes, shapes, (True, False)):
                x = (1e-3 * torch.randn(shape)).to(dtype).requires_grad_(needs_grad)
                norm.train(training)
                assert torch.equal(norm(x), type(norm).forward(norm, x)), (name, value, training, dtype, needs_grad)
        setattr(norm, name, old)


@pytest.mark.parametrize(("expression", "attributes"), EPSILONS.values(), ids=EPSILONS)
@pytest.mark.sampled(9)
def test_a_changed_epsilon_has_its_stock_effect(expression, attributes):
    norm = with_epsilon(expression, **attributes)
    assert tigon.patch(norm)
    recipe = installed_recipe(norm)
    assert isinstance(recipe, RMSNormRecipe), recipe
    assert recipe.eps == 1e-6
    assert_changes_have_their_stock_effect(norm, attributes)


class CallsTorch(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)


class CallsTorchInTraining(nn.LayerNorm):
    def forward(self, x):
        if self.training:
            return super().forward(x)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-5)


class CallsFunction(nn.LayerNorm):
    """A layer norm that does not read the epsilon of its base class."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-5)


@pytest.mark.parametrize("cls", [CallsTorch, CallsTorchInTraining, CallsFunction])
@pytest.mark.sampled(3)
def test_epsilon_that_only_code_of_torch_may_read(cls):
    norm = cls(48)
    recipe = recognise_norm(norm)
    assert isinstance(recipe, LayerNormRecipe), recipe
    assert recipe.eps == 1e-5
    tigon.patch(norm)
    with torch.no_grad():
        for norm.eps, training in itertools.product((0.5, 1e-9), (True, False)):
            x = 1e-3 * torch.randn(3, 48)
            torch.testing.assert_close(norm.train(training)(x), cls.forward(norm, x))
