"""MLPs are recognised by what they compute, whatever the names of their children. Other modules keep their forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.recognition.parts.mlp_recipes import ActivationRecipe, GLURecipe, MLPRecipe
from tigon.recognition.parts.mlps import recognise_glu, recognise_mlp, recognise_relu2


class Split(nn.Module):
    """A gated MLP whose children have the names w1, w3 and w2. They are declared in another order than they run."""

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
def test_a_gated_mlp_is_recognised_under_any_names(act, kind, bias, inner):
    assert recognise_glu(Split(act, bias, inner=inner)) == GLURecipe(kind, "w1", "w3", "w2")


class Scaled(Split):
    """Falcon H1 multiplies the gate and the result by numbers that are attributes."""

    def __init__(self, gate: float = 0.6, result: float = 1.75) -> None:
        super().__init__()
        self.gate_multiplier, self.down_multiplier = gate, result

    def forward(self, x):
        return self.w2(self.act(self.w1(x) * self.gate_multiplier) * self.w3(x)) * self.down_multiplier


def test_factors_of_the_gate_and_of_the_result_belong_to_the_recipe():
    mlp = Scaled()
    assert recognise_glu(mlp) == GLURecipe("swiglu", "w1", "w3", "w2", 0.6, 1.75)
    assert recognise_glu(Scaled(1.0, 0.5)) == GLURecipe("swiglu", "w1", "w3", "w2", 1.0, 0.5)
    x = torch.randn(3, 16)
    with tigon.patched(mlp):
        assert torch.equal(mlp(x), Scaled.forward(mlp, x))
        mlp.gate_multiplier = 0.9
        assert torch.equal(mlp(x), Scaled.forward(mlp, x)), "a changed factor must be seen"


class Limited(Split):
    """DeepSeek V4 clamps gate and up."""

    def __init__(self, limit: float = 0.25) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x):
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(min=-self.limit, max=self.limit)
        return self.w2(self.act(gate) * up)


def test_a_limit_of_gate_and_up_belongs_to_the_recipe():
    mlp, x = Limited(), torch.randn(3, 16) * 4
    assert recognise_glu(mlp) == GLURecipe("swiglu", "w1", "w3", "w2", limit=0.25)
    with tigon.patched(mlp):
        assert torch.equal(mlp(x), Limited.forward(mlp, x))
        mlp.limit = 0.125
        assert torch.equal(mlp(x), Limited.forward(mlp, x)), "a changed limit must be seen"


def test_a_packed_mlp_that_reads_its_size_from_an_attribute_is_recognised():
    assert recognise_glu(Packed()) == GLURecipe("swiglu", "both", None, "out")


class FlatRows(Split):
    """Holds its sizes as attributes, and settings that have the value of a size. The forward reads some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.inner, self.version, self.unread = 16, 32, 16, 32

    def forward(self, x):
        y = super().forward(x.reshape(-1, self.hidden)).reshape(x.shape)
        return -y if self.version == 16 else y


class Versioned(Split):
    def __init__(self) -> None:
        super().__init__()
        self.version = 32

    def forward(self, x):
        return super().forward(x) * (2.0 if self.version == 32 else 1.0)


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
@pytest.mark.parametrize("cls", [FlatRows, Versioned, VersionedPacked, VersionedTwoLayers])
def test_a_setting_with_the_value_of_a_size_keeps_its_value_in_a_probe(cls):
    """A stand-in with other sizes must not change a setting that has the value of a size by chance."""
    module = cls()
    stock, x = copy.deepcopy(module), torch.randn(2, 3, 16)
    tigon.patch(nn.ModuleList([module]))
    assert not isinstance(recognise_glu(module) or recognise_mlp(module), (GLURecipe, MLPRecipe))
    torch.testing.assert_close(module(x), stock(x))


@pytest.mark.parametrize("version", [15, 17])
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
def test_an_mlp_that_computes_more_keeps_its_forward(change, training):
    mlp = Split()
    change(mlp)
    mlp.train(training)
    assert recognise_glu(mlp) in (
        "computes something else than silu, gelu or gelu-tanh gates",
        "its forward draws random numbers",
    )


def test_the_reason_names_a_norm_inside_of_the_mlp():
    mlp = Split()
    mlp.inner_norm = nn.RMSNorm(32)
    assert recognise_glu(mlp) == "has more state than a gated MLP (inner_norm)"


def test_a_packed_mlp_with_up_before_gate_keeps_its_forward():
    assert recognise_glu(Packed(gate_first=False)) == "computes something else than silu, gelu or gelu-tanh gates"


# --- squared ReLU --------------------------------------------------------------------------------


class Squared(nn.Module):
    def forward(self, x):
        return torch.square(F.relu(x))


def test_a_squared_relu_is_recognised():
    assert recognise_relu2(Squared()) == ActivationRecipe("relu2")
