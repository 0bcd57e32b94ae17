"""Checks of values on a GPU. The host does not wait for them, and the process can use the GPU after a failed check.

After a failed assertion in a kernel, every later CUDA call of the process fails. A comparison on the host is a host
synchronisation. `check_later` avoids both: the caller multiplies its loss or gradient by the result, which is NaN if
the check fails, and a later call raises the error.
"""

import builtins
import collections
import threading
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tigon.runtime.device import is_capturing
from tigon.runtime.launch import launcher


class LateFlag(NamedTuple):
    """A flag of the GPU, which is copied to the host without a host synchronisation."""

    # [], bool, in pinned memory
    value: Tensor
    # When this event has completed, `value` has the flag's value.
    copied: torch.cuda.Event

    @classmethod
    def copy(cls, flag: Tensor) -> Self:
        """Start the copy of a tensor [], bool, on a GPU."""
        value = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
        value.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(value, copied)

    def is_known(self) -> bool:
        """Return whether the value has reached the host."""
        return self.copied.query()

    def __bool__(self) -> bool:
        return bool(self.value)


class _Check(NamedTuple):
    holds: LateFlag
    error: str
    message: str


# The checks whose values have not been read yet, oldest first.
_pending: collections.deque[_Check] = collections.deque()
# The replicas of `nn.DataParallel` call the functions of this module in several threads.
_lock = threading.Lock()


@launcher(fake=lambda holds: holds.new_empty((), dtype=torch.float32))
def check_later(holds: Tensor, error: str, message: str) -> Tensor:
    """Return 1.0 if `holds` [], bool, is true, and NaN if it is false, in fp32. If it is false, a call on a CPU raises
    the built-in exception of the name `error`. On a GPU, a later call of a function of this module raises it, the first
    one for which the value has reached the host. While a CUDA graph is captured, and on other devices, the only sign of
    a failed check is NaN."""
    raise_earlier()
    # A fake tensor has no value.
    if type(holds) is Tensor and holds.device.type == "cpu" and not holds:
        raise getattr(builtins, error)(message)
    if holds.is_cuda and not is_capturing(holds):
        _pending.append(_Check(LateFlag.copy(holds), error, message))
    # One kernel computes 1 / 1 or 0 / 0. Without the cast, the dtype is the default dtype of torch.
    return (holds / holds).float()


def raise_earlier() -> None:
    """Raise the error of a failed earlier check on a GPU if its value has reached the host. This never waits."""
    if not _pending or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        while _pending and _pending[0].holds.is_known():
            check = _pending.popleft()
            if not check.holds:
                raise getattr(builtins, check.error)(
                    f"{check.message} (an earlier call on a GPU found this; its loss or its gradients are NaN)"
                )
