"""Which rows have a target that counts, so that the others need not be computed.

The sizes of matrix products are given by the host, so the host must know how many rows count, and the labels are on
the device. The indices of those rows are found by one launch, and their number starts on its way to pinned memory at
once. Whoever needs it waits for no more than what was queued before: made where labels are first known, before the
layers of a model are queued, it has long arrived when the loss is reached, and the device never runs out of work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime import checks
from tigon.runtime.device import Device, device_of, runs_kernels
from tigon.runtime.launch import launch, on_device
from tigon.runtime.tuning import LaunchConfig

__all__ = ["ValidRows", "as_targets"]


# --- configuration -------------------------------------------------------------------------------


class ValidRowsProblem(NamedTuple):
    """What the launch parameters of the search for valid rows depend on."""

    itemsize: int  # bytes of a target


@dataclass(frozen=True)
class ValidRowsConfig(LaunchConfig):
    """Launch parameters of the one program, which looks at `block` targets at a time."""

    block: int
    num_warps: int

    @staticmethod
    def heuristic(problem: ValidRowsProblem, device: Device) -> "ValidRowsConfig":
        return ValidRowsConfig(block=2048, num_warps=8)


# --- kernel --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _valid_rows_kernel(target_ptr, rows_ptr, count_ptr, M, ignore_index, BLOCK: tl.constexpr):
    """One program: the indices of the rows whose target is not ignored, in order, and their number."""
    count, M = tl.zeros([], tl.int64), M.to(tl.int64)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        valid = row < M
        valid &= tl.load(target_ptr + row, mask=valid, other=0) != ignore_index
        ones = valid.to(tl.int32)
        tl.store(rows_ptr + count + tl.cumsum(ones, axis=0) - 1, row.to(tl.int64), mask=valid)
        count += tl.sum(ones, axis=0)
    tl.store(count_ptr, count.to(tl.int64))


# --- launcher ------------------------------------------------------------------------------------


@on_device
def _find(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """target [M] -> rows [M] int64, of which the first `count` are set, and count [1] int64."""
    if runs_kernels(target.new_empty(0, dtype=torch.float32)) and target.numel():
        rows, count = target.new_empty(target.numel(), dtype=torch.int64), target.new_empty(1, dtype=torch.int64)
        config = ValidRowsConfig.choose(ValidRowsProblem(target.element_size()), device_of(target))
        launch(
            _valid_rows_kernel, 1, target, rows, count, target.numel(), ignore_index,
            BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip
        return rows, count
    rows = (target != ignore_index).nonzero()[:, 0]
    return rows, torch.tensor([len(rows)], device="cpu")


# --- public --------------------------------------------------------------------------------------


def _version(x: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


def as_targets(target: Tensor, ignore_index: int) -> Tensor:
    """target [...] -> [M] contiguous, of a type that `ignore_index` fits into: to compare would wrap it."""
    fits = target.dtype == torch.int64 or -(2**31) <= ignore_index < 2**31
    return (target if fits else target.long()).reshape(-1).contiguous()


class ValidRows:
    """The rows of a target that count, found without a wait; `linear_cross_entropy(..., valid_rows=)` takes it.

    Args:
        target: [...] class indices, int64 | int32: the very tensor that the loss will be given, unchanged until then.
            A change is noticed and refused, but not one of an inference tensor or past torch (`.data`, numpy).
        ignore_index: The value of targets that do not count; None is -100, as in the loss.

    Raises:
        TypeError: `target` is no integer tensor, or `ignore_index` no int.

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
            raise ValueError("ValidRows: target must have values to look at, got a tensor on meta")
        ignore_index = checks.ignore_index("ValidRows", -100 if ignore_index is None else ignore_index)
        self.target, self.ignore_index, self._version = target, ignore_index, _version(target)
        self._rows, count = _find(as_targets(target.detach(), ignore_index), ignore_index)
        self._arrived = None
        if count.is_cuda:
            self._host = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._host.copy_(count, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._stream = torch.cuda.current_stream(count.device)
            self._arrived.record(self._stream)
        else:
            self._host = count

    @property
    def count(self) -> int:
        """How many rows count; waits until the device has found them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._host)

    @property
    def rows(self) -> Tensor:
        """[count] int64: their indices, in order, on the target's device."""
        if self._arrived is not None and torch.cuda.current_stream(self._rows.device) != self._stream:
            # Else the memory could be used again, by the stream it is from, while this one still reads it.
            self._rows.record_stream(torch.cuda.current_stream(self._rows.device))
        return self._rows[: self.count]

    def check(self, op: str, target: Tensor, ignore_index: int) -> None:
        """Raise ValueError unless these are the rows of `target`, which has not changed since."""
        made_of = self.target
        same = target.data_ptr() == made_of.data_ptr() and target.dtype == made_of.dtype
        if not same or (target.shape, target.stride()) != (made_of.shape, made_of.stride()):
            raise ValueError(
                f"{op}: valid_rows must be made of the target itself, got those of another tensor, of shape "
                f"{tuple(made_of.shape)} for {tuple(target.shape)}"
            )
        if _version(target) != self._version:
            raise ValueError(f"{op}: valid_rows must be made of the target as it is, which was written to since")
        if ignore_index != self.ignore_index:
            raise ValueError(f"{op}: valid_rows must be made with ignore_index={ignore_index}, got {self.ignore_index}")
