"""Small steps whose products save what an op gives, and what of it is kept."""

import contextlib
import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from tigon.runtime.device import INTERPRETED

ROWS, WIDTH, HEADS = (2, 3), 16, 4


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Step:
    """Inputs and weights that need gradients, always the same, and what of a forward pass is still there."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.dtype, self.device, self.leaves, self.watched = dtype, device, [], {}

    def constant(self, seed: int, *shape: int) -> Tensor:
        return normal(seed, *shape, dtype=self.dtype).to(self.device)

    def leaf(self, *shape: int) -> Tensor:
        self.leaves.append(self.constant(len(self.leaves), *shape).requires_grad_())
        return self.leaves[-1]

    def x(self, *shape: int) -> Tensor:
        """An input that is itself computed: as an activation, it is no leaf."""
        return self.leaf(*(shape or (*ROWS, WIDTH))) * 1.5

    def weight(self, *shape: int) -> nn.Parameter:
        self.leaves.append(nn.Parameter(self.constant(len(self.leaves), *(shape or (WIDTH,)))))
        return self.leaves[-1]

    def product(self, y: Tensor, width: int = 5) -> Tensor:
        """y W^T, of which autograd saves y."""
        return F.linear(y, self.weight(width, y.shape[-1]))

    def watch(self, **tensors: Tensor) -> None:
        self.watched |= {name: StorageWeakRef(y.untyped_storage()) for name, y in tensors.items()}

    def kept(self) -> set[str]:
        if INTERPRETED:
            gc.collect()  # the interpreter leaves cycles
        return {name for name, storage in self.watched.items() if not storage.expired()}

    def gradients(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


def block(lean: bool, **options: bool) -> contextlib.AbstractContextManager:
    return tigon.lean(**options) if lean else contextlib.nullcontext()


def total(*results: Tensor) -> Tensor:
    return sum(z.float().square().sum() for z in results)


def run(
    forward: Callable[[Step], Tensor], lean: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[set[str], list[Tensor]]:
    """What is kept after the forward pass, and the loss and every gradient."""
    step = Step(dtype, device)
    with block(lean):
        loss = forward(step)
    kept = step.kept()
    loss.backward()
    return kept, [loss.detach(), *step.gradients()]


def assert_same_bits(given: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(given) == len(expected)
    for i, (a, b) in enumerate(zip(given, expected, strict=True)):
        assert a is b or (a.dtype == b.dtype and torch.equal(a, b)), f"result {i}"
