"""Small modules that recognition replaces: a gated MLP and a norm, and variants of the MLP."""

import collections

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def variant(name: str, **members) -> type[MLP]:
    return type(name, (MLP,), members)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

    def forward(self, x):
        return self.compute(x, self.weight)

    def compute(self, x, w):
        return w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
