"""Small modules that recognition replaces, their variants, and the reason why a module keeps its forward."""

import collections
import textwrap
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.hf.report import Report


class MLP(nn.Module):
    """A gated MLP with the settings that the tests change."""

    table_of_class = (1.0,)
    scale_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)
        self.log: list[float] = []
        self.statistics = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.down(self.act(self.gate(x)) * self.up(x)))

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def finish(self, y: Tensor) -> Tensor:
        return y


class Norm(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return self.compute(x, self.weight)

    def compute(self, x, w):
        return w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def variant(name: str, **members) -> type[MLP]:
    return type(name, (MLP,), members)


def define(body: str, scope: dict[str, Any], parameters: str = "self, x", name: str = "act") -> types.FunctionType:
    """Return a function with this body, as if the file with the globals `scope` defined it."""
    source, names = f"def {name}({parameters}):\n{textwrap.indent(body, '    ')}", {}
    exec(compile(source, scope["__file__"], "exec"), scope, names)
    return names[name]


def patch(module: nn.Module) -> Report:
    return tigon.patch(nn.ModuleList([module]))


def reason(module: nn.Module) -> str:
    """Patch a module, and return the only reason why it keeps its forward."""
    with pytest.warns(UserWarning, match="nothing was replaced"):
        (entry,) = patch(module).left_alone
    return entry.detail
