"""Small training steps whose products save the result of an op, and the tensors that are alive after the forward."""

import contextlib
import gc
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from tigon.memory import layer_inputs
from tigon.runtime.device import INTERPRETED

ROWS, WIDTH, HEADS = (2, 3), 16, 4


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Step:
    """The inputs and weights of a step, which are the same in every step, and the tensors that are still alive."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.dtype, self.device = dtype, device
        self.leaves: list[Tensor] = []
        self.storages: dict[str, StorageWeakRef] = {}

    def constant(self, seed: int, *shape: int) -> Tensor:
        return normal(seed, *shape, dtype=self.dtype).to(self.device)

    def leaf(self, *shape: int) -> Tensor:
        self.leaves.append(self.constant(len(self.leaves), *shape).requires_grad_())
        return self.leaves[-1]

    def x(self, *shape: int) -> Tensor:
        """Return an input that is computed like an activation, so that it is not a leaf."""
        return self.leaf(*(shape or (*ROWS, WIDTH))) * 1.5

    def weight(self, *shape: int) -> nn.Parameter:
        self.leaves.append(nn.Parameter(self.constant(len(self.leaves), *(shape or (WIDTH,)))))
        return self.leaves[-1]

    def product(self, y: Tensor, width: int = 5) -> Tensor:
        """Return y W^T. Autograd saves y."""
        return F.linear(y, self.weight(width, y.shape[-1]))

    def watch(self, **tensors: Tensor) -> None:
        """Let `alive` report these tensors."""
        self.storages |= {name: StorageWeakRef(y.untyped_storage()) for name, y in tensors.items()}

    def alive(self) -> set[str]:
        """Return the names of the watched tensors whose memory is still allocated."""
        # The interpreter leaves reference cycles.
        if INTERPRETED:
            gc.collect()
        return {name for name, storage in self.storages.items() if not storage.expired()}

    def gradients(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


def block(lean: bool, **options: bool) -> contextlib.AbstractContextManager:
    """Return a block of `lean`, or a block without effect."""
    return tigon.lean(**options) if lean else contextlib.nullcontext()


def paged(smallest: int, page: int = 1024) -> contextlib.AbstractContextManager:
    """Let tensors of `smallest` bytes move to the host in a block, in pages of `page` bytes."""
    return patch.multiple(layer_inputs, SMALLEST=smallest, PAGE=page)


def total(*results: Tensor) -> Tensor:
    """Return the sum of the squares of all elements."""
    return sum(z.float().square().sum() for z in results)


def run(
    forward: Callable[[Step], Tensor], lean: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[set[str], list[Tensor]]:
    """Return the tensors that are alive after the forward pass, and a list of the loss and all gradients."""
    step = Step(dtype, device)
    with block(lean):
        loss = forward(step)
    alive = step.alive()
    loss.backward()
    return alive, [loss.detach(), *step.gradients()]


def assert_same_bits(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a is b or (a.dtype == b.dtype and torch.equal(a, b)), f"result {i}"
