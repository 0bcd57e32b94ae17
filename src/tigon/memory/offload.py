"""Saved tensors on the host: copied out on a side stream during forward, and prefetched on another one for backward.

    forward     When half a window of further bytes has been saved after a tensor, a side stream copies the tensor to
                pinned memory. After a whole window, the compute stream waits for that copy, and the device memory is
                freed.
    backward    A node that unpacks a tensor starts to prefetch the tensors that were saved before it, up to a window of
                prefetched bytes that no node has unpacked yet.

A window is a number of bytes: at least 512 MiB, and more if the saved tensors are large (`OffloadConfig`). The device
therefore holds at most two windows of saved tensors, and the last half window never leaves it. The host waits for
nothing, because events order the streams. Memory is freed in the order of the compute stream, which can reuse it at
once.

Nodes that save the same tensor, or views of it, share one copy. Each backward copies it back once, and frees it when
the last of these nodes has unpacked it. Torch's caching allocator provides the pinned memory, and reuses it in the next
step.
"""

import collections
import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.memory.host_pages import HostPages, PagedCopy
from tigon.runtime.compat.autograd import AccumulateGrad, CastBackward, StorageWeakRef, backward_id, storage_id
from tigon.runtime.device import Device, device_of, simulation_of
from tigon.runtime.tuning import LaunchConfig

# The allocator of the device aligns its blocks to this number of bytes.
ALIGNMENT = 512


class OffloadProblem(NamedTuple):
    """The properties that the parameters of an offloader depend on: none, because one window serves all models."""


@dataclass(frozen=True)
class OffloadConfig(LaunchConfig):
    """Parameters that say which saved tensors move to the host, and when."""

    # Tensors of fewer bytes stay on the device.
    smallest: int
    # The smallest size of a window in bytes.
    window: int
    # A window holds at least this many tensors of the second largest size, because the backward of an attention layer
    # unpacks that many together.
    window_tensors: int

    @staticmethod
    def heuristic(problem: OffloadProblem, device: Device) -> "OffloadConfig":
        # A layer of Llama-3-8B saves 0.3 GiB for 8192 tokens.
        return OffloadConfig(smallest=2**20, window=2**29, window_tensors=4)


def can_offload(device: torch.device) -> bool:
    """Return whether saved tensors can move from a device to the host.

    They can on a GPU that captures no CUDA graph now, and on a simulated device.
    """
    if simulation_of(device) is not None:
        return True
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@functools.cache
def _side_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned_copy(source: Tensor) -> Tensor:
    copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    return copy.copy_(source, non_blocking=True)


def _copy_without_stream(source: Any, direction: str, device: torch.device, pages: HostPages | None) -> Any:
    """Copy on a CPU, or count a copy on a simulated device. The host memory of such a device is a meta tensor."""
    simulation = simulation_of(device)
    copy: Any
    if direction == "out":
        copy = source.clone() if pages is None or simulation is not None else pages.copy(source)
        # Torch's allocator of pinned memory rounds up to powers of two.
        size = 1 << (copy.nbytes - 1).bit_length() if pages is None else pages.round_up(copy.nbytes)
    else:
        copy, size = torch.empty(source.nbytes, dtype=torch.uint8, device=device), 0
        source.copy_to(copy) if isinstance(source, PagedCopy) else copy.copy_(source)
    if simulation is not None:
        simulation.count_copy(copy, size)
    return copy


def _copy(
    source: Any, direction: str, device: torch.device, stream: torch.cuda.Stream | None, pages: HostPages | None = None
) -> tuple[Any, Any]:
    """Copy bytes "out" to the host or "back" to the device on a side stream, after the work queued on `stream`.

    The host memory is pages of a pool, or a pinned tensor.

    Returns:
        The copy, and the event that marks the end of the copy.
    """
    if stream is None:
        return _copy_without_stream(source, direction, device, pages), None
    is_out, side = direction == "out", _side_stream(device, direction)
    copy: Any = None if is_out else torch.empty(source.nbytes, dtype=torch.uint8, device=device)
    side.wait_stream(stream)
    if pages is not None:
        # The pages may still be read for an earlier pass.
        side.wait_stream(_side_stream(device, "back"))
    with torch.cuda.stream(side):
        if is_out:
            copy = _pinned_copy(source) if pages is None else pages.copy(source)
        elif isinstance(source, PagedCopy):
            source.copy_to(copy)
        else:
            copy.copy_(source, non_blocking=True)
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


