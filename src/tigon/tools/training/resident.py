"""Peak memory of a process whose tensors are on a CPU."""

import ctypes
import gc
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["ResidentMemory"]


def _status_bytes(field: str) -> int | None:
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


class ResidentMemory:
    """Peak resident memory of this process above what it held when the meter was made.

    Linux keeps the peak (VmHWM) and resets it on request. Elsewhere it is the process's peak since its start, which is
    the same unless making the model took more than training it.
    """

    def __init__(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what the C library kept of freed memory is not held by the model
        self._baseline = _status_bytes("VmRSS") or self._lifetime_peak()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._resettable = _status_bytes("VmHWM") is not None
        except OSError:
            self._resettable = False

    @staticmethod
    def _lifetime_peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def peak_bytes(self) -> int:
        peak = _status_bytes("VmHWM") if self._resettable else self._lifetime_peak()
        return max(0, (peak or 0) - self._baseline)
