"""A module that is changed after it was recognised computes what it would without the patch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)
        self.multiplier, self.p = 1.0, 0.0

    def forward(self, x):
        h = self.act(self.w1(x)) * self.w3(x)
        return F.dropout(self.drop(self.w2(h) * self.multiplier), self.p)


def set_multiplier(mlp):
    mlp.multiplier = 3.0


def raise_functional_dropout(mlp):
    mlp.p = 1.0


def raise_dropout(mlp):
    mlp.drop.p = 1.0


def change_the_activation(mlp):
    mlp.act.approximate = "tanh"


def exchange_the_activation(mlp):
    mlp.act = nn.GELU("tanh")


def hook_the_dropout(mlp):
    mlp.drop.register_forward_hook(lambda m, args, y: y * 2)


def replace_the_call_of_the_activation(mlp):
    mlp.act._call_impl = torch.relu


@pytest.mark.parametrize(
    "change",
    [
        set_multiplier,
        raise_functional_dropout,
        raise_dropout,
        change_the_activation,
        exchange_the_activation,
        hook_the_dropout,
        replace_the_call_of_the_activation,
    ],
    ids=lambda f: f.__name__,
)
def test_a_changed_mlp_computes_what_its_class_computes(change):
    mlp, x = MLP(), torch.randn(5, 16)
    with tigon.patched(mlp) as report:
        assert [entry.part for entry in report.replaced] == ["glu"]
        assert torch.equal(mlp(x), MLP.forward(mlp, x))
        change(mlp)
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


def test_an_mlp_whose_activation_has_another_call_stays_stock():
    mlp = MLP()
    replace_the_call_of_the_activation(mlp)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(mlp).left_alone
    assert entry.detail == "has hooks on act, or their call or forward was replaced"


def test_modules_that_differ_in_a_setting_are_recognised_separately():
    first, second = MLP(), MLP()
    second.p = 0.5  # a dropout that works, which no op computes
    report = tigon.patch(nn.Sequential(first, second), gelu=False)
    assert [(entry.names, entry.replaced) for entry in report.entries] == [(["0"], True), (["1"], False)]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.plus_one = nn.Parameter(torch.ones(48)), 1e-5, False

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (self.weight + 1 if self.plus_one else self.weight) * y.to(x.dtype)


def test_a_changed_norm_computes_what_its_class_computes():
    norm, x = Norm(), torch.randn(5, 48)
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
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = tigon.patch(Attention()).left_alone
    assert entry.detail == "rope: was already replaced (by fastropes.ops)"