class Segment:
    """A byte range of a saved storage. `device_data` or `host_data` holds the bytes, or both do.

    At first only `device_data` does: it is the memory of the saved tensor. `copy_out` copies it to `host_data`, and
    `free_device_data` frees it. `copy_back` fills new device memory from `host_data`, and another `free_device_data`
    frees that when all nodes that saved the segment have unpacked it. `host_data` stays for a later backward pass.
    """

    def __init__(self, offloader: "Offloader", t: Tensor, start: int, end: int) -> None:
        # True if the segment was copied back and no node has unpacked it yet.
        self.is_prefetched = False
        self.host_data: Tensor | PagedCopy | None = None
        # The event that marks the end of a copy for which the compute streams do not wait yet.
        self.event: torch.cuda.Event | None = None
        self.offloader, self.index, self.size = offloader, len(offloader.segments), end - start
        # No other storage gets the address of this one while the weak reference exists.
        self.storage = StorageWeakRef(t.untyped_storage())
        # The alias shares the version counter of the saved tensor, which shows writes in place. It is None once the
        # memory of the saved tensor has been freed. `device_data` is then None, or a copy from the host.
        self.alias: Tensor | None = t.detach()
        self.version = t._version
        self.device, self.stream = t.device, stream_of(t.device)
        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        self.device_data: Tensor | None = whole[start:end]
        self.start, self.was_written = start, False
        # `savers` counts the nodes that saved the segment, and `users` those that unpacked it in this generation. A new
        # generation starts whenever the segment is copied back. `last_backward` is the id of the last backward pass in
        # which all nodes unpacked the segment, and -2 before there is one.
        self.savers, self.users, self.generation, self.last_backward = 0, 0, 1, -2

    def copy_out(self) -> None:
        """Start the copy to the host."""
        assert self.device_data is not None
        self.host_data, self.event = _copy(self.device_data, "out", self.device, self.stream, self.offloader.pages)

    def check_version(self) -> None:
        """Record whether the tensor was written after it was saved. The copy may then have other values."""
        self.was_written = self.was_written or (self.alias is not None and self.alias._version != self.version)

    def wait_for_copy(self) -> None:
        """Make the compute streams wait for the copy that reads or writes `device_data`."""
        event, self.event = self.event, None
        if event is not None:
            for stream in tuple(self.offloader.streams.get(self.device, ())):
                stream.wait_event(event)

    def free_device_data(self) -> None:
        """Free the device memory, in the order of the compute streams, after the copy to the host."""
        self.check_version()
        self.wait_for_copy()
        self.alias = self.device_data = None

    def copy_back(self) -> Tensor:
        """Start the copy to the device, and return that copy."""
        assert self.host_data is not None
        self.device_data, self.event = _copy(self.host_data, "back", self.device, self.stream)
        self.generation, self.users = self.generation + 1, 0
        return self.device_data

    def unpack(self, view: "SavedView") -> Tensor:
        """Return the bytes on the device, for a node that saved `view`."""
        self.check_version()
        if self.was_written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{view.dtype} {list(view.shape)}], which was being copied to the host"
            )
        stream = stream_of(self.device)
        # The memory belongs to the stream of the forward pass, which might reuse it too early.
        if stream is not None and stream != self.stream:
            return _data_for_stream(self, stream)
        data = self.copy_back() if self.device_data is None else self.device_data
        if self.is_prefetched:
            self.is_prefetched, self.offloader.prefetched_bytes = False, self.offloader.prefetched_bytes - self.size
        # A copy from the host may not have arrived yet. The memory of the saved tensor is valid at any time.
        if self.alias is None:
            self.wait_for_copy()
        if view.generation != self.generation:
            view.generation, self.users = self.generation, self.users + 1
        # No other node needs the data in this backward pass.
        if self.users >= self.savers and self.host_data is not None:
            self.last_backward = backward_id()
            self.free_device_data()
        return data

    def __del__(self) -> None:
        if self.is_prefetched:
            self.offloader.prefetched_bytes -= self.size
        # The compute streams may reuse the freed memory at once, so they must wait for a copy that still uses it.
        if self.event is not None and not sys.is_finalizing():
            self.wait_for_copy()


def _data_for_stream(segment: Segment, stream: torch.cuda.Stream) -> Tensor:
    """Return the bytes for a node that runs on another stream than the forward pass. It shares no copy with others."""
    if segment.alias is not None:
        assert segment.device_data is not None
        segment.device_data.record_stream(stream)
        return segment.device_data
    # `free_device_data` has made the stream of the forward pass wait for the copy to the host. This stream waits for
    # that stream, so it reads the host memory after that copy.
    assert segment.stream is not None
    assert segment.host_data is not None
    stream.wait_stream(segment.stream)
    data, event = _copy(segment.host_data, "back", segment.device, stream)
    stream.wait_event(event)
    return data


