"""Modules that differ from an op only in rare circumstances keep their forward: long inputs, infinite values, modes."""

import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.recognition.parts.activations import recognise_relu2
from tigon.recognition.parts.mlp_recipes import ActivationRecipe, GLURecipe
from tigon.recognition.parts.mlps import recognise_glu
from tigon.recognition.parts.norm_recipes import LayerNormRecipe, RMSNormRecipe
from tigon.recognition.parts.norms import recognise_norm


class MLP(nn.Module):
    """A gated MLP whose steps a test replaces."""

    def __init__(self, size: int = 16, inner: int = 40) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def before(self, x: Tensor) -> Tensor:
        return x

    def between(self, h: Tensor) -> Tensor:
        return h

    def after(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(self.down(self.between(F.silu(self.gate(x)) * self.up(x))))


class Norm(nn.Module):
    """An RMS norm whose steps a test replaces."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def before(self, x: Tensor) -> Tensor:
        return x

    def epsilon(self) -> float:
        return self.eps

    def after(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        wide = self.before(x).float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon())
        return self.after(self.weight * y.to(x.dtype))


class Squared(nn.Module):
    def after(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.relu(x).square())


RECOGNISERS = ((MLP, recognise_glu), (Norm, recognise_norm), (Squared, recognise_relu2))


def variant(base: type, **members) -> nn.Module:
    return type("Changed", (base,), members)()


def is_left_alone(module: nn.Module) -> bool:
    return isinstance(next(f for base, f in RECOGNISERS if isinstance(module, base))(module), (str, type(None)))


def test_plain_modules_are_recognised():
    assert isinstance(recognise_glu(MLP()), GLURecipe)
    assert isinstance(recognise_norm(Norm()), RMSNormRecipe)
    assert isinstance(recognise_relu2(Squared()), ActivationRecipe)


def repeated(self, y):
    for _ in range(y.shape[0] // 3000):
        y = y + 1
    return y


class BoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-100, 100)


class CleanGradient(BoundedGradient):
    @staticmethod
    def backward(ctx, dy):
        return dy.nan_to_num(0.0)


class HalfGradient(BoundedGradient):
    @staticmethod
    def backward(ctx, dy):
        return dy * 2 if dy.dtype == torch.bfloat16 else dy


class Tagged(Tensor):
    pass


class Loud(nn.Linear):
    pass


def with_grad(base):
    def forward(self, x):
        with torch.enable_grad():
            return base.forward(self, x)

    return forward


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return MLP.forward(self, x)


SIZES = {
    "divided": lambda self, y: y * (y.numel() // 100_000 + 1),
    "tuple": lambda self, y: y * [1.0, 3.0][int(y.shape[0] >= 3000)],
    "logarithm": lambda self, y: y * max(1.0, math.log2(y.size(0) + 1) / 11),
    "power": lambda self, y: y * 2.0 ** (y.shape[0] // 3000),
    "repeated": repeated,
    "chunks": lambda self, y: torch.cat([part / (i + 1) for i, part in enumerate(y.split(2000))]),
    "positions": lambda self, y: y - (torch.ones_like(y).cumsum(0) > 2000).to(y.dtype),
    "arange": lambda self, y: y + (torch.arange(y.shape[0]) // 3000).view(-1, *[1] * (y.dim() - 1)).to(y.dtype),
    "tail": lambda self, y: torch.cat((y[:2500], -y[2500:])),
    "checked": lambda self, y: torch._assert(y.shape[0] < 2500, "long") or y,
}
MODES = {
    "bf16 evaluating": lambda self, y: -y if y.dtype == torch.bfloat16 and not self.training and y.dim() == 2 else y,
    "half training": lambda self, y: y + 1 if y.dtype == torch.float16 and self.training else y,
    "one row evaluating": lambda self, y: y * 3 if y.dim() == 1 and not self.training else y,
    "frozen evaluating": lambda self, y: y if self.training else y.detach(),
}
GRADIENTS = {
    cls.__name__: lambda self, y, cls=cls: cls.apply(y) for cls in (BoundedGradient, CleanGradient, HalfGradient)
}
OUTPUTS = {
    "a subclass": lambda self, y: y.as_subclass(Tagged),
    "a parameter": lambda self, y: nn.Parameter(y),
    "another layout": lambda self, y: y.mT.contiguous().mT if y.dim() > 1 else y,
}
INFINITE = {
    "finite": lambda self, y: y.clamp(torch.finfo(y.dtype).min, torch.finfo(y.dtype).max),
    "no infinity": lambda self, y: y.masked_fill(y == torch.inf, 0),
    "no negative infinity": lambda self, y: torch.where(y == -torch.inf, torch.ones_like(y), y),
    "half": lambda self, y: y.clamp(max=60000) if y.dtype == torch.float16 else y,
}
PADDING = {
    f"padding {value}": lambda self, x, value=value: x.masked_fill(x == value, 7.0) for value in (-100.0, 1.0, -1.0)
}
READS = {
    "getattr": lambda self, x: x * getattr(x, "factor", 1.0),
    "hasattr": lambda self, x: x * x.factor if hasattr(x, "factor") else x,
    "try": lambda self, x: getattr(x, "mask", x),
}
FEATURES = {
    "first": lambda self, h: torch.cat((h[..., :90], 0 * h[..., 90:]), -1),
    "strongest": lambda self, h: h * (h.abs() >= h.abs().topk(min(200, h.shape[-1]), -1).values[..., -1:]),
    "attribute": lambda self, h: F.pad(h[..., : self.limit], (0, max(h.shape[-1] - self.limit, 0))),
}
CASTS = {
    "to the dtype": lambda self, x: x.to(next(self.parameters()).dtype),
    "type_as": lambda self, x: x.type_as(next(self.gate.parameters())),
    "to the device": lambda self, x: x.to(next(self.parameters()).device),
}
# These forwards do not call each projection once, or disable autocast.
FORWARDS = {
    "twice": lambda self, x: self.down(self.gate(x) * torch.sigmoid(self.gate(x)) * self.up(x)),
    "forward": lambda self, x: self.down.forward(F.silu(self.gate(x)) * self.up(x)),
    "call_impl": lambda self, x: self.down(F.silu(type(self.gate).forward(self.gate, x)) * self.up(x)),
    "matrix": lambda self, x: self.down(F.silu(x @ next(self.gate.parameters()).t()) * self.up(x)),
    "no autocast": without_autocast,
}
# These read what a projection has below: a gain, a sign and a class.
PROJECTIONS = {
    "a gain": lambda self, y: y * getattr(self.up, "gain", 1.0),
    "a sign": lambda self, y: -y if self.gate.sign == "minus" else y,
    "a class": lambda self, y: y * (2.0 if isinstance(self.up, Loud) else 1.0),
}
WEIGHTS = {
    "ones": lambda self, y: y * 2 if bool((self.weight == 1).all()) else y,
    "zeros": lambda self, y: y + 1 - self.weight.count_nonzero().clamp(max=1).to(y.dtype),
    "small": lambda self, y: y * 0 if self.weight.abs().sum().item() < 1e-3 else y,
}
EVERY = (MLP, Norm, Squared)
# The modules that are attacked in turn, the method that the attack replaces, and the attacks by name.
TABLES = {
    "size": (EVERY, "after", SIZES),
    "several properties": (EVERY, "after", MODES),
    "gradients": (EVERY, "after", GRADIENTS),
    "outputs": (EVERY, "after", OUTPUTS),
    "infinite outputs": ((MLP, Norm), "after", INFINITE),
    "values": ((MLP, Norm), "before", PADDING),
    "attributes of the input": ((MLP, Norm), "before", READS),
    "features": ((MLP,), "between", FEATURES),
    "casts": ((MLP,), "before", CASTS),
    "forwards": ((MLP,), "forward", FORWARDS),
    "projections": ((MLP,), "after", PROJECTIONS),
    "weights": ((Norm,), "after", WEIGHTS),
    **{f"gradients of {base.__name__}": ((base,), "forward", {"enabled": with_grad(base)}) for base in EVERY},
}
# `make test` runs each attack on one of its modules, and `make test-thorough` on the others.
ATTACKS = [
    pytest.param(
        base, method, attack,
        id=f"{base.__name__}, {kind}: {name}",
        marks=[] if base is bases[i % len(bases)] else pytest.mark.thorough,
    )
    for kind, (bases, method, table) in TABLES.items()
    for i, (name, attack) in enumerate(table.items())
    for base in bases
]  # fmt: skip


@pytest.mark.parametrize(("base", "method", "attack"), ATTACKS)
def test_a_module_that_differs_from_an_op_in_rare_circumstances_keeps_its_forward(base, method, attack):
    module = variant(base, **{method: attack})
    module.limit = 333
    if attack in PROJECTIONS.values():
        module.up = Loud(16, 40, bias=False)
        module.up.gain, module.gate.sign = 3.0, "minus"
    assert is_left_alone(module)


def test_the_reason_names_the_size():
    reason = recognise_glu(variant(MLP, after=SIZES["divided"]))
    assert "computes with the size of its input" in reason
    assert "size(0)" in reason
    reason = recognise_glu(variant(MLP, after=lambda self, y: y[:2500] if y.dim() < 0 else torch.cat((y[:9], y[9:]))))
    assert "size of its input" in reason


def test_reshapes_are_no_decisions():
    flat = lambda self, x: x.reshape(-1, x.shape[-1]).reshape(x.shape)
    assert isinstance(recognise_glu(variant(MLP, before=flat)), GLURecipe)
    assert isinstance(recognise_norm(variant(Norm, before=flat)), RMSNormRecipe)


EPSILONS = {
    "floor": lambda self: 1e-9 if self.eps < 1e-9 else self.eps,
    "default": lambda self: self.eps or 1e-5,
    "ceiling": lambda self: min(self.eps, 0.01),
}


@pytest.mark.parametrize("epsilon", EPSILONS.values(), ids=EPSILONS)
@pytest.mark.parametrize("eps", [0.0, 0.25])
@pytest.mark.sampled(5)
def test_an_epsilon_that_the_module_modifies_has_its_stock_effect(epsilon, eps):
    norm, x = variant(Norm, epsilon=epsilon), torch.randn(4, 48) * 1e-3
    x[0] = 0
    with tigon.patched(norm):
        norm(x)
        norm.eps = eps
        assert torch.allclose(norm(x), type(norm).forward(norm, x), rtol=0, atol=0, equal_nan=True)


def order_of_calls(module: nn.Module) -> list[str]:
    calls: list[str] = []
    for name, child in module.named_children():
        child.register_forward_hook(lambda child, args, y, name=name: calls.append(name))
    module(torch.randn(2, 3, 16))
    return calls


def test_projections_are_called_in_the_order_of_the_forward():
    forwards = (
        lambda self, x: self.down(self.up(x) * F.silu(self.gate(x))),
        lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)),
    )
    for forward in forwards:
        mlp = variant(MLP, forward=forward)
        expected = order_of_calls(variant(MLP, forward=forward))
        with tigon.patched(mlp) as report:
            assert report.replaced
            assert order_of_calls(mlp) == expected


def assert_same_outcome(module: nn.Module, *inputs: Tensor) -> None:
    """Assert that a patched module gives the outcome of its class, whether that is an output or an exception."""

    def outcome(run):
        try:
            return run(*inputs)
        except Exception as error:
            return type(error)

    expected = outcome(lambda *x: type(module).forward(module, *x))
    with tigon.patched(module) as report:
        assert report.replaced
        result = outcome(module)
    dense = lambda y: y.to_dense() if y.is_sparse else y.to_padded_tensor(0.0) if y.is_nested else y
    assert type(result) is type(expected)
    assert result is expected or torch.equal(dense(result), dense(expected))


def test_dtypes_that_the_forward_refuses_raise_the_stock_error():
    for weight_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
        assert_same_outcome(nn.LayerNorm(32).to(weight_dtype), torch.randn(4, 32, dtype=dtype))
    assert_same_outcome(nn.LayerNorm(32).double(), torch.randn(4, 32))


def test_a_shape_that_changes_after_the_patch_is_used():
    norm = nn.LayerNorm(32)
    with tigon.patched(norm):
        for shape in ((4, 32), (16,), (33,)):
            norm.normalized_shape = shape
            try:
                expected = type(norm).forward(norm, torch.ones(2, 4, 32))
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    norm(torch.ones(2, 4, 32))
            else:
                assert torch.equal(norm(torch.ones(2, 4, 32)), expected)


def test_inputs_that_view_refuses_raise_the_stock_error():
    flat = lambda self, x: x.view(-1, x.shape[-1]).view(x.shape)
    for module, size in ((variant(MLP, before=flat), 16), (variant(Norm, before=flat), 48)):
        assert_same_outcome(module, torch.randn(3, size, 5).transpose(1, 2))
        assert_same_outcome(module, torch.randn(3, 5, size))


def test_subclasses_and_other_layouts_run_the_stock_forward():
    for module, size in ((MLP(), 16), (Norm(), 48), (Squared(), 16)):
        assert_same_outcome(module, torch.randn(3, size).as_subclass(Tagged))
        assert_same_outcome(module, torch.randn(3, size).to_sparse())
        assert_same_outcome(module, torch.nested.nested_tensor([torch.randn(2, size), torch.randn(3, size)]))


def with_option(name: str):
    source = f"def forward(self, x, {name}=None):\n    y = Norm.forward(self, x if {name} is None else x + {name})\n"
    scope = {"Norm": Norm, "__name__": __name__}
    exec(source + "    return y\n", scope)
    return types.FunctionType(scope["forward"].__code__, scope, "forward", (None,))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["residual", "position_ids"])
def test_an_optional_argument_is_no_gate(name):
    norm = variant(Norm, forward=with_option(name))
    recipe = recognise_norm(norm)
    assert isinstance(recipe, RMSNormRecipe)
    assert recipe.gate is None
    x, option = torch.randn(2, 48), torch.randn(2, 48)
    with tigon.patched(norm):
        assert torch.equal(norm(x, option), type(norm).forward(norm, x, option))
        assert torch.allclose(norm(x), type(norm).forward(norm, x))


def test_probes_leave_no_state():
    assert isinstance(recognise_norm(nn.LayerNorm(8)), LayerNormRecipe)
    module = variant(MLP, after=SIZES["divided"])
    before = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
    recognise_glu(module)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.is_grad_enabled(), torch.get_default_dtype())
    assert type(torch.ones(2)) is Tensor
