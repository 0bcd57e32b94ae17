"""What lean activations keep in place of a tensor: the call that makes it again, or what other hooks made of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.torch_private import current_raw_stream

__all__ = ["Elsewhere", "Recipe", "Result", "cast", "unpack"]


def _stream(device: torch.device) -> int:
    return current_raw_stream(device.index) if device.type == "cuda" else 0


def _autocast(device: torch.device) -> torch.dtype | None:
    if device.type == "meta":  # it has none
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class Recipe:
    """A call that makes results again, shared by all who saved one of them.

    Tensors of one dimension, the parameters of norms, are copied: engines that shard a model take those away between
    forward and backward, and give them back for the backward of their own module alone.
    """

    __slots__ = (
        "args", "autocast", "device", "function", "given", "kept", "left", "round", "savers", "stream", "strides",
        "values",
    )  # fmt: skip

    def __init__(self, function: Callable, args: tuple, results: tuple[Tensor | None, ...], device: torch.device):
        self.function, self.args = function, list(args)
        self.given: dict[int, tuple[Tensor, int]] = {}  # which of the arguments are tensors; and their versions
        self.kept: dict[int, Any] | None = None  # the same, as they are kept for backward, once somebody saves a result
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                if x.dim() > 1:
                    self.given[i], self.args[i] = (x, x._version), None
                else:
                    self.args[i] = x.detach().clone()
        self.strides = [None if y is None else y.stride() for y in results]
        self.device, self.stream, self.autocast = device, _stream(device), _autocast(device)
        # Of each result: itself while it is needed, how many saved it, how many have yet to take it, how often made.
        n = len(results)
        self.values: list[Tensor | None] = [None] * n
        self.savers, self.left, self.round = [0] * n, [0] * n, [0] * n

    def keep(self, pack: Callable[[Tensor], Any]) -> bool:
        """Keep the arguments for backward, if they still are what the results were made of."""
        if self.kept is None:
            if any(x._version != version for x, version in self.given.values()):
                return False
            self.kept = {i: pack(x) for i, (x, _) in self.given.items()}
            self.given = {}
        return True

    def make(self, own_stream: bool) -> list[Tensor | None]:
        """All results anew, on the stream of the forward pass or on another."""
        args = self.args.copy()
        for i, kept in self.kept.items():
            args[i] = x = unpack(kept)
            if not own_stream:  # its memory belongs to the other, which might use it again too early
                x.record_stream(torch.cuda.current_stream(self.device))
        plain = not torch.is_grad_enabled() and _autocast(self.device) == self.autocast
        results = self.function(*args) if plain else self._as_in_forward(args)
        results = results if isinstance(results, tuple) else (results,)
        return [y if y is None else _with_strides(y, s) for y, s in zip(results, self.strides, strict=True)]

    def _as_in_forward(self, args: list) -> Any:
        kind, enabled = self.device.type, self.autocast is not None
        with torch.no_grad(), torch.autocast(kind, self.autocast, enabled, cache_enabled=False):
            return self.function(*args)

    def take(self, i: int, result: "Result") -> Tensor:
        """Result i for one of its savers; it is held until each of them has taken it."""
        if _stream(self.device) != self.stream:
            return self.make(False)[i]
        value = self.values[i]
        if value is None:
            made = self.make(True)
            value = made[i]
            for j, savers in enumerate(self.savers):
                if savers and self.values[j] is None:
                    self.values[j], self.left[j], self.round[j] = made[j], savers, self.round[j] + 1
        if result.round != self.round[i]:
            result.round = self.round[i]
            self.left[i] -= 1
            if self.left[i] <= 0:
                self.values[i] = None
        return value


def _with_strides(y: Tensor, strides: tuple[int, ...]) -> Tensor:
    if y.stride() == strides:
        return y
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)


class Result:
    """A result of a recipe, or a view `t` of it, as one of its savers keeps it."""

    __slots__ = ("index", "recipe", "round", "view")

    def __init__(self, recipe: Recipe, index: int, y: Tensor, t: Tensor) -> None:
        self.recipe, self.index, self.round = recipe, index, 0
        view = t.shape, t.stride(), t.storage_offset()
        self.view = None if view == (y.shape, y.stride(), 0) else view
        recipe.savers[index] += 1

    def take(self) -> Tensor:
        value = self.recipe.take(self.index, self)
        return value if self.view is None else value.as_strided(*self.view)


class Elsewhere:
    """A tensor as the hooks around the block keep it: on the host, say."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack

    def take(self) -> Tensor:
        return self.unpack(self.packed)


def unpack(kept: Any) -> Tensor:
    if type(kept) is not tuple:
        return kept.take()
    # Hooks turn off autograd's own check.
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
        )
    return x


def cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)