class SavedView:
    """The object that a node saves in place of a tensor: a view of a segment."""

    __slots__ = ("dtype", "generation", "offset", "segment", "shape", "strides")

    def __init__(self, segment: Segment, t: Tensor) -> None:
        self.segment, self.generation, self.dtype = segment, 0, t.dtype
        self.shape, self.strides = t.shape, t.stride()
        self.offset = t.storage_offset() - segment.start // t.element_size()
        segment.savers += 1

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor has not been written in place since it was saved."""
        self.segment.check_version()
        return not self.segment.was_written

    def unpack(self) -> Tensor:
        """Return the tensor on the device, and prefetch the tensors that were saved before it."""
        segment, offloader = self.segment, self.segment.offloader
        with torch.no_grad(), offloader.lock:
            data = segment.unpack(self)
            offloader.prefetch_before(segment)
        # Data that never left the device starts at its offset in the storage. A copy starts with the segment.
        first = data.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), first + self.offset, self.shape, self.strides)


class _Queue:
    """The segments that were pushed last, up to a limit of bytes. The last one stays even if it exceeds the limit."""

    def __init__(self) -> None:
        self.segments: collections.deque[weakref.ref[Segment]] = collections.deque()
        self.size = 0

    def push(self, segment: Segment, limit: int) -> Iterator[Segment]:
        """Append a segment, then remove and yield the first ones until the queue holds at most `limit` bytes."""
        self.segments.append(weakref.ref(segment))
        self.size += segment.size
        while self.size > limit and len(self.segments) > 1:
            if (first := self.segments.popleft()()) is None:
                # This segment has been freed, and perhaps other segments too.
                self.size = sum(s.size for ref in self.segments if (s := ref()) is not None)
            else:
                self.size -= first.size
                yield first


class Offloader:
    """The object that moves the saved tensors of the forward passes in a block to the host."""

    def __init__(self) -> None:
        # All segments, in the order in which they were saved.
        self.segments: list[weakref.ref[Segment]] = []
        self.segments_by_key: dict[tuple, weakref.ref[Segment]] = {}
        # Segments whose copy has not started, and segments whose device memory is not freed yet.
        self.device_queue, self.copy_queue = _Queue(), _Queue()
        # The pool of host memory; None takes pinned tensors of torch's allocator.
        self.pages: HostPages | None = None
        # The compute streams of each device.
        self.streams: dict[torch.device, set] = {}
        # The size of the window, and the two largest sizes of tensors so far, smallest first. All are in bytes.
        self.window, self.largest = 0, [0, 0]
        # Bytes that were copied back and that no node has unpacked yet.
        self.prefetched_bytes = 0
        self.lock = threading.RLock()

    def save(self, t: Tensor) -> SavedView | None:
        """Return what autograd saves in place of `t`; None if `t` stays on the device."""
        if not can_offload(t.device) or t.numel() == 0 or t.dtype.is_complex or t.is_neg() or is_weight(t):
            return None
        storage, (start, end) = t.untyped_storage(), byte_range(t)
        config = OffloadConfig.choose(OffloadProblem(), device_of(t))
        if end - start < config.smallest:
            return None
        with torch.no_grad(), self.lock:
            address, version = storage_id(storage), t._version
            key = (address, start, end, version)
            # A segment of the whole storage contains the bytes of this tensor too.
            for known_key in ((address, 0, storage.nbytes(), version), key):
                segment = self.segments_by_key[known_key]() if known_key in self.segments_by_key else None
                if segment is not None and not segment.was_written:
                    return SavedView(segment, t)
            # A tensor that is far larger than all others stays. One example is the gradient of the head: the loss
            # saves it, and its backward runs first.
            self.largest = sorted((*self.largest, end - start))[1:]
            self.window = max(self.window, config.window, config.window_tensors * self.largest[0])
            if end - start > self.window:
                return None
            segment = self.add_segment(t, start, end)
            self.segments_by_key[key] = self.segments[-1]
            for older in self.device_queue.push(segment, self.window // 2):
                if older.alias is not None and older.host_data is None:
                    older.copy_out()
                    for oldest in self.copy_queue.push(older, self.window // 2):
                        # A backward pass inside the block may have freed the memory already.
                        if oldest.alias is not None:
                            oldest.free_device_data()
            return SavedView(segment, t)

    def add_segment(self, t: Tensor, start: int, end: int) -> Segment:
        """Return a new segment for a byte range of the storage of `t`. Nothing is copied yet."""
        if (stream := stream_of(t.device)) is not None:
            self.streams.setdefault(t.device, set()).add(stream)
        segment = Segment(self, t, start, end)
        self.segments.append(weakref.ref(segment))
        return segment

    def prefetch_before(self, segment: Segment) -> None:
        """Copy back the segments that were saved before this one, because backward unpacks them next."""
        current_backward, index, stream = backward_id(), segment.index, stream_of(segment.device)
        if stream != segment.stream:
            return
        while self.prefetched_bytes < self.window and index > 0:
            index -= 1
            earlier = self.segments[index]()
            if earlier is None or earlier.device_data is not None:
                continue
            # A segment that all nodes have unpacked in this backward pass is not needed again.
            if earlier.was_written or earlier.last_backward == current_backward:
                continue
            if earlier.device == segment.device and earlier.stream == stream:
                earlier.copy_back()
                earlier.is_prefetched, self.prefetched_bytes = True, self.prefetched_bytes + earlier.size

    def end(self) -> None:
        """End the forward pass. Segments that are on the device stay there, because backward unpacks them first."""
        self.segments_by_key.clear()
        self.device_queue, self.copy_queue = _Queue(), _Queue()
