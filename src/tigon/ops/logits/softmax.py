r"""Softmax over the last dimension (online, for wide rows: Milakov and Gimelshein, arXiv:1805.02867).

    y     = exp(x - max(x)) / sum(exp(x - max(x)))
    dx    = y * (dy - sum(y * dy))

In fp32, rounded once. A row that fits in the registers of one workgroup is read once. A wider one is read twice, in
blocks; the first pass keeps, per thread, the maximum m so far and the sum s of exp(x - m), and a new maximum m'
multiplies s by exp(m - m'). The second pass goes backwards: what the first read last is in the L2 cache still.

Shapes: M = rows (all leading dimensions), N = features.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tigon.ops.logits.token.maths import LOG2E
from tigon.runtime import checks
from tigon.runtime.autograd import first_order
from tigon.runtime.device import Device, cdiv, device_of, runs_kernels
from tigon.runtime.launch import launch, launcher
from tigon.runtime.rows import dense_rows
from tigon.runtime.tuning import LaunchConfig, rung

__all__ = ["Softmax", "softmax", "softmax_reference"]

WIDEST = 2**30  # the columns of a block are 32-bit ints, also where it ends beyond the row; wider rows are torch's

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


# --- reference -----------------------------------------------------------------------------------


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Eager definition of `softmax`; the tests' ground truth and the CPU path."""
    return torch.softmax(x, dim, dtype=x.dtype)  # without `dtype`, autocast makes the result fp32


# --- configuration -------------------------------------------------------------------------------


class SoftmaxProblem(NamedTuple):
    """What the launch parameters of one direction of `softmax` depend on."""

    features: int  # N
    itemsize: int  # bytes of an element
    backward: bool


# For rows of up to so many features, which are read at once, the warps: 16 elements a thread and tensor. More threads
# than 512 leave one program a multiprocessor, and no overlap.
WARPS = ((2048, 4), (4096, 8), (16384, 16), (32768, 32))


