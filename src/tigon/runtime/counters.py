"""Counters in the memory of a device, by which the programs of a launch find out which of them finishes last."""

import torch
from torch import Tensor

from tigon.runtime.torch_private.operators import current_raw_stream, dispatch_modes

__all__ = ["zero_counters"]

# The counters of each stream, by the device and the number of the stream.
_counters: dict[tuple[int, int], Tensor] = {}


def zero_counters(x: Tensor, count: int) -> Tensor:
    """Return at least `count` counters int32 on the device of x, all of which are zero when the next kernel starts.

    The kernel that gets them has to leave them at zero. The same counters are returned for each launch on a stream,
    because the kernels of one stream run one after another. A CUDA graph may run on any stream, so a launch that is
    captured gets counters of its own.
    """
    index = x.get_device()
    may_keep = index >= 0 and not dispatch_modes() and not torch.cuda.is_current_stream_capturing()
    if not may_keep:
        return x.new_zeros(count, dtype=torch.int32)
    key = index, current_raw_stream(index)
    counters = _counters.get(key)
    if counters is None or len(counters) < count:
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            counters = _counters[key] = torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=x.device)
    return counters
