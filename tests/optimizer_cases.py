"""The parameters and the training loop that the tests of optimizers share."""

import torch
from torch import nn

from op_cases import DEVICE


def make_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for s in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> list[nn.Parameter]:
    """Take steps with random gradients, which depend on the number of the step, and return the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(parameters, step)
        optimizer.step()
    return parameters
