"""Memory of a device that launches share: counters of finished programs, partial sums, and numbers for a maximum.

On the default stream, all launches share the same counters and partial sums, and many numbers are allocated at once.
Everywhere else, each call allocates memory of its own, which takes the host 10 us more for each tensor (measured on the
host of an H200).
"""

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream, dispatch_modes

# The counters and the fp32 memory of the default stream, by the device.
_scratch: dict[int, tuple[Tensor, Tensor]] = {}

# A launch that needs more fp32 numbers gets memory that is freed after it. The largest tensors of partial sums of a
# model of 8 billion parameters with adapters of rank 16 have 6.2 million.
LARGEST_SCRATCH = 2**23

# Zeros of the default stream that no call has returned yet, by the device.
_numbers: dict[int, list[Tensor]] = {}

# This many numbers are allocated at once. A step of a model of 8 billion parameters with adapters takes about 300.
NUMBERS = 1024


def _may_keep(x: Tensor) -> bool:
    """Return whether zeros on the device of x may outlive the call that allocates them.

    A CUDA graph may run on any stream, and has a memory pool of its own. Before torch captures the graph of a function
    that was compiled with `mode="reduce-overhead"`, it runs the function on a side stream, in the pool of the graph. It
    raises an error if a tensor in this pool outlives the run. Therefore only zeros of the default stream are kept.
    """
    index = x.get_device()
    return (
        index >= 0
        and current_raw_stream(index) == 0
        and not dispatch_modes()
        and not torch.cuda.is_current_stream_capturing()
    )


def scratch(x: Tensor, counters: int, floats: int) -> tuple[Tensor, Tensor]:
    """Return memory on the device of x that one launch may use: zero counters int32, and fp32 memory of any content.

    Both may be longer than `counters` and `floats`. The kernel that gets them has to leave the counters at zero. The
    same memory is returned for each launch on the default stream, because the kernels of one stream run one after
    another. On other streams, each launch has its own, and so has a launch that needs more than `LARGEST_SCRATCH`.
    """
    if floats > LARGEST_SCRATCH or not _may_keep(x):
        return x.new_zeros(counters, dtype=torch.int32), x.new_empty(floats, dtype=torch.float32)
    index = x.get_device()
    memory = _scratch.get(index)
    if memory is None or len(memory[0]) < counters or len(memory[1]) < floats:
        lengths = (4096, 0) if memory is None else (len(memory[0]), len(memory[1]))
        counters, floats = max(lengths[0], 2 * counters), max(lengths[1], floats)
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            memory = _scratch[index] = (
                torch.zeros(counters, dtype=torch.int32, device=x.device),
                torch.empty(floats, dtype=torch.float32, device=x.device),
            )
    return memory


def zero_number(x: Tensor) -> Tensor:
    """Return a zero [1] int32 on the device of x, which no other call returns.

    The compiler may trace a caller of this function. It does not trace the launchers, which alone call `scratch`.
    """
    if torch.compiler.is_compiling() or not _may_keep(x):
        return x.new_zeros(1, dtype=torch.int32)
    index = x.get_device()
    try:
        return _numbers[index].pop()
    except (KeyError, IndexError):
        # Each number is aligned to 16 bytes. Triton would compile another variant of a kernel for other addresses.
        with torch.inference_mode(False):
            numbers = torch.zeros((NUMBERS, 4), dtype=torch.int32, device=x.device)
        first, *others = numbers[:, :1].unbind()
        _numbers[index] = others
        return first
