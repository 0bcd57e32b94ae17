"""Peak memory of a process whose tensors are on a CPU."""

import ctypes
import gc
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path


def _status_bytes(field: str) -> int | None:
    """Return a size that Linux reports for this process, or None on other systems."""
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


class ResidentMemory:
    """Peak resident memory of this process above the memory that it had when this object was created.

    Linux records the peak (VmHWM) and resets it on request. Other systems report the peak since the process started,
    which is the same unless building the model took more memory than training it.
    """

    def __init__(self) -> None:
        gc.collect()
        # Return freed memory from the C library to the system, so that it does not count as memory of the model.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
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
        """Return the peak above the memory at the start."""
        peak = _status_bytes("VmHWM") if self._resettable else self._lifetime_peak()
        return max(0, (peak or 0) - self._baseline)
