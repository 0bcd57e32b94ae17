"""Zeros in the memory of a device: counters of finished programs, and numbers that kernels raise to a maximum.

On the default stream, all launches share the same counters, and many numbers are allocated at once. Everywhere else,
each call allocates zeros of its own, which takes the host 10 us more (measured on the host of an H200).
"""

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream, dispatch_modes

# The counters of the default stream, by the device.
_counters: dict[int, Tensor] = {}

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


def zero_counters(x: Tensor, count: int) -> Tensor:
    """Return at least `count` counters int32 on the device of x, all of which are zero when the next kernel starts.

    The kernel that gets them has to leave them at zero. The same counters are returned for each launch on the default
    stream, because the kernels of one stream run one after another. On other streams, each launch has its own.
    """
    if not _may_keep(x):
        return x.new_zeros(count, dtype=torch.int32)
    index = x.get_device()
    counters = _counters.get(index)
    if counters is None or len(counters) < count:
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            counters = _counters[index] = torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=x.device)
    return counters


def zero_number(x: Tensor) -> Tensor:
    """Return a zero [1] int32 on the device of x, which no other call returns.

    The compiler may trace a caller of this function. It does not trace the launchers, which alone call `zero_counters`.
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
