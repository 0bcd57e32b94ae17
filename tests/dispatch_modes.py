"""Modes that count what torch does in a block: the memory of its tensors, and its products."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """A mode that records the largest number of bytes that the tensors created in the block hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def _died(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in inputs:
                size = x.untyped_storage().nbytes()
                self.live += size
                weakref.finalize(x, self._died, size)
        self.peak = max(self.peak, self.live)
        return result


class Products(TorchDispatchMode):
    """A mode that records the sizes (M, K, N) of all matrix products in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:]
            self.sizes.append((*a.shape, b.shape[1]))
        return function(*args, **(kwargs or {}))

    @property
    def multiplications(self) -> int:
        return sum(m * k * n for m, k, n in self.sizes)
