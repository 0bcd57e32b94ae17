"""The saved-tensor hooks of a block of `lean`, and what they know of the tensors that they may be given."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.offload import Away
from tigon.memory.recipe import Elsewhere, Recipe, Result, cast
from tigon.memory.repeating import CallWatch, RepeatedCall
from tigon.runtime.torch_private import CastBackward, storage_id

__all__ = ["Block"]


class _Known:
    """A live tensor, its version, and how it is kept: result `index` of a recipe, or elsewhere."""

    __slots__ = ("how", "index", "node", "ref", "version")

    def __init__(self, x: Tensor, forget: Callable, how: Recipe | Elsewhere, index: int = 0) -> None:
        # Of the tensor, not of its storage: its version tells of writing through any view. It lives as long as these.
        self.ref, self.version, self.how, self.index = weakref.ref(x, forget), x._version, how, index
        self.node = x.grad_fn, x.output_nr

    def current(self, t: Tensor) -> Tensor | None:
        """The tensor, if `t`, of its storage, has nothing but its values."""
        x = self.ref()
        unchanged = x is not None and x._version == self.version == t._version and x.dtype == t.dtype
        return x if unchanged else None


class Block:
    """The saved-tensor hooks of one block of `lean`."""

    def __init__(self, outer: tuple[Callable, Callable] | None) -> None:
        self.outer = outer
        self.mlp = False  # whether gate and up are made again too
        self.away: Away | None = None  # what is left goes there
        self.known: dict[int, _Known] = {}  # by storage
        self.nodes: dict[tuple, _Known] = {}  # by what computed it, for its casts

    def learn(self, x: Tensor, how: Recipe | Elsewhere, index: int = 0) -> None:
        key = storage_id(x.untyped_storage())

        def forget(ref: weakref.ref | None = None) -> None:
            if key in self.known and (ref is None or self.known[key].ref is ref):
                self.nodes.pop(self.known.pop(key).node, None)

        forget()
        self.known[key] = new = _Known(x, forget, how, index)
        if type(how) is Recipe:
            self.nodes[new.node] = new

    def remember(self, results: Tensor | tuple, function: Callable, args: tuple) -> None:
        results = results if isinstance(results, tuple) else (results,)
        recipe = None
        for i, y in enumerate(results):
            if type(y) is Tensor and y.requires_grad and _is_whole(y):
                recipe = recipe or Recipe(function, args, results, y.device)
                self.learn(y, recipe, i)

    def call(self, module: nn.Module, x: Tensor) -> Any:
        """`module(x)`, which the same call makes again; kept if that would give other values or do more than that."""
        watch = CallWatch.of(module, x)
        y = module(x)
        if watch is None or type(y) is not Tensor or not watch.may_repeat(x):
            return y
        if storage_id(y.untyped_storage()) != storage_id(x.untyped_storage()) and self.find(y) is None:
            self.remember(y, RepeatedCall(module, watch), (x,))
        return y

    def find(self, t: Tensor) -> tuple[_Known, Tensor] | None:
        """What is known of a tensor or of that which it is a view of."""
        known = self.known.get(storage_id(t.untyped_storage()))
        x = None if known is None else known.current(t)
        return None if x is None else (known, x)

    def makes(self, t: Tensor) -> bool:
        """Whether a tensor is a result that can be made again, or a view of one."""
        found = self.find(t) if type(t) is Tensor else None
        return found is not None and type(found[0].how) is Recipe

    def find_cast(self, t: Tensor) -> tuple[_Known, Tensor] | None:
        """The same for a cast of a result, which from here on is a result itself."""
        made = t if t._base is None else t._base
        node = made.grad_fn
        if type(node) is not CastBackward or made._version or not _is_whole(made):
            return None
        known = self.nodes.get(node.next_functions[0])
        y = None if known is None else known.ref()
        if y is None or known.current(y) is None or y.device != made.device or y.shape != made.shape:
            return None
        self.learn(made, Recipe(cast, (y, made.dtype), (made,), made.device))
        return self.find(t)

    def pack(self, t: Tensor) -> Any:
        if type(t) is not Tensor or t.layout is not torch.strided:  # parameters among others
            return self.keep(t, None)
        found = self.find(t) or self.find_cast(t)
        if found is not None:
            known, x = found
            if type(known.how) is Recipe:
                if known.how.keep(self.pack):
                    return Result(known.how, known.index, x, t)
            elif t is x:
                return known.how
        return self.keep(t, found)

    def keep(self, t: Tensor, found: tuple | None) -> Any:
        if self.outer is None:
            whole = self.away is not None and type(t) is Tensor and t.layout is torch.strided
            if whole and (saved := self.away.keep(t)) is not None:
                return saved
            # A leaf as it is: engines exchange the values of parameters. Another without its history, which may end in
            # the very node that saves it.
            return t if t.is_leaf else t.detach(), t._version
        kept = Elsewhere(self.outer[0](t), self.outer[1])
        if type(t) is Tensor and found is None:
            self.learn(t, kept)  # an op and the recipe of its result keep the same inputs
        return kept


def _is_whole(y: Tensor) -> bool:
    """Whether a tensor has a storage of its own, without gaps: every view of that is one of a tensor like it."""
    return 0 < y.numel() * y.element_size() == y.untyped_storage().nbytes() and y.layout is torch.strided
