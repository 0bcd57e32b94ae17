"""Saved tensors on the host: out on a side stream while forward goes on, and back on another before backward asks.

    forward     half a window of bytes after a tensor was saved, a side stream waits until it is there and copies it to
                pinned memory; a whole window after, the stream that computes waits for the copy and lets it go
    backward    who takes one has those brought that were saved before it, up to a window that nobody has taken yet

So a device holds at most two windows of what was saved; the last half never leaves. The host waits for nothing: events
order the streams. Memory is let go in the order of the stream that computes, which can take it again at once.

Several that save one tensor or views of it share one copy; it is brought once in each backward, and let go when the
last of them has taken it. Pinned memory is that of torch's caching allocator, which gives it again in the next step.
"""

import collections
import functools
import sys
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tigon.runtime.device import simulation_of
from tigon.runtime.torch_private import AccumulateGrad, CastBackward, StorageWeakRef, backward_id, storage_id

__all__ = ["Away"]

SMALLEST = 2**20  # bytes; what is smaller stays
WINDOW = 2**29  # bytes: a Llama-3-8B's layer keeps 0.3 GiB of 8192 tokens
WINDOW_TENSORS = 4  # or so many of the largest but one: an attention asks for them at once
ALIGNED = 512  # as the device's allocator aligns


def is_moved(device: torch.device) -> bool:
    """Whether tensors of a device go to the host: those of a GPU, which captures no graph just now."""
    if simulation_of(device) is not None:
        return True
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@functools.cache
def _side_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy(given: Tensor, direction: str, device: torch.device, stream: torch.cuda.Stream | None) -> tuple:
    """A copy of bytes, "out" or "back", made on the side stream once `stream` is here; and the event of its end."""
    if stream is None:
        made = given.clone()
        if (simulation := simulation_of(device)) is not None:
            simulation.copied(made, direction == "out")
        return made, None
    empty = functools.partial(torch.empty, given.shape, dtype=given.dtype)
    made = empty(device="cpu", pin_memory=True) if direction == "out" else empty(device=device)
    side = _side_stream(device, direction)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        made.copy_(given, non_blocking=True)
        return made, side.record_event()


def _is_weight(t: Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or its cast by autocast, which keeps that for others."""
    base = t if t._base is None else t._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = base.grad_fn
    return type(node) is CastBackward and type(node.next_functions[0][0]) is AccumulateGrad


def _stretch(t: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor needs; all of them, if that is half of them."""
    size, whole = t.element_size(), t.untyped_storage().nbytes()
    start = t.storage_offset() * size // ALIGNED * ALIGNED
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    end = (t.storage_offset() + last + 1) * size
    return (0, whole) if 2 * (end - start) >= whole else (start, end)


class _Moved:
    """A stretch of a storage that was saved: `here` while the device has it, on `host` once it is on its way."""

    def __init__(self, away: "Away", t: Tensor, start: int, end: int) -> None:
        self.ahead = False  # brought, and not yet taken
        self.host: Tensor | None = None
        self.event: torch.cuda.Event | None = None  # of a copy that the stream that computes has not waited for
        self.away, self.index, self.size = away, len(away.moved), end - start
        self.storage = StorageWeakRef(t.untyped_storage())  # no other gets its address while this is here
        self.source, self.version = t.detach(), t._version  # shares the counter of writes
        self.device, self.stream = t.device, _stream(t.device)
        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        self.here: Tensor | None = whole[start:end]
        self.start, self.written = start, False
        # How many saved it and how many took it in this round of backward; which backward all of them have.
        self.savers, self.taken, self.round, self.done = 0, 0, 1, -2

    def send(self) -> None:
        self.host, self.event = _copy(self.here, "out", self.device, self.stream)

    def check(self) -> None:
        """Note whether what was saved has been written since: the copy may have the one or the other."""
        self.written = self.written or (self.source is not None and self.source._version != self.version)

    def wait(self) -> None:
        """The stream that computes waits for the copy that reads or writes what is here."""
        event, self.event = self.event, None
        if event is not None:
            for stream in tuple(self.away.streams.get(self.device, ())):
                stream.wait_event(event)

    def let_go(self) -> None:
        self.check()
        self.wait()
        self.source = self.here = None

    def bring(self) -> None:
        self.here, self.event = _copy(self.host, "back", self.device, self.stream)
        self.round, self.taken = self.round + 1, 0

    def bytes(self, saver: "_Saved") -> Tensor:
        """Those of the storage, on the device, for one that saved them."""
        self.check()
        if self.written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{saver.dtype} {list(saver.shape)}], which was on its way to the host"
            )
        stream = _stream(self.device)
        if stream != self.stream:  # its memory belongs to the other, which might use it again too early
            return _elsewhere(self, stream)
        if self.here is None:
            self.bring()
        if self.ahead:
            self.ahead, self.away.ahead = False, self.away.ahead - self.size
        if self.source is None:
            self.wait()
        here = self.here
        if saver.round != self.round:
            saver.round, self.taken = self.round, self.taken + 1
        if self.taken >= self.savers and self.host is not None:
            self.done = backward_id()
            self.let_go()
        return here

    def __del__(self) -> None:
        if self.ahead:
            self.away.ahead -= self.size
        if self.event is not None and not sys.is_finalizing():
            self.wait()


