"""The rows whose targets are not ignored, so that the loss need not compute the other rows.

The host passes the sizes of matrix products, so it must know how many rows are valid, but the labels are on the device.
One launch finds the indices of the valid rows, and an asynchronous copy brings their number to pinned memory. The host
waits only for the work that was queued before that copy. If `ValidRows` is created as soon as the labels are known,
before the layers of the model are queued, the number has arrived long before the loss, and the device never runs out of
work.
"""

import torch
from torch import Tensor

from tigon.runtime import checks
from tigon.runtime.autograd import version_of
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import runs_kernels
from tigon.runtime.launch import launch, on_device

# Targets that the single program reads at a time.
BLOCK = 2048
WARPS = 8


@triton.jit(do_not_specialize=["M"])
def _valid_rows_kernel(target_ptr, rows_ptr, count_ptr, M, ignore_index, BLOCK: tl.constexpr):
    """Write the indices of the rows whose target is not ignored, in order, and their number, in one program."""
    count, M = tl.zeros([], tl.int64), M.to(tl.int64)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        valid = row < M
        valid &= tl.load(target_ptr + row, mask=valid, other=0) != ignore_index
        ones = valid.to(tl.int32)
        tl.store(rows_ptr + count + tl.cumsum(ones, axis=0) - 1, row.to(tl.int64), mask=valid)
        count += tl.sum(ones, axis=0)
    tl.store(count_ptr, count.to(tl.int64))


@on_device
def _find(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return rows [M] int64, of which the first `count` are written, and count [1] int64, for target [M]."""
    if runs_kernels(target.new_empty(0, dtype=torch.float32)) and target.numel():
        rows, count = target.new_empty(target.numel(), dtype=torch.int64), target.new_empty(1, dtype=torch.int64)
        launch(
            _valid_rows_kernel, 1, target, rows, count, target.numel(), ignore_index,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return rows, count
    rows = (target != ignore_index).nonzero()[:, 0]
    return rows, torch.tensor([len(rows)], device="cpu")


def as_targets(target: Tensor, ignore_index: int) -> Tensor:
    """Return target [...] as contiguous [M], in a dtype that holds `ignore_index`, which would wrap otherwise."""
    fits = target.dtype == torch.int64 or -(2**31) <= ignore_index < 2**31
    return (target if fits else target.long()).reshape(-1).contiguous()


class ValidRows:
    """The rows of a target that are not ignored, for the argument `valid_rows` of `linear_cross_entropy`.

    The constructor does not wait for the device.

    Args:
        target: [...] class indices, int64 | int32. Pass the same tensor to the loss, and do not change its values in
            between. The loss refuses a changed tensor, but it cannot notice changes of an inference tensor, or changes
            through `.data` or numpy.
        ignore_index: The value of ignored targets. None means -100, as in the loss.

    Raises:
        TypeError: `target` is not an integer tensor, or `ignore_index` is not an int.
        ValueError: `target` is a meta tensor, which has no values.

    Example:
        >>> labels = torch.tensor([3, -100, 5, -100])
        >>> valid = tigon.ValidRows(labels)  # before the model runs
        >>> hidden, head = torch.randn(4, 16), torch.randn(100, 16)
        >>> loss = tigon.linear_cross_entropy(hidden, head, labels, valid_rows=valid)
        >>> valid.count
        2
    """

    def __init__(self, target: Tensor, ignore_index: int | None = -100) -> None:
        checks.integer("ValidRows", target=target)
        if target.is_meta:
            raise ValueError("ValidRows: target must have values, got a tensor on meta")
        ignore_index = checks.ignore_index("ValidRows", -100 if ignore_index is None else ignore_index)
        self.target, self.ignore_index, self._version = target, ignore_index, version_of(target)
        self._rows, count = _find(as_targets(target.detach(), ignore_index), ignore_index)
        self._copy_event: torch.cuda.Event | None = None
        if count.is_cuda:
            self._host_count = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._host_count.copy_(count, non_blocking=True)
            self._copy_event = torch.cuda.Event()
            self._stream = torch.cuda.current_stream(count.device)
            self._copy_event.record(self._stream)
        else:
            self._host_count = count

    @property
    def count(self) -> int:
        """The number of valid rows. The host waits until the device has counted them."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return int(self._host_count)

    @property
    def rows(self) -> Tensor:
        """The indices of the valid rows [count] int64, in order, on the device of the target."""
        if self._copy_event is not None and torch.cuda.current_stream(self._rows.device) != self._stream:
            # Otherwise the stream that allocated the memory could reuse it while the current stream still reads it.
            self._rows.record_stream(torch.cuda.current_stream(self._rows.device))
        return self._rows[: self.count]

    def check(self, op: str, target: Tensor, ignore_index: int) -> None:
        """Raise a ValueError if the rows are those of another tensor, of earlier values or of another index."""
        source = self.target
        is_same = target.data_ptr() == source.data_ptr() and target.dtype == source.dtype
        if not is_same or (target.shape, target.stride()) != (source.shape, source.stride()):
            raise ValueError(
                f"{op}: valid_rows must be those of the target, got those of another tensor, of shape "
                f"{tuple(source.shape)} instead of {tuple(target.shape)}"
            )
        if version_of(target) != self._version:
            raise ValueError(f"{op}: valid_rows must be those of the current target, got those of its earlier values")
        if ignore_index != self.ignore_index:
            raise ValueError(f"{op}: valid_rows must have ignore_index={ignore_index}, got {self.ignore_index}")
