"""Inputs of checkpointed layers on the host: copied out while their layer runs, copied back one layer ahead.

    forward     When a layer is called, a side stream starts to copy its input to the host. When the next layer is
                called, the compute stream waits for that copy, and the device memory is freed.
    backward    The node that unpacks the input of a layer starts to copy back the input of the layer before it.

A checkpoint saves the input of its layer like any node, so saved-tensor hooks around the checkpoint receive it. The
hooks take the input alone; what else a checkpoint saves stays on the device. Between two layers, the device holds no
input in forward, and one copy in backward.

The inputs of the last layers stay on the device where that does not raise the peak of the step. Backward reaches these
layers first, before the gradients of the other layers exist. At the end of backward all gradients exist and all inputs
are freed. The peak of the step therefore does not grow if these inputs take at most as many bytes as the gradients.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tigon.memory.host_pages import GIB, HostPages, available_host_bytes
from tigon.memory.offload import Offloader, SavedView, Segment, byte_range, can_offload, is_weight
from tigon.memory.recomputation import unpack
from tigon.runtime.device import Device, device_of, simulation_of
from tigon.runtime.torch_private.autograd import saved_tensor_hooks, storage_id
from tigon.runtime.tuning import LaunchConfig

__all__ = ["LayerInputConfig", "LayerInputProblem", "LayerInputs"]


class LayerInputProblem(NamedTuple):
    """The launch parameters depend on no property of the problem."""


@dataclass(frozen=True)
class LayerInputConfig(LaunchConfig):
    """Parameters that say which inputs of layers move to the host."""

    # Inputs of fewer bytes stay on the device.
    smallest: int
    # The bytes of a page of host memory, a power of two.
    page: int

    @staticmethod
    def heuristic(problem: LayerInputProblem, device: Device) -> "LayerInputConfig":
        # 16 MiB are copied in 0.3 ms. All inputs that are smaller take half a GiB in 32 layers.
        return LayerInputConfig(smallest=2**24, page=2**24)


def _config(x: Tensor) -> LayerInputConfig:
    return LayerInputConfig.choose(LayerInputProblem(), device_of(x))


def _future_gradient_bytes(layers: Iterable[nn.Module], device: torch.device) -> int:
    """Return the bytes of the gradients that backward allocates for these layers on this GPU."""
    parameters = [p for layer in layers for p in layer.parameters()]
    # A sharded parameter is a DTensor, which has a local part.
    with torch.no_grad():
        local = [
            p.to_local() if hasattr(p, "to_local") else p for p in parameters if p.requires_grad and p.grad is None
        ]
    simulation = simulation_of(device)
    return sum(p.nbytes for p in local) // (1 if simulation is None else simulation.shards)


class _LayerOffloader(Offloader):
    """The inputs of the layers in one forward pass. Backward copies back one input ahead."""

    def __init__(self, pages: HostPages, copies: int) -> None:
        super().__init__()
        # One byte is enough for one input, because prefetching ends with the input that reaches this limit.
        self.pages, self.window = pages, 1
        # The number of inputs that still have to be copied to the host in this pass.
        self.copies = copies
        # The input of the last call, if it is being copied.
        self.copied: weakref.ref[Segment] | None = None

    def save(self, t: Tensor) -> SavedView | None:
        """Return what autograd saves in place of the input of a layer; None if it is a parameter."""
        if t.numel() == 0 or t.dtype.is_complex or t.is_neg() or is_weight(t):
            return None
        with torch.no_grad(), self.lock:
            segment = self.add_segment(t, *byte_range(t))
            if self.copies:
                self.copies -= 1
                segment.copy_out()
                self.copied = self.segments[-1]
            # The others stay on the device.
            return SavedView(segment, t)

    def prefetch_before(self, segment: Segment) -> None:
        """Copy back the input before this one. If it is on the device, copy nothing: backward needs no other yet."""
        earlier = (ref() for ref in reversed(self.segments[: segment.index]))
        previous = next((s for s in earlier if s is not None), None)
        if previous is not None and previous.device_data is None:
            super().prefetch_before(segment)

    def free_copied(self) -> None:
        """Free the device memory of the input of the previous layer, in the order of the compute stream."""
        with self.lock:
            segment = None if self.copied is None else self.copied()
            self.copied = None
            # A backward pass inside the forward pass may have freed the memory already.
            if segment is not None and segment.alias is not None:
                segment.free_device_data()


class LayerInputs:
    """The inputs of the layers of a stack. Each forward pass begins with the first layer.

    Args:
        on_host: The number of layers, from the first one on, whose inputs move to the host. If it is None, all inputs
            move but those of the last layers that stay because the peak memory does not grow.
        checkpointed: The number of layers, from the first one on, that may save their input here. The layers after
            these save more than their input.
    """

    def __init__(self, on_host: int | None = None, checkpointed: int = 0) -> None:
        self.on_host, self.checkpointed = on_host, checkpointed
        # The layers of the stack, by their numbers. The function that calls a layer adds the layer. A copy of a model
        # has such functions too, so a copy of this object needs no layers, and a copied layer brings no others.
        self.layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.pages: HostPages | None = None
        self.offloader: _LayerOffloader | None = None
        # The number of the layer that was called last.
        self.current = -1

    def __reduce__(self) -> tuple:
        # Memory and passes belong to the original. A copy of a model has a pool of its own.
        return LayerInputs, (self.on_host, self.checkpointed)

    def call(self, index: int, function: Callable[[], Any], x: Any) -> Any:
        """Return `function()`, a checkpoint of layer `index` with the input `x`, which may move to the host."""
        self.leave_layer(index)
        if not self._moves(x):
            return function()
        if self.offloader is None:
            self.offloader = self._begin(x)
        offloader, key = self.offloader, storage_id(x.untyped_storage())

        def pack(t: Tensor) -> Any:
            is_input = type(t) is Tensor and storage_id(t.untyped_storage()) == key
            view = offloader.save(t) if is_input else None
            return view or (t if t.is_leaf else t.detach(), t._version)

        with saved_tensors_hooks(pack, unpack):
            return function()

    def leave_layer(self, index: int) -> None:
        """End the previous layer: free its input if that was copied. Layer `index` is called next."""
        if self.offloader is not None:
            self.offloader.free_copied()
            if index <= self.current:
                self.offloader = None
        self.current = index

    def _moves(self, x: Any) -> bool:
        """Return whether the input of a layer is saved here.

        Hooks around the layer receive what it saves, so these hooks decide where its input is.
        """
        return (
            type(x) is Tensor
            and torch.is_grad_enabled()
            and x.layout is torch.strided
            and saved_tensor_hooks(True) is None
            and can_offload(x.device)
            and x.nbytes >= _config(x).smallest
        )

    def _begin(self, x: Tensor) -> _LayerOffloader:
        """Begin a forward pass, whose layers have inputs of the size of `x`.

        Raises:
            RuntimeError: The host has too little memory.
        """
        size, config = x.nbytes, _config(x)
        if self.pages is None or self.pages.page != config.page:
            self.pages = HostPages(config.page, is_pinned=x.is_cuda)
        layers = sorted(self.layers.items())
        # Layers may have been removed from the stack.
        count = sum(index < self.checkpointed for index, _ in layers)
        if self.on_host is not None:
            count = min(count, self.on_host)
        else:
            # The gradients of the first layer are not among those that exist at the peak.
            count -= min(count, _future_gradient_bytes((layer for _, layer in layers[1:]), x.device) // size)
        if not x.is_meta:
            self._reserve(self.pages, size, count)
        return _LayerOffloader(self.pages, count)

    def _reserve(self, pages: HostPages, size: int, count: int) -> None:
        """Let the pool grow for `count` inputs of `size` bytes."""
        missing = pages.missing_bytes(size, count)
        available = available_host_bytes() if missing else None
        if available is not None and missing > available:
            fitting = (count * pages.round_up(size) - missing + available) // pages.round_up(size)
            hint = f"memory='checkpoint+offload:{fitting}' moves {fitting} of them, or u" if fitting > 0 else "U"
            raise RuntimeError(
                f"tigon: memory='checkpoint+offload' needs {count * pages.round_up(size) / GIB:.1f} GiB of host memory "
                f"for the inputs of {count} layers, {missing / GIB:.1f} GiB more than it has, and "
                f"{available / GIB:.1f} GiB are available. {hint}se shorter sequences or a smaller batch; "
                "`tigon plan` shows what fits"
            )
        pages.reserve(size, count)
