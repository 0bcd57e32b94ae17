"""Tensors of checkpointed layers on the host: copied out while their layer runs, copied back one layer ahead.

    forward     A side stream starts to copy a tensor to the host when its layer saves it. When the next layer is
                called, the compute stream waits for that copy, and the device memory is freed.
    backward    A node that unpacks a tensor starts to copy back the other tensors of its layer, and those of the layer
                before it.

The host waits for nothing, because events order the streams. Memory is freed in the order of the compute stream, which
can reuse it at once.
"""

import functools
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.host_pages import HostPages, PagedCopy
from tigon.runtime.compat.autograd import AccumulateGrad, CastBackward, backward_id
from tigon.runtime.device import simulation_of

# The allocator of the device aligns its blocks to this number of bytes.
ALIGNMENT = 512


def can_offload(device: torch.device) -> bool:
    """Return whether saved tensors can move from a device to the host: a simulated one, or a GPU that captures no CUDA
    graph now."""
    if simulation_of(device) is not None:
        return True
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@functools.cache
def _side_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_out(source: Tensor, pages: HostPages, stream: torch.cuda.Stream | None) -> tuple[Any, Any]:
    """Copy bytes to the host, after the work queued on `stream`. Return the copy, and the event that marks its end."""
    if (simulation := simulation_of(source.device)) is not None:
        # The host memory of a simulated device is a meta tensor.
        copy = source.clone()
        simulation.count_copy(copy, pages.round_up(copy.nbytes))
        return copy, None
    if stream is None:
        return pages.copy(source), None
    side = _side_stream(source.device, "out")
    side.wait_stream(stream)
    # The pages may still be read for an earlier pass.
    side.wait_stream(_side_stream(source.device, "back"))
    with torch.cuda.stream(side):
        return pages.copy(source), side.record_event()


def _copy_back(source: Any, device: torch.device, stream: torch.cuda.Stream | None) -> tuple[Tensor, Any]:
    """Copy bytes to the device, after the work queued on `stream`. Return the copy, and the event that marks its end.
    The source is pages of a pool, or a meta tensor on a simulated device."""
    copy = torch.empty(source.nbytes, dtype=torch.uint8, device=device)
    if (simulation := simulation_of(device)) is not None:
        simulation.count_copy(copy, 0)
        return copy, None
    if stream is None:
        source.copy_to(copy)
        return copy, None
    side = _side_stream(device, "back")
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        source.copy_to(copy)
        return copy, side.record_event()


