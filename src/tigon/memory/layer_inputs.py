"""Inputs of checkpointed layers on the host: which of them move there, and how much memory they take there.

A checkpoint saves the input of its layer like any node, so saved-tensor hooks around the checkpoint receive it. The
hooks take the input alone; what else a checkpoint saves stays on the device. Between two layers, the device holds no
input in forward, and one copy in backward.

The inputs of the last layers stay on the device where that does not raise the peak of the step. Backward reaches these
layers first, before the gradients of the other layers exist. At the end of backward all gradients exist and all inputs
are freed. The peak of the step therefore does not grow if these inputs take at most as many bytes as the gradients.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tigon.memory.host_pages import GIB, HostPages, available_host_bytes
from tigon.memory.offload import OffloadedTensor, Offloader, can_offload
from tigon.memory.recomputation import unpack
from tigon.runtime.compat.autograd import saved_tensor_hooks, storage_id
from tigon.runtime.device import simulation_of

# Inputs of fewer bytes stay on the device. 16 MiB are copied in 0.3 ms. Smaller inputs take half a GiB in 32 layers.
SMALLEST = 2**24
# The bytes of a page of host memory, a power of two.
PAGE = 2**24


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


class LayerInputs:
    """The inputs of the layers of a stack and, with `has_outputs`, their outputs of attention. The first `on_host`
    layers move them to the host; None moves those of all layers but the last ones, whose tensors do not raise the peak
    memory. Layers after the first `checkpointed` ones save more than their input, and never move it."""

    def __init__(self, on_host: int | None = None, checkpointed: int = 0, has_outputs: bool = False) -> None:
        self.on_host, self.checkpointed, self.has_outputs = on_host, checkpointed, has_outputs
        # The layers of the stack, by their numbers. The function that calls a layer adds the layer. A copy of a model
        # has such functions too, so a copy of this object needs no layers, and a copied layer brings no others.
        self.layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.pages: HostPages | None = None
        self.offloader: Offloader | None = None
        # The number of the layer that was called last, and whether it is running and saves its tensors here.
        self.current, self.is_saving = -1, False
        # These belong to the pass: the bytes of each tensor that a layer saves here, as far as they are known; the
        # number of layers that may move their tensors; the number of those that have; and the bytes of the gradients
        # that backward allocates later.
        self.sizes: list[int] = []
        self.candidates = self.moved = self.gradient_bytes = 0
        # True if this pass only counts the copies to the host, because its tensors have no values.
        self.is_simulated = False

    def __reduce__(self) -> tuple:
        # Memory and passes belong to the original. A copy of a model has a pool of its own.
        return LayerInputs, (self.on_host, self.checkpointed, self.has_outputs)

    def call(self, index: int, function: Callable[[], Any], x: Any) -> Any:
        """Return `function()`, a checkpoint of layer `index` with the input `x`, which may move to the host."""
        self.leave_layer(index)
        if not self._moves(x):
            return function()
        if self.offloader is None:
            self.offloader = self._begin(x)
        offloader, key = self.offloader, storage_id(x.untyped_storage())
        moves = self.moved < self._count()
        offloader.begin_layer(index, moves)
        self.moved += moves

        def pack(t: Tensor) -> Any:
            is_input = type(t) is Tensor and storage_id(t.untyped_storage()) == key
            view = offloader.save(t) if is_input else None
            return view or (t if t.is_leaf else t.detach(), t._version)

        self.is_saving = True
        try:
            with saved_tensors_hooks(pack, unpack):
                return function()
        finally:
            self.is_saving = False

    def save_output(self, t: Tensor) -> OffloadedTensor | None:
        """Return what is saved in place of an output of attention in the current layer; None to save the tensor."""
        is_large = self.is_saving and type(t) is Tensor and t.nbytes >= SMALLEST
        return self.offloader.save(t) if is_large and self.offloader is not None else None

    def leave_layer(self, index: int) -> None:
        """Free the tensors of the previous layer that were copied to the host. Layer `index` is called next. Too little
        host memory for the outputs of attention raises a RuntimeError."""
        if self.offloader is not None:
            self.offloader.free_copied()
            if index <= self.current:
                self.offloader = None
            elif sum(self.offloader.sizes) > sum(self.sizes):
                self.sizes = self.offloader.sizes
                self._reserve()
        self.current = index

    def _moves(self, x: Any) -> bool:
        """Return whether the input of a layer is saved here. Hooks around the layer receive what it saves, so these
        hooks decide where its input is."""
        return (
            type(x) is Tensor
            and torch.is_grad_enabled()
            and x.layout is torch.strided
            and saved_tensor_hooks(True) is None
            and can_offload(x.device)
            and x.nbytes >= SMALLEST
        )

    def _begin(self, x: Tensor) -> Offloader:
        """Begin a forward pass, whose layers have inputs of the size of `x`. Too little host memory raises a
        RuntimeError."""
        if self.pages is None:
            self.pages = HostPages(PAGE, is_pinned=x.is_cuda)
        layers = sorted(self.layers.items())
        # Layers may have been removed from the stack.
        self.candidates = sum(index < self.checkpointed for index, _ in layers)
        # The gradients of the first layer are not among those that exist at the peak.
        self.gradient_bytes = _future_gradient_bytes((layer for _, layer in layers[1:]), x.device)
        self.sizes, self.moved, self.is_simulated = [x.nbytes], 0, x.is_meta
        self._reserve()
        return Offloader(self.pages)

    def _count(self) -> int:
        """Return the number of layers that move their tensors in this pass."""
        if self.on_host is not None:
            return min(self.candidates, self.on_host)
        # The output of attention has about the size of the input.
        expected = self.sizes[0] if self.has_outputs and len(self.sizes) == 1 else 0
        return self.candidates - min(self.candidates, self.gradient_bytes // (sum(self.sizes) + expected))

    def _reserve(self) -> None:
        """Let the pool grow for the known tensors of each layer that has not moved its tensors yet, or raise a
        RuntimeError."""
        pages, count = self.pages, self._count() - self.moved
        if pages is None or self.is_simulated or count <= 0:
            return
        first, *others = map(pages.round_up, self.sizes)
        missing = pages.missing_bytes(first + sum(others), count)
        available = available_host_bytes() if missing else None
        if available is not None and missing > available:
            raise RuntimeError(self._describe_shortage(first, sum(others), count, missing, available))
        pages.reserve(first + sum(others), count)

    def _describe_shortage(self, inputs: int, outputs: int, count: int, missing: int, available: int) -> str:
        """Return the message of the error for too little host memory. The bytes are those of one layer."""
        level, tensors, size = "checkpoint+offload", "inputs", inputs
        if outputs:
            level, tensors, size = (
                "checkpoint+attention+offload",
                "inputs and the outputs of attention",
                inputs + outputs,
            )
        usable = count * size - missing + available
        if not outputs:
            fitting = usable // inputs
            advice = f"memory='checkpoint+offload:{fitting}' moves {fitting} of them, or u" if fitting > 0 else "U"
        else:
            # The layers that stay on the device, and the one that has just run, save their outputs in any case.
            fitting = self.candidates - count + max(0, usable - count * inputs) // outputs
            advice = f"memory='checkpoint+attention:{fitting}+offload' saves the outputs of {fitting} layers, or u"
        return (
            f"tigon: memory='{level}' needs {count * size / GIB:.1f} GiB of host memory for the {tensors} of {count} "
            f"layers, {missing / GIB:.1f} GiB more than it has, and {available / GIB:.1f} GiB are available. "
            f"{advice}se shorter sequences or a smaller batch; `tigon plan` shows what fits"
        )
