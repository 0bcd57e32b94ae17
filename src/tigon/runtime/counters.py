"""Memory of a device that launches share: counters of finished programs, partial sums, and numbers for a maximum.

On the default stream, all launches share the same counters and partial sums, and many numbers are allocated at once. So
do the launches that `shared_in_capture` captures in one CUDA graph. Everywhere else, each call allocates memory of its
own, which takes the host 10 us more for each tensor (measured on the host of an H200), and the device a kernel.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream, dispatch_modes

# A launch that needs more fp32 numbers gets memory that is freed after it. The largest tensors of partial sums of a
# model of 8 billion parameters with adapters of rank 16 have 6.2 million.
LARGEST_SCRATCH = 2**23

# This many numbers are allocated at once. A step of a model of 8 billion parameters with adapters takes about 300.
NUMBERS = 1024


@dataclass
class _Shared:
    """The memory that launches share."""

    # Counters int32, which are zero between launches, and fp32 memory of any content; and the lengths of both, because
    # `len` of a tensor takes the host 1 us. One assignment replaces them all, because other threads read them.
    scratch: tuple[tuple[Tensor, Tensor] | None, int, int] = None, 4096, 0
    # zeros that no call has returned yet
    numbers: list[Tensor] = field(default_factory=list)


# The memory of the default stream, by the index of the device.
_default: dict[int, _Shared] = {}

# The memory of the CUDA graph that is captured, if `shared_in_capture` captures it.
_captured: _Shared | None = None


@contextlib.contextmanager
def shared_in_capture() -> Iterator[None]:
    """Let the launches of one CUDA graph, which the block captures on one stream, share memory of the graph's pool. The
    graph sets this memory to zero at the start of each replay."""
    global _captured
    _captured = _Shared()
    try:
        yield
    finally:
        _captured = None


def _find_shared(x: Tensor) -> _Shared | None:
    """Return the memory that the next launch on the device of x may share; None if there is none. A CUDA graph may run
    on any stream, and has a memory pool of its own. Before torch captures the graph of a function that was compiled
    with `mode="reduce-overhead"`, it runs the function on a side stream, in the pool of the graph. It raises an error
    if a tensor in this pool outlives the run. Therefore only memory of the default stream is kept."""
    index = x.get_device()
    if index < 0 or dispatch_modes():
        return None
    if torch.cuda.is_current_stream_capturing():
        return _captured
    if current_raw_stream(index) != 0:
        return None
    shared = _default.get(index)
    if shared is None:
        shared = _default[index] = _Shared()
    return shared


def scratch(x: Tensor, counters: int, floats: int) -> tuple[Tensor, Tensor]:
    """Return memory on the device of x that one launch may use: zero counters int32, and fp32 memory of any content.
    Both may be longer than `counters` and `floats`. The kernel that gets them has to leave the counters at zero. The
    same memory is returned for launches that run one after another, as those of the default stream do. A launch that
    needs more than `LARGEST_SCRATCH` has its own."""
    shared = None if floats > LARGEST_SCRATCH else _find_shared(x)
    if shared is None:
        return x.new_zeros(counters, dtype=torch.int32), x.new_empty(floats, dtype=torch.float32)
    memory, most_counters, most_floats = shared.scratch
    if memory is None or most_counters < counters or most_floats < floats:
        counters, floats = max(most_counters, 2 * counters), max(most_floats, floats)
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            memory = (
                torch.zeros(counters, dtype=torch.int32, device=x.device),
                torch.empty(floats, dtype=torch.float32, device=x.device),
            )
        shared.scratch = memory, counters, floats
    return memory


def zero_number(x: Tensor) -> Tensor:
    """Return a zero [1] int32 on the device of x, which no other call returns. The compiler may trace a caller of this
    function. It does not trace the launchers, which alone call `scratch`."""
    shared = None if torch.compiler.is_compiling() else _find_shared(x)
    if shared is None:
        return x.new_zeros(1, dtype=torch.int32)
    if not shared.numbers:
        # Each number is aligned to 16 bytes. Triton would compile another variant of a kernel for other addresses.
        with torch.inference_mode(False):
            numbers = torch.zeros((NUMBERS, 4), dtype=torch.int32, device=x.device)
        shared.numbers = [*numbers[:, :1].unbind()]
    return shared.numbers.pop()
