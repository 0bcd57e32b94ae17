"""A module that is changed after it was recognised computes what it would without the patch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from recognition.modules import Norm, reason

pytestmark = pytest.mark.usefixtures("no_symbolic_runs")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)
        self.multiplier, self.p = 1.0, 0.0

    def forward(self, x):
        h = self.act(self.w1(x)) * self.w3(x)
        return F.dropout(self.drop(self.w2(h) * self.multiplier), self.p)


def assign(path: str, value):
    """Return a function that assigns an attribute of an MLP, or of a child."""
    child, _, name = path.rpartition(".")
    return lambda mlp: setattr(mlp.get_submodule(child), name, value)


CHANGES = {
    "multiplier": assign("multiplier", 3.0),
    "functional dropout": assign("p", 1.0),
    "dropout": assign("drop.p", 1.0),
    "kind of the activation": assign("act.approximate", "tanh"),
    "another activation": assign("act", nn.GELU("tanh")),
    "no gate": assign("act", nn.ReLU()),
    "hook of the activation": lambda mlp: mlp.act.register_forward_hook(lambda m, args, y: y * (y > 1)),
    "forward of the activation": assign("act.forward", torch.relu),
    "hook of the dropout": lambda mlp: mlp.drop.register_forward_hook(lambda m, args, y: y * 2),
    "call of the activation": assign("act._call_impl", torch.relu),
}


@pytest.mark.filterwarnings("ignore:.*nothing was replaced")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_mlp_computes_what_its_class_computes(name):
    """A change of the activation before the patch keeps the MLP from being replaced."""
    mlp, x, change = MLP(), torch.randn(5, 16), CHANGES[name]
    with tigon.patched(mlp) as report:
        assert [entry.part for entry in report.replaced] == ["glu"]
        assert torch.equal(mlp(x), MLP.forward(mlp, x))
        change(mlp)
        assert torch.equal(mlp(x), MLP.forward(mlp, x))
    if name in ("no gate", "hook of the activation", "forward of the activation", "call of the activation"):
        (detail,) = (entry.detail for entry in tigon.patch(mlp).left_alone if entry.part == "glu")
        assert name == "no gate" or detail == "has hooks on act, or their call or forward was replaced"
        assert torch.equal(mlp(x), MLP.forward(mlp, x))


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("cls", [nn.GELU, nn.Module])
def test_a_call_that_is_replaced_on_the_class_of_the_activation_is_used(monkeypatch, cls, name):
    mlp, x, call = MLP(), torch.randn(5, 16), getattr(cls, name)

    def doubled(self, *args, **kwargs):
        y = call(self, *args, **kwargs)
        return 2 * y if isinstance(self, nn.GELU) else y

    stock = mlp(x)
    with tigon.patched(mlp):
        monkeypatch.setattr(cls, name, doubled, raising=False)
        y = mlp(x)
        assert torch.equal(y, MLP.forward(mlp, x))
        assert not torch.allclose(y, stock)


def test_modules_that_differ_in_a_setting_are_recognised_separately():
    first, second = MLP(), MLP()
    second.p = 0.5  # a dropout that works, which no op computes
    report = tigon.patch(nn.Sequential(first, second), gelu=False)
    assert [(entry.names, entry.replaced) for entry in report.entries] == [(["0"], True), (["1"], False)]


class ChangingNorm(Norm):
    plus_one = False

    def compute(self, x, w):
        return super().compute(x, w + 1 if self.plus_one else w)


def test_a_changed_norm_computes_what_its_class_computes():
    norm, x = ChangingNorm(), torch.randn(5, 48)
    with tigon.patched(norm):
        norm.eps = 1.0
        assert torch.equal(norm(x), Norm.forward(norm, x))
        norm.plus_one = True
        assert torch.equal(norm(x), Norm.forward(norm, x))


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rope(q, k, cos, sin)


@pytest.mark.parametrize("name", ["rope", "half"])
def test_a_rope_function_that_is_replaced_in_its_file_is_used(monkeypatch, name):
    """The rope function is replaced after the patch. The helper that it calls is replaced before the next patch."""
    model, inputs = Attention(), [torch.randn(shape) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 8), (1, 5, 8))]
    report = tigon.patch(model)
    others = {"rope": lambda q, k, cos, sin: (q + 1, k), "half": lambda x: x}
    monkeypatch.setitem(globals(), name, others[name])
    if name == "half":
        report.restore()
        with pytest.warns(UserWarning, match="nothing was replaced"):
            tigon.patch(model)
    assert all(torch.equal(a, b) for a, b in zip(model(*inputs), Attention.forward(model, *inputs), strict=True))


def test_the_reason_names_a_rope_function_of_another_library(monkeypatch):
    def foreign(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    foreign.__module__ = "fastropes.ops"
    monkeypatch.setitem(globals(), "rope", foreign)
    assert reason(Attention()) == "rope: was already replaced (by fastropes.ops)"