@dataclass(frozen=True)
class SoftmaxConfig(LaunchConfig):
    """Launch parameters of one direction."""

    block_m: int  # rows a tile, where they fit
    block_n: int
    lane: int  # features that a thread takes together: 16 bytes
    num_warps: int
    fits: bool = True  # a row in one block, so that it is read once
    keeps_y: bool = True  # in registers, in backward; a wide row has none to spare and reads y again, from L1 or L2

    @staticmethod
    def heuristic(problem: SoftmaxProblem, device: Device) -> "SoftmaxConfig":
        block_n, lane = max(triton.next_power_of_2(problem.features), 16), 16 // problem.itemsize
        if block_n > (32768 if problem.backward else 16384):
            # 4096 x 128256 in bf16 on an H200: 0.636 + 1.031 ms, with 4096 and 8 warps 0.772 + 1.243, because of fewer
            # rows at a time more is still in L2. The forward of 32000 features: 0.264 for 0.272 in registers.
            return SoftmaxConfig(1, 16384, lane, num_warps=min(32, device.max_warps), fits=False)
        # A tile of about 2048 elements: several short rows, or one long row, per program.
        block_m = max(1, 2048 // block_n)
        num_warps = min(rung(WARPS, block_n), device.max_warps)
        return SoftmaxConfig(block_m, block_n, lane, num_warps, keeps_y=block_n <= 16384)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _load(ptrs, mask, other: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY).to(tl.float32)
    return tl.load(ptrs, mask=mask, other=other, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _fold(x_ptr, start, N, high, total, INSIDE: tl.constexpr, BLOCK_N: tl.constexpr, LANE: tl.constexpr):
    """Fold a block of x into each thread's maximum and sum of exp(x - maximum) [BLOCK_N / LANE]."""
    # A row of indices is what a thread holds, so a reduction over it needs no exchange.
    cols = start + tl.arange(0, BLOCK_N // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    x = _load(x_ptr + cols, cols < N, float("-inf"), INSIDE, "evict_last")  # for the second pass
    new = tl.maximum(high, tl.max(x, axis=1))
    # The difference first: the largest feature then contributes exactly one.
    total = total * tl.exp2((high - new) * LOG2E) + tl.sum(tl.exp2((x - new[:, None]) * LOG2E), axis=1)
    return new, total


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr, y_ptr,  # [M, N] each
    stride_x, stride_y,
    M, N,
    FITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    if FITS:
        cols = tl.arange(0, BLOCK_N)[None, :]
        rows = (pid * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        x = _load(x_ptr + rows * stride_x + cols, mask, float("-inf"), EVEN, "")  # [BM, BN]
        e = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * LOG2E)
        y = e * tl.div_rn(1.0, tl.sum(e, axis=1, keep_dims=True))
        tl.store(y_ptr + rows * stride_y + cols, y, mask=None if EVEN else mask)
    else:
        x_ptr += pid * stride_x
        y_ptr += pid * stride_y
        # No maximum is -inf, so no difference of infinities appears; a row of -inf alone has the sum 0, and gives NaN.
        high = tl.full([BLOCK_N // LANE], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_N // LANE], tl.float32)
        blocks = N // BLOCK_N
        for block in tl.range(0, blocks, num_stages=1):  # the arithmetic has no time for masks
            high, total = _fold(x_ptr, block * BLOCK_N, N, high, total, True, BLOCK_N, LANE)
        if blocks * BLOCK_N < N:
            high, total = _fold(x_ptr, blocks * BLOCK_N, N, high, total, False, BLOCK_N, LANE)
        top = tl.max(high, axis=0)
        scale = tl.div_rn(1.0, tl.sum(total * tl.exp2((high - top) * LOG2E), axis=0))
        last = tl.cdiv(N, BLOCK_N) - 1
        for block in tl.range(0, last + 1, num_stages=1):
            cols = (last - block) * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            tl.store(y_ptr + cols, tl.exp2((x - top) * LOG2E) * scale, mask=cols < N, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr,  # [M, N] each
    stride_dy, stride_y, stride_dx,
    M, N,
    FITS: tl.constexpr, EVEN: tl.constexpr, KEEPS_Y: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    if FITS:
        cols = tl.arange(0, BLOCK_N)[None, :]
        rows = (pid * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (rows < M) & (cols < N)
        dy = _load(dy_ptr + rows * stride_dy + cols, mask, 0.0, EVEN, "")  # [BM, BN]
        y = _load(y_ptr + rows * stride_y + cols, mask, 0.0, EVEN, "")
        total = tl.sum(y * dy, axis=1, keep_dims=True)
        if not KEEPS_Y:
            y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx = y * (dy - total)
        tl.store(dx_ptr + rows * stride_dx + cols, dx, mask=None if EVEN else mask)
    else:
        dy_ptr += pid * stride_dy
        y_ptr += pid * stride_y
        dx_ptr += pid * stride_dx
        sums = tl.zeros([BLOCK_N], tl.float32)
        blocks = tl.cdiv(N, BLOCK_N)
        for block in tl.range(0, blocks, num_stages=1):
            cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
            dy = _load(dy_ptr + cols, cols < N, 0.0, False, "evict_last")
            sums += dy * _load(y_ptr + cols, cols < N, 0.0, False, "evict_last")
        total = tl.sum(sums, axis=0)
        for block in tl.range(0, blocks, num_stages=1):
            cols = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
            dy = tl.load(dy_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_ptr + cols, mask=cols < N, eviction_policy="evict_first").to(tl.float32)
            tl.store(dx_ptr + cols, y * (dy - total), mask=cols < N, eviction_policy="evict_first")


# --- launchers (any strides, no autograd) --------------------------------------------------------


@launcher(fake=lambda x: x.new_empty(x.shape))
def softmax_forward(x: Tensor) -> Tensor:
    """x [..., N] -> y [..., N]."""
    y, n = x.new_empty(x.shape), x.shape[-1]
    x, stride_x = dense_rows(x)
    m, problem = x.numel() // n, SoftmaxProblem(n, x.element_size(), backward=False)
    config = SoftmaxConfig.choose(problem, device_of(x))
    launch(
        _forward_kernel, cdiv(m, config.block_m), x, y, stride_x, n, m, n,
        FITS=config.fits, EVEN=n == config.block_n and config.block_m == 1, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, LANE=config.lane, num_warps=config.num_warps,
    )  # fmt: skip
    return y


@launcher(fake=lambda dy, y: y.new_empty(y.shape))
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """dy, y [..., N] -> dx [..., N]."""
    dx, n = y.new_empty(y.shape), y.shape[-1]
    (dy, stride_dy), (y, stride_y) = dense_rows(dy), dense_rows(y)
    m, problem = y.numel() // n, SoftmaxProblem(n, y.element_size(), backward=True)
    config = SoftmaxConfig.choose(problem, device_of(y))
    launch(
        _backward_kernel, cdiv(m, config.block_m), dy, y, dx, stride_dy, stride_y, n, m, n,
        FITS=config.fits, EVEN=n == config.block_n and config.block_m == 1, KEEPS_Y=config.keeps_y,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return dx


# --- autograd ------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax_forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return softmax_backward(dy, *ctx.saved_tensors)


# --- public --------------------------------------------------------------------------------------


def _check_dim(op: str, dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}")


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over one dimension, with a gradient for `x`.

    Another dimension than the last is computed by torch, whose kernel for it moves fewer bytes than two transposes.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        dim: The dimension to sum over.

    Returns:
        The shape and the dtype of `x`, under autocast too. NaN where all is -inf, or any is NaN or inf, as in torch.

    Raises:
        TypeError: `x` is no floating-point tensor or `dim` no int.
        ValueError: `x` has no such dimension.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example:
        >>> tigon.softmax(torch.tensor([[0.0, 0.0], [1.0, float("-inf")]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    checks.tensor("softmax", x=x)
    checks.floating("softmax", x=x)
    _check_dim("softmax", dim)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim must be in [{-rank}, {rank - 1}], got {checks.shown(dim)}")
    last = x.dim() > 0 and dim in (-1, rank - 1)
    if not runs_kernels(x) or not last or not 0 < x.shape[-1] <= WIDEST:
        return softmax_reference(x, dim)
    return _Softmax.apply(x)


class Softmax(nn.Softmax):
    """`torch.nn.Softmax` computed by `softmax`, over the last dimension unless `dim` names another.

    Example:
        >>> tigon.Softmax()(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(self, dim: int = -1) -> None:
        _check_dim("Softmax", dim)  # torch's default of None chooses by the number of dimensions, and is deprecated
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x, self.dim)