def is_weight(t: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view of one, or a cast of one by autocast, which caches such casts."""
    base = t if t._base is None else t._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = base.grad_fn
    return node is not None and type(node) is CastBackward and type(node.next_functions[0][0]) is AccumulateGrad


def byte_range(t: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor needs, or the whole storage if it needs at least half of it."""
    size, whole = t.element_size(), t.untyped_storage().nbytes()
    start = t.storage_offset() * size // ALIGNMENT * ALIGNMENT
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    end = int(t.storage_offset() + last + 1) * size
    return (0, whole) if 2 * (end - start) >= whole else (start, end)


class OffloadedTensor:
    """The object that is saved in place of a tensor. `device_data` or `host_data` holds its bytes, or both do. At first
    only `device_data` does: it is the memory of the saved tensor. `copy_out` copies it to `host_data`, and
    `free_device_data` frees it. `copy_back` fills new device memory from `host_data`, which `unpack` frees again.
    `host_data` stays for a later backward pass. A tensor that is never copied out stays on the device."""

    def __init__(self, offloader: "Offloader", t: Tensor) -> None:
        self.offloader, self.layer = offloader, offloader.layer
        self.dtype, self.shape, self.strides = t.dtype, t.shape, t.stride()
        start, end = byte_range(t)
        self.size, self.offset = end - start, t.storage_offset() - start // t.element_size()
        self.host_data: Tensor | PagedCopy | None = None
        # The event that marks the end of a copy for which the compute streams do not wait yet.
        self.event: torch.cuda.Event | None = None
        # The alias shares the version counter of the saved tensor, which shows writes in place. It is None once the
        # memory of the saved tensor has been freed. `device_data` is then None, or a copy from the host.
        self.alias: Tensor | None = t.detach()
        self.version, self.was_written = t._version, False
        self.device, self.stream = t.device, stream_of(t.device)
        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        self.device_data: Any = whole[start:end]
        # The id of the last backward pass that has unpacked the tensor, and -2 before there is one.
        self.last_backward = -2

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor has not been written in place since it was saved. The copy may then have other values."""
        self.was_written = self.was_written or (self.alias is not None and self.alias._version != self.version)
        return not self.was_written

    def copy_out(self) -> None:
        self.host_data, self.event = _copy_out(self.device_data, self.offloader.pages, self.stream)

    def copy_back(self) -> Tensor:
        self.device_data, self.event = _copy_back(self.host_data, self.device, self.stream)
        return self.device_data

    def wait_for_copy(self) -> None:
        """Make the compute streams wait for the copy that reads or writes `device_data`."""
        event, self.event = self.event, None
        if event is not None:
            for stream in tuple(self.offloader.streams.get(self.device, ())):
                stream.wait_event(event)

    def free_device_data(self) -> None:
        """Free the device memory, in the order of the compute streams, after the copy to the host."""
        self.was_written = not self.is_unchanged
        self.wait_for_copy()
        self.alias = self.device_data = None

    def unpack(self) -> Tensor:
        """Return the tensor on the device, and copy back the tensors that backward needs next."""
        with torch.no_grad(), self.offloader.lock:
            data = self._data()
            self.offloader.prefetch_before(self)
        # Data that never left the device starts at its offset in the storage. A copy starts with the byte range.
        first = data.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), first + self.offset, self.shape, self.strides)

    def _data(self) -> Tensor:
        if not self.is_unchanged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.shape)}], which was being copied to the host"
            )
        stream = stream_of(self.device)
        # The memory belongs to the stream of the forward pass, which might reuse it too early.
        if stream is not None and stream != self.stream:
            return self._data_for(stream)
        data = self.copy_back() if self.device_data is None else self.device_data
        # A copy from the host may not have arrived yet. The memory of the saved tensor is valid at any time.
        if self.alias is None:
            self.wait_for_copy()
        if self.host_data is not None:
            self.last_backward = backward_id()
            self.free_device_data()
        return data

    def _data_for(self, stream: torch.cuda.Stream) -> Tensor:
        """Return the bytes for a node that runs on another stream than the forward pass."""
        if self.alias is not None:
            self.device_data.record_stream(stream)
            return self.device_data
        # `free_device_data` has made the stream of the forward pass wait for the copy to the host. This stream waits
        # for that stream, so it reads the host memory after that copy.
        assert self.stream is not None
        stream.wait_stream(self.stream)
        data, event = _copy_back(self.host_data, self.device, stream)
        stream.wait_event(event)
        return data

    def __del__(self) -> None:
        # The compute streams may reuse the freed memory at once, so they must wait for a copy that still uses it.
        if self.event is not None and not sys.is_finalizing():
            self.wait_for_copy()


class Offloader:
    """The tensors that the layers of one forward pass save here."""

    def __init__(self, pages: HostPages) -> None:
        self.pages = pages
        # The compute streams of each device.
        self.streams: dict[torch.device, set] = {}
        # All tensors, in the order in which they were saved, and those that are being copied out.
        self.tensors: list[weakref.ref[OffloadedTensor]] = []
        self.copied: list[weakref.ref[OffloadedTensor]] = []
        # The number of the current layer, whether its tensors move, and the bytes of those that it has saved.
        self.layer, self.moves = -1, False
        self.sizes: list[int] = []
        self.lock = threading.RLock()

    def begin_layer(self, layer: int, moves: bool) -> None:
        """Begin layer `layer`, whose tensors move to the host or stay."""
        self.layer, self.moves, self.sizes = layer, moves, []

    def save(self, t: Tensor) -> OffloadedTensor | None:
        """Return the object that is saved in place of a tensor of the current layer; None for a parameter, or an empty,
        complex or negated tensor, which stays on the device."""
        if t.numel() == 0 or t.dtype.is_complex or t.is_neg() or is_weight(t):
            return None
        with torch.no_grad(), self.lock:
            if (stream := stream_of(t.device)) is not None:
                self.streams.setdefault(t.device, set()).add(stream)
            tensor = OffloadedTensor(self, t)
            self.tensors.append(weakref.ref(tensor))
            self.sizes.append(tensor.size)
            if self.moves:
                tensor.copy_out()
                self.copied.append(self.tensors[-1])
            return tensor

    def prefetch_before(self, tensor: OffloadedTensor) -> None:
        """Copy back the other tensors of this layer, and those of the layer before, unless they are on the device
        already."""
        if (stream := stream_of(tensor.device)) != tensor.stream:
            return
        current_backward = backward_id()
        living = [x for ref in self.tensors if (x := ref()) is not None]
        before = max((x.layer for x in living if x.layer < tensor.layer), default=tensor.layer)
        same_layer, layer_before = ([x for x in living if x.layer == n] for n in (tensor.layer, before))
        for x in (*same_layer, *layer_before):
            # A tensor that was unpacked in this backward pass is not needed again.
            is_needed = x.device_data is None and not x.was_written and x.last_backward != current_backward
            if is_needed and x.device == tensor.device and x.stream == stream:
                x.copy_back()

    def free_copied(self) -> None:
        """Free the device memory of the tensors of the previous layer, in the order of the compute stream."""
        with self.lock:
            tensors, self.copied = [ref() for ref in self.copied], []
            for tensor in tensors:
                # A backward pass inside the forward pass may have freed the memory already.
                if tensor is not None and tensor.alias is not None:
                    tensor.free_device_data()
