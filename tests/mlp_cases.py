"""The levels of memory at which the tests of MLPs run their ops."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon

HIDDEN, INNER, OUT = 24, 40, 16
LEVELS = "default", "lean", "lean+mlp", "checkpoint"


def run_at(level: str, op: Callable, *arguments: object, **options: object) -> Tensor:
    """Return the result of an op at a level of memory."""
    if level == "checkpoint":
        return checkpoint(op, *arguments, use_reentrant=False, **options)
    with contextlib.nullcontext() if level == "default" else tigon.lean(mlp=level == "lean+mlp"):
        return op(*arguments, **options)


def gradients_of(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return y, and the gradients of the leaves that need one, for a loss that depends on all elements of y."""
    return [y, *torch.autograd.grad(y.square().sum(), [x for x in leaves if x.requires_grad])]


def assert_equal(results: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
