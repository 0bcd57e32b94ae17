"""Gradients that the forward pass made, multiplied in backward by the gradient that arrives.

A loss at the end of a graph almost always receives exactly 1, but only the device knows. The kernel looks there:
where the one factor is one, it ends without touching the gradient. The buffers belong to the op, so they are written in
place, unless the graph is kept for another backward, which must find them as they were.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tigon.runtime.device import Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, on_device
from tigon.runtime.torch_private import keeps_graph
from tigon.runtime.tuning import LaunchConfig

__all__ = ["RescaleConfig", "RescaleProblem", "rescale", "rescaled"]


# --- configuration -------------------------------------------------------------------------------


class RescaleProblem(NamedTuple):
    """What the launch parameters of `rescale` depend on."""

    columns: int  # N
    itemsize: int  # bytes of an element of x


@dataclass(frozen=True)
class RescaleConfig(LaunchConfig):
    """Launch parameters: at most `programs` programs take blocks of one row in turn."""

    block: int
    num_warps: int
    programs: int

    @staticmethod
    def heuristic(problem: RescaleProblem, device: Device) -> "RescaleConfig":
        # Few programs: nearly always all that they do is look at the factor.
        return RescaleConfig(block=4096, num_warps=8, programs=8 * device.multiprocessors)


# --- kernel --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_factor", "M"])
def _rescale_kernel(x_ptr, factor_ptr, stride_x, stride_factor, M, N, blocks, BLOCK: tl.constexpr):
    """x [M, N] *= factor, [M] or one value for all (stride 0); a program takes every so many blocks of rows."""
    if (stride_factor == 0) & (tl.load(factor_ptr) == 1.0):
        return
    for block in range(tl.program_id(0).to(tl.int64), M.to(tl.int64) * blocks, tl.num_programs(0)):
        row = block // blocks
        cols = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        factor = tl.load(factor_ptr + row * stride_factor).to(tl.float32)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * stride_x + cols, x * factor, mask=cols < N)


# --- launchers -----------------------------------------------------------------------------------


@on_device
def rescale(x: Tensor, factor: Tensor) -> Tensor:
    """x [M, N] *= factor, [] or one value a row [M]."""
    if not runs_kernels(x):
        return x.mul_(factor[:, None] if factor.dim() else factor)
    if x.numel():
        m, n = x.shape
        config = RescaleConfig.choose(RescaleProblem(n, x.element_size()), device_of(x))
        blocks, stride = cdiv(n, config.block), factor.stride(0) if factor.dim() else 0
        launch(
            _rescale_kernel, min(m * blocks, config.programs), x, factor, x.stride(0), stride, m, n, blocks,
            BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip
    return x


def rescaled(x: Tensor, factor: Tensor) -> Tensor:
    """x [M, N] times factor, [] or one value a row [M]: in place if this backward is the last, or in a new tensor."""
    if torch.compiler.is_compiling() or keeps_graph():
        return (x * (factor[:, None] if factor.dim() else factor)).to(x.dtype)
    return rescale(x, factor)
