"""Multiply the gradients that a forward pass has computed by the upstream gradient, in backward.

The upstream gradient of a loss at the end of a graph is almost always exactly 1, but only the device knows its value.
The kernel therefore reads it first, and if it is one value that equals 1, the kernel ends without reading the gradient.
No other code reads the gradients, so the op overwrites them, unless the graph is retained for another backward pass,
which needs them unchanged.
"""

import torch
from torch import Tensor

from tigon.runtime.compat.autograd import keeps_graph
from tigon.runtime.compat.triton import tl, triton
from tigon.runtime.device import cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, on_device

# Elements that a program multiplies at a time.
BLOCK = 4096
WARPS = 8
# There are few programs, because nearly always they read the factor and end.
PROGRAMS_PER_MULTIPROCESSOR = 8


@triton.jit(do_not_specialize=["stride_factor", "M"])
def _rescale_kernel(x_ptr, factor_ptr, stride_x, stride_factor, M, N, blocks, BLOCK: tl.constexpr):
    """Multiply x [M, N] in place by factor, [M] or one value for all (stride 0), in blocks of one row."""
    if (stride_factor == 0) & (tl.load(factor_ptr) == 1.0):
        return
    for block in range(tl.program_id(0).to(tl.int64), M.to(tl.int64) * blocks, tl.num_programs(0)):
        row = block // blocks
        cols = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        factor = tl.load(factor_ptr + row * stride_factor).to(tl.float32)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * stride_x + cols, x * factor, mask=cols < N)


@on_device
def rescale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x [M, N] in place by factor, [] or one value per row [M], and return x."""
    if not runs_kernels(x):
        return x.mul_(factor[:, None] if factor.dim() else factor)
    if x.numel():
        m, n = x.shape
        blocks, stride = cdiv(n, BLOCK), factor.stride(0) if factor.dim() else 0
        programs = min(m * blocks, PROGRAMS_PER_MULTIPROCESSOR * device_of(x).multiprocessors)
        launch(
            _rescale_kernel, programs, x, factor, x.stride(0), stride, m, n, blocks,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return x


def rescaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x [M, N] times factor, [] or one value per row [M]. The product is computed in place if this backward pass
    is the last one, and in a new tensor otherwise."""
    if torch.compiler.is_compiling() or keeps_graph():
        return (x * (factor[:, None] if factor.dim() else factor)).to(x.dtype)
    return rescale(x, factor)
