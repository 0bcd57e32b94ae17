"""Blocks in which the host must not wait, captured steps, and peaks of memory, for all tests on a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Results = TypeVar("Results")


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise an error if the host waits for the device in this block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(
    step: Callable[[], Results], warm_ups: int = 2, warm_up: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Run `warm_up`, or else the step, on another stream, and capture the step in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            (warm_up or step)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest number of bytes that are allocated while `run` runs, above those that were before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
