"""MLPs and activations are recognised by what they compute, whatever the names of their children are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.recognition.parts.activations import recognise_relu2
from tigon.recognition.parts.mlp_recipes import ActivationRecipe, GLURecipe, MLPRecipe
from tigon.recognition.parts.mlps import recognise_glu, recognise_mlp

NO_GATED_MLP = "computes something else than silu, gelu or gelu-tanh gates"


class Split(nn.Module):
    """A gated MLP whose children have the names w1, w3 and w2. They are declared in another order than they run.

    `gated(gate, up, x)` computes the product.
    """

    def __init__(self, gated=lambda g, u, x: F.silu(g) * u, bias: bool = False, inner: int = 32) -> None:
        super().__init__()
        self.w2 = nn.Linear(inner, 16, bias=bias)
        self.w1, self.w3 = nn.Linear(16, inner, bias=bias), nn.Linear(16, inner, bias=bias)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(self.w1(x), self.w3(x), x))


class Packed(nn.Module):
    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.both, self.out, self.inner = nn.Linear(16, 64), nn.Linear(32, 16), 32
        self.gate_first = gate_first

    def forward(self, x):
        first, second = self.both(x).split(self.inner, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.out(F.silu(gate) * up)


GATES = {
    "silu": (F.silu, "swiglu", False, 32),
    "silu, square": (F.silu, "swiglu", True, 16),
    "gelu": (F.gelu, "geglu", True, 32),
    "gelu tanh, square": (lambda x: F.gelu(x, approximate="tanh"), "geglu (tanh)", False, 16),
}


@pytest.mark.parametrize(("act", "kind", "bias", "inner"), GATES.values(), ids=GATES)
def test_a_gated_mlp_is_recognised_under_any_names(act, kind, bias, inner):
    assert recognise_glu(Split(lambda g, u, x: act(g) * u, bias, inner)) == GLURecipe(kind, "w1", "w3", "w2")


def test_a_packed_mlp_that_reads_its_size_from_an_attribute_is_recognised():
    assert recognise_glu(Packed()) == GLURecipe("swiglu", "both", None, "out")
    assert recognise_glu(Packed(gate_first=False)) == NO_GATED_MLP


class Scaled(Split):
    """Falcon H1 multiplies the gate and the result by numbers that are attributes."""

    setting, result = 0.6, 1.75

    def __init__(self) -> None:
        super().__init__()
        self.setting, self.result = type(self).setting, type(self).result

    def forward(self, x):
        return self.w2(F.silu(self.w1(x) * self.setting) * self.w3(x)) * self.result


class ScaledResult(Scaled):
    setting, result = 1.0, 0.5


class Limited(Scaled):
    """DeepSeek V4 clamps gate and up."""

    setting = 0.25

    def forward(self, x):
        gate, up = self.w1(x).clamp(max=self.setting), self.w3(x).clamp(min=-self.setting, max=self.setting)
        return self.w2(F.silu(gate) * up)


@pytest.mark.parametrize(
    ("cls", "numbers"),
    [
        (Scaled, {"gate_scale": 0.6, "output_scale": 1.75}),
        (ScaledResult, {"output_scale": 0.5}),
        (Limited, {"limit": 0.25}),
    ],
)
def test_factors_and_a_limit_belong_to_the_recipe(cls, numbers):
    mlp, x = cls(), torch.randn(3, 16) * 4
    assert recognise_glu(mlp) == GLURecipe("swiglu", "w1", "w3", "w2", **numbers)
    with tigon.patched(mlp):
        assert torch.equal(mlp(x), cls.forward(mlp, x))
        mlp.setting = 0.125
        assert torch.equal(mlp(x), cls.forward(mlp, x)), "a changed number must be seen"


class FlatRows(Split):
    """Holds its sizes as attributes, and settings that have the value of a size. The forward reads some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.inner, self.version, self.unread = 16, 32, 16, 32

    def forward(self, x):
        y = super().forward(x.reshape(-1, self.hidden)).reshape(x.shape)
        return -y if self.version == 16 else y


