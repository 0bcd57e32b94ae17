"""The rows that `linear_cross_entropy` computes: all of them, or those whose target is not ignored."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logits.valid_rows import ValidRows
from tigon.runtime.device import Device, device_of
from tigon.runtime.tuning import LaunchConfig

# --- configuration -------------------------------------------------------------------------------


class CountProblem(NamedTuple):
    """The property that the search for ignored tokens depends on."""

    # "cuda", "cpu" and so on
    device_type: str


@dataclass(frozen=True)
class CountConfig(LaunchConfig):
    """Parameters that say when ignored tokens are left out of the products."""

    # With fewer multiplications in one product, it costs more to find the ignored tokens than it saves.
    min_multiplications: int
    # All tokens are computed if at most one in `tokens_per_ignored` tokens is ignored, because copying the rows of the
    # other tokens would cost more.
    tokens_per_ignored: int

    @staticmethod
    def heuristic(problem: CountProblem, device: Device) -> "CountConfig":
        # 2^35 multiplications take 0.1 ms on an H200.
        return CountConfig(2**35 if problem.device_type == "cuda" else 0, tokens_per_ignored=64)


# --- the rows to compute -------------------------------------------------------------------------


def find_rows(target: Tensor, ignore_index: int, multiplications: int) -> ValidRows | None:
    """Return the valid rows, or None if a graph fixes the sizes or if finding the rows costs more than it saves."""
    if torch.compiler.is_compiling() or target.device.type not in ("cpu", "cuda"):
        return None
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    config = CountConfig.choose(CountProblem(target.device.type), device_of(target))
    return ValidRows(target, ignore_index) if multiplications >= config.min_multiplications else None


def rows_to_compute(
    valid_rows: ValidRows | bool | None, target: Tensor, ignore_index: int, multiplications: int
) -> tuple[Tensor | None, int]:
    """Return the rows to compute and their number. None stands for all rows.

    All rows are computed if the caller requests it by `valid_rows=False`, or if few rows are ignored.
    """
    m = target.numel()
    if valid_rows is None or (valid_rows and target.is_cuda and torch.cuda.is_current_stream_capturing()):
        valid_rows = find_rows(target, ignore_index, multiplications)
    if not isinstance(valid_rows, ValidRows):
        return None, m
    config = CountConfig.choose(CountProblem(target.device.type), device_of(target))
    if (m - valid_rows.count) * config.tokens_per_ignored <= m:
        return None, m
    return valid_rows.rows, valid_rows.count
