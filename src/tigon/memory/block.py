"""The saved-tensor hooks of a block of `lean`, and the tensors that these hooks recognise."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.recomputation import PackedTensor, Recomputation, SavedResult, cast
from tigon.memory.repeating import CallWatch, ReachableStates, RepeatedCall
from tigon.runtime.compat.autograd import CastBackward, storage_id


class _LiveTensor:
    """A live tensor, its version, and the source of its values: a packed tensor, or a recomputation with this result
    `index`."""

    __slots__ = ("index", "node", "ref", "source", "version")

    def __init__(
        self, x: Tensor, forget: Callable[..., None], source: Recomputation | PackedTensor, index: int = 0
    ) -> None:
        # The reference is to the tensor and not to its storage, because the tensor's version counts writes through any
        # view. The tensor lives as long as its views.
        self.ref, self.version, self.source, self.index = weakref.ref(x, forget), x._version, source, index
        self.node = x.grad_fn, x.output_nr

    def find_unchanged(self, t: Tensor) -> Tensor | None:
        """Return the tensor if its values are unchanged and `t`, which shares its storage, has its dtype; else None."""
        x = self.ref()
        is_unchanged = x is not None and x._version == self.version == t._version and x.dtype == t.dtype
        return x if is_unchanged else None


class Block:
    """The saved-tensor hooks of one block of `lean`."""

    def __init__(self, outer: tuple[Callable, Callable] | None) -> None:
        # The saved-tensor hooks around the block, as (pack, unpack), or None.
        self.outer = outer
        # True if the gate and up projections are recomputed too.
        self.mlp = False
        # True if they are recomputed where the MLP is computed in tiles of tokens.
        self.large_mlps = False
        # The snapshots of the state that projections read. Blocks of one model share them.
        self.reachable_states: ReachableStates = weakref.WeakKeyDictionary()
        # The entries by the storage of their tensors.
        self.by_storage: dict[int, _LiveTensor] = {}
        # The entries by the autograd node that computed their tensors. Casts of a tensor are recognised by this node.
        self.by_node: dict[tuple, _LiveTensor] = {}

    def add(self, x: Tensor, source: Recomputation | PackedTensor, index: int = 0) -> None:
        """Record the source from which backward gets the values of `x`."""
        key = storage_id(x.untyped_storage())

        def forget(ref: weakref.ref | None = None) -> None:
            if key in self.by_storage and (ref is None or self.by_storage[key].ref is ref):
                self.by_node.pop(self.by_storage.pop(key).node, None)

        if key in self.by_storage:
            forget()
        self.by_storage[key] = entry = _LiveTensor(x, forget, source, index)
        if type(source) is Recomputation:
            self.by_node[entry.node] = entry

    def register(self, results: Tensor | tuple, function: Callable, args: tuple) -> None:
        results = results if isinstance(results, tuple) else (results,)
        recomputation = None
        for i, y in enumerate(results):
            if type(y) is Tensor and y.requires_grad and _is_whole(y):
                recomputation = recomputation or Recomputation(function, args, results, y.device)
                self.add(y, recomputation, i)

    def call(self, module: nn.Module, x: Tensor) -> Any:
        """Return `module(x)`, and recompute it in backward if a second call gives the same values and has no side
        effects. Otherwise the result is saved for backward."""
        watch = CallWatch.of(module, x, self.reachable_states)
        y = module(x)
        if watch is None or type(y) is not Tensor or not watch.may_repeat(x):
            return y
        if storage_id(y.untyped_storage()) != storage_id(x.untyped_storage()) and self.find(y) is None:
            self.register(y, RepeatedCall(module, watch), (x,))
        return y

    def find(self, t: Tensor) -> tuple[_LiveTensor, Tensor] | None:
        """Return the entry of `t`, or of the tensor that `t` is a view of, and the tensor of that entry."""
        entry = self.by_storage.get(storage_id(t.untyped_storage()))
        if entry is None or (x := entry.find_unchanged(t)) is None:
            return None
        return entry, x

    def can_recompute(self, t: Tensor) -> bool:
        """Return whether `t` is a result that can be recomputed, or a view of one."""
        match = self.find(t) if type(t) is Tensor else None
        return match is not None and type(match[0].source) is Recomputation

    def find_cast(self, t: Tensor) -> tuple[_LiveTensor, Tensor] | None:
        """Return the same as `find` for a `t` that autograd computed as a cast of a result, or that is a view of such a
        cast. The cast then becomes a result that can be recomputed."""
        base = t if t._base is None else t._base
        node = base.grad_fn
        if node is None or base._version or not _is_whole(base):
            return None
        entry = self.by_node.get(node.next_functions[0])
        y = None if entry is None else entry.ref()
        if entry is None or y is None or entry.find_unchanged(y) is None:
            return None
        if y.device != base.device or y.shape != base.shape:
            return None
        self.add(base, Recomputation(cast, (y, base.dtype), (base,), base.device))
        return self.find(t)

    def pack(self, t: Tensor) -> Any:
        """Return what autograd saves in place of `t`. This is the pack hook of the block."""
        match = None
        # Parameters are not of type Tensor.
        if type(t) is Tensor and t.layout is torch.strided:
            # Most tensors are neither results nor casts of results. They need no further call.
            if storage_id(t.untyped_storage()) in self.by_storage:
                match = self.find(t)
            if match is None and type((t if t._base is None else t._base).grad_fn) is CastBackward:
                match = self.find_cast(t)
        if match is not None:
            entry, x = match
            if type(entry.source) is Recomputation:
                if entry.source.save_args(self.pack):
                    return SavedResult(entry.source, entry.index, x, t)
            elif t is x:
                return entry.source
        if self.outer is None:
            # Leaves are saved themselves, because FSDP and ZeRO swap the data of parameters. Other tensors are
            # detached: the graph of such a tensor may contain the node that saves it, which would be a reference cycle.
            return t if t.is_leaf else t.detach(), t._version
        packed = PackedTensor(self.outer[0](t), self.outer[1])
        if type(t) is Tensor and match is None:
            # An op and the recomputation of its result save the same inputs, so they share the packed tensor.
            self.add(t, packed)
        return packed


def _is_whole(y: Tensor) -> bool:
    """Return whether a tensor fills its storage without gaps, so that each view of the storage is a view of it."""
    return 0 < y.numel() * y.element_size() == y.untyped_storage().nbytes() and y.layout is torch.strided
