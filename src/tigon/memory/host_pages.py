"""Host memory in pages of one size, which copies of tensors of any size share and reuse.

Torch's allocator of pinned memory rounds each block up to a power of two: 3.43 GiB, the input of a layer of Llama-3-8B
for 450,000 tokens, would take 4 GiB. `HostPages` allocates slabs whose sizes are powers of two already, and divides
them into pages. A copy takes as many pages as it needs, so it wastes less than a page. Pages are freed with the copy,
and the next step takes them again, also for sequences of other lengths. The pool therefore holds the most bytes that
were in use at one time, and grows in slabs that are as large as possible.

Page-locking is slow (about 3 GiB a second), so it happens only where the pool grows. If pinned memory cannot be had, a
slab is pageable. Copies to it and from it are correct, but the host waits for them, and they do not overlap with
computation.
"""

import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

from tigon.runtime.device import cdiv

GIB = 2**30


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    # Without a limit, the file contains "max".
    except (OSError, ValueError):
        return None


def _group_limits(root: Path) -> list[int]:
    """Return the bytes that each control group of this process still allows. Memory of cached files is available."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current") if not controllers else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip
        # In a container, the path may be that of the host, and the files are in the top directory.
        group = top / path.lstrip("/")
        for folder in {group, *group.parents, top}:
            limit, usage = (_read_number(folder / name) for name in names)
            if limit is None or usage is None or not folder.is_relative_to(top):
                continue
            try:
                rows = [row.split() for row in (folder / "memory.stat").read_text().splitlines()]
                usage -= sum(int(n) for name, n in rows if name in ("active_file", "inactive_file"))
            except (OSError, ValueError):
                pass
            limits.append(max(0, limit - max(0, usage)))
    return limits


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes of host memory this process can still allocate; None if the system does not tell it."""
    try:
        rows = [row.split() for row in (root / "proc/meminfo").read_text().splitlines()]
        available = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return min([available, *_group_limits(root)])


def _allocate(nbytes: int, is_pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


class HostPages:
    """A pool of pages of host memory, of a power of two bytes each. Several threads may use it. The host does not wait
    for copies to pinned (page-locked) pages."""

    def __init__(self, page: int, is_pinned: bool = True) -> None:
        self.page, self.is_pinned = page, is_pinned
        self.free_pages: list[Tensor] = []
        # The bytes of all slabs.
        self.capacity = 0
        self.lock = threading.RLock()

    def round_up(self, nbytes: int) -> int:
        """Return the bytes of the pages that a copy of `nbytes` bytes takes."""
        return cdiv(nbytes, self.page) * self.page

    def missing_bytes(self, nbytes: int, copies: int) -> int:
        """Return by how many bytes the pool must grow for further copies of `nbytes` bytes each."""
        return max(0, copies * self.round_up(nbytes) - len(self.free_pages) * self.page)

    def reserve(self, nbytes: int, copies: int) -> None:
        """Let the pool grow until it has pages for further copies of `nbytes` bytes each."""
        with self.lock:
            pages = self.missing_bytes(nbytes, copies) // self.page
            # The slabs are the binary digits of the number of pages, the largest one first.
            while pages:
                slab = 1 << (pages.bit_length() - 1)
                self._grow(slab * self.page)
                pages -= slab

    def _grow(self, nbytes: int) -> None:
        try:
            slab = _allocate(nbytes, self.is_pinned)
        except RuntimeError as error:
            if not self.is_pinned:
                raise
            self.is_pinned = False
            warnings.warn(
                f"tigon: {nbytes / GIB:.2f} GiB of pinned host memory cannot be allocated ({error}), so pageable "
                "memory takes its place. The results are the same, but the host waits for each copy, and copies do not "
                "overlap with computation: each GiB that moves to the host and back adds about 0.2 s to a step",
                RuntimeWarning,
                stacklevel=2,
            )
            slab = _allocate(nbytes, False)
        self.capacity += nbytes
        self.free_pages += slab.split(self.page)

    def copy(self, source: Tensor) -> "PagedCopy":
        """Copy a tensor of bytes into pages, on the current stream. The pool grows if it has too few pages."""
        count = cdiv(source.numel(), self.page)
        with self.lock:
            if count > len(self.free_pages):
                self.reserve(source.numel(), 1)
            pages = [self.free_pages.pop() for _ in range(count)]
        copy = PagedCopy(self, pages, source.numel())
        for part, page in zip(source.split(self.page), pages, strict=True):
            page[: len(part)].copy_(part, non_blocking=True)
        return copy


class PagedCopy:
    """Bytes of a tensor in pages of a pool. The pages go back to the pool when this object is deleted."""

    def __init__(self, pool: HostPages, pages: list[Tensor], nbytes: int) -> None:
        self.pool, self.pages, self.nbytes = pool, pages, nbytes

    def copy_to(self, target: Tensor) -> None:
        """Copy the bytes into a tensor of as many bytes, on the current stream."""
        for part, page in zip(target.split(self.pool.page), self.pages, strict=True):
            part.copy_(page[: len(part)], non_blocking=True)

    def __del__(self) -> None:
        with self.pool.lock:
            self.pool.free_pages += self.pages