class VersionedPacked(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.version = self.inner

    def forward(self, x):
        return super().forward(x) if self.version != 32 else super().forward(x.flip(-1))


class VersionedTwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.version = nn.Linear(16, 32), nn.Linear(32, 16), 16

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return y + 1.0 if self.version == 16 else y


@pytest.mark.filterwarnings("ignore:.*nothing was re")
@pytest.mark.parametrize("cls", [FlatRows, VersionedPacked, VersionedTwoLayers])
def test_a_setting_with_the_value_of_a_size_keeps_its_value_in_a_probe(cls):
    """A stand-in with other sizes must not change a setting that has the value of a size by chance."""
    module = cls()
    stock, x = copy.deepcopy(module), torch.randn(2, 3, 16)
    tigon.patch(nn.ModuleList([module]))
    assert not isinstance(recognise_glu(module) or recognise_mlp(module), (GLURecipe, MLPRecipe))
    torch.testing.assert_close(module(x), stock(x))


@pytest.mark.parametrize("version", [15, 17])
@pytest.mark.sampled(2)
def test_sizes_that_a_forward_reads_do_not_keep_an_mlp_from_being_recognised(version):
    class Flat(FlatRows):
        def forward(self, x):
            y = Split.forward(self, x.reshape(-1, self.hidden)).view(*x.shape[:-1], self.hidden)
            return -y if self.version == version else y

    assert recognise_glu(Flat()) == GLURecipe("swiglu", "w1", "w3", "w2")


def test_children_of_other_classes_need_only_the_attributes_for_their_sizes():
    class Quantised(nn.Module):
        def __init__(self, features_in, features_out):
            super().__init__()
            self.in_features, self.out_features = features_in, features_out

        def forward(self, x):
            raise AssertionError("recognition must not run the children of full size")

    mlp = Split()
    mlp.w1, mlp.w3, mlp.w2 = Quantised(16, 32), Quantised(16, 32), Quantised(32, 16)
    assert recognise_glu(mlp) == GLURecipe("swiglu", "w1", "w3", "w2")


def without_gradients(g, u, x):
    with torch.no_grad():
        return F.silu(g) * u


IMPOSTORS = {
    "relu": lambda g, u, x: F.relu(g) * u,
    "sigmoid": lambda g, u, x: torch.sigmoid(g) * u,
    "near": lambda g, u, x: F.silu(g) * 1.0001 * u,
    "multiplier": lambda g, u, x: F.silu(g) * u * 0.7,
    "sparsity": lambda g, u, x: F.silu(g.masked_fill(g < g.mean(), 0)) * u,
    "clamped": lambda g, u, x: F.silu(g.clamp(max=12.0)) * u.clamp(-12.0, 12.0),
    "clamped late": lambda g, u, x: F.silu(g.clamp(max=1e4)) * u.clamp(-1e4, 1e4),
    "gate detached": lambda g, u, x: F.silu(g).detach() * u,
    "up detached": lambda g, u, x: F.silu(g) * u.detach(),
    "no_grad": without_gradients,
    "fp16": lambda g, u, x: F.silu(g) * u * (2.0 if x.dtype == torch.float16 else 1.0),
}


@pytest.mark.parametrize("gated", IMPOSTORS.values(), ids=IMPOSTORS)
def test_mlps_that_resemble_a_gated_mlp_keep_their_forward(gated):
    assert recognise_glu(Split(gated)) == NO_GATED_MLP


class WithDropout(Split):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_a_dropout_in_an_mlp_keeps_its_forward_in_both_modes(training):
    assert recognise_glu(WithDropout().train(training)) == "its forward draws random numbers"


def test_the_reason_names_a_norm_inside_of_the_mlp():
    mlp = Split()
    mlp.inner_norm = nn.RMSNorm(32)
    assert recognise_glu(mlp) == "has more state than a gated MLP (inner_norm)"


def test_an_attention_is_no_mlp():
    """The sizes of query, key and value would fit a gated MLP."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, mask=None):
            return self.query(x).view(*x.shape[:2], 4, 4) @ mask

    assert recognise_glu(Attention()) is None


def activation(act) -> nn.Module:
    return type("Activation", (nn.Module,), {"forward": act, "__module__": __name__})()


NO_SQUARES = {
    "nearly": lambda m, x: F.relu(x).square() * 1.001,
    "clamped": lambda m, x: F.relu(x).clamp(max=1e5).square(),
    "evaluating": lambda m, x: F.relu(x).square() * (1.0 if m.training else 2.0),
    "half detached": lambda m, x: F.relu(x).detach() * F.relu(x),
}


def test_a_squared_relu_is_recognised_and_what_resembles_one_keeps_its_forward():
    assert recognise_relu2(activation(lambda m, x: torch.square(F.relu(x)))) == ActivationRecipe("relu2")
    results = {name: recognise_relu2(activation(act)) for name, act in NO_SQUARES.items()}
    assert not [name for name, result in results.items() if isinstance(result, ActivationRecipe)]