def _elsewhere(moved: _Moved, stream: torch.cuda.Stream) -> Tensor:
    """The bytes for a stream other than that of the forward pass, by themselves."""
    if moved.source is not None:
        moved.here.record_stream(stream)
        return moved.here
    stream.wait_stream(moved.stream)  # which may have to wait for the host's copy itself
    made, event = _copy(moved.host, "back", moved.device, stream)
    stream.wait_event(event)
    return made


class _Saved:
    """A tensor that was saved, as a view of what was moved."""

    __slots__ = ("dtype", "moved", "offset", "round", "shape", "strides")

    def __init__(self, moved: _Moved, t: Tensor) -> None:
        self.moved, self.round, self.dtype = moved, 0, t.dtype
        self.shape, self.strides = t.shape, t.stride()
        self.offset = t.storage_offset() - moved.start // t.element_size()
        moved.savers += 1

    def take(self) -> Tensor:
        moved, away = self.moved, self.moved.away
        with torch.no_grad(), away.lock:
            here = moved.bytes(self)
            away.bring_before(moved)
        # What never left the device has its offset there, a copy starts with the stretch.
        first = here.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=here.device)
        return empty.set_(here.untyped_storage(), first + self.offset, self.shape, self.strides)


class _Queue:
    """What was saved last, up to `limit` bytes, but one at least."""

    def __init__(self) -> None:
        self.moved: collections.deque[weakref.ref[_Moved]] = collections.deque()
        self.size = 0

    def push(self, moved: _Moved, limit: int) -> Iterator[_Moved]:
        """Add one, and yield those that are too many."""
        self.moved.append(weakref.ref(moved))
        self.size += moved.size
        while self.size > limit and len(self.moved) > 1:
            if (first := self.moved.popleft()()) is None:  # dropped since, with others perhaps
                self.size = sum(m.size for ref in self.moved if (m := ref()) is not None)
            else:
                self.size -= first.size
                yield first


class Away:
    """What a forward pass in a block moves to the host."""

    def __init__(self) -> None:
        self.moved: list[weakref.ref[_Moved]] = []  # in the order in which they were saved
        self.known: dict[tuple, weakref.ref[_Moved]] = {}
        self.staying, self.leaving = _Queue(), _Queue()
        self.streams: dict[torch.device, set] = {}  # those that compute
        self.window, self.largest = WINDOW, [0, 0]  # bytes
        self.ahead = 0  # bytes that were brought and not yet taken
        self.lock = threading.RLock()

    def keep(self, t: Tensor) -> _Saved | None:
        """How a tensor is kept for backward; None if it stays."""
        if not is_moved(t.device) or t.numel() == 0 or t.dtype.is_complex or t.is_neg() or _is_weight(t):
            return None
        storage, (start, end) = t.untyped_storage(), _stretch(t)
        if end - start < SMALLEST:
            return None
        with torch.no_grad(), self.lock:
            address, version = storage_id(storage), t._version
            for key in ((address, 0, storage.nbytes(), version), (address, start, end, version)):
                moved = self.known[key]() if key in self.known else None
                if moved is not None and not moved.written:
                    return _Saved(moved, t)
            # One that is far larger than all others stays: a loss keeps the gradient of the head for the very next.
            self.largest = sorted((*self.largest, end - start))[1:]
            self.window = max(self.window, WINDOW_TENSORS * self.largest[0])
            if end - start > self.window:
                return None
            if (stream := _stream(t.device)) is not None:
                self.streams.setdefault(t.device, set()).add(stream)
            moved = _Moved(self, t, start, end)
            self.known[key] = weakref.ref(moved)
            self.moved.append(self.known[key])
            for first in self.staying.push(moved, self.window // 2):
                if first.source is not None and first.host is None:
                    first.send()
                    for last in self.leaving.push(first, self.window // 2):
                        if last.source is not None:
                            last.let_go()
            return _Saved(moved, t)

    def bring_before(self, moved: _Moved) -> None:
        """Bring what backward will ask for after `moved`."""
        task, index, stream = backward_id(), moved.index, _stream(moved.device)
        if stream != moved.stream:
            return
        while self.ahead < self.window and index > 0:
            index -= 1
            before = self.moved[index]()
            if before is None or before.here is not None or before.written or before.done == task:
                continue
            if before.device == moved.device and before.stream == stream:
                before.bring()
                before.ahead, self.ahead = True, self.ahead + before.size

    def end(self) -> None:
        """The forward pass is over: what has not left stays, because backward asks for it first."""
        self.known.clear()
        self.staying, self.leaving = _Queue(), _Queue()
