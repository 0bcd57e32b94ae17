"""A small module that several tests of this folder call."""

from torch import nn


class Layer(nn.Module):
    """A module that doubles its input by an attribute that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale
