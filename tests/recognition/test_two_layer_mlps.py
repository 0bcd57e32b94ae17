"""MLPs of two linear layers are recognised by what they compute. Other modules are not replaced."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.recognition.parts.activations import ActivationRecipe, recognise_gelu
from tigon.recognition.parts.mlp import MLPRecipe, recognise_mlp


class Transposed(nn.Module):
    """The layer of GPT-2: x W + b. Its attributes have the names of the layer in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * nx**-0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Scaled(Transposed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


def power(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


class MLP(nn.Module):
    def __init__(self, act=F.gelu, bias: bool = True, inner: int = 40, p: float = 0.0) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(inner, 16, bias=bias), nn.Linear(16, inner, bias=bias)
        self.act, self.before, self.after, self.scale = act, nn.Dropout(p), nn.Dropout(p), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(self.before(self.act(self.first(x)))) * self.scale)


class OfTransposedLayers(MLP):
    def __init__(self, layer: type = Transposed) -> None:
        super().__init__(power)
        self.first, self.second = layer(40, 16), layer(16, 40)


RECIPE = MLPRecipe("gelu", "first", "second", ("before",), ("after",))


@pytest.mark.parametrize(
    ("act", "formula"),
    [
        (F.gelu, "gelu"),
        (nn.GELU("tanh"), "gelu tanh"),
        (power, "gelu tanh, power"),
        (lambda x: x * torch.sigmoid(1.702 * x), "gelu sigmoid"),
        (lambda x: F.relu(x).square(), "relu2"),
    ],
    ids=["gelu", "tanh", "power", "sigmoid", "relu2"],
)
@pytest.mark.parametrize("inner", [40, 16], ids=["wide", "square"])
def test_every_activation_is_recognised(act, formula, inner):
    recipe = MLPRecipe(formula, "first", "second", ("before",), ("after",))
    assert recognise_mlp(MLP(act, inner=inner)) == recipe
    assert recognise_mlp(MLP(act, bias=False, inner=inner)) == recipe


def test_layers_with_transposed_weights_are_recognised():
    recipe = recognise_mlp(OfTransposedLayers())
    assert recipe == MLPRecipe("gelu tanh, power", "first", "second", ("before",), ("after",))
    assert recipe.transposed_forward is Transposed.forward
    assert recognise_mlp(OfTransposedLayers(Scaled)) is None


@pytest.mark.parametrize(
    "act",
    [
        F.relu,
        F.silu,
        lambda x: F.gelu(x) * 1.0001,
        lambda x: F.gelu(x).clamp(-10, 10),
        lambda x: F.gelu(x.detach()) + 0 * x,
        lambda x: F.gelu(x) * (2.0 if x.dtype == torch.float16 else 1.0),
        lambda x: F.gelu(x) if x.dim() < 4 else F.gelu(x).flip(1),
    ],
    ids=["relu", "silu", "nearly", "clamped", "detached", "fp16", "four dimensions"],
)
def test_mlps_that_resemble_one_keep_their_forward(act):
    assert not isinstance(recognise_mlp(MLP(act)), MLPRecipe)


class Residual(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class DropoutOfTheInput(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.after(x))


class TwoDropouts(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


class FunctionalDropout(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class ReadsWeight(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(F.linear(x, self.first.weight, self.first.bias)))


@pytest.mark.parametrize("cls", [Residual, DropoutOfTheInput, TwoDropouts, FunctionalDropout, ReadsWeight])
def test_other_forwards_are_not_replaced(cls):
    assert not isinstance(recognise_mlp(cls()), MLPRecipe)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("make", [MLP, OfTransposedLayers], ids=["linear", "transposed"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_replaced_mlp_computes_what_it_did(make, p, training):
    torch.manual_seed(0)
    stock = make().train(training)
    stock.before.p = stock.after.p = p
    module = copy.deepcopy(stock)
    assert [entry.part for entry in tigon.patch(module).replaced] == ["mlp"]
    results = []
    for each in (stock, module, pickle.loads(pickle.dumps(module)) if make is not MLP else copy.deepcopy(module)):
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(2)
        y = each(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
    for other in results[1:]:
        for ours, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("make", [MLP, OfTransposedLayers], ids=["linear", "transposed"])
def test_a_replaced_mlp_does_not_save_its_activation(make):
    """Only x, the weights and the output of the first layer are saved, unless a dropout is active in between."""

    def saved_wide_tensors(module: nn.Module) -> int:
        parameters, pointers = {p.data_ptr() for p in module.parameters()}, set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (pointers.add(t.data_ptr()) if t.shape[-1] == 40 else None) or t, lambda t: t
        ):
            y = module(torch.randn(3, 16, requires_grad=True))
        assert y.requires_grad
        return len(pointers - parameters)

    module = make()
    with tigon.patched(module):
        assert saved_wide_tensors(module) == 1
        assert saved_wide_tensors(module.eval()) == 1
    assert saved_wide_tensors(module.train()) > 1


def set_scale(mlp):
    mlp.scale = 3.0


def exchange_the_activation(mlp):
    mlp.act = F.silu


def raise_dropout(mlp):
    mlp.after.p = 1.0


def hook_a_layer(mlp):
    mlp.first.register_forward_hook(lambda m, args, y: y * 2)


@pytest.mark.parametrize("change", [set_scale, exchange_the_activation, raise_dropout, hook_a_layer])
def test_a_later_change_has_its_effect(change):
    module, x = MLP(), torch.randn(3, 16)
    tigon.patch(module)
    before = module(x)
    change(module)
    stock = MLP()
    stock.load_state_dict(module.state_dict())
    change(stock)
    torch.testing.assert_close(module(x), stock(x))
    assert not torch.equal(module(x), before)


# --- activations ---------------------------------------------------------------------------------


class Activation(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def test_gelus_are_recognised():
    assert recognise_gelu(nn.GELU()) == ActivationRecipe("gelu")
    assert recognise_gelu(nn.GELU("tanh")) == ActivationRecipe("gelu tanh")
    assert recognise_gelu(Activation(power)) == ActivationRecipe("gelu tanh, power")


@pytest.mark.parametrize(
    "act",
    [
        F.silu,
        F.relu,
        lambda x: power(x) * 1.001,
        lambda x: power(x).clamp(max=1e5),
        lambda x: power(x.detach()) + 0 * x,
    ],
    ids=["silu", "relu", "nearly", "clamped", "detached"],
)
def test_other_activations_keep_their_forward(act):
    assert not isinstance(recognise_gelu(Activation(act)), ActivationRecipe)


def test_an_activation_of_a_replaced_mlp_is_left_to_the_mlp():
    """The guard of the MLP watches its activation, and another forward of the activation would disable the MLP."""
    model = nn.Sequential(MLP(nn.GELU("tanh")), nn.GELU("tanh"))
    report = tigon.patch(model)
    assert [(entry.part, entry.names) for entry in report.replaced] == [("mlp", ["0"]), ("gelu", ["1"])]
    assert "a replaced module computes this activation itself" in str(report.why("0.act"))


@pytest.mark.parametrize("act", [nn.GELU(), Activation(power)], ids=["one kernel", "several"])
def test_lean_gives_the_gradients_of_the_default_level(act):
    """In lean, backward recomputes the input of the second layer."""
    model = nn.Sequential(nn.Linear(8, 32), act, nn.Linear(32, 8))
    x = torch.randn(4, 8)
    tigon.patch(model)
    outputs = [model(x)]
    with tigon.lean():
        outputs.append(model(x))
    gradients = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in outputs]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
