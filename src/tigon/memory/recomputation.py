"""The objects that `lean` saves for backward in place of a tensor: the call that recomputes it, or a packed tensor."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.runtime.autograd import modified_in_place
from tigon.runtime.compat.autograd import is_any_autocast_enabled
from tigon.runtime.compat.operators import current_raw_stream


def _stream(device: torch.device) -> int:
    return current_raw_stream(device.index) if device.type == "cuda" else 0


def _autocast(device: torch.device) -> torch.dtype | None:
    # Autocast does not exist on the meta device.
    if device.type == "meta":
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class Recomputation:
    """A call that recomputes its results in backward. All autograd nodes that saved one of the results share it. In a
    process group, the constructor copies tensors of one dimension, which are the parameters of norms. Engines that
    shard a model free these parameters between forward and backward, and gather them only for the backward of the
    module that holds them."""

    __slots__ = (
        "arg_versions", "args", "autocast", "device", "function", "generations", "pending", "saved_args", "savers",
        "stream", "strides", "values",
    )  # fmt: skip

    def __init__(
        self, function: Callable, args: tuple, results: tuple[Tensor | None, ...], device: torch.device
    ) -> None:
        self.function, self.args = function, list(args)
        # Maps the index of a tensor argument to the tensor and its version.
        self.arg_versions: dict[int, tuple[Tensor, int]] = {}
        # Maps the same indices to the packed tensors. It is None until a node saves a result.
        self.saved_args: dict[int, Any] | None = None
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                if x.dim() > 1 or (x.numel() and not (dist.is_available() and dist.is_initialized())):
                    self.arg_versions[i], self.args[i] = (x, x._version), None
                else:
                    self.args[i] = x.detach().clone()
        self.strides = [None if y is None else y.stride() for y in results]
        self.device, self.stream = device, _stream(device)
        self.autocast = _autocast(device) if is_any_autocast_enabled() else None
        # Each list has one entry for each result. `values` holds the result while a node still needs it, `savers`
        # counts the nodes that saved it, `pending` counts those that have not unpacked it yet, and `generations` counts
        # how often it was recomputed.
        n = len(results)
        self.values: list[Tensor | None] = [None] * n
        self.savers, self.pending, self.generations = [0] * n, [0] * n, [0] * n

    def save_args(self, pack: Callable[[Tensor], Any]) -> bool:
        """Save the arguments for backward. Return False if one of them was written in place since the call."""
        if self.saved_args is None:
            for x, version in self.arg_versions.values():
                if x._version != version:
                    return False
            self.saved_args = {i: pack(x) for i, (x, _) in self.arg_versions.items()}
            self.arg_versions = {}
        return True

    def recompute(self, is_forward_stream: bool) -> list[Any]:
        """Recompute all results on the current stream, which is that of the forward pass if `is_forward_stream`."""
        args = self.args.copy()
        assert self.saved_args is not None
        for i, packed in self.saved_args.items():
            args[i] = x = unpack(packed)
            if x.dim() == 1 and not x.untyped_storage().nbytes():
                raise RuntimeError(
                    "tigon: the memory of a weight was freed between forward and backward, outside of a process group, "
                    "and lean needs the weight to recompute the output of a norm; use memory='default'"
                )
            # The memory belongs to the stream of the forward pass, which might reuse it too early.
            if not is_forward_stream:
                x.record_stream(torch.cuda.current_stream(self.device))
        is_plain = not torch.is_grad_enabled() and _autocast(self.device) == self.autocast
        results = self.function(*args) if is_plain else self._call_as_in_forward(args)
        results = results if isinstance(results, tuple) else (results,)
        pairs = zip(results, self.strides, strict=True)
        return [None if y is None or strides is None else _with_strides(y, strides) for y, strides in pairs]

    def _call_as_in_forward(self, args: list) -> Any:
        device_type, enabled = self.device.type, self.autocast is not None
        with torch.no_grad(), torch.autocast(device_type, self.autocast, enabled, cache_enabled=False):
            return self.function(*args)

    def result(self, i: int, saved: "SavedResult") -> Tensor:
        """Return result `i` for one of the nodes that saved it, and hold it until all of them have unpacked it."""
        if _stream(self.device) != self.stream:
            return self.recompute(False)[i]
        value = self.values[i]
        if value is None:
            results = self.recompute(True)
            value = results[i]
            for j, savers in enumerate(self.savers):
                if savers and self.values[j] is None:
                    self.values[j], self.pending[j], self.generations[j] = results[j], savers, self.generations[j] + 1
        assert value is not None
        if saved.generation != self.generations[i]:
            saved.generation = self.generations[i]
            self.pending[i] -= 1
            if self.pending[i] <= 0:
                self.values[i] = None
        return value


def _with_strides(y: Tensor, strides: tuple[int, ...]) -> Tensor:
    if y.stride() == strides:
        return y
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)


class SavedResult:
    """The object that a node saves in place of `t`, which is the result `y` of a recomputation or a view of it."""

    __slots__ = ("generation", "index", "recomputation", "view")

    def __init__(self, recomputation: Recomputation, index: int, y: Tensor, t: Tensor) -> None:
        self.recomputation, self.index, self.generation = recomputation, index, 0
        view = t.shape, t.stride(), t.storage_offset()
        self.view = None if view == (y.shape, y.stride(), 0) else view
        recomputation.savers[index] += 1

    def unpack(self) -> Tensor:
        value = self.recomputation.result(self.index, self)
        return value if self.view is None else value.as_strided(*self.view)


class PackedTensor:
    """A tensor that the saved-tensor hooks around the block of `lean` have packed, for example onto the host."""

    def __init__(self, packed: Any, unpack_hook: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack_hook = packed, unpack_hook

    def unpack(self) -> Tensor:
        return self.unpack_hook(self.packed)


def unpack(packed: Any) -> Tensor:
    """Return the tensor that `Block.pack` has packed. This is the unpack hook of the block."""
    if type(packed) is not tuple:
        return packed.unpack()
    # Saved-tensor hooks disable autograd's own check of the version.
    x, version = packed
    if x._version != version:
        raise modified_in_place(x, version)
    return x


def cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `y` in another dtype, as autocast computes it."""
    return y.to(dtype)
